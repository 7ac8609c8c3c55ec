"""Example images of a dataset with their objects drawn, as many as a page has room for."""

from collections import Counter
from typing import NamedTuple

import numpy as np

from mask_rcnn_jax import opencv as cv2
from mask_rcnn_jax.data.coco import CocoDataset
from mask_rcnn_jax.data.dataset import Annotation
from mask_rcnn_jax.data.segmentation import crop_mask
from mask_rcnn_jax.evaluation.visualize import draw_instances, trace_masks
from mask_rcnn_jax.report.error_images import data_uri
from mask_rcnn_jax.report.set_objects import SetObjects

PER_CLASS, FEW, MAX_SHOWN = 3, 12, 48  # images: of a class, of few classes, in total
SIDE = 400  # longer side of an image in pixels
MAX_BYTES = 2_300_000  # of all images, as text
MAX_DRAWN = 300  # objects of an image, the largest
MASK_SIDE = 112


class Example(NamedTuple):
    """An image on the page."""

    name: str  # file name
    size: tuple[int, int]  # (height, width) in the json
    classes: list[tuple[str, int]]  # class names and how often each occurs, crowds included
    uri: str | None  # JPEG; None if the image cannot be read


def examples(dataset: CocoDataset, objects: SetObjects) -> list[Example]:
    """Return drawn examples of all classes, fewer if they outgrow `MAX_BYTES`."""
    found, used = [], 0
    for index in chosen_images(objects):
        example = _example(dataset, index)
        used += len(example.uri or "")
        if used > MAX_BYTES:
            break
        found.append(example)
    return found


def chosen_images(objects: SetObjects) -> list[int]:
    """Choose up to `PER_CLASS` images of each class, rare classes first, spread over the set.

    With few classes, there are more of each, `FEW` in total. An image counts for all of its
    classes. The first image of every class comes before any second one. Without objects, the first
    images are chosen.
    """
    pairs = objects.pairs()
    if not len(pairs):
        return list(range(min(FEW, len(objects.sizes))))
    pairs = pairs[np.argsort(pairs[:, 1], kind="stable")]
    classes, starts = np.unique(pairs[:, 1], return_index=True)
    members = np.split(pairs[:, 0], starts[1:])
    order = np.argsort([len(images) for images in members], kind="stable")
    classes_of: dict[int, list[int]] = {}
    for image, class_index in pairs.tolist():
        classes_of.setdefault(image, []).append(class_index)
    per_class = max(PER_CLASS, FEW // len(classes))
    chosen: dict[int, None] = {}
    shown: Counter[int] = Counter()
    for wanted in range(1, per_class + 1):
        for place in order:
            images, class_index = members[place], int(classes[place])
            if shown[class_index] >= min(wanted, len(images)):
                continue
            at = round((wanted - 1) * (len(images) - 1) / (per_class - 1))
            image = next(i for i in np.roll(images, -at).tolist() if i not in chosen)
            chosen[image] = None
            shown.update(classes_of[image])
            if len(chosen) == MAX_SHOWN:
                return list(chosen)
    return list(chosen)


def _example(dataset: CocoDataset, index: int) -> Example:
    record = dataset.images[index]
    names = Counter(dataset.class_names[a.class_index - 1] for a in record.annotations)
    size = record.height, record.width
    try:
        image = dataset.bands.to_rgb(dataset.decode(index))
    except (OSError, ValueError):
        return Example(record.file_name, size, names.most_common(), None)
    scale = min(SIDE / max(size), 2)
    shape = max(1, round(record.width * scale)), max(1, round(record.height * scale))
    method = cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC
    image = cv2.resize(image, shape, interpolation=method)
    drawn = sorted(record.annotations, key=lambda a: -a.area)[:MAX_DRAWN]
    boxes = np.array([a.box for a in drawn], np.float64).reshape(-1, 4) * scale
    masks = np.array([_mask(a, *size) for a in drawn]).reshape(-1, MASK_SIDE, MASK_SIDE)
    # A single class needs no names, which would cover small objects.
    labels = [dataset.class_names[a.class_index - 1] for a in drawn]
    labels = labels if len(dataset.class_names) > 1 else []
    outlines = trace_masks(masks / 255, boxes)
    image = draw_instances(image, boxes, labels, [""] * len(labels), outlines)
    return Example(record.file_name, size, names.most_common(), data_uri(image))


def _mask(annotation: Annotation, height: int, width: int) -> np.ndarray:
    """Crop an object's mask to its box; zeros for a box without a mask."""
    if not annotation.segmentation:
        return np.zeros((MASK_SIDE, MASK_SIDE), np.uint8)
    return crop_mask(annotation.segmentation, annotation.box, height, width, MASK_SIDE)
