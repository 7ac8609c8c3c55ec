"""Encode the detections of one image as COCO results.

Worker processes import this module, which needs neither JAX nor Flax.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mask_rcnn_jax.evaluation.paste import paste_mask
from mask_rcnn_jax.rle import WindowMask, encode_window

if TYPE_CHECKING:
    from mask_rcnn_jax.structures import Detections

# Of n objects: [n, M, M] float32 probabilities on a grid over each box, or their pixels.
Masks = np.ndarray | Sequence[WindowMask]


class ImageDetections(NamedTuple):
    """The detections of one image; all rows are valid."""

    image_id: int | str
    height: int  # of the original image, pixels
    width: int
    boxes: np.ndarray  # [n, 4] float64 (x1, y1, x2, y2), original pixels, not clipped
    scores: np.ndarray  # [n] float32
    category_ids: list  # [n] of the json
    masks: Masks | None  # None: boxes only


def split_images(
    detections: "Detections",
    scales: np.ndarray,
    image_ids: Sequence[int | str | None],
    sizes: Sequence[tuple[int, int]],
    category_ids: Sequence[int | str],
) -> Iterator[ImageDetections]:
    """Yield the valid detections of each image of a batch, without the padding images.

    Args:
        detections: a batch [B, D, ...] with boxes in network pixels.
        scales: [B, 2] (y, x) network pixels per original pixel.
        image_ids: json id per image; None for an image that pads the batch.
        sizes: original (height, width) per image; ignored for padding.
        category_ids: class k has the json id `category_ids[k - 1]`.
    """
    fields = ("boxes", "scores", "classes", "valid")
    batch = [np.asarray(getattr(detections, name)) for name in fields]
    all_masks = None if detections.masks is None else np.asarray(detections.masks)
    for b, image_id in enumerate(image_ids):
        if image_id is None:
            continue
        height, width = (int(side) for side in sizes[b])
        scale_y, scale_x = np.asarray(scales[b], np.float64)
        valid = batch[-1][b]
        boxes, scores, classes = (leaf[b][valid] for leaf in batch[:-1])
        masks = None if all_masks is None else all_masks[b][valid]
        boxes = boxes.astype(np.float64) / (scale_x, scale_y, scale_x, scale_y)
        categories = [category_ids[k - 1] for k in classes.tolist()]
        yield ImageDetections(image_id, height, width, boxes, scores, categories, masks)


def encode_image(
    image: ImageDetections, paste: str, inclusive_boxes: bool
) -> tuple[list[dict], list[dict]]:
    """Return box results and mask results, none without masks, of the same detections in order.

    Args:
        image: the detections.
        paste: mask pasting rule, see `paste.paste_mask`.
        inclusive_boxes: x2 and y2 are the last pixels of a box, so width = x2 - x1 + 1.
    """
    _, height, width, boxes, scores, categories, masks = image
    clipped = _clipped_xywh(boxes, height, width, float(inclusive_boxes))
    bbox_results, segm_results = [], []
    rows = zip(boxes, clipped, scores.tolist(), categories, strict=True)
    for i, (box, bbox, score, category) in enumerate(rows):
        entry = {"image_id": image.image_id, "category_id": category, "score": score}
        bbox_results.append({**entry, "bbox": bbox})
        if masks is None:
            continue
        crop, origin = mask_crop(masks[i], box, height, width, paste)
        segm_results.append({**entry, "segmentation": encode_window(crop, origin, height, width)})
    return bbox_results, segm_results


def mask_crop(
    mask: np.ndarray | WindowMask, box: np.ndarray, height: int, width: int, paste: str
) -> tuple[np.ndarray, tuple[int, int]]:
    """Return the pixels of one of `Masks`, and their place, as `paste.paste_mask` does.

    The box must not be clipped, which would squeeze a grid.
    """
    if isinstance(mask, WindowMask):
        return mask.crop()
    return paste_mask(mask, box, height, width, rule=paste)


def _clipped_xywh(boxes: np.ndarray, height: int, width: int, offset: float) -> list[list[float]]:
    """Clip boxes (x1, y1, x2, y2) to the image and convert to COCO's (x, y, width, height)."""
    corners = np.clip(boxes.reshape(-1, 2, 2), 0, (width - offset, height - offset))
    low, high = corners[:, 0], corners[:, 1]
    xywh = np.concatenate([low, high - low + offset], axis=1)
    return [[round(value, 3) for value in row] for row in xywh.tolist()]
