#!/usr/bin/env bash
# Check kernel values and measure speed on a machine with an NVIDIA GPU.
#
#     benchmarks/gpu_check.sh [FOLDER]
#
# Compares every kernel with its XLA reference and times both, then times training and prediction,
# the most informative batch sizes and precisions first, and torchvision's operations and model if
# torch is installed. Skips and names steps that might not end within 9 minutes. For more time or
# other choices:
#
#     MINUTES=60 BATCHES="8 32" PRECISIONS=bfloat16 benchmarks/gpu_check.sh
#
# Writes JSON files into FOLDER (default benchmarks/results). Exits with 0 only if every started
# step succeeded and every value was right.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
out=${1:-benchmarks/results}
python=${PYTHON:-python3}
device=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr -cs 'A-Za-z0-9\n' '-')
name=$out/${device%-}-$(date +%Y-%m-%d)
mkdir -p "$out"
seconds=$((${MINUTES:-9} * 60 - 20))
failed=0

step() { # step SECONDS NAME COMMAND..: run within a time limit, if enough time is left
  local limit=$1 title=$2
  shift 2
  if ((SECONDS + limit > seconds)); then
    echo "== left out for time: $title"
    return
  fi
  echo "== $title"
  timeout "$limit" "$@" || { echo "FAILED ($?): $title"; failed=1; }
}

benchmark() { # benchmark KIND FILE ARGUMENTS..
  local kind=$1 file=$2
  shift 2
  step 75 "$kind $*" "$python" -m mask_rcnn_jax.benchmark "$kind" --json "$name-$file.json" "$@"
}

model() { # model KIND BATCH PRECISION [SUFFIX ARGUMENTS..]: train or infer
  local -A section=([train]=train [infer]=eval)
  benchmark "$1" "$1_$2_$3${4:-}" --config configs/coco.py \
    "--config.${section[$1]}.batch_size=$2" "--config.train.precision=$3" "${@:5}"
}

peer() { # peer train|infer: without preallocation, or JAX would take most of the memory
  step 75 "torchvision, $1" env XLA_PYTHON_CLIENT_PREALLOCATE=false "$python" benchmarks/peers.py \
    --python "$python" --mode "$1" --size 800,1216 --batch 4 --precision bfloat16 --channels_last \
    --json "$name-peer_$1.json"
}

step 90 "kernel tests" "$python" -m pytest -q --gpu -m gpu tests/benchmarking
benchmark kernels kernels
model train 8 bfloat16
model infer 8 bfloat16
if "$python" -c 'import torchvision' 2>/dev/null; then
  peer train
  peer infer
  step 30 "torchvision's operations" "$python" benchmarks/torchvision_ops.py "$name-torchvision_ops.json"
fi
trace=$(mktemp -d)
model train 8 bfloat16 _profile --profile "$trace"
rm -rf "$trace"
for precision in ${PRECISIONS:-bfloat16 float16 tf32}; do
  for batch in ${BATCHES:-16 24 4 2 1 8}; do
    for kind in train infer; do
      [ "$batch $precision" = "8 bfloat16" ] || model "$kind" "$batch" "$precision"
    done
  done
done
exit "$failed"
