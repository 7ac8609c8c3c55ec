#!/usr/bin/env bash
# Reproduce the tables that NVIDIA published for its three Mask R-CNN examples, on one machine.
#
#   DATA=/data/coco WEIGHTS=/data/weights OUT=/runs/reproduce launch/reproduce.sh
#   DATA=/data/coco WEIGHTS=/data/weights OUT=/runs/reproduce sbatch launch/reproduce.sh
#   launch/reproduce.sh --rehearse          (minutes on a CPU: generated images, two steps each)
#
# RECIPES, PRECISIONS, GPUS, SEEDS and STEPS choose less, see docs/reproducing.md; flags after the script's
# name go to every training, benchmark and prediction. The same command goes on where it was stopped.
#
#SBATCH --job-name=mask_rcnn_reproduce
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=64
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# Five minutes before the time limit the training saves, and the job is requeued. Preemption does not
# signal a job without steps when the grace time begins, but at its end, and Slurm requeues it then.
#SBATCH --signal=B:TERM@300
set -euo pipefail
# Slurm runs a copy of this script and knows where the original is.
here=$(dirname "${BASH_SOURCE[0]}")
if [ ! -e "$here/env.sh" ]; then
  original=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p')
  here=$(dirname "${original%%/reproduce.sh*}/reproduce.sh")
fi
# shellcheck source=launch/env.sh
source "$here/env.sh"
exec "${PYTHON:-python}" -m benchmarks.reproduce_job "$@"
