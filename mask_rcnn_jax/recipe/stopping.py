"""When a run ends before its last step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mask_rcnn_jax.ranges import Fraction, NotNegative, Ranged, Whole

Metrics = Mapping[str, float | None]
M = TypeVar("M", bound=Metrics)
KINDS = ("box", "mask", "keypoints")  # of APs; the last one that is there is the main one


@dataclass(frozen=True)
class StopRule(Ranged):
    """Ends a run at target APs, or once they no longer improve; which AP that is, says `ap`.

    Attributes:
        stop_at_box_ap: stop once this, `stop_at_mask_ap` and `stop_at_keypoints_ap` are reached; 0
            for all: never.
        stop_at_mask_ap: see `stop_at_box_ap`.
        stop_at_keypoints_ap: see `stop_at_box_ap`.
        patience: evaluations in a row without an improvement of the keypoints AP (or else of the
            mask AP, or of the box AP where there are no masks), after which to stop; 0: never.
            An evaluation that measures nothing (AP -1 or NaN) does not count.
        min_improvement: an AP is an improvement if it is more than this above the AP of the last
            improvement.
    """

    stop_at_box_ap: Fraction = 0.0
    stop_at_mask_ap: Fraction = 0.0
    stop_at_keypoints_ap: Fraction = 0.0
    patience: Whole = 0
    min_improvement: NotNegative = 0.0

    def needs_evaluation(self) -> dict[str, float]:
        """The entries that stop nothing if nothing is evaluated, and their values."""
        names = (*(f"stop_at_{kind}_ap" for kind in KINDS), "patience")
        return {name: getattr(self, name) for name in names if getattr(self, name) > 0}

    def is_reached(self, metrics: Metrics) -> bool:
        """Whether an evaluation reached the targets."""
        targets = {kind: getattr(self, f"stop_at_{kind}_ap") for kind in KINDS}
        wanted = {kind: target for kind, target in targets.items() if target > 0}
        return bool(wanted) and all((ap(metrics, k) or 0) >= t for k, t in wanted.items())

    def is_stalled(self, evaluations: Sequence[Metrics]) -> bool:
        """Whether the last evaluations of a run improved nothing.

        evaluations: all of the run, so that a run that was interrupted counts on.
        """
        best, since = -math.inf, 0
        for value in filter(lambda ap: ap >= 0, map(main_ap, comparable(evaluations))):
            improved = value > best + self.min_improvement
            best, since = (value, 0) if improved else (best, since + 1)
        return 0 < self.patience <= since


def main_ap(metrics: Metrics) -> float:
    """The keypoints AP, or else the mask AP, or else the box AP; NaN where it is unknown."""
    value = metrics.get(measure(metrics))
    return math.nan if value is None else value


def measure(metrics: Metrics) -> str:
    """The name of `main_ap` in the metrics of an evaluation; APs of one name can be compared."""
    found = [kind for kind in KINDS if f"ap/{kind}" in metrics]
    return _name(metrics, found[-1] if found else "box")


def comparable(evaluations: Sequence[M]) -> list[M]:
    """The evaluations with the measure of the last one: a run that was resumed with another
    `eval.detections_per_image` has APs over different numbers of detections."""
    return [one for one in evaluations if measure(one) == measure(evaluations[-1])]


def ap(metrics: Metrics, kind: str) -> float | None:
    """The AP of one of `KINDS` that says how good a model is: where images hold more objects
    than COCO's rules score, `ap/box_at_K`, which scores K, or else `ap/box`."""
    return metrics.get(_name(metrics, kind))


def _name(metrics: Metrics, kind: str) -> str:
    at_limit = (name for name in metrics if name.startswith(f"ap/{kind}_at_"))
    return next(at_limit, f"ap/{kind}")
