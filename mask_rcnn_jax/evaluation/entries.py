"""Validate and complete COCO annotations and results, which pycocotools does not do."""

import math
from typing import Any

from pycocotools import mask as coco_mask

from mask_rcnn_jax.rle import run_lengths


def check_ground_truth(gt: Any, source: str) -> None:
    """Raise ValueError naming the missing key if the ground truth is not COCO."""
    annotation_keys = ("image_id", "category_id")
    required = {"images": ("id",), "categories": ("id",), "annotations": annotation_keys}
    for section, keys in required.items():
        if not isinstance(gt, dict) or section not in gt:
            raise ValueError(f"{source}: not a COCO instances json: it has no {section!r}")
        for i, entry in enumerate(gt[section]):
            for key in keys:
                if key not in entry:
                    raise ValueError(f"{source}: entry {i} of {section!r} has no {key!r}")
    known = {image["id"] for image in gt["images"]}
    for i, annotation in enumerate(gt["annotations"]):
        if annotation["image_id"] not in known:
            where = f"{source}: entry {i} of 'annotations' refers to image"
            raise ValueError(f"{where} {annotation['image_id']!r}, which is not in 'images'")


def fill_annotations(gt: dict, iou_type: str, source: str, skip_bad: bool) -> list[dict]:
    """Copy the ground truth's annotations, adding every key that pycocotools reads."""
    sizes = _image_sizes(gt)
    filled = []
    for position, annotation in enumerate(gt["annotations"]):
        try:
            annotation = _fill_annotation(annotation, sizes[annotation["image_id"]], iou_type)
        except ValueError as error:
            if skip_bad:
                continue
            name = annotation.get("id", f"number {position} (no id)")
            raise ValueError(f"{source}: annotation {name} {error}") from error
        if skip_bad and min(annotation["bbox"][2:]) == 0:
            continue
        # Renumber from 1: pycocotools treats a match with annotation 0 as no match.
        filled.append({**annotation, "id": len(filled) + 1})
    return filled


def _image_sizes(gt: dict) -> dict[int | str, tuple[int, int]]:
    """(height, width) per image id; 0 if missing from the json."""
    images = gt["images"]
    return {i["id"]: (int(i.get("height", 0)), int(i.get("width", 0))) for i in images}


def _fill_annotation(annotation: dict, size: tuple[int, int], iou_type: str) -> dict:
    """Add `bbox`, `area`, `iscrowd` and, for masks, an RLE to an annotation."""
    annotation = {**annotation, "iscrowd": int(annotation.get("iscrowd", 0))}
    if iou_type == "segm" or "bbox" not in annotation or "area" not in annotation:
        if annotation.get("segmentation"):
            rle = _ground_truth_rle(annotation["segmentation"], *size)
            annotation.setdefault("bbox", coco_mask.toBbox(rle).tolist())
            annotation.setdefault("area", float(coco_mask.area(rle)))
            annotation["segmentation"] = rle
        elif iou_type == "segm":
            raise ValueError("has no 'segmentation', required for mask scores")
    if not is_box(annotation.get("bbox")):
        raise ValueError(f"has the box {annotation.get('bbox')!r}, expected [x, y, width, height]")
    annotation.setdefault("area", annotation["bbox"][2] * annotation["bbox"][3])
    return annotation


def _ground_truth_rle(segmentation: list | dict, height: int, width: int) -> dict:
    """Compressed RLE of polygons or of either kind of RLE."""
    if not height or not width:
        raise ValueError("refers to an image without 'height' or 'width'")
    if isinstance(segmentation, list):
        if any(not isinstance(part, list) or len(part) < 6 for part in segmentation):
            raise ValueError("has a polygon of fewer than three points")
        return coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width))
    return _checked_rle(segmentation, height, width)


def _checked_rle(rle: object, height: int, width: int) -> dict:
    """Return a compressed RLE after checking that it covers exactly the image.

    pycocotools does not check: it loops forever over an RLE that ends too early.
    """
    if not isinstance(rle, dict) or not {"size", "counts"} <= rle.keys():
        raise ValueError("has a segmentation that is neither polygons nor an RLE (size, counts)")
    if list(rle["size"]) != [height, width]:
        raise ValueError(f"has an RLE of size {rle['size']}, its image is {[height, width]}")
    runs = run_lengths(rle)
    if runs.min(initial=0) < 0 or runs.sum() != height * width:
        raise ValueError(f"has a broken RLE, its runs do not add up to {height} x {width} pixels")
    return coco_mask.frPyObjects(rle, height, width) if isinstance(rle["counts"], list) else rle


def fill_results(gt: dict, results: list[dict], iou_type: str) -> list[dict]:
    """Copy the results with exactly the keys that pycocotools reads.

    Only the scored geometry is kept: given a box beside a mask, pycocotools would sort into small,
    medium and large by the box area.
    """
    sizes = _image_sizes(gt)
    key = "bbox" if iou_type == "bbox" else "segmentation"
    filled = []
    for i, result in enumerate(results):
        if result["image_id"] not in sizes:
            absent = f"which is not among the {len(sizes)} images of the ground truth"
            raise ValueError(f"results: entry {i} refers to image {result['image_id']!r}, {absent}")
        geometry = result[key]
        if iou_type == "bbox":
            box, area = geometry, geometry[2] * geometry[3]
        else:
            try:
                geometry = _checked_rle(geometry, *sizes[result["image_id"]])
            except ValueError as error:
                raise ValueError(f"results: entry {i} {error}") from error
            box, area = coco_mask.toBbox(geometry).tolist(), float(coco_mask.area(geometry))
        entry = {k: result[k] for k in ("image_id", "category_id", "score")}
        entry |= {"id": i + 1, "iscrowd": 0, "bbox": box, "area": area, key: geometry}
        filled.append(entry)
    return filled


def is_box(value: object) -> bool:
    """Check for a list of four finite numbers, the last two not negative."""
    return (
        isinstance(value, list)
        and len(value) == 4
        and all(isinstance(number, int | float) and math.isfinite(number) for number in value)
        and min(value[2:]) >= 0
    )
