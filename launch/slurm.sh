#!/usr/bin/env bash
# Start one task per GPU on some nodes, from any folder; relative paths are those of that folder:
#
#   sbatch --nodes=2 launch/slurm.sh train --config coco --workdir runs/coco
#   sbatch --nodes=1 --ntasks-per-node=4 --gres=gpu:4 launch/slurm.sh evaluate --workdir runs/coco
#
# A run that was stopped early, by preemption or the time limit, saves, goes back into the queue and
# resumes, unless it has written no checkpoint since its last start. scancel ends it for good. What is
# compiled is kept beside the workdir, in `compiled`, unless JAX_COMPILATION_CACHE_DIR names a folder.
#
#SBATCH --job-name=mask_rcnn_jax
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=8
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# SIGTERM three minutes before the time limit: enough for a step and a checkpoint.
#SBATCH --signal=TERM@180
set -euo pipefail
[ $# -gt 0 ] || { echo "error: slurm.sh needs train, train_amp, evaluate or benchmark" >&2; exit 2; }
job() { scontrol show job "$SLURM_JOB_ID"; }
# Slurm runs a copy of this script and knows where the original is.
here=$(dirname "${BASH_SOURCE[0]}")
if [ ! -e "$here/env.sh" ]; then
  original=$(job | sed -n 's/^ *Command=//p')
  here=$(dirname "${original%%/slurm.sh*}/slurm.sh")
fi

workdir='' previous=''
for argument in "$@"; do
  if [ "$previous" = --workdir ]; then workdir=$argument; fi
  case $argument in --workdir=*) workdir=${argument#*=} ;; esac
  previous=$argument
done
case $1 in train*) [ -n "$workdir" ] || { echo "error: slurm.sh $1 needs --workdir" >&2; exit 2; } ;; esac
newest_step() {
  local folders
  folders=$(cd "$workdir/checkpoints" 2>/dev/null && ls) || true
  { echo 0; grep -xE '[0-9]+' <<< "$folders" || true; } | sort -n | tail -n 1
}
before=$(newest_step)

# Every task sees all GPUs of its node and uses one: --gpus-per-task would hide from NCCL the GPUs it
# accesses directly. If one task dies, srun ends the others and returns the largest code of all. The
# code of a task that was told to end says nothing, so each task notes its own: 0 if it was told to
# end, and 137 before it ends at all, which stays there if it is killed.
export CODES=$PWD/slurm-$SLURM_JOB_ID.codes
mkdir -p "$CODES"
trap 'rm -rf "$CODES"' EXIT
# shellcheck disable=SC2016
task='source "$0/env.sh"
note() { echo "$1" > "$CODES/$SLURM_PROCID"; } 2> /dev/null
note 137
trap "told=yes; note 0" TERM
share_compiled "$@"
run_entry "$@" &
while wait $!; code=$?; [ "$code" -gt 128 ] && kill -0 $! 2> /dev/null; do :; done
[ "${told:-no}" = yes ] || note "$code"
exit "$code"'

code=0
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun has not taken sbatch's since Slurm 22.05
srun --kill-on-bad-exit=1 bash -c "$task" "$here" "$@" --coordinator_address=auto || code=$?
noted=$({ echo 0; cat "$CODES"/*; } 2> /dev/null | sort -n | tail -n 1) || true
if [ "$code" -ne 0 ] && [ "$noted" -ne 0 ]; then code=$noted; fi

# 75: stopped early. From 128: a signal ended a task. Start again, but not for ever.
[ "$code" -eq 75 ] || [ "$code" -ge 128 ] || exit "$code"
after=$(newest_step)
if [ "$after" -le "$before" ] && ! job | grep 'PreemptTime=[0-9]' > /dev/null; then
  echo "error: not requeued: no checkpoint after step $before since this start" >&2
  exit "$code"
fi
echo "requeued at step $after"
scontrol requeue "$SLURM_JOB_ID"
