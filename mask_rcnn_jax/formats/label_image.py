"""Read masks that are images: a number for each instance, or one file for each."""

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from mask_rcnn_jax.annotations.reader import read_regular
from mask_rcnn_jax.data.images import MAX_BYTES, check_header
from mask_rcnn_jax.rle import encode_window

FORMATS = ("PNG", "TIFF", "BMP", "GIF")  # without loss, unlike JPEG
MAX_INSTANCES = 20_000


def read_label_image(path: Path, size: tuple[int, int] | None = None) -> np.ndarray:
    """Read a mask [H, W] with whole numbers: values, indices into a palette, or 24-bit colors.

    Args:
        path: the file.
        size: its image's (height, width).

    Raises:
        ValueError, OSError: naming the file.
    """
    content = read_regular(path, MAX_BYTES)
    check_header(content, str(path))
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            mode, values = image.mode, np.asarray(image)
    except Exception as error:  # whatever Pillow's parsers raise on damaged files
        raise ValueError(f"{path}: damaged, or no PNG, TIFF, BMP or GIF") from error
    if mode == "RGBA" and (values[..., 3] == 255).all():
        mode, values = "RGB", values[..., :3]
    if mode == "RGB":
        values = values.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], np.uint32)
    if values.ndim != 2 or values.dtype.kind not in "bui":
        raise ValueError(f"{path}: pixels of mode {mode}, expected whole numbers or colors")
    if size is not None and values.shape != size:
        found, expected = (f"{height} x {width}" for height, width in (values.shape, size))
        raise ValueError(f"{path}: {found} (height x width), the image is {expected}")
    return values


def instances(values: np.ndarray, where: str) -> Iterator[tuple[int, dict]]:
    """Each number in a mask [H, W], in rising order, with its pixels' RLE."""
    height, width = values.shape
    found, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    if len(found) > MAX_INSTANCES:
        raise ValueError(
            f"{where}: {len(found):,} different values, at most {MAX_INSTANCES:,} are read; "
            "is it a mask?"
        )
    order = np.argsort(inverse.ravel(), kind="stable")
    for value, places in zip(found, np.split(order, np.cumsum(counts)[:-1]), strict=True):
        rows, columns = np.divmod(places, width)
        top, left = rows.min(), columns.min()
        crop = np.zeros((rows.max() - top + 1, columns.max() - left + 1), np.uint8)
        crop[rows - top, columns - left] = 1
        yield int(value), encode_window(crop, (int(left), int(top)), height, width)
