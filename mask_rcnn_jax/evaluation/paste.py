"""Paste box masks into the image with NumPy.

A predicted mask is an M x M grid of probabilities stretched over its box by one of two rules:

  * "continuous": cell centers and pixel centers are at +0.5, the probability is zero outside the
    grid, and pixels with a probability of at least 0.5 are foreground (Detectron2).
  * "integer": the grid is padded by one zero cell, the box is scaled by (M + 2) / M about its
    center, its corners are truncated toward zero to the first and last pixel, the grid is resized
    to those pixels, and pixels above 0.5 are foreground. Used by the original Detectron,
    torchvision, maskrcnn-benchmark and NVIDIA's PyTorch and TensorFlow code. Objects come out 0.9
    pixels wider and higher on average.

Only the part of the image inside the box is computed.
"""

import math

import numpy as np

RULES = ("continuous", "integer")
# Chunk size: avoids a float array of the whole image, and keeps the products small enough for
# OpenBLAS to use a single thread. Multiple threads wait for each other and take many times as long
# on a machine with other work, such as decoding and drawing.
_PIXELS_AT_ONCE = 8192


def paste_mask(
    mask: np.ndarray,
    box: np.ndarray,
    height: int,
    width: int,
    *,
    rule: str = "continuous",
    threshold: float = 0.5,
) -> tuple[np.ndarray, tuple[int, int]]:
    """Compute the binary mask of an object within its box.

    Args:
        mask: [M, M] probabilities in 0..1.
        box: (x1, y1, x2, y2) in image pixels; may extend beyond the image.
        height: image height in pixels.
        width: image width in pixels.
        rule: "continuous" or "integer".
        threshold: foreground probability.

    Returns:
        uint8 crop [h, w] of zeros and ones, and the (x, y) of its upper left pixel. The crop is
        empty (h or w is 0) if the box covers no pixel.

    Raises:
        ValueError: for an unknown rule.
    """
    if rule not in RULES:
        raise ValueError(f"rule is {rule!r}, expected one of {list(RULES)}")
    axis_weights = _axis_weights if rule == "continuous" else _integer_axis_weights
    columns, x_weights = axis_weights(box[0], box[2], width, mask.shape[1])
    rows, y_weights = axis_weights(box[1], box[3], height, mask.shape[0])
    # Bilinear interpolation is separable into two small matrix products.
    mask = mask.astype(np.float32, copy=False)
    inside = np.greater_equal if rule == "continuous" else np.greater
    crop = np.empty((len(rows), len(columns)), bool)
    step = max(1, _PIXELS_AT_ONCE // max(len(columns), mask.shape[1]))
    for start in range(0, len(rows), step):
        chunk = slice(start, start + step)
        pasted = y_weights[chunk] @ mask @ x_weights.T
        inside(pasted, np.float32(threshold), out=crop[chunk])
    return crop.view(np.uint8), (columns.start, rows.start)


def _axis_weights(low: float, high: float, size: int, cells: int) -> tuple[range, np.ndarray]:
    """Interpolate along one axis, for pixels with centers in [low, high].

    Returns the range of the n pixels, and float32 weights [n, cells]: two cells per pixel, or one
    if the other is outside the grid and therefore zero.
    """
    # `not >` instead of `<=` also catches NaN.
    if not high > low or not math.isfinite(low) or not math.isfinite(high):
        return range(0), np.zeros((0, cells), np.float32)
    low, high = float(low), float(high)
    first = min(max(math.ceil(low - 0.5), 0), size)
    last = max(min(math.floor(high - 0.5) + 1, size), first)
    cell = (np.arange(first, last) + 0.5 - low) * (cells / (high - low)) - 0.5
    distance = np.abs(cell[:, None] - np.arange(cells))
    return range(first, last), np.maximum(1.0 - distance, 0.0).astype(np.float32)


def _integer_axis_weights(
    low: float, high: float, size: int, cells: int
) -> tuple[range, np.ndarray]:
    """Like `_axis_weights`, by the integer rule."""
    # Float32 as in the original code: rounding decides which pixels are covered.
    low, high = np.float32(low), np.float32(high)  # type: ignore[assignment]
    if not math.isfinite(low) or not math.isfinite(high):
        return range(0), np.zeros((0, cells), np.float32)
    center = (high + low) * np.float32(0.5)
    half = (high - low) * np.float32(0.5) * np.float32((cells + 2) / cells)
    start, last = int(center - half), int(center + half)
    first = min(max(start, 0), size)
    stop = max(min(last + 1, size), first)
    # No antialiasing; positions beyond the outer cell centers are clamped.
    scale = (cells + 2) / max(last + 1 - start, 1)
    cell = (np.arange(first, stop) - start + 0.5) * scale - 0.5
    cell = np.minimum(np.maximum(cell, 0), cells + 1)  # np.clip takes three times as long
    distance = np.abs(cell[:, None] - np.arange(1, cells + 1))  # border cells are zero
    return range(first, stop), np.maximum(1.0 - distance, 0.0).astype(np.float32)
