"""How far the detections of an exported model are from those of the live one."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from mask_rcnn_jax.structures import Detections

# A float export must stay within these.
BOX_BAR = 0.1  # pixels
SCORE_BAR = 1e-3
SAME_PLACE = 2.0  # pixels between boxes that are taken for the same detection


@dataclass
class Differences:
    """The largest ones over all pictures."""

    pictures: int = 0
    detections: int = 0  # of the live model
    boxes: float = 0.0  # pixels
    scores: float = 0.0
    masks: float = 0.0
    unmatched: int = 0  # detections of one side only, but for those at the edge of being kept

    @property
    def within_bars(self) -> bool:
        return not self.unmatched and self.boxes <= BOX_BAR and self.scores <= SCORE_BAR

    def __str__(self) -> str:
        return (
            f"{self.detections} detections in {self.pictures} pictures, largest difference of "
            f"boxes {self.boxes:.2g} px, scores {self.scores:.2g}, masks {self.masks:.2g}, "
            f"{self.unmatched} on one side only"
        )


def compare(
    live: Callable,
    other: Callable,
    pictures: Iterable[tuple[np.ndarray, np.ndarray]],
    score_threshold: float,
) -> Differences:
    """Differences of two functions (images [B, H, W, 3], image_sizes [B, 2]) to `Detections`."""
    total = Differences()
    for images, sizes in pictures:
        expected, found = live(images, sizes), other(images, sizes)
        for row in range(len(images)):
            a, b = (
                Detections(**{k: np.asarray(v)[row] for k, v in vars(side).items()})
                for side in (expected, found)
            )
            _add(total, a, b, score_threshold)
    return total


def _add(total: Differences, a: Detections, b: Detections, score_threshold: float) -> None:
    """The differences of one picture. Rows of equal score may come in another order."""
    total.pictures += 1
    rows_a, rows_b = (np.flatnonzero(side.valid) for side in (a, b))
    total.detections += len(rows_a)
    free, lost = list(rows_b), []
    for i in rows_a:
        gaps = [
            np.abs(a.boxes[i] - b.boxes[j]).max() if a.classes[i] == b.classes[j] else np.inf
            for j in free
        ]
        if not gaps or min(gaps) > SAME_PLACE:
            lost.append(a.scores[i])
            continue
        j = free.pop(int(np.argmin(gaps)))
        total.boxes = max(total.boxes, float(np.abs(a.boxes[i] - b.boxes[j]).max()))
        total.scores = max(total.scores, float(abs(a.scores[i] - b.scores[j])))
        total.masks = max(total.masks, float(np.abs(a.masks[i] - b.masks[j]).max()))
    lost += [b.scores[j] for j in free]
    # Whether a score just at the limit is kept is a matter of rounding.
    limits = [score_threshold]
    limits += [side.scores[rows].min() for side, rows in ((a, rows_a), (b, rows_b)) if rows.size]
    total.unmatched += sum(
        bool(min(abs(score - limit) for limit in limits) > SCORE_BAR) for score in lost
    )
