"""Read masks that are images: a number for each instance, or one file for each."""

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from mask_rcnn_jax.annotations.reader import read_regular
from mask_rcnn_jax.formats.mask_codes import Runs, column_runs
from mask_rcnn_jax.images.decode import MAX_BYTES, check_header
from mask_rcnn_jax.rle import edges_to_rle

FORMATS = ("PNG", "TIFF", "BMP", "GIF")  # without loss, unlike JPEG
MAX_INSTANCES = 20_000


def read_label_image(path: Path, size: tuple[int, int]) -> Runs:
    """Read a mask with whole numbers: values, indices into a palette, or 24-bit colors (uint32).

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
            image.load()
    except Exception as error:  # whatever Pillow's parsers raise on damaged files
        raise ValueError(f"{path}: damaged, or no PNG, TIFF, BMP or GIF") from error

    def block(x1: int, y1: int, x2: int, y2: int) -> np.ndarray:
        values = np.asarray(image.crop((x1, y1, x2, y2)))
        if image.mode == "RGB" or image.mode == "RGBA" and (values[..., 3] == 255).all():
            red, green, blue = (values[..., n].astype(np.uint32) for n in range(3))
            return red << 16 | green << 8 | blue
        if values.ndim != 2 or values.dtype.kind not in "bui":
            mode = image.mode
            raise ValueError(f"{path}: pixels of mode {mode}, expected whole numbers or colors")
        return values.view(np.uint8) > 0 if values.dtype == bool else values  # Pillow has 255

    block(0, 0, 1, 1)  # names a wrong mode before a wrong size
    if image.size != size[::-1]:
        found, expected = (f"{height} x {width}" for height, width in (image.size[::-1], size))
        raise ValueError(f"{path}: {found} (height x width), the image is {expected}")
    return column_runs(block, size, str(path))


def instances(runs: Runs, size: tuple[int, int], where: str) -> Iterator[tuple[int, dict]]:
    """Each number in a mask [H, W], in rising order, with its pixels' RLE."""
    found, counts = np.unique(runs.values, return_counts=True)
    if len(found) > MAX_INSTANCES:
        raise ValueError(
            f"{where}: {len(found):,} different values, at most {MAX_INSTANCES:,} are read; "
            "is it a mask?"
        )
    edges = _edges(runs, size)
    del runs
    ends = np.cumsum(2 * counts)
    for value, start, end in zip(found.astype(int).tolist(), ends - 2 * counts, ends, strict=True):
        yield value, edges_to_rle(edges[start:end].astype(np.int32), *size)


def _edges(runs: Runs, size: tuple[int, int]) -> np.ndarray:
    """Where runs start and end, int64 [2 R], sorted by the value, which is in the upper 32 bits."""
    edges = np.empty((len(runs.starts), 2), np.int64)
    edges[:] = runs.values[:, None]
    edges <<= 32
    edges[:, 0] |= runs.starts
    edges[:-1, 1] |= runs.starts[1:]
    edges[-1, 1] |= size[0] * size[1]
    flat = edges.ravel()
    flat.sort()
    return flat
