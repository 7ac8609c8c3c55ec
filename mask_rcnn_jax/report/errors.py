"""The most costly mistakes of one pycocotools evaluation, with what their pictures need.

Who matches whom is COCOeval's own answer. The cost of a mistake is how sure the model was of it:

  * a miss is an object without a detection of its category that reaches the score threshold. Its
    cost is 1 minus the score of the detection that does match it, 0 where none does.
  * a false alarm is a detection that reaches the threshold and matches no object of its category.
    Its cost is its score.

Of equal costs the larger object comes first.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pycocotools.cocoeval import COCOeval

# What a report shows of each kind, and of one image, so that one odd picture does not fill it.
MAX_SHOWN, MAX_PER_IMAGE = 16, 2
# Further objects of a picture are not drawn.
MAX_SHAPES = 100


class Shape(NamedTuple):
    """An object or a detection to be drawn."""

    box: tuple[float, float, float, float]  # x, y, width, height in pixels of the picture
    mask: dict | None  # run-length code of the whole picture, None where only boxes are scored
    name: str
    score: float | None  # None for an object of the ground truth
    is_it: bool  # whether it is the mistake itself


class Mistake(NamedTuple):
    """One miss or false alarm."""

    image: dict  # the json's entry
    name: str  # of the category
    cost: float
    note: str
    box: tuple[float, float, float, float]  # x, y, width, height
    truth: list[Shape]
    found: list[Shape]  # detections that reach the threshold, highest score first


def entries(evaluation: COCOeval, area: int) -> Iterator[tuple[int, dict]]:
    """(place of its category in `catIds`, entry of `evalImgs`) for one of the `areaRng`."""
    images, areas = len(evaluation.params.imgIds), len(evaluation.params.areaRng)
    for k in range(len(evaluation.params.catIds)):
        start = (k * areas + area) * images
        for entry in evaluation.evalImgs[start : start + images]:
            if entry is not None:
                yield k, entry


def misses(
    evaluation: COCOeval, iou: int, threshold: float, names: dict[int | str, str]
) -> list[Mistake]:
    """The most costly misses at the IoU threshold number `iou`, at most MAX_SHOWN.

    names: of the category ids.
    """
    found = []
    for _, entry in entries(evaluation, 0):
        scores = dict(zip(entry["dtIds"], entry["dtScores"], strict=True))
        for i, match, ignored in zip(
            entry["gtIds"], entry["gtMatches"][iou], entry["gtIgnore"], strict=True
        ):
            score = scores[int(match)] if match else 0.0
            score = score if math.isfinite(score) else 0.0
            if not ignored and score < threshold:
                found.append((1 - score, evaluation.cocoGt.anns[i]))
    shown = []
    for cost, annotation in _most_costly(found):
        note = f"found with score {1 - cost:.2f}" if cost < 1 else "nothing found"
        shown.append(_mistake(evaluation, annotation, cost, note, threshold, names))
    return shown


def false_alarms(
    evaluation: COCOeval, iou: int, threshold: float, names: dict[int | str, str]
) -> list[Mistake]:
    """The most costly false alarms at the IoU threshold number `iou`, at most MAX_SHOWN."""
    found, nearest = [], {}
    for _, entry in entries(evaluation, 0):
        # Rows in the order of dtIds; without objects or without detections it is an empty list.
        ious = evaluation.ious[entry["image_id"], entry["category_id"]]
        for row, (i, score) in enumerate(zip(entry["dtIds"], entry["dtScores"], strict=True)):
            false = not entry["dtMatches"][iou][row] and not entry["dtIgnore"][iou][row]
            if false and score >= threshold and math.isfinite(score):
                found.append((score, evaluation.cocoDt.anns[i]))
                nearest[i] = float(max(ious[row], default=0)) if len(ious) else 0.0
    shown = []
    for cost, annotation in _most_costly(found):
        name, overlap = names[annotation["category_id"]], nearest[annotation["id"]]
        note = f"IoU {overlap:.2f} with the nearest {name}" if overlap else f"no {name} there"
        shown.append(_mistake(evaluation, annotation, cost, note, threshold, names))
    return shown


def _most_costly(found: Iterable[tuple[float, dict]]) -> list[tuple[float, dict]]:
    """The first MAX_SHOWN pairs (cost, annotation), with at most MAX_PER_IMAGE of an image."""
    of_image, chosen = Counter(), []
    for cost, annotation in sorted(found, key=lambda pair: (-pair[0], -pair[1]["area"])):
        of_image[annotation["image_id"]] += 1
        if of_image[annotation["image_id"]] <= MAX_PER_IMAGE:
            chosen.append((cost, annotation))
            if len(chosen) == MAX_SHOWN:
                break
    return chosen


def _mistake(
    evaluation: COCOeval,
    annotation: dict,
    cost: float,
    note: str,
    threshold: float,
    names: dict[int | str, str],
) -> Mistake:
    image_id = annotation["image_id"]
    with_masks = evaluation.params.iouType == "segm"

    def shapes(annotations: Iterable[dict], scored: bool) -> list[Shape]:
        known = [a for a in annotations if a["category_id"] in names]
        known.sort(key=lambda a: -a["score"] if scored else 0)
        known.sort(key=lambda a: a is not annotation)  # the first gets the best place for its label
        return [
            Shape(
                tuple(a["bbox"]),
                a["segmentation"] if with_masks else None,
                names[a["category_id"]] + (" (crowd)" if a["iscrowd"] else ""),
                a["score"] if scored else None,
                a is annotation,
            )
            for a in known[:MAX_SHAPES]
        ]

    reached = [a for a in evaluation.cocoDt.imgToAnns[image_id] if a["score"] >= threshold]
    return Mistake(
        image=evaluation.cocoGt.imgs[image_id],
        name=names[annotation["category_id"]],
        cost=float(cost),
        note=note,
        box=tuple(annotation["bbox"]),
        truth=shapes(evaluation.cocoGt.imgToAnns[image_id], scored=False),
        found=shapes(reached, scored=True),
    )
