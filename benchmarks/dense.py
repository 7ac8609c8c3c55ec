"""Measure training and prediction of images with hundreds to thousands of objects.

    python -m benchmarks.dense --config dense:small --objects 2000 --target h100 \\
        --config.data.fixed_size_crop.size="(1024, 1024)"

Writes images of 1024 x 1024 pixels with so many discs, reads them with the recipe's loader, and
takes training steps and predictions on this machine; limits and budgets follow the objects, see
`entries.budgets`. With `--target`, compiles both for absent GPUs, too, with `train.batch_size`
images and one. Prints a json object a line: the figures of this machine, then those that are only
planned.
`--config.section.name=value` changes an entry.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import jax
import numpy as np

from benchmarks import entries
from mask_rcnn_jax.benchmarking import inputs, process_tree
from mask_rcnn_jax.benchmarking.absent import MODES, compile_programs
from mask_rcnn_jax.benchmarking.devices import describe
from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.data.kinds import build_augment
from mask_rcnn_jax.data.loader import TrainLoader, TrainOrder
from mask_rcnn_jax.evaluation.encode import encode_image, split_images
from mask_rcnn_jax.memory import peak_rss_mb
from mask_rcnn_jax.models.build import init_variables
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.structures import Batch
from mask_rcnn_jax.training.step import make_mesh, make_predict_step, shard_batch

SIDE, IMAGES = 1024, 4
CORNERS = 16


def main(arguments: argparse.Namespace) -> None:
    recipe = load_config(arguments.config, entries.budgets(arguments.objects) | arguments.entries)
    if arguments.calls:
        measured = measure(recipe, arguments.objects, arguments.calls)
        print(json.dumps({"objects": arguments.objects, **measured}), flush=True)
    if arguments.target:
        planned = plan(recipe, arguments.target)
        print(json.dumps({"objects": arguments.objects, **planned}), flush=True)


def measure(recipe: Recipe, objects: int, calls: int) -> dict[str, Any]:
    """Return seconds and memory on this machine, of the last of `calls` steps.

    `host_peak_mb` is the highest memory of this process, and what its loader's processes have
    beside it; pages that they share count for each.
    """
    data, rows = recipe.data, recipe.train.batch_size
    with tempfile.TemporaryDirectory() as folder:
        dataset = load_coco(write_images(Path(folder), objects), folder)
        order = TrainOrder(seed=0, batch_size=rows, keep_empty=True)
        options = data.in_training()
        workers, augment = data.num_workers, build_augment(data)
        loader = TrainLoader(dataset, options, order, num_workers=workers, augment=augment)
        train_s, train_cpu_s, batch = _train(recipe, loader, calls)
        others = process_tree.rss_mb(process_tree.family()[1:])
        train_peak_mb = peak_rss_mb() + others
        loader.close()
    return {
        **describe(),
        "batch_size": rows,
        "num_workers": data.num_workers,
        "objects_in_batch": int(np.sum(batch.targets.valid)),
        "train_s": round(train_s, 2),
        "train_cpu_s": round(train_cpu_s, 2),
        "train_host_peak_mb": round(train_peak_mb),
        **_predict(recipe, batch, calls),
    }


def _train(recipe: Recipe, loader: Iterator[Batch], calls: int) -> tuple[float, float, Batch]:
    """Return seconds and processor seconds of the last step, with its batch's loading."""
    mesh, model = make_mesh(), inputs.recipe_model(recipe)
    variables = init_variables(model, recipe.train.seed)
    step, tx = inputs.recipe_step(recipe, model, variables["params"], mesh, recipe.train.batch_size)
    state = inputs.TrainState.start(variables, tx)
    del variables
    for _ in range(1 + calls):
        processes = process_tree.family()
        start, start_cpu = time.perf_counter(), process_tree.cpu_seconds(processes)
        batch = next(loader)
        state, metrics = step(state, shard_batch(batch, mesh))
        jax.block_until_ready(metrics)
        cpu = process_tree.cpu_seconds(processes) - start_cpu
        seconds = time.perf_counter() - start
    return seconds, cpu, batch


def _predict(recipe: Recipe, batch: Batch, calls: int) -> dict[str, Any]:
    """Return processor seconds of the last prediction of an image, and of encoding its masks."""
    one = jax.tree.map(lambda leaf: leaf[:1], batch)
    mesh, model = make_mesh(), inputs.recipe_model(recipe)
    variables = init_variables(model, recipe.train.seed)
    predict: Any = make_predict_step(model, mesh, recipe.eval)
    for _ in range(1 + calls):
        start = time.process_time()
        found = jax.device_get(predict(variables, shard_batch(one, mesh)))
        predicted = time.process_time()
    sizes = [tuple(one.image_sizes[0].tolist())]
    (image,) = split_images(found, np.ones((1, 2)), [1], sizes, [1])
    encode_image(image, recipe.eval.paste, inclusive_boxes=False)
    return {
        "detections": len(image.scores),
        "predict_cpu_s": round(predicted - start, 2),
        "encode_cpu_s": round(time.process_time() - predicted, 2),
        "host_peak_mb": round(peak_rss_mb()),
    }


def plan(recipe: Recipe, target: str) -> dict[str, Any]:
    """Return XLA's planned memory of one absent GPU in training and in prediction of an image."""
    found: dict[str, Any] = {"planned_for": target, "batch_size": recipe.train.batch_size}
    for mode in MODES:
        images = recipe.train.batch_size if mode == "train" else 1
        ((figures, _),) = compile_programs(recipe, target, [(images, 1)], mode)
        found[f"planned_{mode}_mb"] = figures["peak_mb"]
    return found


def write_images(folder: Path, objects: int) -> Path:
    """Write PNGs with discs, which may overlap, and return their COCO json's path."""
    rng, angle = np.random.default_rng(0), np.arange(CORNERS) / CORNERS * 2 * np.pi
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    images, annotations = [], []
    for index in range(1, IMAGES + 1):
        pixels = rng.normal(60, 10, (SIDE, SIDE, 3)).clip(0, 255).astype(np.uint8)
        for _ in range(objects):
            radius = rng.uniform(5, 12)
            outline = rng.uniform(radius, SIDE - radius, 2) + radius * circle
            shade = rng.uniform(120, 250, 3).tolist()
            cv2.fillPoly(pixels, [outline.round().astype(np.int32)], shade)
            low, size = outline.min(axis=0), np.ptp(outline, axis=0)
            one = {"id": len(annotations) + 1, "image_id": index, "category_id": 1, "iscrowd": 0}
            one |= {"bbox": [*low.tolist(), *size.tolist()], "area": 3 * radius**2}
            annotations.append(one | {"segmentation": [outline.round(2).ravel().tolist()]})
        name = f"{index}.png"
        cv2.imwrite(str(folder / name), pixels)
        images.append({"id": index, "file_name": name, "height": SIDE, "width": SIDE})
    content = {"images": images, "annotations": annotations}
    content["categories"] = [{"id": 1, "name": "disc"}]
    path = folder / "instances.json"
    path.write_text(json.dumps(content))
    return path


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", required=True, help=entries.CONFIG_HELP)
    parser.add_argument("--objects", type=int, default=2000, help="objects in an image")
    parser.add_argument("--calls", type=int, default=2, help="steps after the first; 0: plan alone")
    parser.add_argument("--target", help="GPU to plan for, such as h100")
    return entries.parse(parser, arguments)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    try:
        main(parse())
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
