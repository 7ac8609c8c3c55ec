"""COCO annotations and results, checked and completed for pycocotools, which does neither."""

import math

from pycocotools import mask as coco_mask

from mask_rcnn_jax.rle import run_lengths


def check_ground_truth(gt: object, source: str) -> None:
    """Says which key is missing where the ground truth is not COCO."""
    for section, keys in (
        ("images", ("id",)),
        ("categories", ("id",)),
        ("annotations", ("image_id", "category_id")),
    ):
        if not isinstance(gt, dict) or section not in gt:
            raise ValueError(f"{source}: not a COCO instances json: it has no {section!r}")
        for i, entry in enumerate(gt[section]):
            for key in keys:
                if key not in entry:
                    raise ValueError(f"{source}: entry {i} of {section!r} has no {key!r}")
    known = {image["id"] for image in gt["images"]}
    for i, annotation in enumerate(gt["annotations"]):
        if annotation["image_id"] not in known:
            raise ValueError(
                f"{source}: entry {i} of 'annotations' is of image {annotation['image_id']!r}, "
                "which is not in 'images'"
            )


def fill_annotations(gt: dict, iou_type: str, source: str, skip_bad: bool) -> list[dict]:
    """Copies of the ground truth's annotations with every key that pycocotools reads."""
    sizes = _image_sizes(gt)
    filled = []
    for position, annotation in enumerate(gt["annotations"]):
        try:
            annotation = _fill_annotation(annotation, sizes[annotation["image_id"]], iou_type)
        except ValueError as error:
            if skip_bad:
                continue
            name = annotation.get("id", f"number {position}, which has no id,")
            raise ValueError(f"{source}: annotation {name} {error}") from error
        if skip_bad and min(annotation["bbox"][2:]) == 0:
            continue
        # Numbered anew from 1, because pycocotools takes a match with annotation 0 for no match.
        filled.append({**annotation, "id": len(filled) + 1})
    return filled


def _image_sizes(gt: dict) -> dict[int | str, tuple[int, int]]:
    """(height, width) per image id, zeros where the json does not say."""
    return {
        image["id"]: (int(image.get("height", 0)), int(image.get("width", 0)))
        for image in gt["images"]
    }


def _fill_annotation(annotation: dict, size: tuple[int, int], iou_type: str) -> dict:
    """One annotation with `bbox`, `area`, `iscrowd` and, for masks, a run-length code."""
    annotation = {**annotation, "iscrowd": int(annotation.get("iscrowd", 0))}
    if iou_type == "segm" or "bbox" not in annotation or "area" not in annotation:
        if annotation.get("segmentation"):
            code = _ground_truth_code(annotation["segmentation"], *size)
            annotation.setdefault("bbox", coco_mask.toBbox(code).tolist())
            annotation.setdefault("area", float(coco_mask.area(code)))
            annotation["segmentation"] = code
        elif iou_type == "segm":
            raise ValueError("has no 'segmentation', which mask scores need")
    if not is_box(annotation.get("bbox")):
        raise ValueError(f"has the box {annotation.get('bbox')!r}, expected [x, y, width, height]")
    annotation.setdefault("area", annotation["bbox"][2] * annotation["bbox"][3])
    return annotation


def _ground_truth_code(segmentation: list | dict, height: int, width: int) -> dict:
    """The compressed run-length code of polygons or of either kind of RLE."""
    if not height or not width:
        raise ValueError("is of an image without 'height' or 'width'")
    if isinstance(segmentation, list):
        if any(not isinstance(part, list) or len(part) < 6 for part in segmentation):
            raise ValueError("has a polygon of fewer than three points")
        return coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width))
    return _checked_code(segmentation, height, width)


def _checked_code(code: object, height: int, width: int) -> dict:
    """A run-length code, compressed if it is not, that covers the picture and no more.

    Checked because pycocotools would not: it loops for ever over a code that ends too early.
    """
    if not isinstance(code, dict) or not {"size", "counts"} <= code.keys():
        raise ValueError("has a segmentation that is neither polygons nor an RLE (size, counts)")
    if list(code["size"]) != [height, width]:
        raise ValueError(f"has an RLE of size {code['size']}, its image is {[height, width]}")
    runs = run_lengths(code)
    if runs.min(initial=0) < 0 or runs.sum() != height * width:
        raise ValueError(f"has a broken RLE, its runs are not {height} x {width} pixels in all")
    if isinstance(code["counts"], list):
        return coco_mask.frPyObjects(code, height, width)
    return code


def fill_results(gt: dict, results: list[dict], iou_type: str) -> list[dict]:
    """Copies of the results with every key that pycocotools reads, and no other.

    Only one type's geometry stays: were the box left beside the mask, pycocotools would take the
    box's area for the mask's when it sorts into small, medium and large.
    """
    sizes = _image_sizes(gt)
    key = "bbox" if iou_type == "bbox" else "segmentation"
    filled = []
    for i, result in enumerate(results):
        if result["image_id"] not in sizes:
            raise ValueError(
                f"results: entry {i} is of image {result['image_id']!r}, "
                f"which is not among the {len(sizes)} images of the ground truth"
            )
        geometry = result[key]
        if iou_type == "bbox":
            box, area = geometry, geometry[2] * geometry[3]
        else:
            try:
                geometry = _checked_code(geometry, *sizes[result["image_id"]])
            except ValueError as error:
                raise ValueError(f"results: entry {i} {error}") from error
            box, area = coco_mask.toBbox(geometry).tolist(), float(coco_mask.area(geometry))
        entry = {k: result[k] for k in ("image_id", "category_id", "score")}
        entry |= {"id": i + 1, "iscrowd": 0, "bbox": box, "area": area, key: geometry}
        filled.append(entry)
    return filled


def is_box(value: object) -> bool:
    """Whether it is a list of four finite numbers, the last two not negative."""
    return (
        isinstance(value, list)
        and len(value) == 4
        and all(isinstance(number, int | float) and math.isfinite(number) for number in value)
        and min(value[2:]) >= 0
    )
