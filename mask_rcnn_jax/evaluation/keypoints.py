"""Scores of keypoints, by COCO's object keypoint similarity (OKS), always by pycocotools."""

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from pycocotools.cocoeval import COCOeval

from mask_rcnn_jax.annotations.checks import MAX_STATED_PIXELS, is_number, show
from mask_rcnn_jax.annotations.faults import KEYPOINTS
from mask_rcnn_jax.annotations.keypoints import PERSON, listed_names
from mask_rcnn_jax.annotations.reader import GroundTruth
from mask_rcnn_jax.evaluation.engines import index_annotations, mean
from mask_rcnn_jax.evaluation.entries import check_image, fill_annotations

# The ten statistics of pycocotools' COCOeval.summarize() for keypoints, in its order.
METRICS = {
    "AP": "OKS 0.50:0.95",
    "AP50": "OKS 0.50",
    "AP75": "OKS 0.75",
    "APm": "OKS 0.50:0.95  medium",
    "APl": "OKS 0.50:0.95  large (> 96^2)",
    "ARmax20": "20 detections per image",
    "AR50": "20 detections  OKS 0.50",
    "AR75": "20 detections  OKS 0.75",
    "ARm": "20 detections  medium",
    "ARl": "20 detections  large",
}
PREFIX = "keypoints_"
# Standard deviations of people who label a point, relative to the root of the object's area.
_OF_PERSON = [26, 25, 25, 35, 35, 79, 79, 72, 72, 62, 62, 107, 107, 87, 87, 89, 89]
SIGMAS = dict(zip(PERSON, (np.array(_OF_PERSON) / 100 / 10.0).tolist(), strict=True))
UNKNOWN_SIGMA = 0.05


def sigmas_of(names: Sequence[str], given: Sequence[float]) -> tuple[np.ndarray, str]:
    """Sigmas [P]: those given, COCO's by name, or all the same; and a line about these, or ""."""
    if given:
        if len(given) != len(names):
            found = f"eval.keypoint_sigmas has {len(given)} values"
            raise ValueError(f"{found}, expected one for each of {len(names)} keypoints")
        return np.array(given, np.float64), ""
    if unknown := [name for name in names if name not in SIGMAS]:
        why = f"eval.keypoint_sigmas is (), and COCO has none for {show(unknown[0])}"
        return np.full(len(names), UNKNOWN_SIGMA), f"{why}: all are {UNKNOWN_SIGMA}"
    return np.array([SIGMAS[name] for name in names]), ""


def evaluate(
    truth: GroundTruth,
    results: list[dict],
    image_ids: Sequence[int | str] | None,
    sigmas: Sequence[float],
    source: str = "results",
) -> tuple[dict[str, float], dict[Any, float]]:
    """Score COCO results of keypoints.

    Args:
        truth: read with the names of the keypoints.
        results: with `keypoints` x, y, v in the order of these names.
        image_ids: images to score; None scores all.
        sigmas: see `sigmas_of`.
        source: names the results in messages.

    Returns:
        The numbers of METRICS, and the AP of each category id; -1 without labeled keypoints.
    """
    filled = fill_results(truth, results, source)
    with contextlib.redirect_stdout(io.StringIO()):
        coco_gt = index_annotations(truth.content, fill_annotations(truth, KEYPOINTS))
        evaluation = COCOeval(coco_gt, index_annotations(truth.content, filled), KEYPOINTS)
        evaluation.params.kpt_oks_sigmas = sigmas_of(truth.keypoints, sigmas)[0]
        if image_ids is not None:
            evaluation.params.imgIds = sorted(set(image_ids))
        evaluation.evaluate()
        evaluation.accumulate()
    precision, recall = (evaluation.eval[name][..., 0] for name in ("precision", "recall"))
    ids = sorted(category["id"] for category in truth.content["categories"])
    aps = {category_id: mean(precision[:, :, k, 0]) for k, category_id in enumerate(ids)}
    return summary(precision, recall), aps


def summary(precision: np.ndarray, recall: np.ndarray) -> dict[str, float]:
    """METRICS of precision [OKS, recall, category, area] and recall [OKS, category, area], whose
    areas are all, medium and large."""
    values = [
        part
        for of in (precision, recall)
        for part in (of[..., 0], of[0, ..., 0], of[5, ..., 0], of[..., 1], of[..., 2])
    ]
    return {name: mean(value) for name, value in zip(METRICS, values, strict=True)}


def fill_results(truth: GroundTruth, results: list[dict], source: str) -> list[dict]:
    """Copy the results with exactly the keys that pycocotools reads; boxes and areas are those
    around the points, as its `loadRes` has them."""
    filled, count = [], len(truth.keypoints)
    for i, result in enumerate(results):
        check_image(truth, result, f"{source}: entry {i}")
        points = result["keypoints"]
        if fault := _fault(points, count):
            raise ValueError(f"{source}: entry {i} has {fault}")
        x, y = np.array(points[::3]), np.array(points[1::3])
        x0, y0, x1, y1 = (float(v) for v in (x.min(), y.min(), x.max(), y.max()))
        entry = {key: result[key] for key in ("image_id", "category_id", "score")}
        entry |= {"id": i + 1, "iscrowd": 0, "bbox": [x0, y0, x1 - x0, y1 - y0]}
        filled.append(entry | {"area": (x1 - x0) * (y1 - y0), "keypoints": points})
    return filled


def _fault(points: Any, count: int) -> str | None:
    if not isinstance(points, list) or len(points) != 3 * count:
        return f"keypoints {show(points)}, expected {3 * count} numbers: x, y, v of {count} points"
    if wrong := [v for v in points if not (is_number(v) and abs(v) <= MAX_STATED_PIXELS)]:
        return f"the value {show(wrong[0])} among its keypoints, expected finite numbers"
    return None


def split(boxes: list[dict]) -> tuple[list[dict], list[dict]]:
    """Box results without keypoints, and the keypoints of those that have some as results."""
    extra = ("keypoints", "keypoint_scores")
    alone = [{key: v for key, v in entry.items() if key not in extra} for entry in boxes]
    points = [{k: v for k, v in one.items() if k != "bbox"} for one in boxes if "keypoints" in one]
    return alone, points


def names_in(categories: Sequence[dict]) -> tuple[str, ...]:
    """The keypoints of the first category that lists some; ValueError if none does."""
    for category in categories:
        if names := listed_names(category):
            return names
    raise ValueError("no category lists 'keypoints', expected the names of the points to score")


def format_table(metrics: dict) -> list[str]:
    """The rows of the table, (label, value)."""
    rows = [f"{name:<9}{meaning:<35}" for name, meaning in METRICS.items()]
    values = [f"{metrics[PREFIX + name]:>8.3f}" for name in METRICS]
    head = f"{'':<44}{'keypoint':>8}"
    return [head, *(row + value for row, value in zip(rows, values, strict=True))]
