#!/usr/bin/env bash
# Check the package on a machine with an NVIDIA GPU and no network, in three stages.
#
#     benchmarks/gpu_check.sh prepare          # here, with a network
#     benchmarks/gpu_check.sh rehearse         # here: all stages on a CPU, with a tiny model
#     benchmarks/gpu_check.sh 1 [FOLDER]       # there: is it right, does it learn
#     benchmarks/gpu_check.sh 2 [FOLDER]       # how fast is it
#     benchmarks/gpu_check.sh 3 [FOLDER]       # beside torchvision; XLA's flags
#
# `prepare` collects wheels in .whl for a Python 3.12 that has jax, flax, optax, orbax and numpy, and
# values of a CPU in .firstday; take both along with the checkout. LEAVE_OUT="pillow .." names
# packages to leave out; unset, that is OpenCV, without which the steps that read pictures do not run.
# More than MAX_MIB (60) to take along is an error. A stage takes at most SECONDS_LEFT (570).
#
# The stages write stage_N.json (each figure at once) and stage_N.log (each step as it ends) into
# FOLDER, by default $OUT or benchmarks/results/DATE. The exit code is 0 if every step succeeded that
# the machine has the programs for, 1 if one failed, 3 if none did but time was too short for all, and
# 128 + N if signal N ended the stage.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
python=${PYTHON:-python3}
packages=(array_record cloudpickle flatbuffers flax google-crc32c grain jaxtyping ml_collections msgspec
  opencv-python-headless optax orbax-checkpoint packaging pillow portpicker pycocotools safetensors
  tensorboardX wadler_lindig)

prepare() {
  local wanted=() platforms=() name
  for name in "${packages[@]}"; do
    [[ " ${LEAVE_OUT-opencv-python-headless} " == *" $name "* ]] || wanted+=("$name")
  done
  for name in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014; do
    platforms+=(--platform "${name}_x86_64")
  done
  rm -f .whl/*.whl
  "$python" -m pip download -q --no-deps --only-binary=:all: --implementation cp \
    --python-version 3.12 "${platforms[@]}" -c constraints.txt -d .whl "${wanted[@]}" || return
  install_wheels # or do without, in an environment that has all packages
  JAX_PLATFORMS=cpu "$python" -m benchmarks.gpu_parity reference .firstday || return
  local taken
  taken=$(du -smc .whl .firstday | tail -n 1 | cut -f 1)
  echo "$taken MiB of wheels and values"
  ((taken <= ${MAX_MIB:=60})) || {
    echo "more than MAX_MIB=$MAX_MIB; LEAVE_OUT=\"NAME ..\" leaves out what is there anyway, of:" >&2
    du -k .whl/*.whl | sort -n | tail -n 2 >&2
    return 1
  }
}

install_wheels() { # the carried packages, for all steps
  compgen -G '.whl/*.whl' >/dev/null || return 0
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --target "$scratch/site" .whl/*.whl || {
    echo "the wheels in .whl do not fit this Python" >&2
    return 1
  }
  export PYTHONPATH="$scratch/site:$PYTHONPATH"
}

stage() { # stage NUMBER FOLDER SECONDS FLAGS..
  "$python" -m benchmarks.gpu_steps "$1" --out "$2" --seconds "$3" "${@:4}"
}

[[ "${1:-}" =~ ^(prepare|rehearse|1|2|3)$ ]] || {
  echo "expected prepare, rehearse, 1, 2 or 3" >&2
  exit 2
}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
if [ "$1" = prepare ]; then
  prepare
  exit
fi
install_wheels || [ "$1" = rehearse ] || exit 1
if [ "$1" = rehearse ]; then
  export JAX_PLATFORMS=cpu XLA_FLAGS="${XLA_FLAGS:---xla_backend_optimization_level=0}"
  export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$scratch/compiled}"
  failed=0
  for number in 1 2 3; do
    stage "$number" "${2:-$scratch/out}" 3600 --rehearse || failed=$?
    ((failed <= 128)) || exit "$failed" # by a signal
  done
  exit "$failed"
fi
# JAX and NVIDIA's programs look for a CUDA toolkit in these.
cuda=$("$python" -c 'from pallas_kernels.check_compile import cuda_root; print(cuda_root())')
[ -e "$cuda/bin/ptxas" ] && export CUDA_ROOT="$cuda" PATH="$cuda/bin:$PATH"
stage "$1" "${2:-${OUT:-benchmarks/results/$(date +%F)}}" $((${SECONDS_LEFT:-570} - SECONDS))
