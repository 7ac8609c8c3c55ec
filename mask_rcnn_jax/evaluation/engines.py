"""Compute COCO metrics with pycocotools, or with hotcoco: the same bits in a fraction of the time.

Both get the same checked and completed annotations and results (`entries.py`).
"""

import contextlib
import importlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import logging
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from mask_rcnn_jax.evaluation import boundary

ENGINES = ("auto", "pycocotools", "hotcoco")
Ids = Sequence[int | str]


def check_engine(engine: str) -> None:
    """Raise ValueError, naming what to install, if an engine is unknown or missing."""
    if engine not in ENGINES:
        raise ValueError(f"eval.engine is {engine!r}, expected one of {list(ENGINES)}")
    if engine == "hotcoco":
        try:
            importlib.import_module(engine)
        except ImportError as error:
            needed = "needs hotcoco: pip install 'mask-rcnn-jax[eval]'"
            raise ValueError(f"eval.engine={engine} {needed}") from error


def resolve(engine: str) -> str:
    """Return the engine that "auto" is: hotcoco where it is installed, or else pycocotools."""
    if engine != "auto":
        return engine
    try:
        check_engine("hotcoco")
    except ValueError:
        return "pycocotools"
    return "hotcoco"


def announce_engine(engine: str) -> None:
    """`check_engine`; log which one "auto" is."""
    check_engine(engine)
    if engine == "auto":
        logging.info("scores are computed by %s", resolve(engine))


def evaluate(
    engine: str,
    gt: dict,
    truth: list[dict],
    results: list[dict],
    iou_type: str,
    image_ids: Ids | None,
    max_detections: Sequence[int] = (1, 10, 100),
) -> Any:
    """Score one result type, without the engine's printing.

    Args:
        engine: one of `ENGINES`.
        gt: content of the json; only its images and categories are used.
        truth: annotations, from `entries.fill_annotations`.
        results: from `entries.fill_results`.
        iou_type: "bbox", "segm", or "boundary", which no engine but pycocotools scores.
        image_ids: images to score; None scores all.
        max_detections: most detections of a category in an image, increasing; one run serves all.

    Returns:
        The engine's evaluation: `eval["precision"]` is [IoU, recall, category, area, detections],
        `eval["recall"]` the same without recall, with the categories by increasing id.
    """
    engine = "pycocotools" if iou_type == boundary.BOUNDARY else resolve(engine)
    if engine == "hotcoco" and not all(entry["id"] for entry in truth):
        engine = "pycocotools"  # in which a match with annotation 0 counts as none
    run = _hotcoco if engine == "hotcoco" else _pycocotools
    return run(gt, truth, results, iou_type, image_ids, list(max_detections))


def summary(precision: np.ndarray, recall: np.ndarray) -> dict[str, float]:
    """Average as COCOeval.summarize() does, to the bit.

    Args:
        precision: [IoU, recall, category, area], -1 without ground truth.
        recall: [IoU, category, area], likewise.

    Returns:
        AP, AP50, AP75, APs, APm, APl, AR, ARs, ARm and ARl; -1 without ground truth.
    """
    values = {"AP": precision[..., 0], "AP50": precision[0, ..., 0], "AP75": precision[5, ..., 0]}
    values |= {f"AP{size}": precision[..., area] for area, size in enumerate("sml", start=1)}
    values |= {f"AR{size}": recall[..., area] for area, size in enumerate(["", *"sml"])}
    return {name: mean(array) for name, array in values.items()}


def mean(values: np.ndarray) -> float:
    """Average the values that are not -1; -1 if there is none."""
    measured = values[values > -1]
    return float(np.mean(measured)) if measured.size else -1.0


def index_annotations(gt: dict, annotations: list[dict]) -> COCO:
    """Index annotations with pycocotools on the ground truth's images and categories."""
    coco = COCO()
    coco.dataset = {key: gt[key] for key in ("images", "categories")} | {"annotations": annotations}
    coco.createIndex()
    return coco


class Evaluation(COCOeval):
    """COCOeval, to the bit, in a time that suits thousands of objects in an image.

    COCOeval compares each detection with all objects, this one with those that it overlaps enough.
    """

    def evaluateImg(self, imgId, catId, aRng, maxDet):
        ious, self.ious[imgId, catId] = self.ious[imgId, catId], []
        entry = super().evaluateImg(imgId, catId, aRng, maxDet)  # without IoUs it matches nothing
        self.ious[imgId, catId] = ious
        if entry is not None and len(ious):
            ids = [catId] if self.params.useCats else self.params.catIds
            truth = [one for i in ids for one in self._gts[imgId, i]]
            order = np.argsort([one["_ignore"] for one in truth], kind="mergesort")
            is_crowd = [bool(truth[i]["iscrowd"]) for i in order]
            _match(entry, ious[:, order], is_crowd, self.params.iouThrs)
        return entry


class BoundaryEvaluation(Evaluation):
    """Of masks, by the lower of mask IoU and boundary IoU."""

    def computeIoU(self, imgId, catId):
        ious = super().computeIoU(imgId, catId)
        if not len(ious):
            return ious
        found, truth = self._dts[imgId, catId], self._gts[imgId, catId]
        order = np.argsort([-one["score"] for one in found], kind="mergesort")  # that of `ious`
        best = [found[i] for i in order[: len(ious)]]
        return boundary.lowered(ious, best, truth, min(self.params.iouThrs))


def _match(
    entry: dict, ious: np.ndarray, is_crowd: list[bool], thresholds: Sequence[float]
) -> None:
    """Fill in the matches of an entry of `evalImgs` in which nothing is matched.

    ious: [detections, objects], both as in the entry, whose ignored objects are the last.
    """
    ignored, least = entry["gtIgnore"].tolist(), min(*thresholds, 1 - 1e-10)
    near: list[list[tuple[int, float]]] = [[] for _ in entry["dtIds"]]
    rows, columns = np.nonzero(ious[: len(near)] >= least)
    pairs = rows.tolist(), columns.tolist(), ious[rows, columns].tolist()
    for d, g, iou in zip(*pairs, strict=True):
        near[d].append((g, iou))
    for t, threshold in enumerate(thresholds):
        taken: set[int] = set()
        for d, objects in enumerate(near):
            best, match = min(threshold, 1 - 1e-10), -1
            for g, iou in objects:
                if g in taken and not is_crowd[g]:
                    continue
                if match > -1 and not ignored[match] and ignored[g]:
                    break
                if iou >= best:
                    best, match = iou, g
            if match > -1:
                taken.add(match)
                number = entry["gtIds"][match]
                entry["dtMatches"][t, d], entry["gtMatches"][t, match] = number, entry["dtIds"][d]
                outside = entry["dtIgnore"][t, d] and number == 0
                entry["dtIgnore"][t, d] = ignored[match] or outside


def _pycocotools(
    gt: dict,
    truth: list[dict],
    results: list[dict],
    iou_type: str,
    image_ids: Ids | None,
    max_detections: list[int],
) -> COCOeval:
    with contextlib.redirect_stdout(io.StringIO()):
        coco_gt = index_annotations(gt, truth)
        coco_results = index_annotations(gt, results)
        if iou_type == boundary.BOUNDARY:
            evaluation = BoundaryEvaluation(coco_gt, coco_results, "segm")
        else:
            evaluation = Evaluation(coco_gt, coco_results, iou_type)
        if image_ids is not None:
            evaluation.params.imgIds = sorted(set(image_ids))
        evaluation.params.maxDets = max_detections
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation


def _hotcoco(
    gt: dict,
    truth: list[dict],
    results: list[dict],
    iou_type: str,
    image_ids: Ids | None,
    max_detections: list[int],
) -> Any:
    hotcoco = importlib.import_module("hotcoco")
    datasets, numbers = _with_numbers(gt, truth, results)
    evaluation = hotcoco.COCOeval(*map(hotcoco.COCO, datasets), iou_type)
    if image_ids is not None:
        evaluation.params.img_ids = sorted(numbers[i] for i in set(image_ids))
    evaluation.params.max_dets = max_detections
    evaluation.evaluate()
    evaluation.accumulate()
    return evaluation


def _with_numbers(gt: dict, *entries: list[dict]) -> tuple[list[dict], dict[int | str, int]]:
    """Return a dataset for each list of annotations or results, and the numbers of the images.

    hotcoco takes numbers alone; their order decides about equal scores, so it is that of the ids.
    """
    images, categories = (
        {one: n for n, one in enumerate(sorted({entry["id"] for entry in gt[key]}), start=1)}
        for key in ("images", "categories")
    )
    sizes = {entry["id"]: (entry.get("height"), entry.get("width")) for entry in gt["images"]}

    def dataset(annotations: list[dict]) -> dict:
        shapes = ((images[i], height or 0, width or 0) for i, (height, width) in sizes.items())
        return {
            "images": [{"id": n, "height": h, "width": w, "file_name": ""} for n, h, w in shapes],
            "categories": [{"id": n, "name": str(n)} for n in categories.values()],
            "annotations": [
                {
                    **entry,
                    "image_id": images[entry["image_id"]],
                    "category_id": categories[entry["category_id"]],
                }
                for entry in annotations
                if entry["category_id"] in categories  # as pycocotools, which looks at no others
            ],
        }

    return [dataset(one) for one in entries], images
