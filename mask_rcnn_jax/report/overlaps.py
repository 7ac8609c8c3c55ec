"""Objects that NMS would drop even if each were found perfectly, because their boxes overlap."""

from typing import NamedTuple

import numpy as np

from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.report.set_objects import SetObjects
from mask_rcnn_jax.report.suggestion import Suggestion

LOWEST = 0.3  # IoU of pairs that are kept
SAMPLE = 200_000  # objects that are compared with their neighbors

NOTABLE_LOSS = 0.01  # of the objects, which NMS may drop although they are found
NMS_THRESHOLDS, RPN_NMS_THRESHOLDS = (0.6, 0.7), (0.8, 0.9)  # that are tried beyond the recipe's


class Overlaps(NamedTuple):
    """Pairs of boxes of an image whose IoU is above `LOWEST`, by the first of both."""

    pairs: np.ndarray  # [P, 2] int64, rows of objects, the first one lower
    ious: np.ndarray  # [P] float64
    same_class: np.ndarray  # [P] bool
    total: int  # objects that were compared


def find_overlaps(objects: SetObjects) -> Overlaps:
    """Compare the boxes in each image; of a large set, those of evenly spread images."""
    bounds = np.searchsorted(objects.images, np.arange(len(objects.sizes) + 1))
    step = -(-len(objects.images) // SAMPLE) or 1
    found = [
        _pairs(objects.boxes[a:b]) + a
        for a, b in zip(bounds[:-1:step], bounds[1::step], strict=True)
    ]
    pairs = np.concatenate([np.zeros((0, 2), np.int64), *found])
    ious = _iou(*(objects.boxes[pairs[:, side]] for side in (0, 1)))
    kept = ious > LOWEST
    pairs, ious = pairs[kept], ious[kept]
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))
    same = objects.classes[pairs[:, 0]] == objects.classes[pairs[:, 1]]
    total = int(np.diff(bounds)[::step].sum())
    return Overlaps(pairs[order], ious[order], same[order], total)


def dropped_share(found: Overlaps, thresh: float, *, within_class: bool) -> float:
    """Return the share of objects that NMS drops if each box is found as it is.

    within_class: as in detections; otherwise as in proposals.
    """
    overlap = (found.ious > thresh) & (found.same_class | (not within_class))
    dropped: set[int] = set()
    for first, second in found.pairs[overlap].tolist():
        if first not in dropped:
            dropped.add(second)
    return len(dropped) / max(found.total, 1)


def _pairs(boxes: np.ndarray) -> np.ndarray:
    """Rows [P, 2] of boxes [n, 4] that overlap along x, the lower one first."""
    order = np.argsort(boxes[:, 0], kind="stable")
    starts, ends = boxes[order, 0], boxes[order, 2]
    place = np.arange(len(boxes))
    following = np.maximum(np.searchsorted(starts, ends) - place - 1, 0)
    first = np.repeat(place, following)
    within = np.arange(len(first)) - np.repeat(np.cumsum(following) - following, following)
    return np.sort(np.stack([order[first], order[first + 1 + within]], axis=1), axis=1)


def _iou(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """IoU [P] of boxes [P, 4] with boxes [P, 4]."""
    sides = np.minimum(a[:, 2:], b[:, 2:]) - np.maximum(a[:, :2], b[:, :2])
    overlap = sides.clip(0).prod(axis=1)
    areas = [(box[:, 2:] - box[:, :2]).prod(axis=1) for box in (a, b)]
    return overlap / np.maximum(sum(areas) - overlap, 1e-9)


def overlap_suggestions(objects: SetObjects, recipe: Recipe) -> list[Suggestion]:
    """Suggest NMS that keeps objects whose boxes overlap; nothing where it drops few."""
    overlaps, wanted, rpn = find_overlaps(objects), recipe.eval, recipe.model.rpn
    found = []
    if wanted.nms == "hard":
        lost = dropped_share(overlaps, wanted.nms_thresh, within_class=True)
        why = f"At {wanted.nms_thresh:g}, {lost:.1%} of the objects, found perfectly, are dropped"
        higher = [t for t in NMS_THRESHOLDS if t > wanted.nms_thresh]
        left = {t: dropped_share(overlaps, t, within_class=True) for t in higher}
        enough = [t for t in higher if left[t] < NOTABLE_LOSS]
        if lost >= NOTABLE_LOSS and enough:
            reason = (
                f"{why} for one of their class that overlaps; with this, {left[enough[0]]:.1%}."
            )
            found.append(Suggestion("eval.nms_thresh", wanted.nms_thresh, enough[0], reason))
        elif lost >= NOTABLE_LOSS:
            reason = (
                f"{why} for one of their class that overlaps, and at {NMS_THRESHOLDS[-1]:g} still "
                "too many: soft-NMS lowers their scores instead (not in ONNX models)."
            )
            found.append(Suggestion("eval.nms", "hard", "gaussian", reason))
    lost = dropped_share(overlaps, rpn.nms_thresh, within_class=False)
    higher = [t for t in RPN_NMS_THRESHOLDS if t > rpn.nms_thresh]
    if lost >= NOTABLE_LOSS and higher:
        left = {t: dropped_share(overlaps, t, within_class=False) for t in higher}
        value = next((t for t in higher if left[t] < NOTABLE_LOSS), higher[-1])
        reason = (
            f"At {rpn.nms_thresh:g}, {lost:.1%} of the objects lose their best proposal to one of "
            f"another object; with this, {left[value]:.1%}."
        )
        found.append(Suggestion("model.rpn.nms_thresh", rpn.nms_thresh, value, reason))
    return found
