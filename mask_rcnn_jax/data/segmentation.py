"""Validate, rasterize and crop COCO segmentations.

A segmentation is a list of polygons `[[x1, y1, x2, y2, ...], ...]` in pixels, or a run-length
encoding `{"size": [height, width], "counts": ...}`, whose counts are a list (uncompressed) or a
string. All functions also accept the compact form returned by `compact`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from pycocotools import mask as coco_mask

from mask_rcnn_jax.rle import run_lengths

Segmentation = Sequence[Any] | dict[str, Any]


def segmentation_fault(
    segmentation: Any, height: int, width: int, *, is_compact: bool = False
) -> str | None:
    """Return why a segmentation is invalid for an image of this size; None if it is valid.

    `is_compact` expects the compact form, otherwise that of a COCO json.
    """
    if isinstance(segmentation, dict):
        return _rle_fault(segmentation, height, width)
    if not isinstance(segmentation, tuple | list if is_compact else list) or not segmentation:
        return "segmentation is empty, expected polygons or RLE"
    for part in segmentation:
        if is_compact and not (isinstance(part, np.ndarray) and part.ndim == 1):
            return "segmentation holds a polygon that is not a flat array of x, y"
        if not is_compact and not isinstance(part, list):
            return "segmentation is a flat list, expected a list of polygons"
        if len(part) < 6 or len(part) % 2:
            return f"polygon of {len(part)} numbers, expected x, y of three points or more"
        if not (np.isfinite(part).all() if is_compact else _all_finite(part)):
            return "polygon has a coordinate that is not a finite number"
    return None


def _all_finite(numbers: list[Any]) -> bool:
    try:
        return math.isfinite(sum(numbers))  # NaN or infinity propagates; 20 times faster
    except TypeError:
        return False


def _rle_fault(rle: dict[str, Any], height: int, width: int) -> str | None:
    for key in ("size", "counts"):
        if key not in rle:
            return f"RLE lacks {key!r}"
    if rle["size"] != [height, width]:
        return f"RLE of size {rle['size']}, expected [{height}, {width}]"
    try:
        runs = run_lengths(rle)
    except (TypeError, ValueError, AttributeError, OverflowError):
        return "RLE counts cannot be read"
    # Checked here: pycocotools reads out of bounds if the runs do not add up.
    if runs.min(initial=0) < 0:
        return "RLE counts cannot be read or have a negative run"
    if runs.sum() != height * width:
        return f"RLE covers {runs.sum()} pixels, expected {height} x {width} = {height * width}"
    if runs[1::2].sum() == 0:
        return "RLE has no pixel"
    return None


def compact(segmentation: Segmentation, height: int, width: int) -> Segmentation:
    """Convert a valid segmentation to float32 arrays or compressed RLE, a tenth of the memory."""
    if isinstance(segmentation, dict):
        return _compressed(segmentation, height, width)
    return tuple(np.asarray(part, np.float32) for part in segmentation)


def mask_to_rle(mask: np.ndarray) -> dict[str, Any]:
    """Compressed RLE of a bool mask [H, W]."""
    return coco_mask.encode(np.asfortranarray(mask, np.uint8))


def segmentation_area(segmentation: Segmentation, height: int, width: int) -> float:
    """Return the area in pixels."""
    return float(coco_mask.area(_to_rle(segmentation, height, width)))


def segmentation_box(segmentation: Segmentation, height: int, width: int) -> list[float]:
    """Return the tight box `[x, y, width, height]` in pixels."""
    if isinstance(segmentation, dict):
        return coco_mask.toBbox(_compressed(segmentation, height, width)).tolist()
    points = np.concatenate([np.asarray(part, np.float64).reshape(-1, 2) for part in segmentation])
    low, high = points.min(axis=0), points.max(axis=0)
    return [*low.tolist(), *(high - low).tolist()]


def clipped_box(box: Sequence[float], height: int, width: int) -> np.ndarray:
    """[x1, y1, x2, y2] float32, the part of the box [x, y, width, height] inside the image."""
    x, y, w, h = box
    corners = np.array([x, y, x + w, y + h], np.float32)
    return np.clip(corners, 0, np.array([width, height, width, height], np.float32))


def segmentation_to_mask(segmentation: Segmentation, height: int, width: int) -> np.ndarray:
    """Rasterize to [height, width] uint8 in {0, 1}."""
    return coco_mask.decode(_to_rle(segmentation, height, width))


def crop_mask(
    segmentation: Segmentation, box: np.ndarray, height: int, width: int, side: int = 112
) -> np.ndarray:
    """Crop the mask inside `box` (x1, y1, x2, y2 in image pixels): [side, side] uint8 in 0..255.

    Polygons are transformed to the crop and rasterized there. RLE is sampled bilinearly at the
    centers of the crop pixels, with border pixels replicated outside the image.
    """
    x1, y1, x2, y2 = (float(v) for v in box)
    if isinstance(segmentation, dict):
        mask = coco_mask.decode(_compressed(segmentation, height, width))
        rows, row_weights = _sample_positions(y1, y2, height, side)
        columns, column_weights = _sample_positions(x1, x2, width, side)
        taps = mask[rows[:, :, None, None], columns]  # [2, side, 2, side]
        crop = np.einsum("pyqx,py,qx->yx", taps, row_weights, column_weights)
        return np.rint(crop * 255).astype(np.uint8)
    scale = np.array([side / (x2 - x1), side / (y2 - y1)])
    parts = [
        ((np.asarray(part, np.float64).reshape(-1, 2) - (x1, y1)) * scale).ravel()
        for part in segmentation
    ]
    return segmentation_to_mask(parts, side, side) * np.uint8(255)


def vertex_count(segmentation: Segmentation) -> int:
    """Count the vertices of all polygons; 0 for RLE."""
    return 0 if isinstance(segmentation, dict) else sum(len(part) // 2 for part in segmentation)


def polygon_vertices(segmentation: Segmentation, max_vertices: int) -> np.ndarray:
    """Return polygon vertices as [n, 3] float64: x, y in image pixels and polygon index.

    n is 0 for RLE and for more than `max_vertices` vertices in total.
    """
    if not 0 < vertex_count(segmentation) <= max_vertices:
        return np.zeros((0, 3))
    points = [np.asarray(part, np.float64).reshape(-1, 2) for part in segmentation]
    indices = np.repeat(np.arange(len(points)), [len(part) for part in points])
    return np.column_stack([np.concatenate(points), indices])


def _sample_positions(
    start: float, stop: float, limit: int, side: int
) -> tuple[np.ndarray, np.ndarray]:
    """Indices and weights [2, side] of the two pixels around each sample along one axis."""
    position = start + (np.arange(side) + 0.5) * (stop - start) / side - 0.5
    low = np.floor(position).astype(np.int64)
    fraction = (position - low).astype(np.float32)
    indices = np.clip(np.stack([low, low + 1]), 0, limit - 1)
    return indices, np.stack([1 - fraction, fraction])


def _to_rle(segmentation: Segmentation, height: int, width: int) -> dict[str, Any]:
    if isinstance(segmentation, dict):
        return _compressed(segmentation, height, width)
    polygons = [np.asarray(part, np.float64).tolist() for part in segmentation]
    return coco_mask.merge(coco_mask.frPyObjects(polygons, height, width))


def _compressed(rle: dict[str, Any], height: int, width: int) -> dict[str, Any]:
    counts = rle["counts"]
    if isinstance(counts, list):
        return coco_mask.frPyObjects(rle, height, width)
    counts = counts.encode() if isinstance(counts, str) else counts
    return {"size": [height, width], "counts": counts}
