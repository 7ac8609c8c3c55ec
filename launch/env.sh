# What every launch script sets, and how it names the commands. Sourced, not run.
# shellcheck shell=bash

# All of the GPU's memory but what NCCL, cuDNN and the driver need.
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}"
# XLA's scheduler that starts the all-reduce of the gradients that are ready while the backward pass
# computes the others. On an H100 it is on anyway wherever there is an all-reduce, on an A100 it is
# not. It takes memory for that (benchmarks/README.md), up to 95 % of the card's
# (xla_gpu_memory_limit_slop_factor); without an all-reduce it takes none. Where memory is short, put
# both this and xla_gpu_enable_analytical_sol_latency_estimator to false.
#
# Nothing else is set, as JAX 0.10.2 and 0.12.0.1 have by default what is worth having:
#   xla_gpu_enable_command_buffer: fusions, cuBLAS, cuDNN and custom calls go out as CUDA graphs of at
#     least xla_gpu_graph_min_graph_size=5, so that 900 launches a step do not wait for the host.
#   xla_gpu_autotune_level=4: convolutions and products are timed when the program is compiled, and
#     their results compared. Lower levels only compile faster, 0 takes algorithms without timing them.
#   xla_gpu_enable_triton_gemm, xla_gpu_enable_cublaslt: on, and the faster of the two is taken.
#   xla_gpu_enable_highest_priority_async_stream: on, so that all-reduces come before computing.
# And these stay as they are, because nothing known here speaks for another value:
#   xla_gpu_cudnn_gemm_fusion_level=0: cuDNN as a third way for products; to be tried on a GPU.
#   xla_gpu_experimental_enable_conv_fusion=false: another way to fuse convolutions; likewise.
#   xla_gpu_enable_pipelined_all_reduce=false: for all-reduces in loops, and the step has no loop.
#   xla_gpu_all_reduce_combine_threshold_bytes=30 MB: makes six all-reduces of the gradients.
#   xla_gpu_dot_merger_threshold_mb=64: 0 spares the RPN a copy (1 % of all bytes) for 19 launches.
export XLA_FLAGS="--xla_gpu_enable_latency_hiding_scheduler=true ${XLA_FLAGS:-}"
# Says why a connection failed; silent otherwise.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
# The loader has processes of its own: a pool of threads in each would fight over the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

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
