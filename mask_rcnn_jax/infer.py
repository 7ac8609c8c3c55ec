"""Find objects in pictures; write annotated pictures and detections.json (COCO results).

    python -m mask_rcnn_jax.infer --workdir runs/quickstart --input photo.jpg --output out
    python -m mask_rcnn_jax.infer --workdir runs/quickstart --input 'photos/*.png' --input more/ \\
        --output out --score_threshold 0.7
    python -m mask_rcnn_jax.infer --config configs/coco_torchvision.py:coco_v1 \\
        --weights maskrcnn_resnet50_fpn_coco-bf2d0c1e.pth --input photo.jpg --output out
"""

import glob
import json
import os
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import flags, logging
from ml_collections import ConfigDict

from mask_rcnn_jax import cli
from mask_rcnn_jax.data.coco import UndecodableImage, decode_image
from mask_rcnn_jax.deploy.predictor import Predictor
from mask_rcnn_jax.evaluation import visualize
from mask_rcnn_jax.evaluation.coco import to_coco_results
from mask_rcnn_jax.training import pretrained, run
from mask_rcnn_jax.training.checkpoint import find_checkpoint
from mask_rcnn_jax.training.metrics import Progress

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp")


def infer(
    config: ConfigDict | None,
    weights: str,
    inputs: Sequence[str],
    output: str,
    score_threshold: float,
) -> list[dict]:
    """Detect in every picture of `inputs` and write what was found below `output`.

    weights: a run, one of its checkpoints, or a file of weights, which needs a config; without one
    that of the run is taken. A picture that cannot be read is named and left out,
    unless there is no other. Returns the entries of detections.json.
    """
    paths = find_images(inputs)
    folder = Path(output)
    targets = _targets(paths, folder)
    if pretrained.is_run(weights):
        workdir = find_checkpoint(weights).workdir
        run_config, categories = run.read_workdir(workdir)
        config = run_config if config is None else config
        run.check_model(config, workdir)
        run.make_model(config, len(categories))  # a config of other classes is found out
        config.model.num_classes = len(categories)
    elif config is None:
        raise ValueError(f"--weights {weights} is no run: it needs --config")
    variables = run.load_variables(weights, config)
    if not pretrained.is_run(weights):
        categories = run.categories_of_weights(config, variables)
    config.eval.score_threshold = score_threshold
    predictor = Predictor(config, variables)
    names = [category["name"] for category in categories]
    ids = [category["id"] for category in categories]

    folder.mkdir(parents=True, exist_ok=True)
    progress = Progress("pictures", len(paths))
    entries, unreadable = [], []
    for image_id, (path, target) in enumerate(zip(paths, targets, strict=True), start=1):
        progress.advance(1)
        try:
            image = decode_image(path)
        except UndecodableImage as error:
            unreadable.append(str(error))
            logging.warning("left out %s", error)
            continue
        found = predictor(image)
        picture = visualize.draw_detections(
            image, found.boxes, found.classes, found.scores, found.masks, names,
            score_threshold=score_threshold,
        )  # fmt: skip
        visualize.write_picture(target, picture)
        entries += _results(found, image.shape[:2], image_id, path, ids, config)
    if len(unreadable) == len(paths):
        raise ValueError(f"no picture could be read: {unreadable[0]}")
    (folder / "detections.json").write_text(json.dumps(entries))
    logging.info("%d detections in %d pictures: %s", len(entries), len(paths), folder)
    return entries


def find_images(inputs: Sequence[str]) -> list[Path]:
    """Picture files named by files, folders and glob patterns, each once, in order.

    Raises ValueError for an input without any picture.
    """
    found: dict[Path, None] = {}
    for item in inputs:
        if os.path.isfile(item):
            paths = [item]
        else:
            names = glob.glob(os.path.join(glob.escape(item), "*") if os.path.isdir(item) else item)
            paths = sorted(name for name in names if name.lower().endswith(IMAGE_SUFFIXES))
        if not paths:
            raise ValueError(f"--input {item}: no pictures there ({', '.join(IMAGE_SUFFIXES)})")
        found |= dict.fromkeys(map(Path, paths))
    return list(found)


def _targets(paths: Sequence[Path], folder: Path) -> list[Path]:
    """A file in `folder` for each picture; two of the same name get a number.

    Raises ValueError if one of the pictures would be overwritten.
    """
    taken: set[str] = set()
    targets = []
    for path in paths:
        suffix = ".png" if path.suffix.lower() == ".png" else ".jpg"
        name, count = path.stem, 1
        while name + suffix in taken:
            count += 1
            name = f"{path.stem}_{count}"
        taken.add(name + suffix)
        targets.append(folder / (name + suffix))
    overwritten = {path.resolve() for path in paths} & {path.resolve() for path in targets}
    if overwritten:
        raise ValueError(
            f"--output {folder} would overwrite {len(overwritten)} pictures of --input, "
            f"{min(overwritten)} for one; choose another folder"
        )
    return targets


def _results(
    found, size: tuple[int, int], image_id: int, path: Path, ids: list, config: ConfigDict
) -> list[dict]:
    """Entries of detections.json, box and mask in one, with `file_name`."""
    one = jax.tree.map(lambda leaf: leaf[None], found)
    boxes, masks = to_coco_results(
        one, [(1.0, 1.0)], [image_id], [size], ids,
        paste=config.eval.paste, box_offset=config.eval.box_offset,
    )  # fmt: skip
    return [
        {"file_name": path.name, **box, "segmentation": mask["segmentation"]}
        for box, mask in zip(boxes, masks, strict=True)
    ]


def _define_flags() -> None:
    cli.define_config(required=False)
    flags.DEFINE_string("workdir", None, "Folder of a run; its latest checkpoint is taken.")
    flags.DEFINE_string("weights", None, "A workdir, one of its checkpoints/<step>, or a file.")
    flags.DEFINE_multi_string("input", None, "File, folder or glob; repeatable.", required=True)
    flags.DEFINE_string("output", None, "Folder for the annotated pictures.", required=True)
    flags.DEFINE_float("score_threshold", 0.5, "Leave out detections below it.", 0.0, 1.0)


def main(_: Sequence[str]) -> None:
    FLAGS = flags.FLAGS
    if (FLAGS.workdir is None) == (FLAGS.weights is None):
        raise ValueError("infer needs exactly one of --workdir and --weights")
    weights = FLAGS.workdir or FLAGS.weights
    infer(FLAGS.config, weights, FLAGS.input, FLAGS.output, FLAGS.score_threshold)


if __name__ == "__main__":
    cli.run(main, _define_flags)
