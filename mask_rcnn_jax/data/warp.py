"""Resample images and masks through an affine map."""

import numpy as np
from PIL import Image

from mask_rcnn_jax import opencv as cv2
from mask_rcnn_jax.data.affine import (
    Affine,
    Color,
    compose,
    fill_of,
    is_axis_aligned,
    scaling,
    transform,
)

Window = tuple[int, int, int, int]  # x1, y1, x2, y2 on the canvas
_EPSILON = 1e-6  # pixels
_AT_ONCE = (1, 3, 4)  # bands that OpenCV rotates alike
_MOST_WHOLE = 8  # times the pixels of its part that a whole image may take


def warp_image(image: np.ndarray, affine: Affine, out: np.ndarray | None = None) -> np.ndarray:
    """Map a [h, w, C] image, uint8 or float32, to its canvas of such values: bilinear, averaging
    all pixels if it shrinks.

    Maps that keep axes agree with Pillow's resize. `out` is a canvas to write into.
    """
    bands = image.shape[2]
    canvas = np.empty((*affine.size, bands), image.dtype) if out is None else out
    fill = fill_of(affine.fill or (0,), bands)
    if not is_axis_aligned(affine.matrix):
        canvas[...] = _rotate(image, affine, fill)
        return canvas
    matrix = affine.matrix
    if abs(matrix[0, 0]) < abs(matrix[0, 1]):  # a quarter turn: x and y change places
        image, matrix = _transposed(image), matrix[:, [1, 0, 2]]
    scales, offsets = matrix[[1, 0], [1, 0]], matrix[[1, 0], [2, 2]]  # of y and x
    mirrored = scales < 0
    if mirrored.any():
        flipped = cv2.flip(image, int(mirrored[1]) - int(mirrored.all()) * 2)
        image = flipped.reshape(image.shape)  # OpenCV drops the axis of one band
        offsets = np.where(mirrored, offsets + scales * image.shape[:2], offsets)
    _place(image, np.abs(scales), offsets, fill, canvas)
    return canvas


def _place(
    image: np.ndarray,
    scales: np.ndarray,
    offsets: np.ndarray,
    fill: Color,
    canvas: np.ndarray,
) -> None:
    """Resize by `scales` and shift by `offsets`, each of y and x."""
    size = canvas.shape[:2]
    ends = offsets + scales * image.shape[:2]
    start = np.ceil(offsets - _EPSILON).clip(0, size).astype(int)
    stop = np.floor(ends + _EPSILON).clip(start, size).astype(int)
    (top, left), (bottom, right) = start, stop
    line = np.empty(canvas.shape[1:], canvas.dtype)  # filling by lines is faster than by pixels
    line[:] = fill
    canvas[:top] = canvas[bottom:] = line
    canvas[top:bottom, :left] = line[:left]
    canvas[top:bottom, right:] = line[right:]
    if (stop > start).all():
        canvas[top:bottom, left:right] = _resized(image, scales, start - offsets, stop - start)


def _resized(
    image: np.ndarray, scales: np.ndarray, start: np.ndarray, shape: np.ndarray
) -> np.ndarray:
    """Resize by `scales` and cut out the part of `shape` pixels at `start`, (y, x).

    `start` may lie between pixels.
    """
    (height, width), (y, x) = (np.rint(a).astype(int) for a in (scales * image.shape[:2], start))
    rows, columns = shape.tolist()
    is_whole = np.abs([scales * image.shape[:2] - (height, width), start - (y, x)]).max()
    whole = is_whole < _EPSILON and height * width <= _MOST_WHOLE * rows * columns
    if whole and (scales >= 1).all():
        # Nothing is averaged then: OpenCV is the same to one gray level, and five times as fast.
        enlarged = cv2.resize(image, (width, height)).reshape(height, width, -1)
        return enlarged[y : y + rows, x : x + columns]
    low, high = ((place / scales).clip(0, image.shape[:2]) for place in (start, start + shape))
    box = (*low[::-1].tolist(), *high[::-1].tolist())
    return antialiased(image, (rows, columns), box)


def antialiased(
    image: np.ndarray,
    size: tuple[int, int],
    box: tuple[float, float, float, float] | None = None,
) -> np.ndarray:
    """Resize [H, W, C], or a box (x1, y1, x2, y2) of it, to (height, width), averaging all pixels
    where it shrinks, as Pillow does; uint8 stays uint8, other numbers become float32."""
    whole = (size[1], size[0]), Image.Resampling.BILINEAR, box
    if image.dtype == np.uint8 and image.shape[2] == 3:
        return np.asarray(Image.fromarray(np.ascontiguousarray(image)).resize(*whole))
    kind = np.uint8 if image.dtype == np.uint8 else np.float32
    bands = (np.ascontiguousarray(band, kind) for band in np.moveaxis(image, 2, 0))
    return np.stack([np.asarray(Image.fromarray(one).resize(*whole)) for one in bands], axis=2)


def _transposed(image: np.ndarray) -> np.ndarray:
    """Exchange the first two axes; OpenCV is faster, but knows some numbers of bands only."""
    if image.shape[2] in (3, 4):
        return cv2.transpose(image)
    return np.ascontiguousarray(image.swapaxes(0, 1))


def _rotate(image: np.ndarray, affine: Affine, fill: Color) -> np.ndarray:
    """Shrink first, with averaging, as far as the map shrinks; OpenCV samples four pixels."""
    size = image.shape[:2]
    scale_x, scale_y = np.minimum(np.linalg.norm(affine.matrix[:, :2], axis=0), 1)
    height, width = max(1, round(size[0] * scale_y)), max(1, round(size[1] * scale_x))
    if (height, width) != size:
        shrunk = scaling(size, (height, width))
        image = warp_image(image, shrunk)
        affine = compose(scaling((height, width), size), affine)
    matrix, bands, groups = _to_opencv(affine.matrix), image.shape[2], []
    step = bands if bands in _AT_ONCE else 1
    for first in range(0, bands, step):
        some = slice(first, first + step)
        warped = cv2.warpAffine(
            np.ascontiguousarray(image[..., some]),
            matrix,
            affine.size[::-1],
            flags=cv2.INTER_LINEAR,
            borderMode=cv2.BORDER_CONSTANT,
            borderValue=fill[some],
        )
        groups.append(warped.reshape(*affine.size, -1))
    return groups[0] if len(groups) == 1 else np.concatenate(groups, axis=2)


def _to_opencv(matrix: np.ndarray) -> np.ndarray:
    """Return the matrix in OpenCV's coordinates, where pixel i has its center at i."""
    shift = transform(matrix, np.array([[0.5, 0.5]]))[0] - 0.5
    return np.column_stack([matrix[:, :2], shift])


def warp_mask(mask: np.ndarray, affine: Affine, window: Window) -> np.ndarray:
    """Map a uint8 mask [h, w] to a window of the canvas by nearest neighbor.

    Pixels read the source of their center, as Pillow's. With `torch_masks`, pixel i of an axis that
    keeps its direction reads floor(i / scale) in single precision, as torch's interpolate; others
    are mirrored or turned images of that.
    """
    x1, y1, x2, y2 = window
    matrix = affine.matrix.copy()
    if not is_axis_aligned(matrix):
        matrix[:, 2] -= (x1, y1)
        flags = cv2.INTER_NEAREST
        return cv2.warpAffine(mask, _to_opencv(matrix), (x2 - x1, y2 - y1), flags=flags)
    if abs(matrix[0, 0]) < abs(matrix[0, 1]):
        mask, matrix = mask.T, matrix[:, [1, 0, 2]]
    as_torch = affine.torch_masks
    rows = _sources(matrix[1, 1], matrix[1, 2], mask.shape[0], (y1, y2), as_torch)
    columns = _sources(matrix[0, 0], matrix[0, 2], mask.shape[1], (x1, x2), as_torch)
    # Only the part between the first and the last source is copied, not all rows of an image.
    (top, bottom), (left, right) = (_span(sources) for sources in (rows, columns))
    part = mask[top:bottom, left:right]
    warped = part.take((rows - top).clip(0), 0).take((columns - left).clip(0), 1)
    warped[rows < 0] = 0
    warped[:, columns < 0] = 0
    return warped


def _span(sources: np.ndarray) -> tuple[int, int]:
    """The first source that is not -1 and the one after the last; one pixel if there is none."""
    inside = sources[sources >= 0]
    return (int(inside.min()), int(inside.max()) + 1) if inside.size else (0, 1)


def _sources(
    scale: float, offset: float, side: int, span: tuple[int, int], as_torch: bool
) -> np.ndarray:
    """Return the source of each pixel along one axis, -1 beyond the image."""
    pixels = np.arange(*span)
    place = pixels - offset if scale > 0 else offset - 1 - pixels
    place = np.where(abs(place - np.rint(place)) < _EPSILON, np.rint(place), place)
    if as_torch:
        source = place.astype(np.float32) * np.float32(1 / abs(scale))
    else:
        source = (place + 0.5) / abs(scale) + _EPSILON
    beyond = (place < 0) | (place > abs(scale) * side - 1 + _EPSILON)
    return np.where(beyond, -1, np.minimum(np.floor(source).astype(np.int64), side - 1))
