#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: are the kernels right there, and how fast is all of it?
#
#     benchmarks/gpu_check.sh [FOLDER]
#
# Compares every kernel with the plain code and times both, times torchvision's operations where
# torch is installed, then the training step and the prediction. Under 9 minutes. Writes JSON files
# into FOLDER (benchmarks/results); exit code 0 only if everything ran and every value was right.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
out=${1:-benchmarks/results}
python=${PYTHON:-python3}
device=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr -cs 'A-Za-z0-9\n' '-')
name=$out/${device%-}-$(date +%Y-%m-%d)
mkdir -p "$out"
failed=0

step() { # step SECONDS NAME COMMAND..: run it, within a time limit
  local limit=$1 title=$2
  shift 2
  echo "== $title"
  timeout "$limit" "$@" || { echo "FAILED ($?): $title"; failed=1; }
}

benchmark() { # benchmark SECONDS KIND FILE ARGUMENTS..
  local limit=$1 kind=$2 file=$3
  shift 3
  step "$limit" "$kind $*" "$python" -m mask_rcnn_jax.benchmark "$kind" --json "$name-$file.json" "$@"
}

step 100 "kernel tests" "$python" -m pytest -q --gpu -m gpu tests/benchmarking
benchmark 100 kernels kernels
if "$python" -c 'import torchvision' 2>/dev/null; then
  step 40 "torchvision's operations" "$python" benchmarks/torchvision_ops.py "$name-torchvision_ops.json"
fi
for batch in 2 8; do
  benchmark 90 train "train_$batch" --config configs/coco.py --config.train.batch_size="$batch"
done
benchmark 90 infer infer_8 --config configs/coco.py --config.eval.batch_size=8
exit "$failed"
