# What every launch script sets, and how it names the commands. Sourced, not run.
# shellcheck shell=bash

# All of the GPU's memory but what NCCL, cuDNN and the driver need.
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}"
# Starts the all-reduce of the gradients that are ready while the backward pass computes the others.
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
