"""Crops of masks and vertices of polygons, as training takes them."""

import numpy as np

from mask_rcnn_jax.annotations.segmentation import Segmentation, segmentation_to_mask


def crop_mask(
    segmentation: Segmentation, box: np.ndarray, height: int, width: int, side: int = 112
) -> np.ndarray:
    """Crop the mask inside `box` (x1, y1, x2, y2 in image pixels): [side, side] uint8 in 0..255.

    Polygons are transformed to the crop and rasterized there. RLE is sampled bilinearly at the
    centers of the crop pixels, with border pixels replicated outside the image.
    """
    x1, y1, x2, y2 = (float(v) for v in box)
    if isinstance(segmentation, dict):
        mask = segmentation_to_mask(segmentation, height, width)
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
