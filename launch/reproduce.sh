#!/usr/bin/env bash
# Reproduce the tables that NVIDIA published for its three Mask R-CNN examples, on one machine.
#
#   DATA=/data/coco WEIGHTS=/data/weights OUT=/runs/reproduce launch/reproduce.sh
#   DATA=/data/coco WEIGHTS=/data/weights OUT=/runs/reproduce sbatch launch/reproduce.sh
#   launch/reproduce.sh --rehearse          (minutes on a CPU: generated images, two steps each)
#
# Downloads and checks COCO 2017, trains the three recipes on each number of GPUs, on the largest with
# each seed, measures training and prediction, and writes OUT/report.md: the published tables with ours
# beside them. A finished part leaves a file in OUT/parts and is not repeated, so the same command goes
# on where it was stopped. A part that fails is named, and the others go on.
#
# Choose less with RECIPES, PRECISIONS, GPUS, SEEDS and STEPS (timed steps of a throughput). Flags
# after the script's name go to every training, benchmark and prediction.
#
#SBATCH --job-name=mask_rcnn_reproduce
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=64
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# Five minutes before the time limit the training saves, and the job is requeued.
#SBATCH --signal=B:TERM@300
set -uo pipefail
STOPPED=75 # exit code of `train`, and of this script: start again

script=${BASH_SOURCE[0]}
if [ -n "${SLURM_JOB_ID:-}" ]; then # runs from a copy: ask for the name that sbatch was given
  script=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\([^ ]*\).*/\1/p')
fi
root=$(cd "$(dirname "$script")/.." && pwd) || exit 2
DATA=$(realpath -m "${DATA:-data/coco}") OUT=$(realpath -m "${OUT:-runs/reproduce}")
WEIGHTS=$(realpath -m "${WEIGHTS:-weights}")
cd "$root" || exit 2

rehearse=
if [ "${1:-}" = --rehearse ]; then
  rehearse=1
  shift
  DATA=$OUT/shapes GPUS=${GPUS:-1 2} SEEDS=${SEEDS:-0 1} STEPS=${STEPS:-2}
fi
RECIPES=${RECIPES:-coco coco_nvidia_tf1 coco_nvidia_pytorch} PRECISIONS=${PRECISIONS:-tf32 float16}
GPUS=${GPUS:-1 4 8} SEEDS=${SEEDS:-0 1 2 3 4} STEPS=${STEPS:-100}
python=${PYTHON:-python}
most=$(tr ' ' '\n' <<<"$GPUS" | sort -n | tail -n 1)
failed=() child='' stopped=''
flags=("$@")

# shellcheck disable=SC2329  # the trap calls it
stop() {
  stopped=1
  [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
}
trap stop TERM

leave_if_stopped() {
  [ -n "$stopped" ] || return 0
  echo "stopped early; the same command goes on"
  [ -z "${SLURM_JOB_ID:-}" ] || scontrol requeue "$SLURM_JOB_ID"
  exit $STOPPED
}

run() { # run GPUS ENTRY ARGUMENTS..: on the first GPUs of the machine, or as many devices of a CPU
  local gpus=$1
  shift
  if [ -n "$rehearse" ]; then
    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=$gpus launch/local.sh "$@" &
  else
    GPUS=$gpus launch/local.sh "$@" &
  fi
  child=$!
  wait "$child"
  local code=$?
  while kill -0 "$child" 2>/dev/null; do # a signal ends `wait` before the program ends
    wait "$child"
    code=$?
  done
  child=''
  return "$code"
}

part() { # part FILE COMMAND..: run the command, which makes FILE.new, unless there is FILE
  local file=$OUT/parts/$1
  shift
  [ ! -s "$file" ] || return 0
  leave_if_stopped
  mkdir -p "$(dirname "$file")"
  echo "== ${file#"$OUT/parts/"}"
  if "$@" "$file.new" && [ -s "$file.new" ]; then
    mv "$file.new" "$file"
    report
  else
    leave_if_stopped
    failed+=("${file#"$OUT/parts/"}")
    echo "FAILED: ${file#"$OUT/parts/"}"
  fi
}

report() {
  "$python" -m benchmarks.reproduce "$OUT/parts" >"$OUT/report.md.new" &&
    mv "$OUT/report.md.new" "$OUT/report.md"
}

prepare_data() { # prepare_data FILE: downloads what is missing and checks sums, sizes and counts
  if [ -n "$rehearse" ]; then
    "$python" -m mask_rcnn_jax.prepare shapes --data_dir "$DATA" --train 16 --val 4 --size 64
  else
    "$python" -m mask_rcnn_jax.prepare coco2017 --data_dir "$DATA"
  fi && echo "{\"data_dir\": \"$DATA\"}" >"$1"
}

accuracy() { # accuracy RECIPE PRECISION IMAGES GPUS SEED FILE: train to the end, keep its AP
  local run=$OUT/runs/$1-$2-$4-$5 code started
  choose "$1"
  while :; do
    started=$SECONDS
    run "$4" train --config "$1" --workdir "$run" "${config[@]}" --config.train.precision="$2" \
      --config.train.images_per_device="$3" --config.train.seed="$5" "${flags[@]}"
    code=$?
    echo $((SECONDS - started)) >>"${6%.json.new}.seconds"
    [ "$code" = $STOPPED ] && [ -z "$stopped" ] || break
  done
  [ "$code" = 0 ] || return "$code"
  cp "$(find "$run/eval" -name metrics.json | sort -V | tail -n 1)" "$6"
}

training() { # training RECIPE PRECISION IMAGES FILE: images/s over the numbers of GPUs
  choose "$1"
  run "$most" benchmark train --config "$1" "${config[@]}" --config.train.precision="$2" \
    --config.train.batch_size=$((most * $3)) --devices="${GPUS// /,}" --steps="$STEPS" \
    --json="$4" "${flags[@]}"
}

prediction() { # prediction RECIPE PRECISION IMAGES GPUS FILE
  choose "$1"
  run "$4" benchmark infer --config "$1" "${config[@]}" --config.train.precision="$2" \
    --config.eval.batch_size="$3" --steps="$STEPS" --json="$5" "${flags[@]}"
}

choose() { # choose RECIPE: its entries in `config`, images per GPU of the page in `train`, `infer`
  case $1 in
    coco) weights=nvidia_rn50_tf_amp train="4 2" infer="6 12 24" ;;
    coco_nvidia_tf1)
      weights=resnet-nhwc-2018-02-07/model.ckpt-112603 train=4 infer="2 4 8"
      ;;
    coco_nvidia_pytorch) weights=R-50.pkl train=12 infer="1 2 4 8" ;;
    *)
      echo "error: RECIPES has $1, expected coco, coco_nvidia_tf1 or coco_nvidia_pytorch" >&2
      exit 2
      ;;
  esac
  local names=(train2017 val2017 instances_train2017 instances_val2017)
  [ -z "$rehearse" ] || names=(train val instances_train instances_val)
  config=(
    "--config.data.train_images=$DATA/${names[0]}" "--config.data.val_images=$DATA/${names[1]}"
    "--config.data.train_json=$DATA/annotations/${names[2]}.json"
    "--config.data.val_json=$DATA/annotations/${names[3]}.json"
  )
  if [ -z "$rehearse" ]; then
    config+=("--config.model.init_from=$WEIGHTS/$weights")
    return
  fi
  train=1 infer=1
  config+=(
    --config.data.{"image_size=(64, 64)",max_instances=8,num_workers=0}
    --config.model.{fpn.channels=32,rpn.channels=32,box_head.channels=32}
    --config.model.{mask_head.channels=32,rpn.batch_size_per_image=16}
    --config.model.backbone.{depth=10,norm=group,norm_eps=1e-5,frozen_stages=0}
    --config.model.sampling.batch_size_per_image=16
    --config.model.rpn.{pre,post}_nms_topk_{train,test}"=50"
    --config.train.{batch_size=2,steps=2,log_every=1,checkpoint_every=2,eval_every=2}
    --config.eval.{batch_size=2,loss_images=0,pictures=0,pre_nms_topk=50,detections_per_image=5}
    --config.optim.{learning_rate=0.001,warmup_until=0.5}
  )
}

for recipe in $RECIPES; do
  choose "$recipe"
  found=("$WEIGHTS/$weights"*)
  if [ -z "$rehearse" ] && [ ! -e "${found[0]}" ]; then
    echo "error: $WEIGHTS/$weights is missing, see docs/recipes.md for its address" >&2
    exit 2
  fi
done
part data.json prepare_data
[ -s "$OUT/parts/data.json" ] || exit 1
# The cheap parts first: throughputs take minutes, trainings hours.
for recipe in $RECIPES; do
  for precision in $PRECISIONS; do
    choose "$recipe"
    folder=$recipe/$precision
    for images in $train; do
      part "$folder/train-$images.json" training "$recipe" "$precision" "$images"
    done
    for gpus in $GPUS; do
      for images in $infer; do
        part "$folder/infer-$gpus-$images.json" prediction "$recipe" "$precision" "$images" "$gpus"
      done
    done
  done
done
for seed in $SEEDS; do
  for recipe in $RECIPES; do
    for precision in $PRECISIONS; do
      choose "$recipe"
      for gpus in $GPUS; do
        # Other seeds on the largest number of GPUs only.
        [ "$gpus" = "$most" ] || [ "$seed" = "${SEEDS%% *}" ] || continue
        part "$recipe/$precision/accuracy-$gpus-$seed.json" \
          accuracy "$recipe" "$precision" "${train%% *}" "$gpus" "$seed"
      done
    done
  done
done
leave_if_stopped
report || exit 1
echo "$OUT/report.md"
[ ${#failed[@]} = 0 ] || { echo "error: failed: ${failed[*]}" >&2; exit 1; }
