"""Read parts of images whose files allow it."""

import functools
import os
from collections.abc import Callable

import numpy as np

from mask_rcnn_jax import opencv as cv2
from mask_rcnn_jax.annotations.reader import open_regular
from mask_rcnn_jax.images.bands import Bands, Limits
from mask_rcnn_jax.images.decode import (
    MAX_PIXELS,
    TIFF,
    UndecodableImage,
    check_image_size,
    too_many,
)
from mask_rcnn_jax.images.opening import NPY, open_raster
from mask_rcnn_jax.rle import Window

Source = str | bytes  # a file, or its content
RGB_FILES = Bands()
# Of an image that is decoded at once, if it can be read by parts.
MAX_WHOLE_BYTES = 3 * MAX_PIXELS
STRIP_BYTES = 1 << 27  # that are averaged at once; each tile is decoded for one strip, or two


def is_large(size: tuple[int, int], bands: Bands) -> bool:
    """Whether an image (height, width) is read by parts, if its file allows it."""
    height, width = size
    return height * width * _pixel_bytes(bands) > MAX_WHOLE_BYTES


def _pixel_bytes(bands: Bands) -> int:
    return bands.count * (4 if bands.is_scaled else 1)


def read_part(
    source: Source,
    path: str,
    window: Window,
    bands: Bands,
    size: tuple[int, int] | None = None,
    *,
    upright: bool = False,
) -> np.ndarray | None:
    """A window (x1, y1, x2, y2) of an image, as the whole of it is decoded and scaled; None if the
    file has to be decoded whole.

    Args:
        source: what is read.
        path: names it in messages.
        bands: what is read of it.
        size: (height, width) that the json states.
        upright: apply an EXIF rotation.

    Errors are those of `Bands.read`.
    """
    if bands.names:
        given = dict(expected_size=size, window=window, name=path)
        pixels = bands.read(source, upright=upright, **given)  # type: ignore[arg-type]
        return bands.scaled(pixels, _limits(bands, source) if bands.scale == "image" else None)
    if not _start(source).startswith(TIFF):
        return None
    try:
        with open_raster(source, path) as raster:
            if not raster.colors or not raster.by_window:
                return None
            if size is not None:
                check_image_size(np.broadcast_to(0, raster.size), size, path)
            return _as_rgb(raster.read(0, window), raster.colors)
    except ImportError:
        if size is not None and size[0] * size[1] > MAX_PIXELS:
            raise
        return None


def has_parts(source: Source, path: str, bands: Bands) -> bool:
    """Whether `read_part` decodes a window alone; False for a file that cannot be read."""
    start = _start(source)
    if not start.startswith(TIFF) and not (bands.names and start.startswith(NPY)):
        return False
    try:
        with open_raster(source, path) as raster:
            return raster.by_window and bool(bands.names or raster.colors)
    except (OSError, ValueError, ImportError):
        return False


def check_parts(path: str, size: tuple[int, int], bands: Bands = RGB_FILES) -> None:
    """Decode all of an image (height, width) that is too large to be decoded whole, part by part.

    Raises:
        UndecodableImage: its file does not allow it, or is damaged.
        ValueError, OSError: it has another size, or cannot be read.
    """
    if not has_parts(path, path, bands):
        raise UndecodableImage(f"{path}: {too_many(MAX_PIXELS)}")
    (height, width), rows = size, max(1, STRIP_BYTES // (size[1] * _pixel_bytes(bands)))
    for top in range(0, height, rows):
        read_part(path, path, (0, top, width, min(top + rows, height)), bands, size)


def reduced(
    read: Callable[[Window], np.ndarray],
    size: tuple[int, int],
    at_least: tuple[int, int],
    bands: Bands,
) -> np.ndarray:
    """An image (height, width) reduced by a whole factor, by averages, to `at_least` that many
    pixels or a few more, in its dtype; `read` gives its windows, of which one is held at a time."""
    (height, width), factor = size, _factor(size, at_least)
    rows, strips = max(1, STRIP_BYTES // (width * factor * _pixel_bytes(bands))), []
    for top in range(0, height // factor, rows):
        bottom = min(top + rows, height // factor)
        window = 0, top * factor, width // factor * factor, bottom * factor
        few = width // factor, bottom - top
        strip = cv2.resize(read(window), few, interpolation=cv2.INTER_AREA)
        strips.append(strip.reshape(*few[::-1], -1))
    return np.concatenate(strips)


def _factor(size: tuple[int, int], at_least: tuple[int, int]) -> int:
    return max(1, min(side // most for side, most in zip(size, at_least, strict=True)))


def _as_rgb(pixels: np.ndarray, colors: str) -> np.ndarray:
    """[h, w, 3] as OpenCV decodes it."""
    if colors == "gray":
        return np.repeat(pixels[..., :1], 3, axis=2)
    if colors == "rgb":
        return np.ascontiguousarray(pixels[..., :3])
    return ((pixels[..., :3].astype(np.uint16) * pixels[..., 3:] + 127) // 255).astype(np.uint8)


def _start(source: Source) -> bytes:
    """The first bytes of a file, b"" for one that cannot be read."""
    if isinstance(source, bytes):
        return source[:8]
    try:
        with open_regular(source) as file:
            return file.read(8)
    except OSError:
        return b""


def _limits(bands: Bands, source: Source) -> Limits:
    if isinstance(source, bytes):
        return bands.file_limits(source)
    is_file = os.path.isfile(source)  # and not in a store, or a tar
    return _file_limits(bands, source, os.stat(source).st_mtime_ns if is_file else 0)


@functools.lru_cache(4096)
def _file_limits(bands: Bands, path: str, _: int) -> Limits:
    return bands.file_limits(path)
