#!/usr/bin/env bash
# Start one process that uses the GPUs of this machine, or its CPU.
#
#   launch/local.sh train --config configs/coco.py --workdir runs/coco
#   GPUS=4 launch/local.sh train_amp --config configs/coco.py --workdir runs/coco
#   GPUS=8 launch/local.sh evaluate --workdir runs/coco
#
# GPUS: number of GPUs to use, the first of CUDA_VISIBLE_DEVICES or of the machine; all if unset.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=launch/env.sh
source "$here/env.sh"
[ $# -gt 0 ] || { echo "error: local.sh needs train, train_amp, evaluate or benchmark" >&2; exit 2; }
if [ -n "${GPUS:-}" ]; then
  [[ $GPUS =~ ^[1-9][0-9]*$ ]] || { echo "error: GPUS is '$GPUS', expected a number from 1" >&2; exit 2; }
  from=CUDA_VISIBLE_DEVICES
  if [ -z "${CUDA_VISIBLE_DEVICES+set}" ]; then # JAX would take what there is
    from=nvidia-smi
    CUDA_VISIBLE_DEVICES=$(nvidia-smi -L | sed -n 's/^GPU \([0-9]*\):.*/\1/p' | paste -sd,) || true
  fi
  IFS=, read -ra given <<< "$CUDA_VISIBLE_DEVICES"
  [ "$GPUS" -le ${#given[@]} ] || {
    echo "error: GPUS is $GPUS, but $from names ${#given[@]}" >&2; exit 2
  }
  CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${given[*]:0:GPUS}")
  export CUDA_VISIBLE_DEVICES
fi
run_entry "$@"
