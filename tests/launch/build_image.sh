#!/usr/bin/env bash
# Build launch/Dockerfile with buildah, which needs no daemon, and train three steps in the image as
# user 1000, on the CPU. Needs root and a package index.
#
#   tests/launch/build_image.sh [BASE]
#
# BASE: a folder with Ubuntu 24.04 (debootstrap noble) where no registry can be reached.
# CUDA: 12, 13 or none (13). FLAGS: more flags for buildah.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
read -ra flags <<< "--isolation=chroot ${FLAGS:-}"
context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
git -C "$root" archive HEAD | tar -x -C "$context"
from=()
if [ $# -gt 0 ]; then
  base=$(buildah from scratch)
  buildah add --quiet "$base" "$1" / > /dev/null
  buildah commit --quiet --rm "$base" mask_rcnn_jax_base > /dev/null
  from=(--from localhost/mask_rcnn_jax_base)
fi
buildah build "${flags[@]}" "${from[@]}" --build-arg CUDA="${CUDA:-13}" --layers -f "$context/launch/Dockerfile" -t mask_rcnn_jax "$context"
container=$(buildah from mask_rcnn_jax)
in_image() { buildah run "${flags[@]}" --user 1000 "$container" -- "$@"; }
in_image launch/local.sh train --help > "$context/help"
grep -q -- --workdir "$context/help"
in_image python -m mask_rcnn_jax.prepare shapes --data_dir /tmp/shapes --train 8 --val 2
in_image launch/local.sh train --platform cpu --config quickstart --workdir /tmp/run \
  --config.data.train_json=/tmp/shapes/annotations/instances_train.json \
  --config.data.train_images=/tmp/shapes/train \
  --config.data.val_json=/tmp/shapes/annotations/instances_val.json \
  --config.data.val_images=/tmp/shapes/val \
  --config.data.image_size='(64, 64)' --config.train.batch_size=2 --config.train.steps=3
in_image ls /tmp/run/checkpoints/3
buildah rm "$container" > /dev/null
echo "built, and trained 3 steps as user 1000"
