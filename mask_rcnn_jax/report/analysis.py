"""What a report shows of one pycocotools evaluation, taken out of its arrays and small.

Everything is read from `COCOeval.eval` and `COCOeval.evalImgs`, at IoU 0.50 where a detection is
called true or false. "All" areas and the highest number of detections per image are meant unless
said otherwise.
"""

import contextlib
import io
from typing import NamedTuple

import numpy as np
from pycocotools.cocoeval import COCOeval

from mask_rcnn_jax.evaluation.coco import category_names, index_annotations
from mask_rcnn_jax.report.errors import Mistake, entries, false_alarms, misses

# Places in COCOeval's iouThrs, which are 0.50, 0.55, ... 0.95.
IOU_50, IOU_75 = 0, 5
HISTOGRAM_BINS = 25
# The score from which a detection counts where no score separates right from wrong.
DEFAULT_THRESHOLD = 0.5


class Findings(NamedTuple):
    """One type of result; K categories by rising id, T IoU thresholds, R recalls, 4 areas."""

    kind: str  # "box" or "mask"
    stats: np.ndarray  # [12] as in METRIC_NAMES, -1 where there is nothing to measure
    categories: list[str]
    objects: np.ndarray  # [K, 4] int, objects that count: all, small, medium, large
    category_ap: np.ndarray  # [K, 3] AP, AP50, AP75 or -1
    iou_thresholds: np.ndarray  # [T]
    recalls: np.ndarray  # [R]
    precision: np.ndarray | None  # [T, R] mean over the categories with ground truth, if any
    histogram: np.ndarray  # [2, bins] int, scores of true and of false detections
    histogram_range: tuple[float, float]
    num_images: int
    threshold: float  # the score that a detection must reach to count in all that follows
    num_true: int
    num_false: int
    confusion: np.ndarray  # [K + 1, K + 1] int, see `confusion_matrix`
    misses: list[Mistake]
    false_alarms: list[Mistake]

    @property
    def num_objects(self) -> int:
        return int(self.objects[:, 0].sum())


def examine(evaluation: COCOeval) -> Findings:
    """Everything that a report shows of an evaluation that was accumulated and summarised."""
    precision = evaluation.eval["precision"][:, :, :, 0, -1]  # [T, R, K]
    with_truth = (precision > -1).all(axis=(0, 1))
    objects = _count_objects(evaluation)
    scores, is_true = _scores(evaluation)
    threshold = best_threshold(scores, is_true, int(objects[:, 0].sum()))
    counted = scores >= threshold
    low, high = _histogram_range(scores)
    names = category_names(list(evaluation.cocoGt.cats.values()))
    return Findings(
        kind={"bbox": "box", "segm": "mask"}[evaluation.params.iouType],
        stats=np.array(evaluation.stats),
        categories=[names[i] for i in evaluation.params.catIds],
        objects=objects,
        category_ap=_category_ap(precision),
        iou_thresholds=np.array(evaluation.params.iouThrs),
        recalls=np.array(evaluation.params.recThrs),
        precision=precision[:, :, with_truth].mean(axis=2) if with_truth.any() else None,
        histogram=np.stack(
            [
                np.histogram(scores[is_true == truth], HISTOGRAM_BINS, (low, high))[0]
                for truth in (True, False)
            ]
        ),
        histogram_range=(low, high),
        num_images=len(evaluation.params.imgIds),
        threshold=threshold,
        num_true=int((counted & is_true).sum()),
        num_false=int((counted & ~is_true).sum()),
        confusion=confusion_matrix(evaluation, threshold),
        misses=misses(evaluation, IOU_50, threshold, names),
        false_alarms=false_alarms(evaluation, IOU_50, threshold, names),
    )


def best_threshold(scores: np.ndarray, is_true: np.ndarray, num_objects: int) -> float:
    """The score of the best F1: 2 true / (detections + objects), of those that reach the score.

    Detections of all categories together: scores [n] and whether each is true [n]. The highest
    such score where several are as good, DEFAULT_THRESHOLD where no detection is true.
    """
    if not is_true.any():
        return DEFAULT_THRESHOLD
    order = np.argsort(-scores, kind="stable")
    scores, true = scores[order], np.cumsum(is_true[order])
    f1 = 2 * true / (np.arange(1, len(true) + 1) + num_objects)
    # Equal scores are reached together: only the last of them is a threshold.
    f1[:-1][scores[:-1] == scores[1:]] = -1
    return float(scores[np.argmax(f1)])


def confusion_matrix(evaluation: COCOeval, threshold: float) -> np.ndarray:
    """How often an object of category i (row) was found as category j (column): int [K + 1, K + 1].

    The last column counts objects that were not found, the last row detections of nothing. The
    pairs are those of COCOeval itself at IoU 0.50 with `useCats = 0`: detections that reach the
    score threshold, highest first, take the free object they overlap most, whatever its category.
    Detections in a crowd region count nowhere.
    """
    categories = {category: k for k, category in enumerate(evaluation.params.catIds)}
    truth = evaluation.cocoGt
    found = [ann for ann in evaluation.cocoDt.dataset["annotations"] if ann["score"] >= threshold]
    with contextlib.redirect_stdout(io.StringIO()):
        blind = COCOeval(truth, index_annotations(truth.dataset, found), evaluation.params.iouType)
        blind.params.useCats = 0
        blind.params.imgIds = evaluation.params.imgIds
        blind.params.iouThrs = evaluation.params.iouThrs[IOU_50 : IOU_50 + 1]
        blind.params.areaRng = evaluation.params.areaRng[:1]
        blind.params.maxDets = [len(found)]
        blind.evaluate()
    background = len(categories)
    matrix = np.zeros((background + 1, background + 1), np.int64)
    for entry in filter(None, blind.evalImgs):
        for i, partner, ignored in zip(
            entry["gtIds"], entry["gtMatches"][0], entry["gtIgnore"], strict=True
        ):
            if not ignored and not partner:
                matrix[categories[truth.anns[i]["category_id"]], background] += 1
        for i, partner, ignored in zip(
            entry["dtIds"], entry["dtMatches"][0], entry["dtIgnore"][0], strict=True
        ):
            if not ignored:
                row = categories[truth.anns[partner]["category_id"]] if partner else background
                matrix[row, categories[blind.cocoDt.anns[i]["category_id"]]] += 1
    return matrix


def _category_ap(precision: np.ndarray) -> np.ndarray:
    """AP, AP50 and AP75 of each category from precision [T, R, K]: [K, 3], -1 without objects."""
    # A category has values for all thresholds and recalls or for none, then -1.
    ap = precision.mean(axis=1)  # [T, K]
    return np.stack([ap.mean(axis=0), ap[IOU_50], ap[IOU_75]], axis=1)


def _count_objects(evaluation: COCOeval) -> np.ndarray:
    """Objects that count, per category and area range: int [K, areas]."""
    areas = len(evaluation.params.areaRng)
    count = np.zeros((len(evaluation.params.catIds), areas), np.int64)
    for area in range(areas):
        for k, entry in entries(evaluation, area):
            count[k, area] += len(entry["gtIgnore"]) - int(np.sum(entry["gtIgnore"]))
    return count


def _scores(evaluation: COCOeval) -> tuple[np.ndarray, np.ndarray]:
    """Score [n] and correctness [n] of all detections that count and have a finite score."""
    scores, is_true = [np.zeros(0)], [np.zeros(0, bool)]
    for _, entry in entries(evaluation, 0):
        counts = ~entry["dtIgnore"][IOU_50].astype(bool)
        scores.append(np.asarray(entry["dtScores"], np.float64)[counts])
        is_true.append(entry["dtMatches"][IOU_50][counts] > 0)
    scores, is_true = np.concatenate(scores), np.concatenate(is_true)
    finite = np.isfinite(scores)
    return scores[finite], is_true[finite]


def _histogram_range(scores: np.ndarray) -> tuple[float, float]:
    """0 to 1, or what the scores span where they are no probabilities."""
    low, high = float(scores.min(initial=0)), float(scores.max(initial=1))
    return low, high
