"""Costliest errors of a pycocotools evaluation, with the instances needed to draw them.

Matches are those of COCOeval. The cost of an error measures the model's confidence in it:

  * A miss is an object without a detection of its category that reaches the score threshold. Its
    cost is 1 minus the score of its matched detection, or 1 without a match.
  * A false positive is a detection that reaches the threshold and matches no object of its
    category. Its cost is its score.

Ties are ordered by decreasing object area.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from pycocotools.cocoeval import COCOeval

# Limits per error type; the limit per image keeps one odd image from filling the report.
MAX_SHOWN, MAX_PER_IMAGE = 16, 2
# Maximum number of instances drawn per image.
MAX_INSTANCES = 100


class Instance(NamedTuple):
    """A ground-truth object or a detection to draw."""

    box: tuple[float, float, float, float]  # x, y, width, height in image pixels
    mask: dict | None  # RLE of the whole image; None for box results
    name: str
    score: float | None  # None for ground truth
    is_error: bool  # whether this instance is the error itself


class DetectionError(NamedTuple):
    """A miss or a false positive."""

    image: dict  # entry of the json's `images`
    name: str  # category name
    cost: float
    note: str
    box: tuple[float, float, float, float]  # x, y, width, height
    truth: list[Instance]
    detections: list[Instance]  # with at least the threshold score, by decreasing score


def image_entries(evaluation: COCOeval, area: int) -> Iterator[tuple[int, dict]]:
    """Iterate over (index into `catIds`, entry of `evalImgs`) for one index into `areaRng`."""
    images, areas = len(evaluation.params.imgIds), len(evaluation.params.areaRng)
    for k in range(len(evaluation.params.catIds)):
        start = (k * areas + area) * images
        for entry in evaluation.evalImgs[start : start + images]:
            if entry is not None:
                yield k, entry


def misses(
    evaluation: COCOeval, iou: int, threshold: float, names: Mapping[int, str]
) -> list[DetectionError]:
    """Return the costliest misses, at most MAX_SHOWN.

    `iou` is an index into `iouThrs`, `threshold` the minimum detection score; `names` maps category
    ids to names.
    """
    found = []
    for _, entry in image_entries(evaluation, 0):
        scores = dict(zip(entry["dtIds"], entry["dtScores"], strict=True))
        objects = zip(entry["gtIds"], entry["gtMatches"][iou], entry["gtIgnore"], strict=True)
        for i, match, ignored in objects:
            score = scores[int(match)] if match else 0.0
            score = score if math.isfinite(score) else 0.0
            if not ignored and score < threshold:
                cost = 1 - score
                note = f"found with score {1 - cost:.2f}" if cost < 1 else "nothing found"
                found.append((cost, evaluation.cocoGt.anns[i], note))
    return _costliest(evaluation, found, threshold, names)


def false_positives(
    evaluation: COCOeval, iou: int, threshold: float, names: Mapping[int, str]
) -> list[DetectionError]:
    """Return the costliest false positives, at most MAX_SHOWN. Arguments as for `misses`."""
    found = []
    for _, entry in image_entries(evaluation, 0):
        # Rows follow dtIds; an empty list if there are no objects or no detections.
        ious = evaluation.ious[entry["image_id"], entry["category_id"]]
        for row, (i, score) in enumerate(zip(entry["dtIds"], entry["dtScores"], strict=True)):
            is_false = not entry["dtMatches"][iou][row] and not entry["dtIgnore"][iou][row]
            if is_false and score >= threshold and math.isfinite(score):
                name = names[entry["category_id"]]
                nearest = float(max(ious[row], default=0)) if len(ious) else 0.0
                note = f"IoU {nearest:.2f} with the nearest {name}"
                note = note if nearest else f"no {name} there"
                found.append((score, evaluation.cocoDt.anns[i], note))
    return _costliest(evaluation, found, threshold, names)


def _costliest(
    evaluation: COCOeval,
    found: list[tuple[float, dict, str]],
    threshold: float,
    names: Mapping[int, str],
) -> list[DetectionError]:
    """First MAX_SHOWN of (cost, annotation, note), with at most MAX_PER_IMAGE per image."""
    per_image, shown = Counter(), []
    for cost, annotation, note in sorted(found, key=lambda f: (-f[0], -f[1]["area"])):
        per_image[annotation["image_id"]] += 1
        if per_image[annotation["image_id"]] <= MAX_PER_IMAGE and len(shown) < MAX_SHOWN:
            shown.append(_make_error(evaluation, annotation, cost, note, threshold, names))
    return shown


def _make_error(
    evaluation: COCOeval,
    annotation: dict,
    cost: float,
    note: str,
    threshold: float,
    names: Mapping[int, str],
) -> DetectionError:
    image_id = annotation["image_id"]
    has_masks = evaluation.params.iouType == "segm"

    def instances(annotations: Iterable[dict], scored: bool) -> list[Instance]:
        known = [a for a in annotations if a["category_id"] in names]
        known.sort(key=lambda a: -a["score"] if scored else 0)
        known.sort(key=lambda a: a is not annotation)  # the first instance is labeled first
        return [
            Instance(
                tuple(a["bbox"]),
                a["segmentation"] if has_masks else None,
                names[a["category_id"]] + (" (crowd)" if a["iscrowd"] else ""),
                a["score"] if scored else None,
                a is annotation,
            )
            for a in known[:MAX_INSTANCES]
        ]

    kept = [a for a in evaluation.cocoDt.imgToAnns[image_id] if a["score"] >= threshold]
    return DetectionError(
        image=evaluation.cocoGt.imgs[image_id],
        name=names[annotation["category_id"]],
        cost=float(cost),
        note=note,
        box=tuple(annotation["bbox"]),
        truth=instances(evaluation.cocoGt.imgToAnns[image_id], scored=False),
        detections=instances(kept, scored=True),
    )
