"""Complete checked COCO annotations and check results, which pycocotools does not do."""

from typing import Any

from pycocotools import mask as coco_mask

from mask_rcnn_jax.annotations.checks import is_number, show
from mask_rcnn_jax.annotations.faults import BOX, KEYPOINTS, MASK, box_fault
from mask_rcnn_jax.annotations.ids import is_zero
from mask_rcnn_jax.annotations.reader import GroundTruth
from mask_rcnn_jax.annotations.segmentation import code_box, rle_fault, segmentation_fault, to_rle
from mask_rcnn_jax.evaluation.notes import absent_image


def fill_annotations(truth: GroundTruth, iou_type: str) -> list[dict]:
    """Return the annotations to score, with every key that pycocotools reads."""
    filled = []
    for entry in truth.usable(iou_type):
        box, area, code = entry.get("bbox"), entry.get("area"), None
        if entry.get("segmentation") and (iou_type == MASK or box is None or area is None):
            size = truth.sizes[entry["image_id"]]
            assert size is not None  # without one, the check leaves no segmentation
            code = to_rle(entry["segmentation"], *size)
            box = code_box(code) if box is None else box
            area = float(coco_mask.area(code)) if area is None else area
        assert box is not None  # the check asks for a box or a segmentation
        area = box[2] * box[3] if area is None else area
        # Numbered anew, since ids may be strings or absent. But pycocotools takes a match with
        # annotation 0 for none.
        number = 0 if is_zero(entry.get("id")) else len(filled) + 1
        known = {key: entry[key] for key in ("image_id", "category_id")}
        crowd = int(entry.get("iscrowd", 0))
        known |= {"id": number, "iscrowd": crowd, "bbox": box, "area": area}
        known |= {"segmentation": code} if iou_type == MASK else {}
        filled.append(known | (_keypoints(truth, entry) if iou_type == KEYPOINTS else {}))
    return filled


def _keypoints(truth: GroundTruth, entry: dict[str, Any]) -> dict[str, Any]:
    assert truth.layout is not None
    points = truth.layout.pick(entry)
    count = sum(v > 0 for v in points[2::3])
    # Of all of a json's points pycocotools takes the number that it states.
    is_all = len(points) == len(entry.get("keypoints") or ())
    stated = entry.get("num_keypoints") if is_all else None
    return {"keypoints": points, "num_keypoints": count if stated is None else stated}


def result_problem(result: Any) -> str | None:
    """Return why a result cannot be scored, whatever the ground truth."""
    if not isinstance(result, dict):
        return "is not an object"
    for key in ("image_id", "category_id", "score"):
        if key not in result:
            return f"has no {key!r}"
    for key in ("image_id", "category_id"):
        if not is_number(result[key]) and not isinstance(result[key], str):
            return f"has {key!r} {show(result[key])}, expected a number or a string"
    score = result["score"]
    if not (is_number(score) and -1e300 < score < 1e300):
        return f"has the score {show(score)}, expected a finite number"
    if not result.keys() & {"bbox", "segmentation", "keypoints"}:
        return "has neither 'bbox' nor 'segmentation'"
    if "bbox" in result and (fault := box_fault(result["bbox"], None)):
        return f"has a 'bbox' that cannot be scored: {fault}"
    return None


def fill_results(truth: GroundTruth, results: list[dict], iou_type: str, source: str) -> list[dict]:
    """Copy the results with exactly the keys that pycocotools reads.

    Only the scored geometry is kept: given a box beside a mask, pycocotools would sort into small,
    medium and large by the box area.

    Args:
        truth: has the images to which results refer.
        source: names the results in messages.
    """
    key = "bbox" if iou_type == BOX else "segmentation"
    filled, sizes = [], truth.sizes
    for i, result in enumerate(results):
        where, image_id = f"{source}: entry {i}", result["image_id"]
        check_image(truth, result, where)
        geometry = result[key]
        if iou_type == BOX:
            box, area = geometry, geometry[2] * geometry[3]
        else:
            size = sizes[image_id]
            if size is None:
                raise ValueError(f"{where} refers to an image without 'height' or 'width'")
            geometry = _with_areas(geometry)
            if fault := _mask_fault(geometry, *size):
                raise ValueError(f"{where}: {fault}")
            geometry = to_rle(geometry, *size)
            box, area = code_box(geometry), float(coco_mask.area(geometry))
        entry = {k: result[k] for k in ("image_id", "category_id", "score")}
        entry |= {"id": i + 1, "iscrowd": 0, "bbox": box, "area": area, key: geometry}
        filled.append(entry)
    return filled


def check_image(truth: GroundTruth, result: dict[str, Any], where: str) -> None:
    """Raise ValueError if a result is of no image of the ground truth."""
    if (image_id := result["image_id"]) not in truth.sizes:
        absent = absent_image(image_id, truth)
        raise ValueError(f"{where} refers to image {show(image_id)}, {absent}")


def _with_areas(segmentation: Any) -> Any:
    """Leave out points and lines, which outlines traced in masks have, beside polygons."""
    if not isinstance(segmentation, list) or len(segmentation) < 2:
        return segmentation
    kept = [part for part in segmentation if not (isinstance(part, list) and len(part) in (2, 4))]
    return kept or segmentation


def _mask_fault(segmentation: Any, height: int, width: int) -> str | None:
    """Return why a result's polygons or RLE cannot be scored. A mask may have no pixel."""
    if isinstance(segmentation, list):
        return segmentation_fault(segmentation, height, width)
    return rle_fault(segmentation, height, width)
