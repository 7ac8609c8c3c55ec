#!/usr/bin/env bash
# Detect objects in millions of images: a share of them in each task of an array, on one GPU each.
#
#   sbatch --array=0-7 launch/slurm_array_infer.sh --workdir runs/mine --input @list.txt --output out
#   python -m mask_rcnn_jax.infer --merge out    # when all tasks are done
#
# Flags are those of `infer`, but for --shard; relative paths are those of the folder you submit from.
# To start some tasks again, name the number of all: SHARDS=8 sbatch --array=3,5 launch/..
# A shard is one file, written whole at the end; those that are there are done, so all tasks may be started
# again. A task that was preempted goes back into the queue; one that meets the time limit needs more shards.
#
#SBATCH --job-name=mask_rcnn_jax_infer
#SBATCH --ntasks=1
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --output=%x-%A_%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
# SIGTERM a minute before the time limit: the draft of the file is deleted.
#SBATCH --signal=TERM@60
set -euo pipefail
[ $# -gt 0 ] || { echo "error: slurm_array_infer.sh needs the flags of infer" >&2; exit 2; }
: "${SLURM_ARRAY_TASK_ID:?is not set: submit with sbatch --array=0-7}"
if [ -z "${SHARDS:-}" ]; then
  [ "$SLURM_ARRAY_TASK_MIN" -eq 0 ] && [ "$SLURM_ARRAY_TASK_COUNT" -eq $((SLURM_ARRAY_TASK_MAX + 1)) ] || {
    echo "error: --array is not from 0 to n - 1: set SHARDS to the number of all shards" >&2; exit 2
  }
  SHARDS=$SLURM_ARRAY_TASK_COUNT
fi
job() { scontrol show job "$SLURM_JOB_ID"; }
# Slurm runs a copy of this script and knows where the original is.
here=$(dirname "${BASH_SOURCE[0]}")
if [ ! -e "$here/env.sh" ]; then
  original=$(job | sed -n 's/^ *Command=//p')
  here=$(dirname "${original%%/slurm_array_infer.sh*}/slurm_array_infer.sh")
fi

code=0
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun has not taken sbatch's since Slurm 22.05
# shellcheck disable=SC2016
srun bash -c 'source "$0/env.sh"; share_compiled "$@"; run_entry infer "$@"' "$here" "$@" \
  --shard="$SLURM_ARRAY_TASK_ID/$SHARDS" || code=$?

# 75: stopped early. From 128: a signal ended it.
[ "$code" -eq 75 ] || [ "$code" -ge 128 ] || exit "$code"
job | grep 'PreemptTime=[0-9]' > /dev/null || {
  echo "error: stopped early, not preempted: allow more time or memory, or take more shards" >&2
  exit "$code"
}
scontrol requeue "$SLURM_JOB_ID"
