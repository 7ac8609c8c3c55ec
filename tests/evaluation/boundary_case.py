"""A generated set of masks and results, and its boundary AP by the authors' package.

    PYTHONPATH=.:API python -m tests.evaluation.boundary_case [GT.json RESULTS.json]

writes the scores by github.com/bowenc0221/boundary-iou-api at 37d2558, found in the folder API, to
tests/goldens/boundary; with a set, it prints those of that set. Its `np.float` is gone from NumPy:
`float` takes its place.
"""

import copy
import json
import sys
from pathlib import Path

import numpy as np
from pycocotools import mask as coco_mask

from mask_rcnn_jax.evaluation.coco import METRIC_NAMES
from mask_rcnn_jax.rle import compressed_rle

GOLDEN = Path(__file__).parents[1] / "goldens/boundary/scores.json"
SIZES = {4: (90, 130), 9: (240, 170), 2: (61, 33), 7: (400, 560)}  # (height, width) by image
EDGES = (0, 3, 17)  # pixels that an outline of a result is off


def make_case() -> tuple[dict, list[dict]]:
    """Ground truth and mask results: blobs of 2 to 300 pixels, cut by the image, with holes, beside
    crowds; results whose outlines are off by pixels, and empty ones."""
    rng = np.random.RandomState(3)  # its numbers never change
    annotations, results = [], []
    for image_id, (height, width) in SIZES.items():
        for n in range(9):
            center = rng.uniform(0, (height, width))
            radius = np.exp(rng.uniform(np.log(2), np.log(0.6 * max(height, width))))
            turn, hole = rng.uniform(0, np.pi), rng.uniform(-1, 0.6) * radius
            shape = center, radius, turn, hole
            mask, category_id = _blob(height, width, *shape), int(rng.choice([3, 8]))
            entry = {"image_id": image_id, "category_id": category_id}
            code = coco_mask.encode(np.asfortranarray(mask))
            if (area := float(coco_mask.area(code))) == 0:
                continue
            truth = entry | {"id": len(annotations) + 1, "iscrowd": int(n == 8), "area": area}
            truth |= {"bbox": coco_mask.toBbox(code).tolist(), "segmentation": compressed_rle(mask)}
            annotations.append(truth)
            for off in rng.choice(EDGES, size=rng.randint(1, 3)):
                moved = center + rng.normal(0, 1 + off / 4, 2), radius + rng.uniform(-off, off)
                found = _blob(height, width, *moved, *shape[2:])
                score = round(rng.random_sample(), 2)
                results.append(entry | {"score": score, "segmentation": compressed_rle(found)})
        empty = compressed_rle(np.zeros((height, width), np.uint8))
        results.append({**entry, "score": 0.7, "segmentation": empty})
    images = [
        {"id": i, "height": h, "width": w, "file_name": f"{i}.png"} for i, (h, w) in SIZES.items()
    ]
    categories = [{"id": 3, "name": "blob"}, {"id": 8, "name": "spot"}, {"id": 9, "name": "none"}]
    return {"images": images, "annotations": annotations, "categories": categories}, results


def _blob(height: int, width: int, center, radius: float, turn: float, hole: float) -> np.ndarray:
    y, x = np.mgrid[:height, :width] - np.reshape(center, (2, 1, 1))
    along, across = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
    away = np.hypot(along, 1.7 * across) + 0.1 * radius * np.cos(5 * np.arctan2(across, along))
    return ((away <= radius) & (away >= hole)).astype(np.uint8)


def score_with_package(gt: dict, results: list[dict]) -> dict:
    """The twelve numbers, and the AP of each category, by the authors' package."""
    from boundary_iou.coco_instance_api.coco import COCO
    from boundary_iou.coco_instance_api.cocoeval import COCOeval

    np.float = float
    truth = COCO(get_boundary=True)
    truth.dataset = copy.deepcopy(gt)
    truth.createIndex()
    found = truth.loadRes(copy.deepcopy(results))
    evaluation = COCOeval(truth, found, "boundary")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    scores = dict(zip(METRIC_NAMES, map(float, evaluation.stats), strict=True))
    aps = {}
    for k, category_id in enumerate(evaluation.params.catIds):
        measured = evaluation.eval["precision"][:, :, k, 0, -1]
        measured = measured[measured > -1]
        aps[str(category_id)] = float(measured.mean()) if measured.size else -1.0
    return {"scores": scores, "aps": aps}


def main() -> None:
    if len(sys.argv) > 1:
        gt, results = (json.loads(Path(name).read_text()) for name in sys.argv[1:])
        print(json.dumps(score_with_package(gt, results)["scores"]))
    else:
        GOLDEN.write_text(json.dumps(score_with_package(*make_case()), indent=1) + "\n")


if __name__ == "__main__":
    main()
