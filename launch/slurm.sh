#!/usr/bin/env bash
# Start one task per GPU on some nodes. Run from the root of the repository:
#
#   sbatch --nodes=2 launch/slurm.sh train --config configs/coco.py --workdir runs/coco
#   sbatch --nodes=1 --ntasks-per-node=4 --gres=gpu:4 launch/slurm.sh evaluate --workdir runs/coco
#
#SBATCH --job-name=mask_rcnn_jax
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=8
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
# A preempted job saves on SIGTERM, is requeued and resumes.
#SBATCH --requeue
# Three minutes before the time limit it also saves and exits; the same sbatch command resumes it.
#SBATCH --signal=TERM@180
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
# shellcheck source=launch/env.sh
source launch/env.sh
[ $# -gt 0 ] || { echo "error: slurm.sh needs train, train_amp or evaluate" >&2; exit 2; }
# Every task sees all GPUs of its node and uses one: --gpus-per-task would hide from NCCL the GPUs it
# accesses directly. If one task dies, all end.
srun --kill-on-bad-exit=1 bash -c 'source launch/env.sh && run_entry "$@"' task "$@" \
  --coordinator_address=auto
