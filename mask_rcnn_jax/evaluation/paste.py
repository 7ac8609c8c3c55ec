"""Masks from their boxes back into the picture: paste (host numpy) and run-length encoding.

A predicted mask is an M x M grid of probabilities stretched over its box, by one of two rules:

  * "continuous": the grid's cell centres and the picture's pixel centres both lie at +0.5, outside
    the grid the probability is zero, and a pixel belongs to the object from 0.5 up (Detectron2).
  * "integer": the grid gets a border of one zero cell, the box grows about its centre by the same
    (M + 2) / M, its corners are cut to whole numbers (towards zero) that name its first and last
    pixel, the grid is resized to those pixels, and a pixel belongs to the object above 0.5. This is
    Detectron's first version, and with it torchvision, maskrcnn-benchmark and NVIDIA's PyTorch and
    TensorFlow codes. On average objects come out 0.9 pixels wider and higher.

Either way only the box's window of the picture is ever computed.
"""

import math

import numpy as np

RULES = ("continuous", "integer")
# Probabilities are computed for so many pixels at a time: no picture of floats is made, and the
# products are so small that OpenBLAS leaves them to one thread. Several, which wait for each other,
# take many times as long on a machine with other work, such as decoding and drawing.
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
    """Binary mask of an object inside its window of the picture.

    Args:
        mask: [M, M] probabilities in 0..1.
        box: (x1, y1, x2, y2) in picture pixels, not necessarily inside the picture.
        height, width: size of the picture.
        rule: "continuous" or "integer".
        threshold: of the probability.

    Returns:
        uint8 crop [h, w] of zeros and ones, and the (x, y) of its upper left pixel. The crop is
        empty (h or w is 0) where the box covers no pixel of the picture.

    Raises ValueError for another rule.
    """
    if rule not in RULES:
        raise ValueError(f"rule is {rule!r}, expected one of {list(RULES)}")
    axis_weights = _axis_weights if rule == "continuous" else _integer_axis_weights
    columns, x_weights = axis_weights(box[0], box[2], width, mask.shape[1])
    rows, y_weights = axis_weights(box[1], box[3], height, mask.shape[0])
    # Bilinear interpolation is separable: two small matrix products paste a window.
    mask = mask.astype(np.float32, copy=False)
    inside = np.greater_equal if rule == "continuous" else np.greater
    crop = np.empty((len(rows), len(columns)), bool)
    step = max(1, _PIXELS_AT_ONCE // max(len(columns), mask.shape[1]))
    for start in range(0, len(rows), step):
        slab = slice(start, start + step)
        pasted = y_weights[slab] @ mask @ x_weights.T
        inside(pasted, np.float32(threshold), out=crop[slab])
    return crop.view(np.uint8), (columns.start, rows.start)


def _axis_weights(low: float, high: float, size: int, cells: int) -> tuple[range, np.ndarray]:
    """The pixels of one axis whose centres lie in [low, high], and how each reads the cells.

    Returns:
        The pixels [n] as a range, and float32 weights [n, cells]: two neighbours per pixel, one
        where the other lies outside the grid and counts as zero.
    """
    # `not >` rather than `<=`: also true of NaN.
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
    """As `_axis_weights`, by the integer rule."""
    # Float32 throughout, as where the rule comes from: a rounding decides about a pixel.
    low, high = np.float32(low), np.float32(high)
    if not math.isfinite(low) or not math.isfinite(high):
        return range(0), np.zeros((0, cells), np.float32)
    centre = (high + low) * np.float32(0.5)
    half = (high - low) * np.float32(0.5) * np.float32((cells + 2) / cells)
    start, last = int(centre - half), int(centre + half)
    first = min(max(start, 0), size)
    stop = max(min(last + 1, size), first)
    # Without antialiasing; places beyond the outer cells' centres read those cells.
    scale = (cells + 2) / max(last + 1 - start, 1)
    cell = np.clip((np.arange(first, stop) - start + 0.5) * scale - 0.5, 0, cells + 1)
    distance = np.abs(cell[:, None] - np.arange(1, cells + 1))  # the border is zero anyway
    return range(first, stop), np.maximum(1.0 - distance, 0.0).astype(np.float32)
