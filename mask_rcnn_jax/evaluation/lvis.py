"""Score by the rules of LVIS (Gupta et al., 2019, section 3), as the `lvis` package does.

An image was searched for the classes of its objects and its `neg_category_ids`: detections of
others are not scored. Nor is a detection without an object a mistake if the class is among
`not_exhaustive_category_ids`. So each class is scored by an engine for COCO on its own images, in
which a crowd that covers the image takes the detections that are no mistakes.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from pycocotools import mask as coco_mask

from mask_rcnn_jax.annotations.faults import BOX
from mask_rcnn_jax.annotations.lvis import ABSENT, FREQUENCIES, NOT_EXHAUSTIVE, scoring_problems
from mask_rcnn_jax.annotations.reader import GroundTruth, raise_first
from mask_rcnn_jax.evaluation import engines

MAX_DETECTIONS = 300  # per image, over all classes
METRICS = {
    "AP": "IoU 0.50:0.95",
    "AP50": "IoU 0.50",
    "AP75": "IoU 0.75",
    "APs": "IoU 0.50:0.95  small (< 32^2 px)",
    "APm": "IoU 0.50:0.95  medium",
    "APl": "IoU 0.50:0.95  large (> 96^2)",
    "APr": "IoU 0.50:0.95  rare classes",
    "APc": "IoU 0.50:0.95  common classes",
    "APf": "IoU 0.50:0.95  frequent classes",
    "ARmax300": "300 detections per image",
    "ARs": "300 detections  small",
    "ARm": "300 detections  medium",
    "ARl": "300 detections  large",
}
_FAR = 1e12  # pixels: beyond all boxes


class Scores(NamedTuple):
    """Scores of one result type."""

    metrics: dict[str, float]  # `METRICS`, -1 where the ground truth has no objects
    category_aps: dict[Any, dict[str, float]]  # "AP" by category id, likewise


def check_labels(gt: GroundTruth) -> None:
    """Raise ValueError if an image lacks its lists of classes, or a class its frequency."""
    raise_first(gt.source, scoring_problems(gt.content))


def evaluate(
    engine: str,
    gt: GroundTruth,
    truth: Sequence[dict],
    results: Sequence[dict],
    iou_type: str,
    image_ids: Sequence[int | str] | None,
) -> Scores:
    """Score one result type; arguments as for `engines.evaluate`, errors of `check_labels`."""
    check_labels(gt)
    chosen = None if image_ids is None else set(image_ids)
    images = {e["id"]: e for e in gt.content["images"] if chosen is None or e["id"] in chosen}
    # The package leaves out everything without area, and knows no crowds.
    objects = [e | {"iscrowd": 0} for e in truth if e["image_id"] in images and e["area"] > 0]
    found = _scored([e for e in results if e["image_id"] in images], objects, images)
    of_class = _by_category(objects), _by_category(found)
    frequencies = {entry["id"]: entry["frequency"] for entry in gt.content["categories"]}
    tables = {}
    for category_id in sorted(frequencies):
        own_objects, own_found = (group.get(category_id, []) for group in of_class)
        if not own_objects:
            continue
        own_images = {entry["image_id"] for entry in [*own_objects, *own_found]}
        content = {
            "images": [images[i] for i in own_images],
            "categories": [{"id": category_id}],
        }
        crowds = _crowds(own_found, images, iou_type, first_id=len(truth) + 1)
        given = [*own_objects, *crowds], own_found, iou_type, None
        evaluation = engines.evaluate(engine, content, *given, (1, 10, MAX_DETECTIONS))
        values = evaluation.eval
        tables[category_id] = values["precision"][:, :, 0, :, -1], values["recall"][:, 0, :, -1]
    aps = {i: engines.mean(tables[i][0][..., 0]) if i in tables else -1.0 for i in frequencies}
    return Scores(_metrics(tables, frequencies), {i: {"AP": ap} for i, ap in aps.items()})


def _scored(
    results: Sequence[dict], objects: Sequence[dict], images: dict[int | str, dict]
) -> list[dict]:
    """Return the best detections of each image, of the classes that it was searched for."""
    searched = {i: set(entry[ABSENT]) for i, entry in images.items()}
    for entry in objects:
        searched[entry["image_id"]].add(entry["category_id"])
    of_image = defaultdict(list)
    for entry in results:
        of_image[entry["image_id"]].append(entry)
    kept = []
    for image_id, found in of_image.items():
        best = sorted(found, key=lambda entry: -entry["score"])[:MAX_DETECTIONS]
        kept += [e for e in best if e["area"] > 0 and e["category_id"] in searched[image_id]]
    return kept


def _by_category(entries: Sequence[dict]) -> dict[int | str, list[dict]]:
    groups = defaultdict(list)
    for entry in entries:
        groups[entry["category_id"]].append(entry)
    return groups


def _crowds(
    results: Sequence[dict], images: dict[int | str, dict], iou_type: str, first_id: int
) -> Iterator[dict]:
    """Yield a crowd over each image with detections of a class that is not exhaustive in it.

    Detections without an object lie inside the crowd, so they match it and are ignored.
    """
    pairs = {(entry["image_id"], entry["category_id"]): None for entry in results}
    for number, (image_id, category_id) in enumerate(pairs, start=first_id):
        image = images[image_id]
        if category_id not in image[NOT_EXHAUSTIVE]:
            continue
        crowd: dict[str, Any] = {"id": number, "image_id": image_id, "category_id": category_id}
        crowd |= {"iscrowd": 1, "area": 1.0, "bbox": [-_FAR, -_FAR, 2 * _FAR, 2 * _FAR]}
        if iou_type != BOX:
            height, width = int(image["height"]), int(image["width"])
            code = {"size": [height, width], "counts": [0, height * width]}
            crowd["segmentation"] = coco_mask.frPyObjects(code, height, width)
        yield crowd


def _metrics(
    tables: dict[int | str, tuple[np.ndarray, np.ndarray]], frequencies: dict[int | str, str]
) -> dict[str, float]:
    """Return `METRICS` of precision [IoU, recall, area] and recall [IoU, area] by category."""
    precisions, recalls = zip(*tables.values(), strict=True) if tables else ((), ())
    precision = np.stack([np.full((10, 101, 4), -1.0), *precisions], axis=2)
    recall = np.stack([np.full((10, 4), -1.0), *recalls], axis=1)
    overall = engines.summary(precision, recall)
    groups = np.array(["", *(frequencies[i] for i in tables)])
    of_groups = {f"AP{g}": engines.mean(precision[:, :, groups == g, 0]) for g in FREQUENCIES}
    values = overall | of_groups | {"ARmax300": overall["AR"]}
    return {name: values[name] for name in METRICS}
