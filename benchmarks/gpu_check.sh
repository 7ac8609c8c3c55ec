#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: are the kernels right there, and how fast is all of it?
#
#     benchmarks/gpu_check.sh [FOLDER]
#
# Compares every kernel with the plain code and times both, then times the training step and the
# prediction, the most telling batches and precisions first, and torchvision's operations and model
# where torch is installed. It starts nothing that may not end within 9 minutes, and says what it left
# out; with more time, and for other choices:
#
#     MINUTES=60 BATCHES="8 32" PRECISIONS=bfloat16 benchmarks/gpu_check.sh
#
# Writes JSON files into FOLDER (benchmarks/results); exit code 0 only if all that was started ran and
# every value was right.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
out=${1:-benchmarks/results}
python=${PYTHON:-python3}
device=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr -cs 'A-Za-z0-9\n' '-')
name=$out/${device%-}-$(date +%Y-%m-%d)
mkdir -p "$out"
seconds=$((${MINUTES:-9} * 60 - 20))
failed=0

step() { # step SECONDS NAME COMMAND..: run it within a time limit, if there is so much time left
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

peer() { # peer train|infer: JAX would take most of the memory for itself
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
