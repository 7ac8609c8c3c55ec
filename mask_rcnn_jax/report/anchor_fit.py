"""How well anchors fit the boxes of a dataset, and anchors that fit better.

The IoU of a box with an anchor falls with the distance between their centers along each axis, so
the best anchor with a given shape is the one nearest in its grid. One IoU per box and shape
replaces the matrix of all boxes and anchors.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.resize import resize_plan
from mask_rcnn_jax.ops.anchors import AnchorGrid

# Sides of the smallest anchor that are tried, pixels; they double from level to level.
SMALLEST_SIDES = (8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
SAMPLE = 50_000  # boxes on which anchors are tried
MIN_STEP = 1.25  # factor from one aspect ratio to the next
MIN_GAIN = 0.05  # of the sum of both shares, below which a recipe's anchors stay


class NetworkBoxes(NamedTuple):
    """Boxes as they reach the network."""

    boxes: np.ndarray  # [N, 4] float64 (x1, y1, x2, y2), pixels of the network input
    canvases: np.ndarray  # [N, 2] int64 (height, width) of the canvas of each box


class Fit(NamedTuple):
    """How well anchors fit boxes; NaN without boxes."""

    at_50: float  # share of boxes that have an anchor with IoU 0.5 or more
    at_70: float
    mean: float  # mean IoU of each box with its best anchor

    @property
    def shares(self) -> float:
        """Both shares added: boxes that can be found, and those that teach most anchors."""
        return self.at_50 + self.at_70


def network_boxes(
    sizes: np.ndarray, images: np.ndarray, boxes: np.ndarray, options: ExampleOptions
) -> NetworkBoxes:
    """Scale boxes as evaluation scales their images; training without augmentation does the same.

    Args:
        sizes: [I, 2] (height, width) for each image.
        images: [N] index of each box's image.
        boxes: [N, 4] in image pixels.
    """
    distinct, place = np.unique(sizes, axis=0, return_inverse=True)
    plans = [resize_plan(height, width, options) for height, width in distinct.tolist()]
    scales = np.array([plan.scale for plan in plans]).reshape(-1, 2)
    canvases = np.array([plan.canvas for plan in plans], np.int64).reshape(-1, 2)
    of_box = place.reshape(-1)[images]
    return NetworkBoxes(boxes * scales[of_box][:, [1, 0, 1, 0]], canvases[of_box])


def best_iou(found: NetworkBoxes, grid: AnchorGrid) -> np.ndarray:
    """Return the IoU of each box with its best anchor, [N] float64.

    Anchors cover the whole canvas at the strides of the levels. Those that a recipe places by the
    valid part of the canvas (`stride` "map") differ by a few pixels, on the last level alone.
    """
    boxes, best = found.boxes, np.zeros(len(found.boxes))
    sides = boxes[:, 2:] - boxes[:, :2]
    for stride, size in zip(grid.strides, grid.sizes, strict=True):
        # Start and end of the anchors of the first cell, [shapes, 2] along x and y.
        along_x, along_y = (a[0].astype(np.float64) for a in grid.sides((1, 1), stride, size, 0))
        last = -(-found.canvases // stride) - 1  # cell along y and x
        for x, y in zip(along_x, along_y, strict=True):
            overlap = _overlap(boxes[:, 0], boxes[:, 2], x, stride, last[:, 1])
            overlap *= _overlap(boxes[:, 1], boxes[:, 3], y, stride, last[:, 0])
            area = (x[1] - x[0]) * (y[1] - y[0])
            union = sides[:, 0] * sides[:, 1] + area - overlap
            best = np.maximum(best, overlap / union)
    return best


def _overlap(
    start: np.ndarray, end: np.ndarray, first: np.ndarray, stride: int, last: np.ndarray
) -> np.ndarray:
    """Return how much intervals [N] overlap the nearest one among `first` + cell * `stride`."""
    cell = np.rint(((start + end) - (first[0] + first[1])) / 2 / stride)
    shift = np.clip(cell, 0, last) * stride
    return np.maximum(np.minimum(end, first[1] + shift) - np.maximum(start, first[0] + shift), 0)


def measure_fit(found: NetworkBoxes, grid: AnchorGrid) -> Fit:
    """Measure how well anchors fit boxes."""
    if not len(found.boxes):
        return Fit(np.nan, np.nan, np.nan)
    best = best_iou(found, grid)
    return Fit(float((best >= 0.5).mean()), float((best >= 0.7).mean()), float(best.mean()))


def fitting_anchors(found: NetworkBoxes, grid: AnchorGrid) -> AnchorGrid:
    """Return anchors with the highest sum of both shares of `Fit`, as many per cell as `grid` has.

    `SMALLEST_SIDES` with doubled sides are tried, each with the aspect ratios of `grid`, with those
    of the boxes, and with several sizes of one aspect ratio, which suit boxes that are alike in
    it. `grid` itself is returned if nothing gains `MIN_GAIN`, or without boxes.
    """
    if not len(found.boxes):
        return grid
    if len(found.boxes) > SAMPLE:
        chosen = np.random.default_rng(0).choice(len(found.boxes), SAMPLE, replace=False)
        found = NetworkBoxes(found.boxes[chosen], found.canvases[chosen])
    shapes = [grid.aspect_ratios, box_shapes(found.boxes, grid.per_cell)]
    shapes.append(box_sizes(found.boxes, grid.per_cell))
    tried = [
        replace(grid, sizes=_doubled(side, len(grid.sizes)), aspect_ratios=ratios)
        for side in SMALLEST_SIDES
        for ratios in shapes
    ]
    fits = [measure_fit(found, candidate) for candidate in tried]
    best = max(range(len(tried)), key=lambda n: (fits[n].shares, fits[n].mean))
    return tried[best] if fits[best].shares >= measure_fit(found, grid).shares + MIN_GAIN else grid


def _doubled(side: int, levels: int) -> tuple[float, ...]:
    """Return a side per level, from the lowest on."""
    return tuple(float(side * 2**level) for level in range(levels))


def box_shapes(boxes: np.ndarray, count: int) -> tuple[tuple[float, float], ...]:
    """Return `count` (width, height) factors with product 1, wide ones first.

    Their aspect ratios are the middles of as many equal parts of the boxes, ordered by ratio, but
    no closer to the median than steps of `MIN_STEP`.
    """
    sides = boxes[:, 2:] - boxes[:, :2]
    ratios = np.log2(sides[:, 1] / sides[:, 0])  # height / width
    median = np.median(ratios)
    away = np.quantile(ratios, (np.arange(count) + 0.5) / count) - median
    least = (np.arange(count) - (count - 1) / 2) * np.log2(MIN_STEP)
    away = np.where(np.abs(away) < np.abs(least), least, away)
    roots = np.exp2((median + away) / 2).tolist()
    return tuple((round(1 / root, 2), round(root, 2)) for root in roots)


def box_sizes(boxes: np.ndarray, count: int) -> tuple[tuple[float, float], ...]:
    """Return `count` (width, height) factors of the median aspect ratio, small ones first.

    They divide the octave from one level to the next into equal steps.
    """
    sides = boxes[:, 2:] - boxes[:, :2]
    root = float(np.exp2(np.median(np.log2(sides[:, 1] / sides[:, 0])) / 2))
    factors = np.exp2((np.arange(count) - (count - 1) / 2) / count).tolist()
    return tuple((round(factor / root, 2), round(factor * root, 2)) for factor in factors)


def describe_shapes(shapes: Sequence[tuple[float, float]]) -> str:
    """Say how shapes differ, such as "Heights are 0.5, 1, 2 times the widths"."""
    ratios = dict.fromkeys(f"{height / width:.2g}" for width, height in shapes)
    if len(ratios) == len(shapes):
        return f"Heights are {', '.join(ratios)} times the widths"
    sizes = ", ".join(f"{np.sqrt(width * height):.2g}" for width, height in shapes)
    return f"Sizes are {sizes} times that of a level, heights {', '.join(ratios)} times the widths"
