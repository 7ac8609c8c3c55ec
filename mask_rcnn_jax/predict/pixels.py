"""The kinds of images that a predictor takes."""

import os
from contextlib import suppress
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageOps

from mask_rcnn_jax.annotations.reader import open_regular
from mask_rcnn_jax.images.bands import Bands, Limits
from mask_rcnn_jax.images.decode import decode_bytes, decode_image, upright_size
from mask_rcnn_jax.images.headers import open_header
from mask_rcnn_jax.images.opening import open_raster
from mask_rcnn_jax.images.suffixes import IMAGE_SUFFIXES as DECODED

# A path, a file's content or an open file, uint8 [H, W, 3] RGB, or an image of Pillow. With
# `data.bands.names` an array has the numbers of these bands, [H, W, bands], or [H, W] of one.
ImageLike = str | os.PathLike | bytes | bytearray | BinaryIO | np.ndarray | Image.Image
RGB_FILES = Bands()
NUMPY_SUFFIXES = (".npy", ".npz")
_BY_HEAD = (".tif", ".tiff", ".npy")  # whose size a raster tells without reading pixels
_NUMBERS = "buif"  # of NumPy's kinds: bool, whole and floating-point numbers
_VIEW_ROWS = 512  # of a large image that are scaled at a time


def path_if_file(image: Any) -> str:
    """Return the path of an image that is a file, "" for another."""
    return os.fspath(image) if isinstance(image, str | os.PathLike) else ""


def image_suffixes(bands: Bands) -> tuple[str, ...]:
    """Endings of the files that are read."""
    return (*DECODED, *NUMPY_SUFFIXES) if bands.names else DECODED


def is_other_band(name: str, bands: Bands) -> bool:
    """Whether a file has a band of an image that the file of another band stands for."""
    parts = [part for part in bands.files if part in name]
    return bool(parts) and max(parts, key=len) != bands.files[0]


def read_pixels(
    source: str | os.PathLike | bytes,
    bands: Bands,
    upright: bool,
    *,
    name: str = "",
    at_least: tuple[int, int] | None = None,
    max_bytes: int | None = None,
) -> np.ndarray:
    """[H, W, bands] of a file, or of its content, in the numbers that it has; else uint8 RGB.

    Args:
        upright: whether an image is turned as its EXIF entry says.
        name: of the content, for messages.
        at_least: as for `decode_image`; without names of bands.
        max_bytes: see `Bands.read`; with names of bands.

    Raises ValueError, of which UndecodableImage is one, for a file that is not read or lacks bands;
    ImportError for one that needs a package; OSError.
    """
    if bands.names:
        return bands.read(source, upright=upright, name=name, max_bytes=max_bytes)
    if isinstance(source, bytes):
        given: Any = dict(upright=upright, at_least=at_least, is_foreign=True)
        return decode_bytes(source, name, **given)
    return decode_image(source, upright=upright, at_least=at_least)


def to_pixels(image: Any, bands: Bands = RGB_FILES, upright: bool = True) -> np.ndarray:
    """Return any image as an array, whose shape and dtype are not checked.

    Raises ValueError for an image of Pillow with values in no known range.
    """
    if isinstance(image, str | os.PathLike):
        return read_pixels(image, bands, upright)
    content = image.read() if hasattr(image, "read") else image
    if isinstance(content, bytes | bytearray):
        return read_pixels(bytes(content), bands, upright, name="image")
    if isinstance(image, Image.Image):
        turned = ImageOps.exif_transpose(image) if upright else image
        return _pillow_bands(turned) if bands.names else _pillow_pixels(turned)
    if isinstance(image, np.ndarray):
        return image
    kind = type(image).__name__
    raise TypeError(f"image is a {kind}, expected a file, a numpy array or an image of Pillow")


def checked(image: np.ndarray, bands: Bands) -> np.ndarray:
    """[H, W, C] of an array as files are read. Raises ValueError for another shape or dtype."""
    if bands.names and image.ndim == 2:
        image = image[..., None]
    if bands.names:
        channels, dtype = f"{bands.count}] ({', '.join(bands.names)}", "numbers"
        is_fit = image.dtype.kind in _NUMBERS
    else:
        channels, dtype, is_fit = "3] RGB", "uint8", image.dtype == np.uint8
    if image.ndim != 3 or image.shape[2] != bands.count or not is_fit or not image.size:
        closing = ")" if bands.names else ""
        raise ValueError(
            f"image is {image.dtype} {image.shape}, expected {dtype} [H, W, {channels}{closing}"
        )
    return bands.checked(image, "image") if bands.names else image


def to_view(pixels: np.ndarray, bands: Bands, limits: Limits | None) -> np.ndarray:
    """uint8 [H, W, 3] to look at, of [H, W, C] as files are read, row after row."""
    if not bands.is_scaled:
        return bands.to_rgb(pixels)
    view = np.empty((*pixels.shape[:2], 3), np.uint8)
    for y in range(0, len(view), _VIEW_ROWS):
        rows = slice(y, y + _VIEW_ROWS)
        view[rows] = bands.to_rgb(bands.scaled(pixels[rows], limits))
    return view


def file_size(path: str, bands: Bands, upright: bool) -> tuple[int, int] | None:
    """The (height, width) that `read_pixels` gives, by the head of a file; None if that does not
    say."""
    if bands.names and path.lower().endswith(_BY_HEAD):
        with suppress(ImportError, OSError, ValueError), open_raster(path) as raster:
            return raster.size
        return None
    try:
        with open_regular(path) as file:
            if upright:
                return upright_size(file)
            with open_header(file) as image:
                return image.height, image.width
    except Exception:  # whatever its parsers raise on damaged files
        return None


def _pillow_bands(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB") if image.mode == "P" else image)


def _pillow_pixels(image: Image.Image) -> np.ndarray:
    """Return RGB; 16 bits become their upper 8, as in a file, where `convert` would saturate."""
    if image.mode.startswith("I;16"):
        gray = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(gray[..., None], 3, axis=2)
    if image.mode in ("I", "F"):
        raise ValueError(f"image has Pillow's mode {image.mode}, expected 8 or 16 bits per channel")
    return np.asarray(image.convert("RGB"))
