"""Compute COCO metrics with pycocotools, or with faster-coco-eval in a fraction of the time.

Both get the same checked and completed annotations and results (`entries.py`).
"""

import contextlib
import io
import warnings
from collections.abc import Sequence
from typing import Any

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

ENGINES = ("pycocotools", "faster_coco_eval")
Ids = Sequence[int | str]


def check_engine(engine: str) -> None:
    """Raise ValueError, naming the extra to install, if an engine is unknown or missing."""
    if engine not in ENGINES:
        raise ValueError(f"eval.engine is {engine!r}, expected one of {list(ENGINES)}")
    if engine == "faster_coco_eval":
        try:
            import faster_coco_eval  # noqa: F401
        except ImportError as error:
            raise ValueError(
                "eval.engine=faster_coco_eval needs faster-coco-eval: "
                "pip install 'mask-rcnn-jax[eval]'"
            ) from error


def evaluate(
    engine: str,
    gt: dict,
    truth: list[dict],
    results: list[dict],
    iou_type: str,
    image_ids: Ids | None,
    max_detections: int = 100,
) -> Any:
    """Score one result type, without the engine's printing.

    Args:
        engine: one of `ENGINES`.
        gt: content of the json; only its images and categories are used.
        truth: annotations, from `entries.fill_annotations`.
        results: from `entries.fill_results`.
        iou_type: "bbox" or "segm".
        image_ids: images to score; None scores all.
        max_detections: most detections of a category in an image; `stats` are only for 100.

    Returns:
        The engine's evaluation: `stats` are the twelve metrics, `eval["precision"]` is
        [IoU, recall, category, area, detections] with the categories by increasing id.
    """
    run = _faster_coco_eval if engine == "faster_coco_eval" else _pycocotools
    return run(gt, truth, results, iou_type, image_ids, [1, 10, max_detections])


def index_annotations(gt: dict, annotations: list[dict]) -> COCO:
    """Index annotations with pycocotools on the ground truth's images and categories."""
    coco = COCO()
    coco.dataset = {key: gt[key] for key in ("images", "categories")} | {"annotations": annotations}
    coco.createIndex()
    return coco


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
        evaluation = COCOeval(coco_gt, coco_results, iou_type)
        if image_ids is not None:
            evaluation.params.imgIds = sorted(set(image_ids))
        evaluation.params.maxDets = max_detections
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation


def _faster_coco_eval(
    gt: dict,
    truth: list[dict],
    results: list[dict],
    iou_type: str,
    image_ids: Ids | None,
    max_detections: list[int],
) -> Any:
    from faster_coco_eval import COCO, COCOeval_faster

    # It takes numbers alone; their order decides about equal scores, so it is that of the ids.
    images, categories = (
        {one: n for n, one in enumerate(sorted({entry["id"] for entry in gt[key]}), start=1)}
        for key in ("images", "categories")
    )
    sizes = {entry["id"]: (entry.get("height"), entry.get("width")) for entry in gt["images"]}

    def index(annotations: list[dict]) -> COCO:
        coco = COCO()
        shapes = ((images[i], height, width) for i, (height, width) in sizes.items())
        coco.dataset = {
            "images": [{"id": n, "height": h, "width": w} for n, h, w in shapes],
            "categories": [{"id": n} for n in categories.values()],
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
        with warnings.catch_warnings():
            # A match with annotation 0 counts as none, as in pycocotools.
            warnings.filterwarnings("ignore", "Found annotation id 0")
            coco.createIndex()
        return coco

    evaluation = COCOeval_faster(index(truth), index(results), iou_type)
    if image_ids is not None:
        evaluation.params.imgIds = sorted(images[i] for i in set(image_ids))
    evaluation.params.maxDets = max_detections
    evaluation.run()
    return evaluation
