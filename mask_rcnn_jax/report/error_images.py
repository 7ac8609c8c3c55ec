"""A mistake as two small pictures of the same window: what is there, and what was predicted."""

import base64
import math
from collections.abc import Sequence

import cv2
import numpy as np
from pycocotools import mask as coco_mask

from mask_rcnn_jax.evaluation.visualize import draw_instances
from mask_rcnn_jax.report.errors import Mistake, Shape

# The longer side of a picture, and the quality of its JPEG: some 20 kB, 100 kB where it is noise.
SIDE, QUALITY = 320, 85
# The window is so many times the object, but no less than this share of the picture or this many
# pixels.
CONTEXT, MIN_SHARE, MIN_PIXELS = 1.6, 0.3, 48
# Places in the palette of `instance_color`: yellow for the mistake, blue for everything else.
MISTAKE_COLOR, OTHER_COLOR = 5, 0


def draw_mistake(image: np.ndarray, mistake: Mistake) -> tuple[str, str]:
    """The window around the mistake with the ground truth, and with the predictions.

    image: uint8 [H, W, 3] RGB, the whole picture.

    Returns:
        Two JPEG pictures as data URIs, their longer side SIDE pixels.
    """
    x0, y0, x1, y1 = window(mistake.box, *image.shape[:2])
    scale = SIDE / max(x1 - x0, y1 - y0)
    size = (max(1, round((x1 - x0) * scale)), max(1, round((y1 - y0) * scale)))
    method = cv2.INTER_CUBIC if scale > 1 else cv2.INTER_AREA
    crop = cv2.resize(image[y0:y1, x0:x1], size, interpolation=method)
    return tuple(
        _data_uri(_draw(crop, shapes, (x0, y0, x1, y1), scale))
        for shapes in (mistake.truth, mistake.found)
    )


def window(box: Sequence[float], height: int, width: int) -> tuple[int, int, int, int]:
    """x0, y0, x1, y1 around a box x, y, width, height: whole pixels inside the picture, a square
    where the picture is large enough."""
    side = max(CONTEXT * box[2], CONTEXT * box[3], MIN_SHARE * min(height, width), MIN_PIXELS)
    x0, x1 = _span(box[0] + box[2] / 2, side, width)
    y0, y1 = _span(box[1] + box[3] / 2, side, height)
    return x0, y0, x1, y1


def _span(centre: float, length: float, size: int) -> tuple[int, int]:
    """The part of 0..size of that length that lies best about the centre."""
    # Limited before it is rounded: a result's box may be of any size.
    length = math.ceil(min(length, size))
    start = round(min(max(centre - length / 2, 0), size - length))
    return start, start + length


def _draw(
    crop: np.ndarray, shapes: Sequence[Shape], place: tuple[int, int, int, int], scale: float
) -> np.ndarray:
    """The shapes on a window of the picture that was enlarged by `scale`."""
    x0, y0, x1, y1 = place
    seen = []
    for shape in shapes:
        x, y, w, h = shape.box
        if x < x1 and y < y1 and x + w > x0 and y + h > y0 and w > 0 and h > 0:
            seen.append(shape)
    boxes, masks = [], []
    for shape in seen:
        box, mask = _outline(shape)
        boxes.append((np.array(box) - (x0, y0, x0, y0)) * scale)
        masks.append(mask)
    return draw_instances(
        crop,
        np.array(boxes).reshape(-1, 4),
        [shape.name for shape in seen],
        ["" if shape.score is None else f"{shape.score:.2f}" for shape in seen],
        masks if all(mask is not None for mask in masks) else None,
        np.array([MISTAKE_COLOR if shape.is_it else OTHER_COLOR for shape in seen], int),
    )


def _outline(shape: Shape) -> tuple[tuple[float, float, float, float], np.ndarray | None]:
    """x1, y1, x2, y2 of a shape, and its mask inside them: float32 [h, w] of zeros and ones."""
    x, y, w, h = shape.box
    if shape.mask is None:
        return (x, y, x + w, y + h), None
    whole = coco_mask.decode(shape.mask)
    # A box of the json may be another than that of its mask, which is of whole pixels.
    x, y, w, h = (int(value) for value in coco_mask.toBbox(shape.mask))
    mask = whole[y : y + h, x : x + w].astype(np.float32)
    return (x, y, x + w, y + h), mask if mask.size else np.zeros((1, 1), np.float32)


def _data_uri(image: np.ndarray) -> str:
    bgr = cv2.cvtColor(image, cv2.COLOR_RGB2BGR)
    _, data = cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])
    return "data:image/jpeg;base64," + base64.b64encode(data).decode("ascii")
