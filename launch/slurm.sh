#!/usr/bin/env bash
# One task for each GPU of some nodes. From the root of the repository:
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
# A preempted job goes back into the queue and resumes from what SIGTERM made it save.
#SBATCH --requeue
# The same three minutes before the time limit: saved, then done; the same sbatch line goes on.
#SBATCH --signal=TERM@180
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
# shellcheck source=launch/env.sh
source launch/env.sh
[ $# -gt 0 ] || { echo "error: slurm.sh needs train, train_amp or evaluate" >&2; exit 2; }
# Every task sees all GPUs of its node and takes its own: --gpus-per-task would hide from NCCL the
# GPUs that it wants to reach directly. One task's death ends all of them.
srun --kill-on-bad-exit=1 bash -c 'source launch/env.sh && run_entry "$@"' task "$@" \
  --coordinator_address=auto
