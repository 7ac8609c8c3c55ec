"""Boundary IoU (Cheng et al., "Boundary IoU: Improving Object-Centric Image Segmentation
Evaluation", 2021).

The IoU of two masks' bands: their pixels that are near a pixel outside the mask, or near the
image's edge. It stays sensitive to outlines where objects are large.
"""

import math
from collections.abc import Sequence

import numpy as np
from pycocotools import mask as coco_mask

from mask_rcnn_jax import opencv as cv2
from mask_rcnn_jax.annotations.segmentation import run_lengths, segmentation_to_mask
from mask_rcnn_jax.rle import encode_window

BOUNDARY = "boundary"  # type of result, beside those of COCO
DILATION_RATIO = 0.02  # of the image's diagonal


def band(code: dict) -> dict:
    """Return the band of a mask, both as RLE.

    A band is as wide as the image's diagonal times `DILATION_RATIO`, rounded, at least one pixel,
    by the distance that counts the longer of the two sides.
    """
    height, width = code["size"]
    reach = max(1, round(DILATION_RATIO * math.sqrt(height**2 + width**2)))
    x, y, w, h = (int(side) for side in coco_mask.toBbox(code))
    if min(w, h) <= 2 * reach:  # every pixel is near
        return code
    # Only the mask's columns are decoded: runs follow them.
    edges = np.clip(np.cumsum(run_lengths(code)), x * height, (x + w) * height) - x * height
    runs = {"size": [height, w], "counts": np.diff(edges, prepend=0).tolist()}
    mask = np.ascontiguousarray(segmentation_to_mask(runs, height, w)[y : y + h])
    kernel = np.ones((2 * reach + 1, 2 * reach + 1), np.uint8)
    inner = cv2.erode(mask, kernel, borderType=cv2.BORDER_CONSTANT, borderValue=0)
    return encode_window(mask - inner, (x, y), height, width)


def lowered(
    ious: np.ndarray, found: Sequence[dict], truth: Sequence[dict], least: float
) -> np.ndarray:
    """Return the lower of mask IoU and boundary IoU of each pair.

    Those of crowds stay mask IoUs, and those below `least`, which are matched nowhere, too.

    Args:
        ious: mask IoUs [detections, objects].
        found: detections with a "segmentation", an RLE; truth: objects likewise, with "iscrowd".
    """
    crowd = np.array([bool(one["iscrowd"]) for one in truth])
    looked_at = (ious >= least) & ~crowd
    rows, columns = (np.flatnonzero(looked_at.any(axis=axis)).tolist() for axis in (1, 0))
    if not rows:
        return ious
    ours = [band(found[i]["segmentation"]) for i in rows]
    theirs = [band(truth[i]["segmentation"]) for i in columns]
    of_bands = np.ones_like(ious)
    of_bands[np.ix_(rows, columns)] = coco_mask.iou(ours, theirs, [False] * len(theirs))
    return np.where(looked_at, np.minimum(ious, of_bands), ious)
