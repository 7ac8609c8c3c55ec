"""Measure what a set of COCO's size costs until the first batch, and the memory of each process.

    python benchmarks/large_set.py --folder /tmp/large --workers 4 --json large.json

Generates the set in the folder unless it is there: a json in COCO's layout of `--images` images, of
7.29 objects each, and as many names of a few JPEGs. Then reads it as training does. CPU seconds are
those of a process since its start. `private` is memory that no other process shares, `pss` counts
shared pages in parts; both in MB.
"""

import argparse
import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np

from mask_rcnn_jax.benchmarking import process_tree
from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.data.loader import TrainLoader, TrainOrder

SIZES = ((480, 640), (640, 480), (427, 640), (640, 427), (425, 640), (500, 375), (640, 640))
FILES = 4  # of each size; a file system has a limit of links to one
OUTLINES = 2000  # different ones per size
CLASSES, OBJECTS_PER_IMAGE, CROWDS = 80, 7.29, 0.012  # as in COCO
BATCHES = 10


def main(arguments: argparse.Namespace) -> None:
    json_path = arguments.folder / f"instances_{arguments.images}.json"
    if not json_path.exists():
        write_set(arguments.folder, json_path, arguments.images)
    options = load_config(arguments.config).data
    start = time.perf_counter()
    dataset = load_coco(json_path, arguments.folder)
    loaded = {"cpu_s": time.process_time(), "peak_mb": peak_mb(), **memory("self")}
    order = TrainOrder(seed=0, batch_size=arguments.batch_size)
    loader = TrainLoader(dataset, options, order, num_workers=arguments.workers)
    next(loader)
    first = {"cpu_s": time.process_time(), "wall_s": time.perf_counter() - start}
    for _ in range(BATCHES * max(1, arguments.workers)):
        next(loader)
    workers = [
        {"cpu_s": process_tree.cpu_seconds([pid]), **memory(pid)}
        for pid in process_tree.family()[1:]
        if "resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    trainer = {"peak_mb": peak_mb(), **memory("self")}
    loader.close()
    report = {
        "json_mb": json_path.stat().st_size / 1e6,
        "loaded": loaded,
        "first_batch": first,
        "trainer": trainer,
        "workers": workers,
    }
    text = json.dumps(rounded(report), indent=1)
    print(text)
    if arguments.json:
        Path(arguments.json).write_text(text + "\n")


def write_set(folder: Path, json_path: Path, images: int, seed: int = 0) -> None:
    """Write a json of COCO's layout and its images."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for k, (height, width) in enumerate(SIZES):
        for n in range(FILES):
            noise = cv2.resize(rng.uniform(0, 255, (12, 16, 3)), (width, height)).astype(np.uint8)
            cv2.imwrite(str(folder / f"base{k}_{n}.jpg"), noise)
    pools = [[_segmentation(rng, size) for _ in range(OUTLINES)] for size in SIZES]
    counts = rng.poisson(OBJECTS_PER_IMAGE, images)
    kinds = rng.choice(len(SIZES), images, p=(0.35, 0.15, 0.2, 0.1, 0.1, 0.05, 0.05))
    temporary = json_path.with_suffix(".part")
    with open(temporary, "w") as file:
        file.write('{"info": {"description": "generated"}, "licenses": [], "images": [')
        file.write(", ".join(_images(folder, kinds)))
        file.write('], "annotations": [')
        file.write(", ".join(_annotations(rng, pools, kinds, counts)))
        categories = [{"id": k, "name": f"class {k}"} for k in range(1, CLASSES + 1)]
        file.write(f'], "categories": {json.dumps(categories)}}}')
    temporary.rename(json_path)


def _images(folder: Path, kinds: np.ndarray) -> Iterator[str]:
    for index, kind in enumerate(kinds):
        name, (height, width) = f"{index:012d}.jpg", SIZES[kind]
        if not (folder / name).exists():
            os.link(folder / f"base{kind}_{index % FILES}.jpg", folder / name)
        entry = {"license": 1, "file_name": name, "height": height, "width": width, "id": index + 1}
        yield json.dumps(entry | {"date_captured": "2013-11-14 11:18:45"})


def _annotations(
    rng: np.random.Generator, pools: list[list[str]], kinds: np.ndarray, counts: np.ndarray
) -> Iterator[str]:
    number = 0
    for index, (kind, count) in enumerate(zip(kinds.tolist(), counts.tolist(), strict=True)):
        for choice, category in zip(
            rng.integers(0, OUTLINES, count).tolist(),
            rng.integers(1, CLASSES + 1, count).tolist(),
            strict=True,
        ):
            number += 1
            yield (
                f'{{{pools[kind][choice]}, "image_id": {index + 1}, "category_id": {category}, '
                f'"id": {number}}}'
            )


def _segmentation(rng: np.random.Generator, size: tuple[int, int]) -> str:
    """The keys of an object that follow from its shape, as JSON without the braces."""
    height, width = size
    limits = np.array([width, height])
    radius = limits * np.minimum(rng.lognormal(-2.4, 0.8), 0.45)
    if rng.random() < CROWDS:
        runs = rng.integers(1, 60, 300)
        runs[-1] += height * width - runs.sum()
        code = {"size": [height, width], "counts": runs.tolist()}
        fields = {"segmentation": code, "area": int(runs[1::2].sum()), "iscrowd": 1}
        fields["bbox"] = [0, 0, width, height]
        return json.dumps(fields)[1:-1]
    parts, center = [], rng.uniform(0.2, 0.8, 2) * limits
    for _ in range(1 + int(rng.random() < 0.15)):
        corners = int(np.clip(rng.lognormal(2.9, 0.7), 4, 300))
        angle = np.linspace(0, 2 * np.pi, corners, endpoint=False)
        circle = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        points = center + radius * rng.uniform(0.7, 1, (corners, 1)) * circle
        parts.append(np.clip(points, 0, limits).round(2))
    low = np.min([part.min(axis=0) for part in parts], axis=0)
    high = np.max([part.max(axis=0) for part in parts], axis=0)
    box = [*low, *np.maximum(high - low, 1)]
    return json.dumps(
        {
            "segmentation": [part.reshape(-1).tolist() for part in parts],
            "area": round(box[2] * box[3] * 0.6, 4),
            "iscrowd": 0,
            "bbox": [round(float(value), 2) for value in box],
        }
    )[1:-1]


def memory(pid: int | str) -> dict[str, float]:
    """MB of a process: resident, its part of shared pages, and what nobody shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kb = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
    private = kb["Private_Clean"] + kb["Private_Dirty"]
    return {"rss_mb": kb["Rss"] / 1e3, "pss_mb": kb["Pss"] / 1e3, "private_mb": private / 1e3}


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 1) if isinstance(value, float) else value


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="of the generated set")
    parser.add_argument("--images", type=int, default=118_000)
    parser.add_argument("--config", default="coco")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", help="file for the figures")
    main(parser.parse_args())
