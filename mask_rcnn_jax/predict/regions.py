"""Measure objects, with the names and the numbers of skimage.measure.regionprops_table."""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from mask_rcnn_jax import opencv as cv2
from mask_rcnn_jax.images.bands import ABSENT
from mask_rcnn_jax.images.pixel_size import PixelSize
from mask_rcnn_jax.rle import Window

# Of a pixel on the border, by its neighbors on the border: Benkrid and Crookes, "Design and FPGA
# implementation of a perimeter estimator".
_NEIGHBORS = np.array([[10, 2, 10], [2, 1, 2], [10, 2, 10]], np.float32)
_LENGTHS = np.zeros(50)
_LENGTHS[[5, 7, 15, 17, 25, 27]] = 1
_LENGTHS[[21, 33]] = np.sqrt(2)
_LENGTHS[[13, 23]] = (1 + np.sqrt(2)) / 2
_CROSS = np.array([[0, 1, 0], [1, 1, 1], [0, 1, 0]], np.uint8)

Crop = tuple[np.ndarray, tuple[int, int]]


def measure(
    crops: Iterable[Crop],
    boxes: np.ndarray,
    read: Callable[[Window], np.ndarray],
    bands: Sequence[str],
    size: PixelSize | None,
) -> dict[str, np.ndarray]:
    """Measure N masks.

    Lengths, areas and centroids are in the unit of `size`, from the image's upper left pixel, as
    with the `spacing` of skimage; without one, in pixels. An object without pixels has a bbox, that
    of its box, and NaN for what cannot be known.

    Args:
        crops: uint8 [h, w] of zeros and ones, and the (x, y) of their upper left pixels; or none.
        boxes: [N, 4] float (x1, y1, x2, y2).
        read: returns [h, w, C] numbers of a window (x1, y1, x2, y2), whose means, smallest and
            largest are taken; NaN where some are no data.
        bands: names of the C bands.
        size: of a pixel.

    Returns:
        Columns of N numbers; `unit` has texts, "pixel" without a size.
    """
    corners = np.concatenate([np.floor(boxes[:, :2]), np.ceil(boxes[:, 2:])], axis=1)
    boxes_of = corners[:, [1, 0, 3, 2]].astype(int)  # (y1, x1, y2, x2)
    shapes = np.full((len(boxes), 7), np.nan)
    shapes[:, 0] = 0
    values = np.full((len(boxes), 3, len(bands)), np.nan)
    for k, (crop, (x, y)) in enumerate(crops):
        left, top, width, height = cv2.boundingRect(crop) if crop.size else (0, 0, 0, 0)
        if not width:
            continue
        crop = np.ascontiguousarray(crop[top : top + height, left : left + width])
        y, x = y + top, x + left
        boxes_of[k] = y, x, y + height, x + width
        shapes[k] = _shape(crop)
        inside = read((x, y, x + width, y + height))[crop.view(bool)]
        if inside.dtype == np.float32:
            inside = np.where(inside == ABSENT, np.float32(np.nan), inside)
        with np.errstate(invalid="ignore"):  # of inf and -inf
            values[k, 0] = inside.mean(axis=0, dtype=np.float64)
        values[k, 1], values[k, 2] = inside.min(axis=0), inside.max(axis=0)
    columns = _columns(shapes, boxes_of, size)
    for b, name in enumerate(bands):
        for s, what in enumerate(("mean", "min", "max")):
            columns[f"intensity_{what}-{name}"] = values[:, s, b]
    return columns


def _shape(crop: np.ndarray) -> list[float]:
    """Number of pixels, centroid (y, x), covariances (yy, xx, xy) and perimeter of a crop."""
    found = cv2.moments(crop, binaryImage=True)
    count = found["m00"]
    center = found["m01"] / count, found["m10"] / count
    covariances = (found[name] / count for name in ("mu02", "mu20", "mu11"))
    padded = cv2.copyMakeBorder(crop, 1, 1, 1, 1, cv2.BORDER_CONSTANT, value=0)
    border = padded - cv2.erode(padded, _CROSS)
    kinds = cv2.filter2D(border, cv2.CV_8U, _NEIGHBORS, borderType=cv2.BORDER_CONSTANT)
    perimeter = float(np.bincount(kinds.ravel(), minlength=len(_LENGTHS)) @ _LENGTHS)
    return [count, *center, *covariances, perimeter]


def _columns(
    shapes: np.ndarray, boxes: np.ndarray, size: PixelSize | None
) -> dict[str, np.ndarray]:
    """Columns of [N, 7] of `_shape` and of [N, 4] (y1, x1, y2, x2)."""
    height, width, unit = size or PixelSize(1.0, 1.0, "pixel")
    count, y, x, yy, xx, xy, perimeter = shapes.T
    area = count * (height * width)
    yy, xx, xy = yy * height**2, xx * width**2, xy * (height * width)
    spread = np.hypot((yy - xx) / 2, xy)
    major, minor = (yy + xx) / 2 + spread, np.maximum((yy + xx) / 2 - spread, 0)
    diagonal = np.where(xy > 0, np.pi / 4, -np.pi / 4)
    ratio = np.divide(minor, major, out=np.where(np.isnan(major), np.nan, 1.0), where=major > 0)
    return {
        "num_pixels": count.astype(int),
        "area": area,
        **{f"bbox-{k}": side for k, side in enumerate(boxes.T)},
        "centroid-0": (boxes[:, 0] + y) * height,
        "centroid-1": (boxes[:, 1] + x) * width,
        "axis_major_length": 4 * np.sqrt(major),
        "axis_minor_length": 4 * np.sqrt(minor),
        "orientation": np.where(yy == xx, diagonal, np.arctan2(2 * xy, yy - xx) / 2),
        "eccentricity": np.sqrt(1 - ratio),
        "equivalent_diameter_area": np.sqrt(4 * area / np.pi),
        # Of oblong pixels it is not defined.
        "perimeter": perimeter * (height if math.isclose(height, width) else np.nan),
        "unit": np.full(len(count), unit),
    }
