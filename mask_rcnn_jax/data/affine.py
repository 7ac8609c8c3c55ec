"""Affine maps from an image to a canvas, and their composition.

Coordinates are continuous: pixel i spans i to i + 1.
"""

from typing import NamedTuple

import numpy as np

Color = tuple[int, ...]  # of each band, or of all, 0..255
_EPSILON = 1e-6  # pixels


class Affine(NamedTuple):
    """A map from an image to a canvas."""

    matrix: np.ndarray  # [2, 3] float64, (x, y, 1) in the image -> (x, y) on the canvas
    size: tuple[int, int]  # (height, width) of the canvas
    fill: Color | None = None  # beyond the image, if no earlier map has one; None: black
    tight: bool = False  # recompute boxes from masks, and drop objects without any mask left
    torch_masks: bool = False  # codes by torch's nearest neighbor, not by Pillow's


def scaling(size: tuple[int, int], new_size: tuple[int, int]) -> Affine:
    """Stretch an image (height, width) to another size."""
    (height, width), (new_height, new_width) = size, new_size
    return Affine(diagonal(new_width / width, new_height / height), new_size)


def diagonal(x: float, y: float, offset_x: float = 0.0, offset_y: float = 0.0) -> np.ndarray:
    """Return the matrix that scales, then shifts."""
    return np.array([[x, 0, offset_x], [0, y, offset_y]], np.float64)


def compose(first: Affine, second: Affine) -> Affine:
    """Return the map that applies `first`, then `second`."""
    matrix = second.matrix[:, :2] @ first.matrix
    matrix[:, 2] += second.matrix[:, 2]
    fill = second.fill if first.fill is None else first.fill
    tight, torch_masks = first.tight or second.tight, first.torch_masks or second.torch_masks
    return Affine(matrix, second.size, fill, tight, torch_masks)


def fill_of(fill: Color, bands: int) -> Color:
    """Return a color's value for each band; ValueError for one of another number of bands."""
    if len(fill) == bands:
        return fill
    if len(set(fill)) > 1:
        raise ValueError(f"fill is {fill}, expected one value, or one for each of {bands} bands")
    return fill[:1] * bands


def reveals(first: Affine, second: Affine, size: tuple[int, int]) -> bool:
    """Check whether `second` shows parts of an image (height, width) that `first` cut off.

    Then the composition is not the same as one map after the other.
    """
    corners = transform(first.matrix, _corners(size))
    if _inside(corners, first.size):
        return False
    return not _inside(transform(inverse(second.matrix), _corners(second.size)), first.size)


def transform(matrix: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Map points [n, 2]."""
    return points @ matrix[:, :2].T + matrix[:, 2]


def inverse(matrix: np.ndarray) -> np.ndarray:
    """Return the inverse map's matrix."""
    linear = np.linalg.inv(matrix[:, :2])
    return np.column_stack([linear, -linear @ matrix[:, 2]])


def is_axis_aligned(matrix: np.ndarray) -> bool:
    """Check whether boxes stay boxes: scales, flips, quarter turns and shifts only."""
    swapped = np.abs(matrix[[0, 1], [1, 0]])
    straight = np.abs(matrix[[0, 1], [0, 1]])
    return bool(swapped.max() < 1e-9 or straight.max() < 1e-9)


def moves_full_pixels(matrix: np.ndarray) -> bool:
    """Check whether every pixel goes to one pixel, so that nothing is resampled."""
    unit = np.abs(np.abs(matrix[:, :2]).max(axis=1) - 1).max() < 1e-9
    whole = np.abs(matrix[:, 2] - np.rint(matrix[:, 2])).max() < 1e-9
    return is_axis_aligned(matrix) and bool(unit and whole)


def _corners(size: tuple[int, int]) -> np.ndarray:
    height, width = size
    return np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float64)


def _inside(points: np.ndarray, size: tuple[int, int]) -> bool:
    height, width = size
    limit = np.array([width, height]) + _EPSILON
    return bool((points >= -_EPSILON).all() and (points <= limit).all())
