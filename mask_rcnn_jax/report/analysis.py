"""Compact summary of a pycocotools evaluation for the report.

All values come from `COCOeval.eval` and `COCOeval.evalImgs`. A detection is true or false at IoU
0.50. Unless noted, values cover all areas and the largest number of detections per image.
"""

import contextlib
import io
from typing import NamedTuple

import numpy as np
from pycocotools.cocoeval import COCOeval

from mask_rcnn_jax.evaluation.coco import category_names
from mask_rcnn_jax.evaluation.engines import Evaluation, index_annotations, summary
from mask_rcnn_jax.report import outcomes
from mask_rcnn_jax.report.browser import BrowsedImage, browsed_images
from mask_rcnn_jax.report.errors import DetectionError, false_positives, image_entries, misses

# Indices into COCOeval's iouThrs (0.50, 0.55, ... 0.95).
IOU_50, IOU_75 = 0, 5
HISTOGRAM_BINS = 25
# Score threshold if no detection is true.
DEFAULT_THRESHOLD = 0.5


class Analysis(NamedTuple):
    """Analysis of one result type; K categories by increasing id, T IoU thresholds, R recalls."""

    kind: str  # "box" or "mask"
    stats: dict[str, float]  # of `engines.summary`; -1 without ground truth
    detections: int  # of a category in an image that are scored at most
    categories: list[str]
    objects: np.ndarray  # [K, 4] int, non-ignored objects: all, small, medium, large
    category_ap: np.ndarray  # [K, 3] AP, AP50, AP75; -1 without ground truth
    iou_thresholds: np.ndarray  # [T]
    recalls: np.ndarray  # [R]
    precision: np.ndarray | None  # [T, R] category mean; None without ground truth
    histogram: np.ndarray  # [2, bins] int, scores of true and false detections
    histogram_range: tuple[float, float]
    num_images: int
    threshold: float  # minimum detection score for all fields below
    num_true: int
    num_false: int
    confusion: np.ndarray  # [K + 1, K + 1] int, see `confusion_matrix`
    misses: list[DetectionError]
    false_positives: list[DetectionError]
    limits: np.ndarray  # [POSITIONS] score thresholds of the slider, over `histogram_range`
    counts: outcomes.ScoreCounts  # for each of them
    shapes: outcomes.ObjectShapes
    browsed: list[BrowsedImage]

    @property
    def num_objects(self) -> int:
        return int(self.objects[:, 0].sum())


def analyze(evaluation: COCOeval) -> Analysis:
    """Analyze an evaluation on which `accumulate` has been called."""
    precision = evaluation.eval["precision"][:, :, :, 0, -1]  # [T, R, K]
    # COCOeval fills a category's precision entirely or leaves all of it at -1.
    has_truth = (precision > -1).all(axis=(0, 1))
    ap = precision.mean(axis=1)  # [T, K]
    objects = _count_objects(evaluation)
    known, found = outcomes.outcomes(evaluation, IOU_50)
    scores = np.array([one.score for one in found], np.float64)
    is_true = np.array([one.is_true for one in found], bool)
    threshold = best_threshold(scores, is_true, int(objects[:, 0].sum()))
    kept = scores >= threshold
    score_range = float(scores.min(initial=0)), float(scores.max(initial=1))
    names = category_names(list(evaluation.cocoGt.cats.values()))
    parts = scores[is_true], scores[~is_true]
    histogram = [np.histogram(part, HISTOGRAM_BINS, score_range)[0] for part in parts]
    limits = outcomes.thresholds(*score_range)
    images = [evaluation.cocoGt.imgs[i] for i in evaluation.params.imgIds]
    return Analysis(
        kind={"bbox": "box", "segm": "mask"}[evaluation.params.iouType],
        stats=summary(*(evaluation.eval[name][..., -1] for name in ("precision", "recall"))),
        detections=evaluation.params.maxDets[-1],
        categories=[names[i] for i in evaluation.params.catIds],
        objects=objects,
        category_ap=np.stack([ap.mean(axis=0), ap[IOU_50], ap[IOU_75]], axis=1),
        iou_thresholds=np.array(evaluation.params.iouThrs),
        recalls=np.array(evaluation.params.recThrs),
        precision=precision[:, :, has_truth].mean(axis=2) if has_truth.any() else None,
        histogram=np.stack(histogram),
        histogram_range=score_range,
        num_images=len(evaluation.params.imgIds),
        threshold=threshold,
        num_true=int((kept & is_true).sum()),
        num_false=int((kept & ~is_true).sum()),
        confusion=confusion_matrix(evaluation, threshold),
        misses=misses(evaluation, IOU_50, threshold, names),
        false_positives=false_positives(evaluation, IOU_50, threshold, names),
        limits=limits,
        counts=outcomes.count(known, found, len(objects), limits),
        shapes=outcomes.object_shapes(known, threshold),
        browsed=browsed_images(images, known, found, threshold),
    )


def best_threshold(scores: np.ndarray, is_true: np.ndarray, num_objects: int) -> float:
    """Return the score threshold with the best F1, 2 * true / (detections + objects).

    `scores` [n] and `is_true` [n] are those of all categories together. Returns the highest
    threshold on a tie, DEFAULT_THRESHOLD if no detection is true.
    """
    if not is_true.any():
        return DEFAULT_THRESHOLD
    order = np.argsort(-scores, kind="stable")
    scores, true = scores[order], np.cumsum(is_true[order])
    f1 = 2 * true / (np.arange(1, len(true) + 1) + num_objects)
    # Equal scores pass a threshold together, so only the last of a run is a candidate.
    f1[:-1][scores[:-1] == scores[1:]] = -1
    return float(scores[np.argmax(f1)])


def confusion_matrix(evaluation: COCOeval, threshold: float) -> np.ndarray:
    """Count objects of category i (row) detected as category j (column): int [K + 1, K + 1].

    The last column counts missed objects, the last row detections without an object. COCOeval
    itself matches at IoU 0.50 with `useCats = 0`: by decreasing score, each detection that reaches
    the threshold takes the free object with the highest IoU, regardless of category. Detections
    inside a crowd region are ignored.
    """
    categories = {category: k for k, category in enumerate(evaluation.params.catIds)}
    truth = evaluation.cocoGt
    kept = [ann for ann in evaluation.cocoDt.dataset["annotations"] if ann["score"] >= threshold]
    with contextlib.redirect_stdout(io.StringIO()):
        matched = Evaluation(
            truth, index_annotations(truth.dataset, kept), evaluation.params.iouType
        )
        matched.params.useCats = 0
        matched.params.imgIds = evaluation.params.imgIds
        matched.params.iouThrs = evaluation.params.iouThrs[IOU_50 : IOU_50 + 1]
        matched.params.areaRng = evaluation.params.areaRng[:1]
        matched.params.maxDets = [len(kept)]
        matched.evaluate()
    background = len(categories)
    matrix = np.zeros((background + 1, background + 1), np.int64)
    for entry in filter(None, matched.evalImgs):
        objects = zip(entry["gtIds"], entry["gtMatches"][0], entry["gtIgnore"], strict=True)
        for i, match, ignored in objects:
            if not ignored and not match:
                matrix[categories[truth.anns[i]["category_id"]], background] += 1
        found = zip(entry["dtIds"], entry["dtMatches"][0], entry["dtIgnore"][0], strict=True)
        for i, match, ignored in found:
            if not ignored:
                row = categories[truth.anns[match]["category_id"]] if match else background
                matrix[row, categories[matched.cocoDt.anns[i]["category_id"]]] += 1
    return matrix


def _count_objects(evaluation: COCOeval) -> np.ndarray:
    """Non-ignored objects per category and area range: int [K, areas]."""
    areas = len(evaluation.params.areaRng)
    count = np.zeros((len(evaluation.params.catIds), areas), np.int64)
    for area in range(areas):
        for k, entry in image_entries(evaluation, area):
            count[k, area] += len(entry["gtIgnore"]) - int(np.sum(entry["gtIgnore"]))
    return count
