"""Compare the boxes that two programs keep, where rounding may decide about some of them."""

from typing import NamedTuple

import numpy as np


class Survivors(NamedTuple):
    """Boxes that non-maximum suppression kept, by falling score."""

    boxes: np.ndarray  # [N, 4]
    scores: np.ndarray  # [N]
    groups: np.ndarray | int = 0  # [N], boxes of different groups do not suppress each other


def pair_survivors(
    ours: Survivors, theirs: Survivors, *, iou_thresh: float, box_close: float, score_close: float
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of `ours` and of `theirs` that are the same box.

    Rounding may move a box by `box_close` pixels and its score by `score_close`. So an IoU that is
    `iou_thresh` to within that may suppress a box on one side and not on the other, and rows of
    close scores may change places. A box without a partner for no such reason is an error.
    """
    ours, theirs = (
        Survivors(np.float64(s.boxes), s.scores, np.broadcast_to(s.groups, len(s.scores)))
        for s in (ours, theirs)
    )
    distance = np.abs(ours.boxes[:, None] - theirs.boxes[None]).max(axis=-1)
    distance[ours.groups[:, None] != theirs.groups[None]] = np.inf
    pairs, free = [], np.ones(len(theirs.scores), bool)
    for row, scores_apart in enumerate(np.abs(ours.scores[:, None] - theirs.scores[None])):
        candidates = np.flatnonzero((distance[row] <= box_close) & free)
        if len(candidates):  # of boxes without area several may lie in one place
            partner = candidates[scores_apart[candidates].argmin()]
            free[partner] = False
            pairs.append((row, partner))
    rows, their_rows = np.array(pairs, int).reshape(-1, 2).T
    for one, other in ((ours, theirs), (theirs, ours)):
        assert np.all(np.diff(one.scores) <= 0)
        single, other_single = (
            np.setdiff1d(np.arange(len(side.scores)), rows if side is ours else their_rows)
            for side in (one, other)
        )
        assert len(single) <= 0.01 * len(one.scores) + 1, f"{len(single)} boxes have no partner"
        for row in single:
            assert _may_be_missing(
                one, row, other, other_single, iou_thresh, box_close, score_close
            ), f"no partner for {one.boxes[row]} with score {one.scores[row]}"
    return rows, their_rows


def _may_be_missing(one, row, other, other_single, iou_thresh, box_close, score_close) -> bool:
    if len(other_single) and one.scores[row] <= other.scores.min() + score_close:
        return True  # pushed off the end of the other list by a box that it has in addition
    box = one.boxes[row]
    same_group = other.groups == one.groups[row]
    iou = np.where(same_group, _iou(box, other.boxes), 0.0)
    # Two boxes have four sides along each axis.
    iou_close = 8 * box_close / max(np.min(box[2:] - box[:2]), 1.0)
    tied = np.abs(iou - iou_thresh) <= iou_close
    return bool(tied.any() or (iou[other_single] > iou_thresh - iou_close).any())


def _iou(box: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    sides = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])
    inter = np.prod(np.maximum(sides, 0), axis=1)
    union = np.prod(box[2:] - box[:2]) + np.prod(boxes[:, 2:] - boxes[:, :2], axis=1) - inter
    return inter / np.maximum(union, 1e-9)
