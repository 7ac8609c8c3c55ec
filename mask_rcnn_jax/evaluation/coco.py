"""Detections to COCO results, and COCO results to the 24 published numbers.

COCO's own conventions live here and nowhere else: boxes as (x, y, width, height) in pixels of the
original picture, the category ids of the json, masks as run-length codes.
"""

import contextlib
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from mask_rcnn_jax.evaluation.entries import (
    check_ground_truth,
    fill_annotations,
    fill_results,
    is_box,
)
from mask_rcnn_jax.evaluation.paste import paste_mask
from mask_rcnn_jax.rle import encode_window
from mask_rcnn_jax.structures import Detections

# The order in which pycocotools' COCOeval.summarize() leaves its twelve statistics.
METRIC_NAMES = (
    *("AP", "AP50", "AP75", "APs", "APm", "APl"),
    *("ARmax1", "ARmax10", "ARmax100", "ARs", "ARm", "ARl"),
)
# Per type of result: the prefix of its metrics' names and the key that holds its geometry.
_TYPES = {"bbox": ("", "bbox"), "segm": ("mask_", "segmentation")}


def to_coco_results(
    detections: Detections,
    scales: np.ndarray,
    image_ids: Sequence[int | str | None],
    image_sizes_original: Sequence[tuple[int, int]],
    category_ids: Sequence[int | str],
    *,
    paste: str = "continuous",
    inclusive_boxes: bool = False,
) -> tuple[list[dict], list[dict]]:
    """Turns a batch of detections into COCO results, in pixels of the original pictures.

    Args:
        detections: a batch [B, D, ...] with boxes in network pixels.
        scales: [B, 2] (y, x) network pixels per original pixel.
        image_ids: per image the id of the json, or None for an image that only fills the batch.
        image_sizes_original: per image (height, width); not read where the id is None.
        category_ids: the json's id of class k is `category_ids[k - 1]`.
        paste: how masks get into the picture, see `paste.paste_mask`.
        inclusive_boxes: boxes end at their last pixel: width = x2 - x1 + 1.

    Returns:
        Box results and mask results, the same detections in the same order.
    """
    detections = Detections(**{k: np.asarray(v) for k, v in vars(detections).items()})
    bbox_results, segm_results = [], []
    for b, image_id in enumerate(image_ids):
        if image_id is None:
            continue
        height, width = (int(side) for side in image_sizes_original[b])
        boxes = _to_original(detections.boxes[b], scales[b])
        for d in np.flatnonzero(detections.valid[b]):
            entry = {
                "image_id": image_id,
                "category_id": category_ids[int(detections.classes[b][d]) - 1],
                "score": float(detections.scores[b][d]),
            }
            # The mask is pasted with the whole box: clipping the box first would squeeze it.
            crop, origin = paste_mask(detections.masks[b][d], boxes[d], height, width, rule=paste)
            code = encode_window(crop, origin, height, width)
            bbox = _clipped_xywh(boxes[d], height, width, float(inclusive_boxes))
            bbox_results.append({**entry, "bbox": bbox})
            segm_results.append({**entry, "segmentation": code})
    return bbox_results, segm_results


def _to_original(boxes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Boxes [D, 4] from network pixels to original pixels; scale is (y, x)."""
    scale_y, scale_x = np.asarray(scale, np.float64)
    return boxes.astype(np.float64) / np.array([scale_x, scale_y, scale_x, scale_y])


def _clipped_xywh(box: np.ndarray, height: int, width: int, offset: float) -> list[float]:
    """(x1, y1, x2, y2) clipped to the picture, as COCO's (x, y, width, height)."""
    x1, x2 = np.clip(box[[0, 2]], 0, width - offset)
    y1, y2 = np.clip(box[[1, 3]], 0, height - offset)
    return [round(float(value), 3) for value in (x1, y1, x2 - x1 + offset, y2 - y1 + offset)]


def load_results(path: str | os.PathLike) -> list[dict]:
    """Reads a COCO results file: a json list with one object per detection."""
    results = _read_json(path)
    if not isinstance(results, list):
        raise ValueError(f"{path}: expected a json list of detections (COCO results format)")
    for i, result in enumerate(results):
        if not isinstance(result, dict):
            raise ValueError(f"{path}: entry {i} is not an object")
        for key in ("image_id", "category_id", "score"):
            if key not in result:
                raise ValueError(f"{path}: entry {i} has no {key!r}")
        if "bbox" not in result and "segmentation" not in result:
            raise ValueError(f"{path}: entry {i} has neither 'bbox' nor 'segmentation'")
        if "bbox" in result and not is_box(result["bbox"]):
            raise ValueError(
                f"{path}: 'bbox' of entry {i} is {result['bbox']!r}, expected [x, y, width, height]"
            )
    for key in ("bbox", "segmentation"):
        _check_uniform(path, results, key)
    return results


def split_results(results: list[dict]) -> tuple[list[dict] | None, list[dict] | None]:
    """Box results and mask results of one file, None for a type that it does not hold.

    A file without detections counts as box results, so that it scores zero and not nothing.
    """
    if not results:
        return [], None
    return tuple(results if key in results[0] else None for _, key in _TYPES.values())


def score(
    gt: str | os.PathLike | dict,
    bbox_results: list[dict] | None,
    segm_results: list[dict] | None,
    *,
    image_ids: Sequence[int | str] | None = None,
    skip_bad: bool = False,
    examine: Callable[[COCOeval], None] | None = None,
) -> dict:
    """Scores COCO results against COCO ground truth, exactly as pycocotools does.

    Args:
        gt: a COCO instances json or its content. Annotations may lack `id`, `area`, `iscrowd`.
        bbox_results, segm_results: COCO results; None leaves that type out, an empty list is
            scored (as zero).
        image_ids: score on these images only; default is every image of the ground truth.
        skip_bad: leave out ground truth of unusable geometry; default is a ValueError.
        examine: is shown pycocotools' evaluation of each type, with its arrays, boxes first; it is
            not kept, since it may take gigabytes.

    Returns:
        The 12 numbers of METRIC_NAMES for boxes, the same with `mask_` in front for masks, and
        "per_category": {name: {"AP": ..., "mask_AP": ...}}. As in pycocotools, -1 stands where
        the ground truth has nothing to measure.
    """
    source = "ground truth" if isinstance(gt, dict) else str(gt)
    content = gt if isinstance(gt, dict) else _read_json(gt)
    check_ground_truth(content, source)
    names = category_names(content["categories"])
    metrics, per_category = {}, {name: {} for name in names.values()}
    for iou_type, results in (("bbox", bbox_results), ("segm", segm_results)):
        if results is None:
            continue
        prefix, key = _TYPES[iou_type]
        truth = fill_annotations(content, iou_type, source, skip_bad)
        evaluation = _evaluate(content, truth, results, iou_type, image_ids)
        values = zip(METRIC_NAMES, evaluation.stats, strict=True)
        metrics |= {prefix + name: float(value) for name, value in values}
        for category_id, ap in _category_aps(evaluation).items():
            per_category[names[category_id]][prefix + "AP"] = ap
        if examine is not None:
            examine(evaluation)
    return {**metrics, "per_category": per_category}


def format_table(metrics: dict) -> str:
    """The COCO table as text, boxes and masks side by side, then AP per category."""
    prefixes = [prefix for prefix, _ in _TYPES.values() if prefix + "AP" in metrics]
    titles = ["box" if prefix == "" else "mask" for prefix in prefixes]
    lines = [_row("", titles)]
    for name, meaning in zip(METRIC_NAMES, _METRIC_MEANINGS, strict=True):
        label = f"{name:<9}{meaning}"
        lines.append(_row(label, [f"{metrics[prefix + name]:.3f}" for prefix in prefixes]))
    lines.append(_row("AP per category", titles))
    for category, aps in metrics["per_category"].items():
        cells = [aps[prefix + "AP"] for prefix in prefixes]
        lines.append(_row(f"  {category}", ["-" if ap < 0 else f"{ap:.3f}" for ap in cells]))
    return "\n".join(lines)


_METRIC_MEANINGS = (
    *("IoU 0.50:0.95", "IoU 0.50", "IoU 0.75"),
    *("IoU 0.50:0.95  small (< 32^2 px)", "IoU 0.50:0.95  medium", "IoU 0.50:0.95  large (> 96^2)"),
    *("1 detection per image", "10 detections per image", "100 detections per image"),
    *("100 detections  small", "100 detections  medium", "100 detections  large"),
)


def _row(label: str, cells: list[str]) -> str:
    return f"{label:<44}" + "".join(f"{cell:>8}" for cell in cells)


def _evaluate(
    gt: dict, truth: list[dict], results: list[dict], iou_type: str, image_ids: Sequence | None
) -> COCOeval:
    """Runs pycocotools for one type of result, without its printing."""
    with contextlib.redirect_stdout(io.StringIO()):
        coco_gt = index_annotations(gt, truth)
        coco_results = index_annotations(gt, fill_results(gt, results, iou_type))
        evaluation = COCOeval(coco_gt, coco_results, iou_type)
        if image_ids is not None:
            evaluation.params.imgIds = sorted(set(image_ids))
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation


def index_annotations(gt: dict, annotations: list[dict]) -> COCO:
    """A pycocotools index of these annotations on the ground truth's images and categories."""
    coco = COCO()
    coco.dataset = {
        "images": gt["images"],
        "categories": gt["categories"],
        "annotations": annotations,
    }
    coco.createIndex()
    return coco


def _category_aps(evaluation: COCOeval) -> dict[int, float]:
    """AP at IoU 0.50:0.95 over all areas per category id; -1 without ground truth."""
    precision = evaluation.eval["precision"][:, :, :, 0, -1]  # [IoU, recall, category]
    aps = {}
    for k, category_id in enumerate(evaluation.params.catIds):
        measured = precision[:, :, k][precision[:, :, k] > -1]
        aps[category_id] = float(measured.mean()) if measured.size else -1.0
    return aps


def category_names(categories: list[dict]) -> dict[int, str]:
    """Name per category id; where two share one name, the id is added to tell them apart."""
    names = {category["id"]: str(category.get("name", category["id"])) for category in categories}
    count = Counter(names.values())
    return {i: name if count[name] == 1 else f"{name} ({i})" for i, name in names.items()}


def _check_uniform(path: str | os.PathLike, results: list[dict], key: str) -> None:
    """All detections of a file have this key, or none has."""
    having = sum(key in result for result in results)
    if 0 < having < len(results):
        first = next(i for i, result in enumerate(results) if key not in result)
        raise ValueError(f"{path}: entry {first} has no {key!r}, though {having} others have")


def _read_json(path: str | os.PathLike) -> object:
    with open(path, encoding="utf-8") as file:
        try:
            return json.load(file)
        except ValueError as error:  # json's and unicode's decoding errors
            raise ValueError(f"{path}: not readable as json: {error}") from error
