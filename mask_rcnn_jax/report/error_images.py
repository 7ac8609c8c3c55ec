"""Draw a detection error as two crops of the same window: ground truth and predictions."""

import base64
import math
from collections.abc import Sequence

import numpy as np

from mask_rcnn_jax import opencv as cv2
from mask_rcnn_jax.annotations.segmentation import code_box
from mask_rcnn_jax.data.cut import cut_mask
from mask_rcnn_jax.evaluation.visualize import draw_instances, trace_masks
from mask_rcnn_jax.report.errors import DetectionError, Instance

# Longer side of a crop in pixels, and JPEG quality: about 20 kB per crop, 100 kB for noise.
SIDE, QUALITY = 320, 85
# Window side relative to the object, and its minimum relative to the image and in pixels.
CONTEXT, MIN_SHARE, MIN_PIXELS = 1.6, 0.3, 48
# Indices into the palette of `instance_color`: yellow for the error, blue for everything else.
ERROR_COLOR, OTHER_COLOR = 5, 0


def draw_error(image: np.ndarray, error: DetectionError) -> tuple[str, str]:
    """Draw the window around an error, with the ground truth and with the predictions.

    `image` is the whole image, uint8 [H, W, 3] RGB. Returns two JPEG data URIs, whose longer side
    is SIDE pixels.
    """
    window = x0, y0, x1, y1 = error_window(error.box, *image.shape[:2])
    scale = SIDE / max(x1 - x0, y1 - y0)
    size = (max(1, round((x1 - x0) * scale)), max(1, round((y1 - y0) * scale)))
    method = cv2.INTER_CUBIC if scale > 1 else cv2.INTER_AREA
    crop = cv2.resize(image[y0:y1, x0:x1], size, interpolation=method)
    truth, found = (_draw(crop, shown, window, scale) for shown in (error.truth, error.detections))
    return data_uri(truth), data_uri(found)


def error_window(box: Sequence[float], height: int, width: int) -> tuple[int, int, int, int]:
    """Return integer (x0, y0, x1, y1) around a box (x, y, width, height), inside the image.

    The window is square if the image is large enough.
    """
    side = max(CONTEXT * box[2], CONTEXT * box[3], MIN_SHARE * min(height, width), MIN_PIXELS)
    x0, x1 = _span(box[0] + box[2] / 2, side, width)
    y0, y1 = _span(box[1] + box[3] / 2, side, height)
    return x0, y0, x1, y1


def _span(center: float, length: float, size: int) -> tuple[int, int]:
    """Interval of the given length inside 0..size, centered as well as possible."""
    # Clip before rounding: result boxes may have any size.
    length = math.ceil(min(length, size))
    start = round(min(max(center - length / 2, 0), size - length))
    return start, start + length


def _draw(
    crop: np.ndarray, instances: Sequence[Instance], window: tuple[int, int, int, int], scale: float
) -> np.ndarray:
    """Draw the instances on a window of the image resized by `scale`."""
    x0, y0, x1, y1 = window
    visible, boxes, masks = [], [], []
    for instance in instances:
        x, y, w, h = instance.box
        if x < x1 and y < y1 and x + w > x0 and y + h > y0 and w > 0 and h > 0:
            box, mask = _box_and_mask(instance)
            visible.append(instance)
            boxes.append((np.array(box) - (x0, y0, x0, y0)) * scale)
            masks.append(mask)
    names = [instance.name for instance in visible]
    values = ["" if instance.score is None else f"{instance.score:.2f}" for instance in visible]
    colors = np.array([ERROR_COLOR if shown.is_error else OTHER_COLOR for shown in visible], int)
    placed = np.array(boxes).reshape(-1, 4)
    drawn = [mask for mask in masks if mask is not None]
    outlines = trace_masks(drawn, placed) if len(drawn) == len(masks) else None
    return draw_instances(crop, placed, names, values, outlines, colors)


def _box_and_mask(instance: Instance) -> tuple[tuple[float, ...], np.ndarray | None]:
    """(x1, y1, x2, y2) of an instance, and its binary mask inside them: float32 [h, w]."""
    x, y, w, h = instance.box
    if instance.mask is None:
        return (x, y, x + w, y + h), None
    # The json's box may differ from the mask's, which has integer corners.
    x, y, w, h = map(int, code_box(instance.mask))
    if not w * h:
        return (x, y, x + w, y + h), np.zeros((1, 1), np.float32)
    corners = x, y, x + w, y + h
    return corners, cut_mask(instance.mask, corners).astype(np.float32)


def data_uri(image: np.ndarray, quality: int = QUALITY) -> str:
    """Return uint8 [H, W, 3] RGB as a JPEG data URI."""
    bgr = cv2.cvtColor(image, cv2.COLOR_RGB2BGR)
    _, data = cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, quality])
    return "data:image/jpeg;base64," + base64.b64encode(data.tobytes()).decode("ascii")
