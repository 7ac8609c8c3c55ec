"""The kinds of images that a predictor takes."""

import os
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from mask_rcnn_jax.data.images import decode_image

# A file, uint8 [H, W, 3] RGB, or an image of Pillow.
ImageLike = str | os.PathLike | np.ndarray | Image.Image


def path_of(image: Any) -> str:
    """Return the path of an image that is a file, "" for another."""
    return os.fspath(image) if isinstance(image, str | os.PathLike) else ""


def pixels_of(image: Any) -> np.ndarray:
    """Return any image as an array; its shape and dtype are not checked."""
    if isinstance(image, str | os.PathLike):
        return decode_image(image, upright=True)
    if isinstance(image, Image.Image):
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    if isinstance(image, np.ndarray):
        return image
    kind = type(image).__name__
    raise TypeError(f"image is a {kind}, expected a file, a numpy array or an image of Pillow")
