#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: are the kernels right there, and how fast is all of it?
#
#     benchmarks/gpu_check.sh [FOLDER]
#
# Compares every kernel with the plain code and times both, then times the training step and the
# prediction, and torchvision's operations and model where torch is installed. Under 9 minutes. Writes
# JSON files into FOLDER (benchmarks/results); exit code 0 only if everything ran and every value was
# right. With more time, for one part after the other:
#
#     BATCHES="1 2 4 8 16 24" PRECISIONS="bfloat16 float16 tf32" benchmarks/gpu_check.sh
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

step 90 "kernel tests" "$python" -m pytest -q --gpu -m gpu tests/benchmarking
benchmark 90 kernels kernels
if "$python" -c 'import torchvision' 2>/dev/null; then
  step 30 "torchvision's operations" "$python" benchmarks/torchvision_ops.py "$name-torchvision_ops.json"
fi
for precision in ${PRECISIONS:-bfloat16}; do
  for batch in ${BATCHES:-2 8}; do
    benchmark 75 train "train_${batch}_$precision" --config configs/coco.py \
      --config.train.batch_size="$batch" --config.train.precision="$precision"
  done
  for batch in ${BATCHES:-8}; do
    benchmark 75 infer "infer_${batch}_$precision" --config configs/coco.py \
      --config.eval.batch_size="$batch" --config.train.precision="$precision"
  done
done
if "$python" -c 'import torchvision' 2>/dev/null; then
  # JAX would take most of the memory for itself.
  step 75 "torchvision's model" env XLA_PYTHON_CLIENT_PREALLOCATE=false "$python" \
    benchmarks/peers.py --python "$python" --mode train --size 800,1216 --batch 4 \
    --precision bfloat16 --channels_last --json "$name-peer_train.json"
fi
exit "$failed"
