"""COCO ground truth of any dataset, as pycocotools scores against it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mask_rcnn_jax.annotations.lvis import IMAGE_KEYS
from mask_rcnn_jax.annotations.reader import GroundTruth, read_ground_truth
from mask_rcnn_jax.annotations.segmentation import Segmentation
from mask_rcnn_jax.data.coco import CocoDataset
from mask_rcnn_jax.data.dataset import (
    Dataset,
    categories,
    category_ids,
    is_boxes_only,
    keypoints,
)
from mask_rcnn_jax.data.packed import LABELS, PackedImages


def ground_truth(dataset: Dataset) -> GroundTruth:
    """Read the dataset's COCO json again, or make the same content for one without a json, and for
    one whose classes have other numbers than its json's."""
    source, options = ground_truth_source(dataset)
    return read_ground_truth(source, **options)


def ground_truth_source(dataset: Dataset) -> tuple[str | dict[str, Any], dict[str, Any]]:
    """Return the arguments of `read_ground_truth` for the ground truth of a dataset."""
    source = dataset.json_path if type(dataset) is CocoDataset else coco_content(dataset)
    skip_bad, boxes_only = getattr(dataset, "bad_annotations", "") == "skip", is_boxes_only(dataset)
    rules = {"scoring": True, "boxes_only": boxes_only, "skip_bad": skip_bad}
    return source, rules | {"keypoints": keypoints(dataset).names}


def coco_content(dataset: Dataset) -> dict[str, Any]:
    """Return the images, categories and annotations of a dataset as a COCO json holds them."""
    ids, annotations = category_ids(dataset), []
    for record in dataset.images:
        for annotation in record.annotations:
            x1, y1, x2, y2 = (float(value) for value in annotation.box)
            entry = {
                "id": len(annotations) + 1,
                "image_id": record.id,
                "category_id": ids[annotation.class_index - 1],
                "bbox": [x1, y1, x2 - x1, y2 - y1],
                "area": float(annotation.area),
                "iscrowd": int(annotation.iscrowd),
                "segmentation": _as_json(annotation.segmentation),
            }
            if annotation.keypoints is not None:
                entry |= _points_as_json(annotation.keypoints, keypoints(dataset).offset)
            annotations.append(entry)
    images = [
        {"id": r.id, "file_name": str(r.file_name), "height": r.height, "width": r.width}
        for r in dataset.images
    ]
    content = {"images": images, "categories": categories(dataset), "annotations": annotations}
    if isinstance(dataset.images, PackedImages) and dataset.images.has_labels:
        _add_labels(content, dataset.images, ids)
    return content


def _add_labels(
    content: dict[str, Any], images: PackedImages, category_ids: Sequence[int | str]
) -> None:
    """Add LVIS's labels of the images and classes."""
    for index, entry in enumerate(content["images"]):
        for name, key in zip(LABELS, IMAGE_KEYS, strict=True):
            entry[key] = [category_ids[k - 1] for k in images.labels(name, index)]
    for class_index, entry in enumerate(content["categories"], start=1):
        if frequency := images.frequency(class_index):
            entry["frequency"] = frequency


def _points_as_json(points: np.ndarray, offset: float) -> dict[str, Any]:
    labeled = points[:, 2] > 0
    plain = points - np.outer(labeled, (offset, offset, 0))
    values = plain.astype(np.float32).ravel().tolist()
    return {"keypoints": values, "num_keypoints": int(labeled.sum())}


def _as_json(segmentation: Segmentation) -> list | dict[str, Any]:
    if not isinstance(segmentation, dict):
        return [part.tolist() for part in segmentation]
    counts = segmentation["counts"]
    counts = counts.decode("ascii") if isinstance(counts, bytes) else counts
    return {"size": list(segmentation["size"]), "counts": counts}
