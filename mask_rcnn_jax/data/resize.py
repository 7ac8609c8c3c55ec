"""Compute the resized image size, and resize images and masks onto the canvas."""

import math
from typing import NamedTuple

import numpy as np

from mask_rcnn_jax import opencv as cv2
from mask_rcnn_jax.data.options import ExampleOptions, canvas_size
from mask_rcnn_jax.data.warp import antialiased


class ResizePlan(NamedTuple):
    """Placement of an image in the upper left corner of its canvas."""

    canvas: tuple[int, int]  # (H, W)
    size: tuple[int, int]  # (height, width) of the resized image
    scale: tuple[float, float]  # (y, x): network pixels per original pixel


def resize_plan(
    height: int,
    width: int,
    options: ExampleOptions,
    short_side: int | None = None,
    canvas: tuple[int, int] | None = None,
) -> ResizePlan:
    """Choose the static canvas of an image and its size there, keeping the aspect ratio.

    "keep": the size of the image, unless it exceeds the canvas.

    "fit": the largest size that fits the canvas `image_size`, truncated to whole pixels as in
    NVIDIA's TensorFlow code.
    "shortest_edge": `image_size` is (short side, longest side allowed). Landscape and square images
    share one canvas, portraits another, both rounded up to multiples of 64. `short_side` replaces
    the short side on the same canvas. Sides are at least 1 and at most the canvas.

    With `options.canvases`, an image takes the smallest canvas that holds it. `canvas` is its
    batch's; an image that is larger, for instance since it was turned, shrinks to fit it.
    """
    full = canvas_size(options, portrait=height > width)
    if options.resize == "fit":
        size = _fit(height, width, full)
    elif options.resize == "keep":
        fits = height <= full[0] and width <= full[1]
        size = (height, width) if fits else _fit(height, width, full)
    else:
        short, long = sorted(options.image_size)
        size = _SHORTEST_EDGE[options.resize_rounding](height, width, short_side or short, long)
    size = _within(size, full)
    if canvas is None:
        large_enough = [one for one in options.canvases if size == _within(size, one)]
        canvas = min([*large_enough, full], key=math.prod)
    elif size != _within(size, canvas):
        size = _within(_fit(height, width, canvas), canvas)
    return ResizePlan(canvas, size, (size[0] / height, size[1] / width))


def _within(size: tuple[int, int], canvas: tuple[int, int]) -> tuple[int, int]:
    return min(max(1, size[0]), canvas[0]), min(max(1, size[1]), canvas[1])


def _fit(height: int, width: int, limit: tuple[int, int]) -> tuple[int, int]:
    # Integer arithmetic: int(width * scale) may lose a pixel if the exact product is an integer.
    if limit[0] * width <= limit[1] * height:
        return limit[0], width * limit[0] // height
    return height * limit[1] // width, limit[1]


def _floor(height: int, width: int, short: int, long: int) -> tuple[int, int]:
    """torchvision's GeneralizedRCNNTransform: a product just below an integer loses a pixel."""
    scale = min(short / min(height, width), long / max(height, width))
    return math.floor(height * scale), math.floor(width * scale)


def _round(height: int, width: int, short: int, long: int) -> tuple[int, int]:
    """detectron2's ResizeShortestEdge: rounds halves up."""
    scale = short / min(height, width)
    new_height, new_width = (short, scale * width) if height < width else (scale * height, short)
    if max(new_height, new_width) > long:
        scale = long / max(new_height, new_width)
        new_height, new_width = new_height * scale, new_width * scale
    return int(new_height + 0.5), int(new_width + 0.5)


def _caffe(height: int, width: int, short: int, long: int) -> tuple[int, int]:
    """maskrcnn-benchmark's Resize.

    If the long side would exceed its limit, the short side is scaled and rounded (halves to even).
    The long side is truncated, and may still exceed the limit by a few pixels.
    """
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
    """Resize [height, width, C] bilinearly onto a zero-padded [H, W, C] canvas.

    The image is uint8, or float32 in 0..255; the canvas has `image_dtype` with such values. `out`
    is a canvas of zeros to reuse.
    """
    canvas = np.zeros((*plan.canvas, image.shape[2]), options.image_dtype) if out is None else out
    height, width = plan.size
    target = canvas[:height, :width]
    if image.shape[:2] == plan.size:
        target[:] = image
    elif options.antialias:
        target[:] = antialiased(image, (height, width))
    else:
        pixels = image.astype(options.image_dtype, copy=False)
        out = target[..., 0] if image.shape[2] == 1 else target
        cv2.resize(pixels, (width, height), dst=out, interpolation=cv2.INTER_LINEAR)
    return canvas


def resize_mask(mask: np.ndarray, plan: ResizePlan) -> np.ndarray:
    """Resize a mask [height, width] by nearest neighbor onto a [H, W] canvas of its dtype.

    Pixel i reads floor(i * before / after) in single precision, as in torch's interpolate, where
    rounding may select a neighbor if the product is an integer.
    """
    sources = []
    for before, after in zip(mask.shape, plan.size, strict=True):
        source = np.arange(after, dtype=np.float32) * (np.float32(before) / np.float32(after))
        sources.append(np.minimum(source, before - 1).astype(np.intp))
    rows, columns = sources
    canvas = np.zeros(plan.canvas, mask.dtype)
    canvas[: plan.size[0], : plan.size[1]] = mask.take(columns, 1).take(rows, 0)
    return canvas
