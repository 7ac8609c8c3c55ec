"""Generated sets with LVIS's labels, and results for them.

    PYTHONPATH=.:LVIS python -m tests.evaluation.lvis_case

writes the scores by the `lvis` package 0.5.3, found in the folder LVIS, to tests/goldens/lvis. Its
`np.float` is gone from NumPy: `float` takes its place.
"""

import copy
import json
from pathlib import Path

import numpy as np
from pycocotools import mask as coco_mask

GOLDEN = Path(__file__).parents[1] / "goldens/lvis/scores.json"
SEEDS = range(4)
FREQUENCIES = "rcfffccrrf"  # of the categories
IDS = (3, 4, 7, 8, 20, 21, 22, 40, 41, 90)


def make_case(seed: int) -> tuple[dict, list[dict], list[dict]]:
    """Ground truth, box results and mask results.

    Images of all sizes of objects, one with more than 300 results; equal scores; results of all
    four kinds of classes (with objects, absent, not exhaustive, not searched for); results without
    area; a class that has no objects. With seed 3, no rare class has any.
    """
    rng = np.random.RandomState(seed)  # its numbers never change
    categories = [
        {"id": i, "name": f"class {i}", "frequency": f}
        for i, f in zip(IDS, FREQUENCIES, strict=True)
    ]
    usable = [c["id"] for c in categories[:-1] if seed != 3 or c["frequency"] != "r"]
    images, annotations, boxes, masks = [], [], [], []
    for image_id in (5, 2, 9, 11, 30, 31, 32, 47, 48, 60):
        height, width = (int(side) for side in rng.randint(120, 420, 2))
        present = rng.choice(usable, size=rng.randint(0, 5), replace=False).tolist()
        others = [i for i in IDS if i not in present]
        absent = rng.choice(others, size=3, replace=False).tolist()
        partial = [i for i in present if rng.random_sample() < 0.4]
        partial += rng.choice(absent, size=1).tolist()
        labels = {"neg_category_ids": absent, "not_exhaustive_category_ids": partial}
        url = f"http://images.cocodataset.org/train2017/{image_id:012d}.jpg"
        image = {"id": image_id, "height": height, "width": width, "coco_url": url}
        images.append(image | labels)
        crowded = image_id == 9
        for category_id in present:
            for _ in range(rng.randint(1, 5)):
                corners = _outline(rng, height, width)
                area = float(coco_mask.area(_code(corners, height, width)))
                entry = {"image_id": image_id, "category_id": category_id, "area": area}
                entry |= {"id": len(annotations) + 1, "bbox": _box(corners)}
                annotations.append(entry | {"segmentation": [corners.reshape(-1).tolist()]})
                for _ in range(rng.randint(0, 4)):
                    found = corners + rng.normal(0, rng.choice([0.3, 3, 15]), corners.shape)
                    _add_result(rng, found, image, category_id, boxes, masks)
        for _ in range(500 if crowded else rng.randint(5, 40)):
            category_id = int(rng.choice(IDS))
            found = _outline(rng, height, width)
            _add_result(rng, found, image, category_id, boxes, masks)
        nothing = {"image_id": image_id, "category_id": int(IDS[0]), "score": 0.97}
        boxes.append(nothing | {"bbox": [3.0, 4.0, 0.0, 9.0]})
        empty = coco_mask.encode(np.zeros((height, width), np.uint8, order="F"))
        masks.append(nothing | {"segmentation": _text(empty)})
    return {"images": images, "categories": categories, "annotations": annotations}, boxes, masks


def _outline(rng, height: int, width: int) -> np.ndarray:
    """[4, 2] corners of a quadrilateral, of a side from 6 to 300 pixels."""
    side = np.exp(rng.uniform(np.log(6), np.log(300)))
    center = rng.uniform(0, (width, height))
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * side / 2
    corners = center + corners * rng.uniform(0.6, 1, (4, 2))
    return np.clip(corners, 1, (width - 1, height - 1)).round(2)


def _box(corners: np.ndarray) -> list[float]:
    low, high = corners.min(axis=0), corners.max(axis=0)
    return np.concatenate([low, high - low]).round(3).tolist()


def _code(corners: np.ndarray, height: int, width: int) -> dict:
    return coco_mask.merge(coco_mask.frPyObjects([corners.reshape(-1).tolist()], height, width))


def _text(code: dict) -> dict:
    return code | {"counts": code["counts"].decode()}


def _add_result(rng, corners, image, category_id, boxes, masks) -> None:
    corners = np.clip(corners, 0, (image["width"], image["height"]))
    score = round(rng.random_sample(), 2)
    result = {"image_id": image["id"], "category_id": category_id, "score": score}
    boxes.append(result | {"bbox": _box(corners)})
    code = _text(_code(corners, image["height"], image["width"]))
    masks.append(result | {"segmentation": code})


def score_with_package(gt: dict, results: list[dict], iou_type: str) -> dict:
    """The scores and the AP of each category by the `lvis` package."""
    import logging
    import warnings

    from lvis import LVIS, LVISEval, LVISResults

    np.float = float
    logging.disable(logging.WARNING)
    truth = LVIS.__new__(LVIS)
    truth.logger, truth.dataset = logging.getLogger("lvis"), copy.deepcopy(gt)
    truth._create_index()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = LVISResults(truth, copy.deepcopy(results), max_dets=300)
    evaluation = LVISEval(truth, found, iou_type)
    evaluation.run()
    names = {name: name.replace("AR@300", "ARmax300") for name in evaluation.results}
    scores = {names[n].removesuffix("@300"): float(v) for n, v in evaluation.results.items()}
    precision = evaluation.eval["precision"][..., 0]  # [IoU, recall, category]
    aps = []
    for k in range(precision.shape[2]):
        measured = precision[:, :, k][precision[:, :, k] > -1]
        aps.append(float(measured.mean()) if measured.size else -1.0)
    return {"scores": scores, "aps": dict(zip(map(str, sorted(IDS)), aps, strict=True))}


def main() -> None:
    golden = []
    for seed in SEEDS:
        gt, boxes, masks = make_case(seed)
        pairs = (("bbox", boxes), ("segm", masks))
        golden.append({name: score_with_package(gt, found, name) for name, found in pairs})
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
