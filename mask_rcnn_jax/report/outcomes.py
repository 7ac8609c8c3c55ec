"""The outcome for each object and each detection in an evaluation, at any score threshold.

A position is an index into the thresholds of the page's slider. An object or a detection has the
last position that its score reaches and counts at all positions up to it; -1 counts nowhere.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from pycocotools.cocoeval import COCOeval

from mask_rcnn_jax.report.errors import image_entries

POSITIONS = 101


class Outcome(NamedTuple):
    """An object or a detection that counts, matched by COCOeval."""

    annotation: dict
    category: int  # index into `catIds`
    score: float  # of a detection, or of the one that found the object; -inf if none did
    is_true: bool  # whether it has a match


class ScoreCounts(NamedTuple):
    """Counts of K categories, by the last position reached."""

    objects: np.ndarray  # [K] int
    found: np.ndarray  # [K, POSITIONS] int, objects, which are as many as true detections
    false: np.ndarray  # [K, POSITIONS] int, false detections


class ObjectShapes(NamedTuple):
    """Of each object; n objects."""

    sides: np.ndarray  # [n] square roots of the areas, in pixels
    aspects: np.ndarray  # [n] width by height of the box
    found: np.ndarray  # [n] bool, by a detection that reaches the score threshold


def outcomes(evaluation: COCOeval, iou: int) -> tuple[list[Outcome], list[Outcome]]:
    """Return the objects and the detections, without crowds, detections in crowds, and scores that
    are not finite.

    `iou` is an index into `iouThrs`.
    """
    objects, detections = [], []
    truth, found = evaluation.cocoGt.anns, evaluation.cocoDt.anns
    for k, entry in image_entries(evaluation, 0):
        scores = {}
        matches, ignored = entry["dtMatches"][iou], entry["dtIgnore"][iou]
        for row, (i, score) in enumerate(zip(entry["dtIds"], entry["dtScores"], strict=True)):
            if math.isfinite(score):
                scores[i] = float(score)
                if not ignored[row]:
                    detections.append(Outcome(found[i], k, scores[i], bool(matches[row])))
        rows = zip(entry["gtIds"], entry["gtMatches"][iou], entry["gtIgnore"], strict=True)
        for i, match, is_ignored in rows:
            if not is_ignored:
                score = scores.get(int(match), -math.inf)
                objects.append(Outcome(truth[i], k, score, math.isfinite(score)))
    return objects, detections


def thresholds(low: float, high: float) -> np.ndarray:
    """Return the score threshold at each position: float64 [POSITIONS]."""
    return low + (high - low) * np.arange(POSITIONS) / (POSITIONS - 1)


def last_positions(scores: Sequence[float] | np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Return the last position that each score reaches: int [n]."""
    return np.searchsorted(limits, np.asarray(scores, np.float64), side="right") - 1


def count(
    objects: Sequence[Outcome], detections: Sequence[Outcome], categories: int, limits: np.ndarray
) -> ScoreCounts:
    """Count by category and position."""
    false = [one for one in detections if not one.is_true]
    number = np.bincount([one.category for one in objects], minlength=categories)
    return ScoreCounts(number, *(_histogram(part, categories, limits) for part in (objects, false)))


def object_shapes(objects: Sequence[Outcome], threshold: float) -> ObjectShapes:
    """Measure the objects; those with a box or a mask without area have a side of 0."""
    annotations = [one.annotation for one in objects]
    boxes = np.array([one["bbox"][2:] for one in annotations], np.float64).reshape(-1, 2)
    areas = np.array([one["area"] for one in annotations], np.float64)
    return ObjectShapes(
        sides=np.sqrt(np.maximum(areas, 0)),
        aspects=boxes[:, 0] / np.maximum(boxes[:, 1], 1e-9),
        found=np.array([one.score >= threshold for one in objects], bool),
    )


def _histogram(outcomes: Sequence[Outcome], categories: int, limits: np.ndarray) -> np.ndarray:
    histogram = np.zeros((categories, POSITIONS), np.int64)
    reached = last_positions([one.score for one in outcomes], limits)
    rows = np.array([one.category for one in outcomes], np.int64)
    np.add.at(histogram, (rows[reached >= 0], reached[reached >= 0]), 1)
    return histogram
