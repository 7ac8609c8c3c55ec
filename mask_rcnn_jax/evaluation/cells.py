"""Microscopy's measures: objects and detections in one-to-one pairs by IoU, without order by score.

They are those of StarDist's `matching_dataset` (summed over the images), of cellpose's
`average_precision` and the 2018 Data Science Bowl (an average over the images), and the aggregated
Jaccard index of Kumar et al. (2017) and of cellpose. Masks may overlap here.

At an IoU threshold, the pairs are those of the assignment with the most pairs that reach it and,
among these, the largest sum of IoUs. A detection without a pair that lies in a crowd, as COCO
defines it, is ignored. Categories do not count, except where the measures are of one category.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from pycocotools import mask as coco_mask

from mask_rcnn_jax.annotations.faults import BOX
from mask_rcnn_jax.evaluation.engines import mean

THRESHOLDS = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
IOU_50, IOU_75 = 0, 5  # indices into THRESHOLDS
# Those of a table, and what they are; the first have a value for each threshold.
MEASURES = {
    "precision": "TP / (TP + FP)",
    "recall": "TP / (TP + FN)",
    "f1": "2 TP / (2 TP + FP + FN)",
    "AP": "TP / (TP + FP + FN)",
    "AP_by_image": "AP, mean over images",
    "mean_true_score": "sum of IoUs / objects",
    "mean_matched_score": "sum of IoUs / TP",
    "panoptic_quality": "f1 x mean_matched_score",
}
INDICES = {"AJI": "Kumar et al.", "AJI_cellpose": "cellpose"}
LOGGED = ("f1", "AP", "AP_by_image", "panoptic_quality")
BLOCK = 4_000_000  # pairs whose IoUs are computed at a time


class Matches(NamedTuple):
    """Objects and detections of an image; T thresholds."""

    objects: int
    detections: np.ndarray  # [T] int, without those that are ignored
    pairs: np.ndarray  # [T] int
    overlap: np.ndarray  # [T] float64, sum of the pairs' IoUs
    indices: tuple[float, ...]  # those of INDICES, -1 without any mask; empty for boxes


class Pairs(NamedTuple):
    """The pairs that overlap at all."""

    rows: np.ndarray  # [n] int, objects
    columns: np.ndarray  # [n] int, detections
    ious: np.ndarray  # [n] float64, above 0


def evaluate(
    truth: Sequence[dict],
    results: Sequence[dict],
    iou_type: str,
    image_ids: Sequence[int | str],
    names: Mapping[Any, str],
    score_threshold: float,
) -> dict[str, Any]:
    """Measure one result type.

    Args:
        truth: annotations, from `entries.fill_annotations`.
        results: from `entries.fill_results`.
        iou_type: "bbox" or "segm".
        image_ids: images to measure.
        names: of the categories by id; others are left out.
        score_threshold: detections below are left out.

    Returns:
        "tp", "fp", "fn" and the names in MEASURES, lists over "thresholds"; "mean" with the
        averages of these; those in INDICES, for masks; all of this also in "per_category" for each
        that has objects or detections; "per_image". An image without any has -1, and is no part of
        averages over images; other ratios of nothing are 0, as StarDist's.
    """
    kept = [one for one in results if one["score"] >= score_threshold]
    groups = [_by_image(entries, names) for entries in (truth, kept)]
    images, categories = [], defaultdict(list)
    for image_id in image_ids:
        objects, found = (group[image_id] for group in groups)
        images.append(match(objects, found, iou_type))
        present = {one["category_id"] for one in [*objects, *found]}
        for category_id in present:
            own = [_of_category(entries, category_id) for entries in (objects, found)]
            alone = len(present) == 1
            categories[category_id].append(images[-1] if alone else match(own[0], own[1], iou_type))
    return {
        "geometry": "box" if iou_type == BOX else "mask",
        "score_threshold": score_threshold,
        "thresholds": list(THRESHOLDS),
        **_measures(images),
        "per_category": {n: _measures(categories[i]) for i, n in names.items() if i in categories},
        "per_image": [
            {"image_id": i, **_of_image(one)} for i, one in zip(image_ids, images, strict=True)
        ],
    }


def logged(cells: Mapping[str, Any]) -> dict[str, float]:
    """The measures that a training logs, as `cells/f1_50` and, averaged over the thresholds,
    `cells/f1`."""
    metrics = {}
    for name in LOGGED:
        metrics[f"cells/{name.lower()}"] = cells["mean"][name]
        metrics[f"cells/{name.lower()}_50"] = cells[name][IOU_50]
    return metrics | {f"cells/{name.lower()}": cells[name] for name in INDICES if name in cells}


def format_table(cells: Mapping[str, Any]) -> str:
    """Format the measures at IoU 0.50, 0.75 and their average, then f1 per category."""
    title = f"{cells['geometry']}es" if cells["geometry"] == "box" else "masks"
    lines = [_row(f"cells: {title} of score {cells['score_threshold']:.2f} or more", None)]
    lines += [_row(f"{name:<20}{MEASURES[name]}", _cells(cells, name)) for name in MEASURES]
    lines += [_row(f"{n:<20}{INDICES[n]}", [cells[n]]) for n in INDICES if n in cells]
    if len(cells["per_category"]) > 1:
        lines.append(_row("f1 per category", None))
        lines += [_row(f"  {n}", _cells(own, "f1")) for n, own in cells["per_category"].items()]
    return "\n".join(lines)


def _cells(cells: Mapping[str, Any], name: str) -> list[float]:
    return [cells[name][IOU_50], cells[name][IOU_75], cells["mean"][name]]


def _row(label: str, values: Sequence[float] | None) -> str:
    texts = ["0.50", "0.75", "mean"] if values is None else [f"{v:.3f}" for v in values]
    return f"{label:<44}" + "".join(f"{text:>8}" for text in texts)


def match(objects: Sequence[dict], detections: Sequence[dict], iou_type: str) -> Matches:
    """Pair the objects with the detections of an image."""
    key = "bbox" if iou_type == BOX else "segmentation"
    crowds, true = ([o[key] for o in objects if o["iscrowd"] == crowd] for crowd in (1, 0))
    found = [one[key] for one in detections]
    rows, columns, ious = overlapping = _overlaps(true, found)
    covered = np.zeros(len(found))
    if crowds and found:
        covered = coco_mask.iou(found, crowds, [1] * len(crowds)).max(axis=1)
    counts = np.zeros((3, len(THRESHOLDS)))
    indices: tuple[float, ...] = ()
    for t, threshold in enumerate(THRESHOLDS):
        near = np.flatnonzero(ious >= threshold)
        pairs = near[_assignment(overlapping, near)]
        counted = covered < threshold
        counted[columns[pairs]] = True
        counts[:, t] = counted.sum(), len(pairs), ious[pairs].sum()
        if t == IOU_50 and iou_type != BOX:
            chosen = np.flatnonzero(counted[columns])
            kept = Pairs(rows[chosen], columns[chosen], ious[chosen])
            indices = _jaccard_indices(true, found, np.flatnonzero(counted), kept)
    return Matches(len(true), counts[0].astype(int), counts[1].astype(int), counts[2], indices)


def _overlaps(objects: list, detections: list) -> Pairs:
    """IoUs of the pairs that overlap, in blocks: all at once may take too much memory.

    pycocotools compares only masks whose boxes overlap.
    """
    parts = [(np.zeros(0, int), np.zeros(0, int), np.zeros(0))]
    step = max(1, BLOCK // max(1, len(objects)))
    for start in range(0, len(detections) if objects else 0, step):
        ious = coco_mask.iou(detections[start : start + step], objects, [0] * len(objects))
        columns, rows = np.nonzero(ious)
        parts.append((rows, columns + start, ious[columns, rows]))
    return Pairs(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _assignment(pairs: Pairs, chosen: np.ndarray) -> np.ndarray:
    """Indices into `chosen`, of the pairs that may be in the one-to-one assignment: the most pairs
    with an IoU of 0.5 and, among these, the largest sum of IoUs."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import min_weight_full_bipartite_matching

    if not len(chosen):
        return chosen
    objects, rows = np.unique(pairs.rows[chosen], return_inverse=True)
    detections, columns = np.unique(pairs.columns[chosen], return_inverse=True)
    # A sum of IoUs, over twice the number of pairs, is below one pair more.
    ious = pairs.ious[chosen]
    weights = (ious >= THRESHOLDS[0]) + ious / (2 * min(len(objects), len(detections)))
    # Each object may also have a detection of its own that stands for none, so that all have one;
    # one is added to all weights, since a weight of 0 is no pair.
    none = np.arange(len(objects))
    values = np.concatenate([1 + weights, np.ones(len(objects))])
    places = np.concatenate([rows, none]), np.concatenate([columns, len(detections) + none])
    _, taken = min_weight_full_bipartite_matching(csr_array((values, places)), maximize=True)
    return np.flatnonzero(taken[rows] == columns)


def _jaccard_indices(
    objects: list, detections: list, counted: np.ndarray, pairs: Pairs
) -> tuple[float, float]:
    """Kumar's and cellpose's aggregated Jaccard index: pixels in both of a pair over all pixels.

    Kumar's pairs each object with the detection of the largest IoU, which may be that of several,
    and counts a pixel once for each pair, and for each mask without one. cellpose's are one-to-one,
    and a pixel counts once, also where masks overlap. `counted` [n] are the detections that count.
    """
    if not len(objects) and not len(counted):
        return -1.0, -1.0
    areas, found_areas = (
        np.array([coco_mask.area(code) for code in codes], np.int64)
        for codes in (objects, detections)
    )
    rows, columns, ious = pairs
    sums = areas[rows] + found_areas[columns]
    shared = np.rint(ious * sums / (1 + ious))
    order = np.lexsort((columns, -ious, rows))
    best = order[np.unique(rows[order], return_index=True)[1]]
    unpaired = np.delete(areas, rows[best]), found_areas[np.setdiff1d(counted, columns[best])]
    union = (sums - shared)[best].sum() + sum(part.sum() for part in unpaired)
    chosen = _assignment(pairs, np.arange(len(ious)))
    both = zip(rows[chosen], columns[chosen], strict=True)
    common = [coco_mask.merge([objects[i], detections[j]], intersect=True) for i, j in both]
    foreground = _united_area([*objects, *(detections[i] for i in counted)])
    return (
        float(shared[best].sum() / union) if union else -1.0,
        _united_area(common) / foreground if foreground else -1.0,
    )


def _united_area(codes: list[dict]) -> int:
    """Pixels of a union, by unions of few at a time: one by one, the runs would add up."""
    if not codes:
        return 0
    while len(codes) > 1:
        codes = [coco_mask.merge(codes[i : i + 8]) for i in range(0, len(codes), 8)]
    return int(coco_mask.area(codes[0]))


def _by_image(entries: Sequence[dict], names: Mapping[Any, str]) -> dict[Any, list[dict]]:
    groups = defaultdict(list)
    for entry in entries:
        if entry["category_id"] in names:
            groups[entry["image_id"]].append(entry)
    return groups


def _of_category(entries: Sequence[dict], category_id: Any) -> list[dict]:
    return [entry for entry in entries if entry["category_id"] == category_id]


def _ratio(numerator: np.ndarray, denominator: np.ndarray, empty: float = 0.0) -> np.ndarray:
    result = np.full(np.shape(denominator), empty)
    return np.divide(numerator, denominator, out=result, where=denominator > 0)


def _measures(images: Sequence[Matches]) -> dict[str, Any]:
    """Measures of images together."""
    tp, found = (np.array([getattr(one, n) for one in images]) for n in ("pairs", "detections"))
    tp, found = tp.reshape(-1, len(THRESHOLDS)), found.reshape(-1, len(THRESHOLDS))
    objects = np.array([one.objects for one in images], int)[:, None]
    by_image = _ratio(tp, found + objects - tp, -1.0)
    overlap = sum((one.overlap for one in images), np.zeros(len(THRESHOLDS)))
    tp, fp, fn = tp.sum(axis=0), (found - tp).sum(axis=0), (objects - tp).sum(axis=0)
    values = {
        "precision": _ratio(tp, tp + fp),
        "recall": _ratio(tp, tp + fn),
        "f1": _ratio(2 * tp, 2 * tp + fp + fn),
        "AP": _ratio(tp, tp + fp + fn),
        "AP_by_image": np.array([mean(column) for column in by_image.T]),
        "mean_true_score": _ratio(overlap, tp + fn),
        "mean_matched_score": _ratio(overlap, tp),
        "panoptic_quality": _ratio(overlap, tp + fp / 2 + fn / 2),
    }
    indices = zip(*(one.indices for one in images), strict=True)
    return {
        **{n: array.tolist() for n, array in (("tp", tp), ("fp", fp), ("fn", fn))},
        **{name: array.tolist() for name, array in values.items()},
        **{name: mean(np.array(one)) for name, one in zip(INDICES, indices, strict=False)},
        "mean": {name: mean(array) for name, array in values.items()},
    }


def _of_image(one: Matches) -> dict[str, Any]:
    """Counts of an image, and its measures at IoU 0.50 (`f1_50`) or over all thresholds (`AP`)."""
    own, count = _measures([one]), int(one.detections[IOU_50])
    at_50 = {f"{n}_50": own[n][IOU_50] for n in MEASURES if n != "AP_by_image"}
    values = at_50 | {"AP": own["mean"]["AP"]} | {n: own[n] for n in INDICES if n in own}
    values = values if one.objects or count else dict.fromkeys(values, -1.0)
    return {"n_true": one.objects, "n_pred": count, **values}
