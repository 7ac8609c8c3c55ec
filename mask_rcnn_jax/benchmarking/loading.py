"""Measure how fast the loader turns images into batches."""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from mask_rcnn_jax import opencv as cv2
from mask_rcnn_jax.benchmarking import devices, process_tree
from mask_rcnn_jax.data.coco import CocoDataset, load_coco
from mask_rcnn_jax.data.kinds import build_augment
from mask_rcnn_jax.data.loader import TrainLoader, TrainOrder
from mask_rcnn_jax.data.options import DataOptions, canvas_size
from mask_rcnn_jax.data.repeat import Repeats
from mask_rcnn_jax.data.source import load_train
from mask_rcnn_jax.recipe.recipe import Recipe

WARM_UP = 2  # untimed batches
HEIGHT, WIDTH, OBJECTS = 480, 640, 7  # generated images: COCO's most frequent size, mean objects
JPEG_QUALITY = 90  # about 2 bits per pixel with this noise, as in COCO


def run(recipe: Recipe, images: int, batches: int, workers: int) -> dict[str, Any]:
    """Measure the training loader at `train.batch_size` with `workers` processes (0: threads).

    Args:
        recipe: what is trained.
        images: JPEGs to generate and read; 0 reads the training set of the recipe.
        batches: timed batches.
        workers: worker processes.

    Returns:
        Figures; `images_per_s_per_core` divides by the CPU seconds of all processes, and memory is
        summed over them: the peak, after a third of the batches and at the end.
    """
    data, rows = recipe.data, recipe.train.batch_size
    if not images:
        dataset = load_train(data, boxes_only=recipe.learns_boxes_only)
        return _measure(data, dataset, rows, batches, workers)
    if data.bands.names:
        expected = "expected 0 with data.bands.names: none are generated with bands"
        raise ValueError(f"--images is {images}, {expected}")
    with tempfile.TemporaryDirectory() as folder:
        dataset = load_coco(write_images(Path(folder), images), folder)
        return _measure(data, dataset, rows, batches, workers)


def _measure(
    data: DataOptions, dataset: CocoDataset, rows: int, batches: int, workers: int
) -> dict[str, Any]:
    options, repeats = data.in_training(), Repeats(data.repeat_threshold)
    order = TrainOrder(seed=0, batch_size=rows, keep_empty=data.keep_empty, repeats=repeats)
    augment = build_augment(data)
    loader = TrainLoader(dataset, options, order, num_workers=workers, augment=augment)
    for _ in range(WARM_UP * (1 + workers)):  # each worker prefetches two batches
        next(loader)
    processes = process_tree.family()
    times, memory, cpu = [], [], process_tree.cpu_seconds(processes)
    last = time.perf_counter()
    for _ in range(batches):
        next(loader)
        memory.append(process_tree.rss_mb(processes))
        now = time.perf_counter()
        times.append(now - last)
        last = now
    cpu = process_tree.cpu_seconds(processes) - cpu
    loader.close()
    images = rows * batches
    return {
        "jax": devices.describe()["jax"],
        "date": devices.describe()["date"],
        "batch_size": rows,
        "num_workers": workers,
        "image_size": list(canvas_size(options)),
        "images_per_s": round(images / sum(times), 1),
        **{f"{name}_per_batch": value for name, value in devices.summary(times).items()},
        "images_per_s_per_core": round(images / cpu, 1) if cpu else None,
        "peak_memory_mb": max(memory),
        "memory_mb_after_third": memory[(batches - 1) // 3],
        "memory_mb_at_end": memory[-1],
    }


def write_images(folder: Path, count: int) -> Path:
    """Write noisy cloud JPEGs with 40-corner polygons, and return their COCO json's path."""
    rng = np.random.default_rng(0)
    images, annotations = [], []
    for index in range(count):
        clouds = cv2.resize(rng.uniform(0, 255, (12, 16, 3)), (WIDTH, HEIGHT))
        noisy = clouds + rng.normal(0, 12, (HEIGHT, WIDTH, 3))
        pixels = np.clip(noisy, 0, 255).astype(np.uint8)
        name = f"{index}.jpg"
        cv2.imwrite(str(folder / name), pixels, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
        images.append({"id": index, "file_name": name, "height": HEIGHT, "width": WIDTH})
        for _ in range(OBJECTS):
            annotations.append(_annotation(rng, len(annotations) + 1, index))
    categories = [{"id": 1, "name": "cloud"}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    path = folder / "instances.json"
    path.write_text(json.dumps(content))
    return path


def _annotation(rng: np.random.Generator, annotation_id: int, image_id: int) -> dict[str, Any]:
    radius = rng.uniform(10, 100, (40, 1)) * [1, 0.9]
    angle = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    outline = rng.uniform(0.2, 0.8, 2) * [WIDTH, HEIGHT] + radius * circle
    outline = np.clip(outline, 0, [WIDTH, HEIGHT]).round(2)
    low, size = outline.min(axis=0), np.ptp(outline, axis=0)
    return {
        "id": annotation_id,
        "image_id": image_id,
        "category_id": 1,
        "iscrowd": 0,
        "bbox": [*low.tolist(), *size.tolist()],
        "area": float(np.prod(size) / 2),
        "segmentation": [outline.reshape(-1).tolist()],
    }
