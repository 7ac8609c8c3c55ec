"""Compare an exported model's detections with a reference."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax
import numpy as np

from mask_rcnn_jax.structures import Detections

# Limits for a float32 export.
BOX_TOLERANCE = 0.1  # pixels
SCORE_TOLERANCE = 1e-3
MASK_TOLERANCE = 0.1  # probability of a cell, which changes fast at an outline
KEYPOINT_TOLERANCE = 1.0  # pixels, half of an object's: rounding chooses between equal heights
# Of the detections, on one side only: rounding chooses between boxes that NMS finds nearly equal,
# of which a model that has learned little has many.
UNMATCHED_TOLERANCE = 0.005
MATCH_DISTANCE = 2.0  # pixels: closer boxes of one class count as the same detection


@dataclass
class Differences:
    """Largest differences over all images. Field names are keys in manifest.json."""

    pictures: int = 0
    detections: int = 0  # of the reference
    boxes: float = 0.0  # pixels
    scores: float = 0.0
    masks: float | None = None  # None: there are none
    keypoints: float | None = None  # likewise; pixels, the median of an object
    unmatched: int = 0  # detections on one side only, except those close to a score limit

    @property
    def within_tolerance(self) -> bool:
        boxes = self.boxes <= BOX_TOLERANCE
        boxes &= self.unmatched <= UNMATCHED_TOLERANCE * self.detections
        masks = (self.masks or 0) <= MASK_TOLERANCE
        keypoints = (self.keypoints or 0) <= KEYPOINT_TOLERANCE
        return boxes and self.scores <= SCORE_TOLERANCE and masks and keypoints

    @property
    def is_finite(self) -> bool:
        """Whether all outputs of the same detections are numbers, on both sides."""
        found = self.boxes, self.scores, self.masks or 0, self.keypoints or 0
        return bool(np.isfinite(found).all())

    def __str__(self) -> str:
        masks = "" if self.masks is None else f"masks {self.masks:.2g}, "
        keypoints = "" if self.keypoints is None else f"keypoints {self.keypoints:.2g} px, "
        return (
            f"{self.detections} detections in {self.pictures} images, largest difference in boxes "
            f"{self.boxes:.2g} px, scores {self.scores:.2g}, {masks}{keypoints}"
            f"{self.unmatched} on one side only"
        )


def compare(
    reference: Callable,
    exported: Callable,
    inputs: Iterable[tuple[np.ndarray, np.ndarray]],
    score_threshold: float,
) -> Differences:
    """Compare two functions (images [B, H, W, C], image_sizes [B, 2]) -> `Detections`."""
    total = Differences()
    for images, sizes in inputs:
        batches = reference(images, sizes), exported(images, sizes)
        for row in range(len(images)):
            a, b = (
                jax.tree.map(lambda leaf, row=row: np.asarray(leaf)[row], batch)
                for batch in batches
            )
            _add(total, a, b, score_threshold)
    return total


def in_two_batches(predict: Callable, inputs: list[tuple]) -> Callable:
    """Return a function of the inputs in turn that detects in all but the first at once."""
    first, *others = inputs
    batches = [first, tuple(map(np.concatenate, zip(*others, strict=True)))] if others else [first]
    rows = (
        jax.tree.map(lambda array, row=row: array[row : row + 1], found)
        for found, count in ((predict(*given), len(given[0])) for given in batches)
        for row in range(count)
    )
    return lambda images, sizes: next(rows)


def _add(total: Differences, a: Detections, b: Detections, score_threshold: float) -> None:
    """Add the differences in one image. Rows with equal scores may be ordered differently."""
    total.pictures += 1
    rows_a, rows_b = (np.flatnonzero(side.valid) for side in (a, b))
    total.detections += len(rows_a)
    unused, lost_scores = list(rows_b), []
    for i in rows_a:
        distances = [
            _distance(a.boxes[i], b.boxes[j]) if a.classes[i] == b.classes[j] else np.inf
            for j in unused
        ]
        if not distances or min(distances) > MATCH_DISTANCE:
            lost_scores.append(a.scores[i])
            continue
        j = unused.pop(int(np.argmin(distances)))
        total.boxes = max(total.boxes, _distance(a.boxes[i], b.boxes[j]))
        total.scores = max(total.scores, _distance(a.scores[i], b.scores[j]))
        if a.masks is not None and b.masks is not None:
            total.masks = max(total.masks or 0.0, _distance(a.masks[i], b.masks[j]))
        if a.keypoints is not None and b.keypoints is not None:
            moved = np.abs(a.keypoints[i] - b.keypoints[j])[..., :2].max(axis=-1)
            median = float(np.nan_to_num(np.median(moved), nan=np.inf))
            total.keypoints = max(total.keypoints or 0.0, median)
    lost_scores += [b.scores[j] for j in unused]
    # Rounding decides whether a score at the limit is kept.
    limits = [score_threshold]
    limits += [side.scores[rows].min() for side, rows in ((a, rows_a), (b, rows_b)) if rows.size]
    total.unmatched += sum(
        bool(min(abs(score - limit) for limit in limits) > SCORE_TOLERANCE) for score in lost_scores
    )


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference; infinite where one side is not a number."""
    return float(np.nan_to_num(np.abs(a - b), nan=np.inf).max())
