"""Cut objects out of large images: by boxes, outlines and runs, without masks of the image's size.

One rule: an object stays if at least a share of its area lies in the window, by its mask, or by its
box if it has none. The box of one that is cut is that of what is left of the mask.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from pycocotools import mask as coco_mask

from mask_rcnn_jax.annotations.faults import crop_fault
from mask_rcnn_jax.annotations.keypoints import moved
from mask_rcnn_jax.annotations.segmentation import Segmentation, run_lengths
from mask_rcnn_jax.data.affine import diagonal
from mask_rcnn_jax.data.clip import area, clip_polygon, shifted
from mask_rcnn_jax.data.dataset import Annotation
from mask_rcnn_jax.rle import Window, edges_to_rle

MIN_SIDE = 1e-5  # pixels of a box, as in Detectron2


def cut_objects(
    objects: Iterable[Annotation], window: Window, min_visible: float
) -> tuple[Annotation, ...]:
    """The objects in a window (x1, y1, x2, y2), in its pixels; those that it does not cut as they
    are. Of the others, those stay of which at least `min_visible` is inside."""
    found = (_cut(annotation, window, min_visible) for annotation in objects)
    shift, size = (
        diagonal(1, 1, -window[0], -window[1]),
        (window[3] - window[1], window[2] - window[0]),
    )
    return tuple(
        annotation
        if annotation.keypoints is None
        else annotation.with_keypoints(moved(annotation.keypoints, shift, size, ()))
        for annotation in found
        if annotation is not None
    )


def _cut(annotation: Annotation, window: Window, min_visible: float) -> Annotation | None:
    corner = np.array(window[:2] * 2, np.float64)
    size = window[3] - window[1], window[2] - window[0]
    box = annotation.box.astype(np.float64) - corner
    inside = np.minimum(np.maximum(box, 0), np.tile(size[::-1], 2))
    if (inside[2:] - inside[:2]).min() <= MIN_SIDE:
        return None
    if isinstance(annotation.segmentation, dict):
        segmentation, visible, total, extent = _cut_code(annotation.segmentation, window)
    else:
        segmentation, visible, total, extent = _cut_polygons(annotation.segmentation, window)
    if not annotation.segmentation:
        visible, total = (float(np.prod(b[2:] - b[:2])) for b in (inside, box))
    if visible is None:  # nothing is cut
        kept = inside.astype(np.float32)
        return replace(annotation, box=kept, segmentation=segmentation)
    if visible < min_visible * total or not visible:
        return None
    left = inside if extent is None else extent
    sides = float(left[2] - left[0]), float(left[3] - left[1])
    if min(sides) <= MIN_SIDE:
        return None
    if segmentation and not isinstance(segmentation, dict) and crop_fault(segmentation, sides):
        return None
    covered = float(annotation.area if visible == total else visible)
    box = left.astype(np.float32)
    return replace(annotation, box=box, segmentation=segmentation, area=covered)


_Part = tuple[Segmentation, float | None, float, np.ndarray | None]


def _cut_polygons(polygons: Any, window: Window) -> _Part:
    """The polygons in a window; its part of their area, None if it is all; their area; and the
    extent of what is left."""
    corner, size = window[:2], (window[3] - window[1], window[2] - window[0])
    whole = [shifted(part, corner) for part in polygons]
    clipped = [clip_polygon(part, size) for part in whole]
    parts = [part for pieces in clipped for part in pieces]
    kept = tuple(part.reshape(-1) for part in parts)
    if all(len(p) == 1 and p[0] is old for p, old in zip(clipped, whole, strict=True)):
        return kept, None, 0.0, None
    if not parts:
        return (), 0.0, 1.0, None
    points = np.concatenate(parts)
    extent = np.concatenate([points.min(axis=0), points.max(axis=0)])
    return kept, sum(map(area, parts)), sum(map(area, whole)), extent


def _cut_code(code: dict[str, Any], window: Window) -> _Part:
    """`_cut_polygons` of a run-length code."""
    cut, total = cut_code(code, window)
    visible = int(coco_mask.area(cut))
    if not visible:
        return cut, 0.0, 1.0, None
    x, y, w, h = coco_mask.toBbox(cut).tolist()
    extent = np.array([x, y, x + w, y + h])
    return cut, None if visible == total else float(visible), float(total), extent


def cut_code(code: dict[str, Any], window: Window) -> tuple[dict[str, Any], int]:
    """The part of a run-length code in a window (x1, y1, x2, y2), and the pixels of all of it.

    Takes memory for its runs and the window's columns.
    """
    height, _ = code["size"]
    x1, y1, x2, y2 = window
    edges = np.cumsum(run_lengths(code))
    ends = edges[1::2]
    starts = edges[::2][: len(ends)]
    total = int((ends - starts).sum())
    starts, ends = np.maximum(starts, x1 * height), np.minimum(ends, x2 * height)
    starts, ends = starts[ends > starts], ends[ends > starts]
    # A run may go on from the foot of a column to the head of the next: a part in each.
    first, last = starts // height, (ends - 1) // height
    counts = last - first + 1
    run = np.repeat(np.arange(len(counts)), counts)
    column = np.arange(len(run)) - (np.cumsum(counts) - counts)[run] + first[run]
    top = np.where(column == first[run], starts[run] - column * height, 0)
    bottom = np.where(column == last[run], ends[run] - column * height, height)
    top, bottom = np.maximum(top, y1), np.minimum(bottom, y2)
    shown = bottom > top
    low, high = ((column - x1) * (y2 - y1) + side - y1 for side in (top, bottom))
    pairs = np.stack([low[shown], high[shown]], axis=1).reshape(-1)
    # Of a part that ends where the next begins, both edges go.
    joined = np.flatnonzero(pairs[1:-1:2] == pairs[2::2])
    pairs = np.delete(pairs, np.concatenate([2 * joined + 1, 2 * joined + 2]))
    cut = edges_to_rle(pairs, y2 - y1, x2 - x1)
    return {"size": cut["size"], "counts": cut["counts"].encode()}, total


def cut_mask(code: dict[str, Any], window: Window) -> np.ndarray:
    """uint8 [h, w] of zeros and ones: a window of a run-length code."""
    return coco_mask.decode(cut_code(code, window)[0])
