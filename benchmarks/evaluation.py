"""Measure the host's part of an evaluation: masks pasted and encoded, then scored.

    python -m benchmarks.evaluation --folder /tmp/large --images 5000 --detections 100 \\
        --json eval.json

Generates annotations of COCO's density in the folder (`benchmarks/large_set.py`) and detections:
each object once, moved a little, and random ones. CPU seconds are those of all processes together.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from benchmarks.large_set import peak_mb, write_set
from mask_rcnn_jax.annotations.reader import read_ground_truth
from mask_rcnn_jax.evaluation.coco import METRIC_NAMES, score
from mask_rcnn_jax.evaluation.encode import ImageDetections
from mask_rcnn_jax.evaluation.engines import ENGINES
from mask_rcnn_jax.evaluation.workers import encode_images

MASK_SIZE = 28


def main(arguments: argparse.Namespace) -> None:
    json_path = arguments.folder / f"instances_{arguments.images}.json"
    if not json_path.exists():
        write_set(arguments.folder, json_path, arguments.images)
    truth = read_ground_truth(json_path, scoring=True)
    report: dict[str, Any] = {"images": arguments.images, "detections": arguments.detections}
    boxes: list[dict] = []
    masks: list[dict] = []
    for workers in map(int, arguments.workers.split(",")):
        images = list(detections(truth.content, arguments.detections))
        start, cpu = time.perf_counter(), _cpu_s()
        encoded = encode_images(
            images, paste="continuous", inclusive_boxes=False, num_workers=workers
        )
        boxes, masks = (list(chain(*parts)) for parts in zip(*encoded, strict=True))
        took, cpu = time.perf_counter() - start, _cpu_s() - cpu
        report[f"encode, {workers} workers"] = {
            "wall_s": took,
            "cpu_s": cpu,
            "images_per_s": len(images) / took,
        }
        del images
    for engine in arguments.engines.split(","):
        start, cpu = time.perf_counter(), _cpu_s()
        metrics = score(truth, boxes, masks, engine=engine)
        report[engine] = {
            "wall_s": time.perf_counter() - start,
            "cpu_s": _cpu_s() - cpu,
            "peak_mb": peak_mb(),  # of the process, until here
            "metrics": [
                metrics[prefix + name] for prefix in ("", "mask_") for name in METRIC_NAMES
            ],
        }
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.json:
        Path(arguments.json).write_text(text + "\n")


def detections(content: dict[str, Any], per_image: int, seed: int = 0) -> Iterator[ImageDetections]:
    """Yield detections of each image: its objects with high scores, then boxes at random."""
    rng = np.random.default_rng(seed)
    objects: dict[int, list[tuple[list[float], int]]] = {}
    for entry in content["annotations"]:
        objects.setdefault(entry["image_id"], []).append((entry["bbox"], entry["category_id"]))
    classes = [category["id"] for category in content["categories"]]
    blobs = [
        cv2.resize(rng.random((4, 4), np.float32), (MASK_SIZE, MASK_SIZE)) for _ in range(1000)
    ]
    for image in content["images"]:
        found = objects.get(image["id"], [])[:per_image]
        others = per_image - len(found)
        size = np.array([image["width"], image["height"]] * 2)
        boxes = np.array([box for box, _ in found], np.float64).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        boxes += rng.normal(0, 0.01, boxes.shape) * size
        centers = rng.uniform(0, 1, (others, 2)) * size[:2]
        sides = size[:2] * np.minimum(rng.lognormal(-1.7, 0.8, (others, 2)), 0.9)
        random = np.concatenate([centers - sides / 2, centers + sides / 2], axis=1)
        scores = np.sort(rng.uniform(0.05, 1, per_image).astype(np.float32))[::-1]
        yield ImageDetections(
            image["id"],
            image["height"],
            image["width"],
            np.concatenate([boxes, random]),
            scores,
            [category for _, category in found] + rng.choice(classes, others).tolist(),
            np.stack([blobs[k] for k in rng.integers(0, len(blobs), per_image)]),
        )


def _cpu_s() -> float:
    """CPU seconds of this process and of those that have ended."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="of the generated set")
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--detections", type=int, default=100, help="of each image")
    parser.add_argument("--workers", default="0,2", help="worker processes, measured in turn")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--json", help="file for the figures")
    main(parser.parse_args())
