"""How large an image becomes, and its pixels at that size on the canvas."""

import math
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image

from mask_rcnn_jax.data.options import ExampleOptions, canvas_size


class ResizePlan(NamedTuple):
    """How an image is laid on its canvas, in the upper left corner."""

    canvas: tuple[int, int]  # (H, W)
    size: tuple[int, int]  # (height, width) of the resized image
    scale: tuple[float, float]  # (y, x): network pixels per original pixel


def resize_plan(
    height: int, width: int, options: ExampleOptions, short_side: int | None = None
) -> ResizePlan:
    """The static canvas of an image of this size, and its size on it; the aspect ratio is kept.

    "fit": the image is made as large as the canvas `image_size` allows; fractions of a pixel are
    cut off, as in NVIDIA's TensorFlow code.
    "shortest_edge": `image_size` is (short side, longest side allowed); one canvas for landscape
    and square images, one for portraits, both rounded up to a multiple of 64. `short_side` takes
    the place of the first on the same canvas. No side exceeds the canvas, none is below 1.
    """
    canvas = canvas_size(options, portrait=height > width)
    if options.resize == "fit":
        size = _fit(height, width, canvas)
    else:
        short, long = sorted(options.image_size)
        size = _SHORTEST_EDGE[options.resize_rounding](height, width, short_side or short, long)
    size = (min(max(1, size[0]), canvas[0]), min(max(1, size[1]), canvas[1]))
    return ResizePlan(canvas, size, (size[0] / height, size[1] / width))


def _fit(height: int, width: int, limit: tuple[int, int]) -> tuple[int, int]:
    # Whole numbers throughout: int(width * scale) may lose a pixel where the product is whole.
    if limit[0] * width <= limit[1] * height:
        return limit[0], width * limit[0] // height
    return height * limit[1] // width, limit[1]


def _floor(height: int, width: int, short: int, long: int) -> tuple[int, int]:
    """torchvision's GeneralizedRCNNTransform: a product just below a whole number loses a pixel."""
    scale = min(short / min(height, width), long / max(height, width))
    return math.floor(height * scale), math.floor(width * scale)


def _round(height: int, width: int, short: int, long: int) -> tuple[int, int]:
    """detectron2's ResizeShortestEdge: halves go up."""
    scale = short / min(height, width)
    new_height, new_width = (short, scale * width) if height < width else (scale * height, short)
    if max(new_height, new_width) > long:
        scale = long / max(new_height, new_width)
        new_height, new_width = new_height * scale, new_width * scale
    return int(new_height + 0.5), int(new_width + 0.5)


def _caffe(height: int, width: int, short: int, long: int) -> tuple[int, int]:
    """maskrcnn-benchmark's Resize: the short side is rounded (halves to even) where the long one
    would exceed its limit, which it still may by some pixels; the long side is cut off."""
    smaller, larger = min(height, width), max(height, width)
    if larger / smaller * short > long:
        short = max(1, round(long * smaller / larger))
    if width < height:
        return int(short * height / width), short
    return short, int(short * width / height)


_SHORTEST_EDGE = {"floor": _floor, "round": _round, "caffe": _caffe}


def resize_image(
    image: np.ndarray, plan: ResizePlan, options: ExampleOptions, out: np.ndarray | None = None
) -> np.ndarray:
    """[H, W, 3] canvas of `image_dtype` with the resized image, zero right of it and below.

    image: uint8 [height, width, 3]. Bilinear at pixel centres; values stay in 0..255. `out` is a
    canvas of zeros to write on and to return.
    """
    canvas = np.zeros((*plan.canvas, 3), options.image_dtype) if out is None else out
    height, width = plan.size
    place = canvas[:height, :width]
    if options.antialias:
        picture = Image.fromarray(image)
        place[:] = picture.resize((width, height), Image.Resampling.BILINEAR)
    else:
        pixels = image.astype(options.image_dtype, copy=False)
        cv2.resize(pixels, (width, height), dst=place, interpolation=cv2.INTER_LINEAR)
    return canvas


def resize_mask(mask: np.ndarray, plan: ResizePlan) -> np.ndarray:
    """[H, W] canvas of the mask's dtype with the nearest pixels of `mask` [height, width].

    The pixel taken is floor(i * before / after) in single precision, as in torch's interpolate:
    where the product is whole, rounding may choose its neighbour.
    """
    rows, columns = (
        np.minimum(
            np.arange(after, dtype=np.float32) * (np.float32(before) / np.float32(after)),
            before - 1,
        )
        for before, after in zip(mask.shape, plan.size, strict=True)
    )
    canvas = np.zeros(plan.canvas, mask.dtype)
    resized = mask.take(columns.astype(np.intp), 1).take(rows.astype(np.intp), 0)
    canvas[: plan.size[0], : plan.size[1]] = resized
    return canvas
