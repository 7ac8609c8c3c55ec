# Environment and command names shared by the launch scripts. Sourced, not run.
# shellcheck shell=bash

# Find the package from any folder, installed or not.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# Leave some GPU memory to NCCL, cuDNN and the driver.
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}"
# Enable XLA's latency-hiding scheduler: it starts the all-reduce of finished gradients while the
# backward pass computes the others. It is the default on an H100 for programs with an all-reduce, but
# not on an A100. It uses more memory (benchmarks/README.md), up to 95 % of the card's
# (xla_gpu_memory_limit_slop_factor), and none without an all-reduce. If memory is short, set both this
# and xla_gpu_enable_analytical_sol_latency_estimator to false.
#
# No other flag is set, because JAX 0.10.2 and 0.12.0.1 have useful defaults:
#   xla_gpu_enable_command_buffer: fusions, cuBLAS and custom calls run as CUDA graphs of at least
#     xla_gpu_graph_min_graph_size=5, so that most of 1,000 launches a step do not wait for the host.
#     Convolutions are in none unless the flag is +convolution, worth trying with few images.
#   xla_gpu_autotune_level=4: compilation times convolutions and products and compares their results.
#     Lower levels only compile faster; 0 selects algorithms without timing.
#   xla_gpu_enable_triton_gemm, xla_gpu_enable_cublaslt: on; autotuning selects the faster.
#   xla_gpu_enable_highest_priority_async_stream: on, so that all-reduces precede computation.
# The following also keep their defaults, because no known result favors another value:
#   xla_gpu_cudnn_gemm_fusion_level=0: cuDNN as a third option for products; to be tried on a GPU.
#   xla_gpu_experimental_enable_conv_fusion=false: another way to fuse convolutions; likewise.
#   xla_gpu_enable_pipelined_all_reduce=false: for all-reduces in loops; the step has no loop.
#   xla_gpu_all_reduce_combine_threshold_bytes=30 MB: gives six gradient all-reduces.
export XLA_FLAGS="--xla_gpu_enable_latency_hiding_scheduler=true ${XLA_FLAGS:-}"
# Print why a connection failed; silent otherwise.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
# The loader uses worker processes; a thread pool in each would oversubscribe the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# share_compiled [FLAG ...]: keep compiled programs beside the workdir, which all machines and all
# restarts see. Each would compile, and time algorithms, anew: a pod has no home folder of before.
# A workdir in an object store has no folder beside it.
share_compiled() {
  local argument workdir='' previous=''
  for argument in "$@"; do
    if [ "$previous" = --workdir ]; then workdir=$argument; fi
    case $argument in --workdir=*) workdir=${argument#*=} ;; esac
    previous=$argument
  done
  [[ -n $workdir && $workdir != *://* ]] || return 0
  [[ $workdir = /* ]] || workdir=$PWD/$workdir
  export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$(dirname "$workdir")/compiled}"
}

# run_entry ENTRY [FLAG ...]: train, train_amp (float16 with loss scaling), evaluate or benchmark.
run_entry() {
  local entry=$1
  shift
  if [ "$entry" = train_amp ]; then
    entry=train
    set -- "$@" --config.train.precision=float16
  fi
  exec "${PYTHON:-python}" -m "mask_rcnn_jax.$entry" "$@"
}
