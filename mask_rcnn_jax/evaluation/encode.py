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
    keypoints: np.ndarray | None = None  # [n, P, 3] float64 x, y, score, original pixels


def split_images(
    detections: "Detections",
    scales: np.ndarray,
    image_ids: Sequence[int | str | None],
    sizes: Sequence[tuple[int, int]],
    category_ids: Sequence[int | str],
    keypoint_offset: float = 0.0,
) -> Iterator[ImageDetections]:
    """Yield the valid detections of each image of a batch, without the padding images.

    Args:
        detections: a batch [B, D, ...] with boxes in network pixels.
        scales: [B, 2] (y, x) network pixels per original pixel.
        image_ids: json id per image; None for an image that pads the batch.
        sizes: original (height, width) per image; ignored for padding.
        category_ids: class k has the json id `category_ids[k - 1]`.
        keypoint_offset: taken off the keypoints, see `data.keypoint_offset`.
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
        points = None
        if detections.keypoints is not None:
            points = np.asarray(detections.keypoints)[b][valid].astype(np.float64)
            points = points / (scale_x, scale_y, 1) - (keypoint_offset, keypoint_offset, 0)
        found = boxes, scores, categories, masks, points
        yield ImageDetections(image_id, height, width, *found)


def encode_image(
    image: ImageDetections, paste: str, inclusive_boxes: bool
) -> tuple[list[dict], list[dict]]:
    """Return box results and mask results, none without masks, of the same detections in order.

    Box results have the keypoints, too, if there are any.

    Args:
        image: the detections.
        paste: mask pasting rule, see `paste.paste_mask`.
        inclusive_boxes: x2 and y2 are the last pixels of a box, so width = x2 - x1 + 1.
    """
    _, height, width, boxes, scores, categories, masks, points = image
    clipped = _clipped_xywh(boxes, height, width, float(inclusive_boxes))
    bbox_results, segm_results = [], []
    rows = zip(boxes, clipped, scores.tolist(), categories, strict=True)
    for i, (box, bbox, score, category) in enumerate(rows):
        entry = {"image_id": image.image_id, "category_id": category, "score": score}
        more = {} if points is None else keypoint_entries(points[i])
        bbox_results.append({**entry, "bbox": bbox, **more})
        if masks is None:
            continue
        crop, origin = mask_crop(masks[i], box, height, width, paste)
        segm_results.append({**entry, "segmentation": encode_window(crop, origin, height, width)})
    return bbox_results, segm_results


def keypoint_entries(points: np.ndarray) -> dict[str, list[float]]:
    """`keypoints` of a COCO result, x, y and 1 for each of [P, 3] points, and `keypoint_scores`."""
    values = [value for x, y, _ in points.tolist() for value in (round(x, 3), round(y, 3), 1.0)]
    scores = [round(score, 4) for score in points[:, 2].tolist()]
    return {"keypoints": values, "keypoint_scores": scores}


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
