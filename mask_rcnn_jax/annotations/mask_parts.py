"""Connected parts of masks, found by their runs: pixels that touch, also at a corner, are one.

A binary mask of all objects in an image is one object in many parts, which is rarely what is meant.
"""

from collections import defaultdict
from typing import Any

import numpy as np

from mask_rcnn_jax.annotations.segmentation import run_lengths
from mask_rcnn_jax.rle import edges_to_rle

SPECK = 10  # pixels of a part, below which it may be noise
SAMPLE = 200  # images of a set that are looked at
FEW, SEVERAL = 10, 3  # masks of an image, and parts of a mask, from which on they look binary


def mask_parts(
    rle: dict[str, Any], min_area: int = 0, most: int | None = None
) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the connected parts of a mask as RLE, in the order of their first pixels down the
    columns, and the pixels of those that have fewer than `min_area` and are no parts here.

    Raises ValueError for more parts than `most`.
    """
    starts, ends, labels = _labeled_runs(rle)
    areas = np.bincount(labels, weights=ends - starts).astype(np.int64)
    is_large = areas >= min_area
    if most is not None and np.count_nonzero(is_large) > most:
        raise ValueError(f"more than {most:,} parts")
    kept = is_large[labels]
    starts, ends, labels = starts[kept], ends[kept], labels[kept]
    height, width = rle["size"]
    order = np.argsort(labels, kind="stable")
    places = np.flatnonzero(np.diff(labels[order])) + 1
    parts = []
    for runs in np.split(order, places) if len(order) else []:
        first, last = starts[runs], ends[runs]
        goes_on = first[1:] == last[:-1]  # in the next column
        edges = np.stack([first[np.r_[True, ~goes_on]], last[np.r_[~goes_on, True]]], axis=1)
        parts.append(edges_to_rle(edges.ravel().astype(np.int32), height, width))
    return parts, areas[~is_large].tolist()


def parts_notice(content: dict[str, Any]) -> str | None:
    """Say that most images of a COCO json have few masks in several parts each; None if not.

    Specks are no parts. Ids and segmentations are sound.
    """
    masks: defaultdict[int | str, list[dict[str, Any]]] = defaultdict(list)
    for entry in content["annotations"]:
        if isinstance(entry.get("segmentation"), dict) and not entry.get("iscrowd"):
            masks[entry["image_id"]].append(entry["segmentation"])
    found, step = {}, -(-len(masks) // SAMPLE) or 1
    masks_seen = list(masks.items())[::step]
    for image_id, codes in masks_seen:
        counts = [_count(code) for code in codes] if len(codes) <= FEW else []
        if 2 * sum(count >= SEVERAL for count in counts) > len(counts):
            found[image_id] = len(counts), sum(counts)
    if 2 * len(found) <= len(masks_seen):
        return None
    image_id, (objects, parts) = max(found.items(), key=lambda item: item[1][1])
    name = next(e["file_name"] for e in content["images"] if e["id"] == image_id)
    many = f"{len(found)} of {len(masks_seen)} images have few objects in separate parts"
    return f"{many} (such as {objects} in {parts} parts in {name}): binary masks?"


def _count(rle: dict[str, Any]) -> int:
    """The number of parts that are no specks."""
    starts, ends, labels = _labeled_runs(rle)
    return int((np.bincount(labels, weights=ends - starts) >= SPECK).sum())


def _labeled_runs(rle: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where runs of ones start and end within a column, int64 [R], and the part of each."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    height = rle["size"][0]
    edges = np.cumsum(run_lengths(rle))
    starts, ends = edges[:-1:2], edges[1::2]
    starts, ends = _by_column(starts[ends > starts], ends[ends > starts], height)
    columns = starts // height
    # Runs of the next column that touch: one that ends behind the start, or begins before the end,
    # by a pixel at most.
    low = np.searchsorted(ends, starts + height, side="left")
    high = np.searchsorted(starts, ends + height, side="right")
    low = np.maximum(low, np.searchsorted(columns, columns + 1, side="left"))
    high = np.minimum(high, np.searchsorted(columns, columns + 1, side="right"))
    counts = np.maximum(high - low, 0)
    one = np.repeat(np.arange(len(starts)), counts)
    other = np.arange(len(one)) + np.repeat(low - (np.cumsum(counts) - counts), counts)
    graph = csr_array((np.ones(len(one), bool), (one, other)), shape=(len(starts),) * 2)
    labels = connected_components(graph, directed=False)[1] if len(starts) else columns
    return starts, ends, labels


def _by_column(starts: np.ndarray, ends: np.ndarray, height: int) -> tuple[np.ndarray, np.ndarray]:
    """Runs that go on in the next column as several."""
    columns = starts // height
    counts = (ends - 1) // height - columns + 1
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    top = (np.repeat(columns, counts) + number) * height
    return np.maximum(np.repeat(starts, counts), top), np.minimum(
        np.repeat(ends, counts), top + height
    )
