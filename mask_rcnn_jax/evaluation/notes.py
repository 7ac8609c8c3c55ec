"""What scores do not say themselves: that there is nothing to score, ids 0, objects beyond a cap,
and why a result refers to nothing."""

import posixpath
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mask_rcnn_jax.annotations.checks import show
from mask_rcnn_jax.annotations.ids import ZERO_ID, is_zero, other_type
from mask_rcnn_jax.annotations.reader import GroundTruth
from mask_rcnn_jax.evaluation import lvis

Id = int | str
FEW, LOOSE = 3, 2.0  # results whose form may be chance; pixels that boxes may leave an image
COCO_DETECTIONS = 100  # of a class in an image, which COCO's rules score


def check_scorable(truth: GroundTruth) -> None:
    """Raise ValueError for a ground truth without images, or without annotations."""
    nothing_to_score(truth.source, len(truth.content["images"]), len(truth.content["annotations"]))


def nothing_to_score(source: str, images: int, objects: int) -> None:
    """Raise ValueError if there are no images, or no objects in them."""
    if not images:
        raise ValueError(f"{source}: no images, nothing to score")
    if not objects:
        raise ValueError(f"{source}: no annotation in {images} images, nothing to score")


def notes(
    truth: GroundTruth,
    image_ids: Sequence[Id] | None = None,
    protocol: str = "coco",
    detections_per_image: int | None = None,
    scored: int = COCO_DETECTIONS,
) -> list[str]:
    """Return lines about what keeps perfect detections from a perfect score.

    Args:
        truth: the ground truth.
        image_ids: those that are scored; None for all.
        protocol: that of the scores.
        detections_per_image: `eval.detections_per_image` of the model; None if it is not known.
        scored: detections of a class in an image that are scored at most, beside COCO's.
    """
    entries = _entries(truth, image_ids)
    found = [ZERO_ID] if any(is_zero(entry.get("id")) for entry in entries) else []
    pairs = _counts(entries)
    if entries and not pairs:
        found.append(f"all {len(entries)} annotations are crowds, which are not scored")
    in_image: Counter[Id] = Counter()
    for (image_id, _), count in pairs.items():
        in_image[image_id] += count
    caps = []
    if protocol == "lvis":
        caps.append(_beyond(in_image.values(), lvis.MAX_DETECTIONS, "objects", "LVIS scores"))
    else:
        what = "objects of a class", "COCO's rules score"
        if line := _beyond(pairs.values(), COCO_DETECTIONS, *what):
            more = f" (AP@{scored} and AR@{scored} score {scored})"
            larger = " (a larger eval.detections_per_image adds AP@K, which scores K)"
            caps.append(line + (more if scored > COCO_DETECTIONS else larger))
    if detections_per_image is not None:
        what = "objects", "eval.detections_per_image allows"
        caps.append(_beyond(in_image.values(), detections_per_image, *what))
    if any(caps):
        found.append("; ".join(filter(None, caps)))
    return [f"{truth.source}: {line}" for line in found]


def scored_detections(
    truth: GroundTruth, image_ids: Sequence[Id] | None, detections_per_image: int
) -> int:
    """Return how many detections of a class to score in an image: COCO's 100, or
    `detections_per_image` if that is more and an image holds more objects of a class than 100."""
    counts = _counts(_entries(truth, image_ids)).values()
    is_beyond = max(counts, default=0) > COCO_DETECTIONS
    return max(COCO_DETECTIONS, detections_per_image) if is_beyond else COCO_DETECTIONS


def _entries(truth: GroundTruth, image_ids: Sequence[Id] | None) -> list[dict]:
    chosen = None if image_ids is None else set(image_ids)
    entries = truth.content["annotations"]
    return [entry for entry in entries if chosen is None or entry["image_id"] in chosen]


def _counts(entries: Iterable[dict]) -> Counter[tuple[Id, Id]]:
    """Count the objects that are no crowds by image and category."""
    single = (entry for entry in entries if entry.get("iscrowd", 0) != 1)
    return Counter((entry["image_id"], entry["category_id"]) for entry in single)


def _beyond(counts: Iterable[int], cap: int, what: str, who: str) -> str:
    """Say how many objects are beyond a cap on those in an image; "" if there are none."""
    array = np.fromiter(counts, np.int64)
    beyond, total = int(np.maximum(array - cap, 0).sum()), int(array.sum())
    if not beyond:
        return ""
    most = f"an image holds up to {int(array.max())} {what}, {who} {cap}"
    return f"{most}: {beyond} of {total} objects ({beyond / total:.1%}) are beyond it and missed"


def box_form(results: Iterable[dict[str, Any]], truth: GroundTruth) -> str:
    """Say that boxes of checked results seem to be corners or fractions; "" if they do not."""
    sizes = truth.sizes
    rows = [(*r["bbox"], *(sizes[r["image_id"]] or (np.nan, np.nan))) for r in results]
    x, y, w, h, height, width = np.reshape(rows, (-1, 6)).T
    if len(rows) < FEW:
        return ""
    seem = "all boxes of results seem to be {}, expected x, y, width, height in pixels"
    if max(w.max(), h.max()) <= 1:
        return seem.format("fractions of the image")
    beyond = (x + w > width + LOOSE) | (y + h > height + LOOSE)
    may_be = (x < w) & (y < h) & (w <= width + LOOSE) & (h <= height + LOOSE)
    return seem.format("x1, y1, x2, y2") if beyond.any() and may_be.all() else ""


def absent_image(image_id: Any, truth: GroundTruth) -> str:
    """Say why no image of the ground truth has the id of a result."""
    text = f"which is not among the {len(truth.sizes)} images of the ground truth"
    if other := other_type(image_id, truth.sizes):
        return f"{text}; {other}"
    for entry in truth.content["images"]:
        name = str(entry.get("file_name", ""))
        stem = posixpath.splitext(posixpath.basename(name.replace("\\", "/")))[0]
        number = int(stem) if stem.isascii() and stem.isdecimal() and len(stem) < 20 else None
        if image_id in (name, posixpath.basename(name), stem) or image_id == number is not None:
            return f"{text}; it looks like the file {show(name)}, whose id is {show(entry['id'])}"
    return text


def absent_category(category_id: Any, categories: Sequence[dict[str, Any]]) -> str:
    """Say why no category of the ground truth has the id of a result; "" if nothing is known."""
    known = {entry["id"]: entry.get("name") for entry in categories}
    if other := other_type(category_id, known):
        return other
    named = [number for number, name in known.items() if name == category_id]
    if named:
        return f"it is the name of category {show(named[0])}"
    if category_id == 0 and 1 in known:
        return "the ids of results count from 0, those of the ground truth from 1"
    return ""
