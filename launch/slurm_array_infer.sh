#!/usr/bin/env bash
# Detect objects in millions of images: a share of them in each task of an array, on one GPU each.
#
#   sbatch --array=0-7 launch/slurm_array_infer.sh --workdir runs/mine --input @list.txt --output out
#   python -m mask_rcnn_jax.infer --merge out    # when all tasks are done
#
# Flags are those of `infer`, but for --shard; relative paths are those of the folder you submit from.
# To start some tasks again, name the number of all: SHARDS=8 sbatch --array=3,5 launch/..
# A task that was stopped early, by preemption or the time limit, goes back into the queue and goes on
# with the part that it was at, unless it has finished none since its last start.
#
#SBATCH --job-name=mask_rcnn_jax_infer
#SBATCH --ntasks=1
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --output=%x-%A_%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
# SIGTERM a minute before the time limit: the draft of a part is deleted.
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

output='' previous=''
for argument in "$@"; do
  if [ "$previous" = --output ]; then output=$argument; fi
  case $argument in --output=*) output=${argument#*=} ;; esac
  previous=$argument
done
parts() { # that are finished
  local name
  name=$(printf 'part-%05d-of-%05d-*.json' "$SLURM_ARRAY_TASK_ID" "$SHARDS")
  find "$output" -maxdepth 1 -name "$name" 2> /dev/null | wc -l || true
}
before=$(parts)

code=0
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun has not taken sbatch's since Slurm 22.05
# shellcheck disable=SC2016
srun bash -c 'source "$0/env.sh"; share_compiled "$@"; run_entry infer "$@"' "$here" "$@" \
  --shard="$SLURM_ARRAY_TASK_ID/$SHARDS" || code=$?

# 75: stopped early. From 128: a signal ended it. Start again, but not for ever.
[ "$code" -eq 75 ] || [ "$code" -ge 128 ] || exit "$code"
case $output in
  *://*) ;; # whose parts are not seen from here
  *)
    if [ "$(parts)" -le "$before" ] && ! job | grep 'PreemptTime=[0-9]' > /dev/null; then
      echo "error: not requeued: no part was finished since this start, see --part_size" >&2
      exit "$code"
    fi
    ;;
esac
echo "requeued after $(parts) parts"
scontrol requeue "$SLURM_JOB_ID"
