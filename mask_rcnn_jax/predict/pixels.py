"""The kinds of images that a predictor takes."""

import os
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from mask_rcnn_jax.data.images import decode_image

# A file, uint8 [H, W, 3] RGB, or an image of Pillow.
ImageLike = str | os.PathLike | np.ndarray | Image.Image


def path_if_file(image: Any) -> str:
    """Return the path of an image that is a file, "" for another."""
    return os.fspath(image) if isinstance(image, str | os.PathLike) else ""


def to_pixels(image: Any) -> np.ndarray:
    """Return any image as an array, whose shape and dtype are not checked.

    Raises ValueError for an image of Pillow with values in no known range.
    """
    if isinstance(image, str | os.PathLike):
        return decode_image(image, upright=True)
    if isinstance(image, Image.Image):
        return _pillow_pixels(ImageOps.exif_transpose(image))
    if isinstance(image, np.ndarray):
        return image
    kind = type(image).__name__
    raise TypeError(f"image is a {kind}, expected a file, a numpy array or an image of Pillow")


def _pillow_pixels(image: Image.Image) -> np.ndarray:
    """Return RGB; 16 bits become their upper 8, as in a file, where `convert` would saturate."""
    if image.mode.startswith("I;16"):
        gray = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(gray[..., None], 3, axis=2)
    if image.mode in ("I", "F"):
        raise ValueError(f"image has Pillow's mode {image.mode}, expected 8 or 16 bits per channel")
    return np.asarray(image.convert("RGB"))
