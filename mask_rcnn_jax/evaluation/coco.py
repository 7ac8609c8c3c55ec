"""Convert detections to COCO results and compute the metrics of COCO, LVIS or microscopy.

In COCO results, boxes are (x, y, width, height) in original image pixels, category ids are those of
the json, and masks are RLE; `encode.py` makes them of our own.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from pycocotools.cocoeval import COCOeval

from mask_rcnn_jax.annotations.checks import show
from mask_rcnn_jax.annotations.faults import BOX, MASK
from mask_rcnn_jax.annotations.reader import GroundTruth, read_ground_truth, read_json
from mask_rcnn_jax.evaluation import cells, engines, entries, keypoints, lvis
from mask_rcnn_jax.evaluation.boundary import BOUNDARY
from mask_rcnn_jax.evaluation.encode import encode_image, split_images
from mask_rcnn_jax.evaluation.notes import COCO_DETECTIONS, scored_detections
from mask_rcnn_jax.evaluation.options import Scoring

if TYPE_CHECKING:  # scoring needs no JAX
    from mask_rcnn_jax.structures import Detections

# The twelve statistics of pycocotools' COCOeval.summarize(), in its order.
METRICS = {
    "AP": "IoU 0.50:0.95",
    "AP50": "IoU 0.50",
    "AP75": "IoU 0.75",
    "APs": "IoU 0.50:0.95  small (< 32^2 px)",
    "APm": "IoU 0.50:0.95  medium",
    "APl": "IoU 0.50:0.95  large (> 96^2)",
    "ARmax1": "1 detection per image",
    "ARmax10": "10 detections per image",
    "ARmax100": "100 detections per image",
    "ARs": "100 detections  small",
    "ARm": "100 detections  medium",
    "ARl": "100 detections  large",
}
METRIC_NAMES = tuple(METRICS)
PROTOCOLS = ("coco", "lvis", "cells")
COCO_RULES = Scoring()
# Title and width of a column of the table by its metrics' prefix.
_COLUMNS = {"": ("box", 8), "mask_": ("mask", 8), "boundary_": ("boundary", 10)}
# Metric name prefix and geometry key per result type.
_TYPES = {"bbox": ("", "bbox"), "segm": ("mask_", "segmentation")}


def to_coco_results(
    detections: "Detections",
    scales: np.ndarray,
    image_ids: Sequence[int | str | None],
    image_sizes_original: Sequence[tuple[int, int]],
    category_ids: Sequence[int | str],
    *,
    paste: str = "continuous",
    inclusive_boxes: bool = False,
) -> tuple[list[dict], list[dict]]:
    """Convert a batch of detections to COCO results in original image pixels.

    Args:
        detections: a batch [B, D, ...] with boxes in network pixels.
        scales: [B, 2] (y, x) network pixels per original pixel.
        image_ids: json id per image; None for an image that pads the batch.
        image_sizes_original: (height, width) per image; ignored for padding.
        category_ids: class k has the json id `category_ids[k - 1]`.
        paste: mask pasting rule, see `paste.paste_mask`.
        inclusive_boxes: x2 and y2 are the last pixels of a box, so width = x2 - x1 + 1.

    Returns:
        Box results and mask results for the same detections in the same order; no mask results
        without masks.
    """
    images = split_images(detections, scales, image_ids, image_sizes_original, category_ids)
    bbox_results, segm_results = [], []
    for image in images:
        bbox, segm = encode_image(image, paste, inclusive_boxes)
        bbox_results += bbox
        segm_results += segm
    return bbox_results, segm_results


def load_results(path: str | os.PathLike) -> list[dict]:
    """Read a COCO results file, a json list with one object per detection."""
    results = read_json(path)
    if not isinstance(results, list):
        raise ValueError(f"{path}: {_no_list(results)}")
    for i, result in enumerate(results):
        if problem := entries.result_problem(result):
            raise ValueError(f"{path}: entry {i} {problem}")
    for key in ("bbox", "segmentation", "keypoints"):
        lacking = [i for i, result in enumerate(results) if key not in result]
        if 0 < len(lacking) < len(results):
            others = len(results) - len(lacking)
            raise ValueError(f"{path}: entry {lacking[0]} has no {key!r}, but {others} others have")
    return results


def _no_list(content: Any) -> str:
    """Say what is there instead of a list of results."""
    expected = "expected a json list of detections (COCO results format)"
    if isinstance(content, dict) and "images" in content and "categories" in content:
        return f"a ground truth, {expected}"
    lists = (
        [k for k, v in content.items() if isinstance(v, list)] if isinstance(content, dict) else []
    )
    return expected + (f"; that under its key {show(lists[0])} may be meant" if lists else "")


def split_results(results: list[dict]) -> tuple[list[dict] | None, list[dict] | None]:
    """Return the box and the mask results of one file, None for an absent type, without keypoints.

    A file without detections counts as box results, which scores zero.
    """
    if not results:
        return [], None
    bbox, segm = (results if key in results[0] else None for _, key in _TYPES.values())
    return bbox, segm


def score(
    gt: str | os.PathLike | dict | GroundTruth,
    bbox_results: list[dict] | None,
    segm_results: list[dict] | None,
    *,
    image_ids: Sequence[int | str] | None = None,
    results_name: str = "results",
    rules: Scoring = COCO_RULES,
    detections_per_image: int = COCO_DETECTIONS,
    callback: Callable[[COCOeval], None] | None = None,
    keypoint_results: list[dict] | None = None,
) -> dict:
    """Score COCO results against COCO ground truth as pycocotools, or the lvis package, does.

    docs/annotations.md lists the few files for which the numbers differ, all of them on purpose.

    Args:
        gt: a COCO instances json, its content, or `read_ground_truth` of either with `scoring`.
            What cannot be scored raises ValueError, unless `skip_bad` was given there.
        bbox_results: COCO results; None skips the type, an empty list scores zero.
        segm_results: likewise.
        image_ids: images to score; default all images of the ground truth.
        results_name: names the results in messages, such as the path of their file.
        rules: the protocol, and the engine; both give the same bits.
        detections_per_image: K. Where an image holds more than 100 objects of a class, which are
            all that COCO scores, the same averages over K detections of a class are added.
        callback: called with pycocotools' evaluation of each type, boxes first, whatever the
            engine; not with "lvis". It is not kept, since its arrays may take gigabytes.
        keypoint_results: likewise, by COCO's rules with any protocol.

    Returns:
        The names in METRICS (with K also "AP@K", "AR@K" ..), or those in `lvis.METRICS`, for boxes,
        the same with `mask_` for masks, `keypoints.METRICS` with `keypoints_`, and "per_category":
        {name: {"AP": ..., "mask_AP": ...}}. With `rules.boundary`, also with `boundary_` for masks
        by their boundary IoU. As in pycocotools, a value is -1 if the ground truth has no objects
        for it. With the protocol "cells", also `cells.evaluate` of the masks, or else of the boxes,
        as "cells".
    """
    check_protocol(rules.protocol, callback is not None)
    if not isinstance(gt, GroundTruth):
        gt = read_ground_truth(gt, scoring=True)
    engine = "pycocotools" if callback else rules.engine
    engines.check_engine(engine)
    names = category_names(gt.content["categories"])
    metrics: dict[str, Any] = {}
    per_category: dict[str, dict[str, float]] = {name: {} for name in names.values()}
    kinds = [(BOX, "", bbox_results), (MASK, "mask_", segm_results)]
    kinds += [(BOUNDARY, "boundary_", segm_results)] if rules.boundary else []
    truth, filled = [], []
    for iou_type, prefix, results in kinds:
        if results is None:
            continue
        if iou_type != BOUNDARY:  # which is of the masks, the type before
            truth = entries.fill_annotations(gt, iou_type)
            filled = entries.fill_results(gt, results, iou_type, results_name)
        given = truth, filled, iou_type, image_ids
        if rules.protocol == "lvis":
            values, category_aps = lvis.evaluate(engine, gt, *given)
        else:
            most = scored_detections(gt, image_ids, detections_per_image)
            shown = None if iou_type == BOUNDARY else callback
            values, category_aps = _coco_values(engine, gt, given, most, shown)
        metrics |= {prefix + name: value for name, value in values.items()}
        for category_id, aps in category_aps.items():
            per_category[names[category_id]] |= {prefix + name: ap for name, ap in aps.items()}
        if rules.protocol == "cells" and (iou_type == MASK or segm_results is None):
            ids = list(gt.sizes) if image_ids is None else sorted({*image_ids} & gt.sizes.keys())
            metrics["cells"] = cells.evaluate(*given[:3], ids, names, rules.cells_score_threshold)
    if keypoint_results is not None:
        if not gt.keypoints:
            gt = replace(gt, keypoints=keypoints.names_in(gt.content["categories"]))
        given_points = gt, keypoint_results, image_ids, rules.keypoint_sigmas, results_name
        values, of_categories = keypoints.evaluate(*given_points)
        metrics |= {keypoints.PREFIX + name: value for name, value in values.items()}
        for category_id, ap in of_categories.items():
            per_category[names[category_id]][keypoints.PREFIX + "AP"] = ap
    return {**metrics, "per_category": per_category}


def _coco_values(
    engine: str,
    gt: GroundTruth,
    given: tuple[list[dict], list[dict], str, Sequence[int | str] | None],
    most: int,
    callback: Callable[[COCOeval], None] | None,
) -> tuple[dict[str, float], dict[Any, dict[str, float]]]:
    """COCO's numbers, and "AP" by category id; both also over `most` detections, if that is not
    COCO's 100."""
    limits = sorted({1, 10, COCO_DETECTIONS, most})
    evaluation = engines.evaluate(engine, gt.content, *given, limits)
    if callback is not None:
        callback(evaluation)
    precision, recall = (evaluation.eval[name] for name in ("precision", "recall"))
    ids = sorted(category["id"] for category in gt.content["categories"])
    values, aps = {}, {category_id: {} for category_id in ids}
    for at in sorted({limits.index(COCO_DETECTIONS), len(limits) - 1}):
        end = "" if limits[at] == COCO_DETECTIONS else f"@{limits[at]}"
        numbers = engines.summary(precision[..., at], recall[..., at])
        if not end:
            average = {f"ARmax{n}": engines.mean(recall[:, :, 0, i]) for i, n in enumerate(limits)}
            numbers = {name: (numbers | average)[name] for name in METRICS}
        values |= {name + end: value for name, value in numbers.items()}
        for k, category_id in enumerate(ids):
            aps[category_id]["AP" + end] = engines.mean(precision[:, :, k, 0, at])
    return values, aps


def at_limit(metrics: Iterable[str]) -> str:
    """The end "@K" of the names of scores that count more detections than COCO's; "" if there are
    none. Those are the scores to go by: COCO's are low there, however good the detections."""
    return next((f"@{name.partition('@')[2]}" for name in metrics if "@" in name), "")


def check_protocol(protocol: str, callback: bool = False) -> None:
    """Raise ValueError if a protocol is unknown, or cannot be had with a callback or a report."""
    if protocol not in PROTOCOLS:
        raise ValueError(f"eval.protocol is {protocol!r}, expected one of {list(PROTOCOLS)}")
    if callback and protocol == "lvis":
        raise ValueError(f"eval.protocol is {protocol!r}, expected 'coco' for a report")


def format_table(metrics: dict) -> str:
    """Format the table, boxes, masks and boundaries side by side, then AP per category.

    Without categories for LVIS's metrics, since it has over a thousand.
    """
    at = at_limit(metrics)
    is_lvis = not {"APr", "mask_APr"}.isdisjoint(metrics)
    prefixes = [prefix for prefix in _COLUMNS if prefix + "AP" in metrics]
    points = keypoints.format_table(metrics) if keypoints.PREFIX + "AP" in metrics else []
    if not prefixes:
        return "\n".join(points)

    def row(label: str, values: Iterable[str]) -> str:
        widths = (_COLUMNS[prefix][1] for prefix in prefixes)
        return f"{label:<44}" + "".join(f"{v:>{n}}" for v, n in zip(values, widths, strict=True))

    titles = [_COLUMNS[prefix][0] for prefix in prefixes]
    lines = [row("", titles)]
    rows = lvis.METRICS if is_lvis else METRICS
    if at:
        names = [name for name in METRICS if name not in ("ARmax1", "ARmax10")]
        count = f"{COCO_DETECTIONS} detections", f"{at[1:]} detections"
        more = {name.replace("max100", "") + at: METRICS[name].replace(*count) for name in names}
        rows = rows | more
    for name, meaning in rows.items():
        label = f"{name:<{max(9, 5 + len(at))}}{meaning}"
        lines.append(row(label, [f"{metrics[prefix + name]:.3f}" for prefix in prefixes]))
    if is_lvis:
        return "\n".join(lines + points)
    lines.append(row(f"AP{at} per category", titles))
    for category, own in metrics["per_category"].items():
        aps = [own[f"{prefix}AP{at}"] for prefix in prefixes]
        lines.append(row(f"  {category}", ["-" if ap < 0 else f"{ap:.3f}" for ap in aps]))
    if "cells" in metrics:
        lines.append(cells.format_table(metrics["cells"]))
    return "\n".join(lines + points)


def category_names(categories: list[dict]) -> dict[int, str]:
    """Map category ids to names, appending the id to a duplicate name."""
    names = {category["id"]: str(category.get("name", category["id"])) for category in categories}
    count = Counter(names.values())
    return {i: name if count[name] == 1 else f"{name} ({i})" for i, name in names.items()}
