"""Boundary AP equals that of its authors' package, and follows its definition."""

import json
from dataclasses import replace

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from mask_rcnn_jax.evaluation.boundary import band, lowered
from mask_rcnn_jax.evaluation.coco import METRIC_NAMES, format_table, load_results, score
from mask_rcnn_jax.evaluation.options import Scoring
from mask_rcnn_jax.training.validation import logged_scores
from tests.evaluation import lvis_case
from tests.evaluation.boundary_case import GOLDEN, make_case
from tests.helpers import shared

RULES = Scoring(engine="auto", boundary=True)
# By the package on data/eval_oracle, see `boundary_case`.
ORACLE = {
    "AP": 0.22639400050237551,
    "AP50": 0.3775010774391817,
    "AP75": 0.22557984624218536,
    "APs": 0.3873740315997837,
    "APm": 0.27236740312792934,
    "APl": 0.07554378414806896,
    "ARmax1": 0.18722550309388875,
    "ARmax10": 0.31265229701106306,
    "ARmax100": 0.3140431150818811,
    "ARs": 0.4694498622754236,
    "ARm": 0.34054347826086956,
    "ARl": 0.10387037037037035,
}


def slow_band(mask):
    """Pixels of a mask within reach of a pixel outside it, one by one."""
    height, width = mask.shape
    reach = max(1, round(0.02 * float(np.sqrt(height**2 + width**2))))
    padded = np.pad(mask, reach)
    side = 2 * reach + 1
    inner = [
        [padded[y : y + side, x : x + side].all() for x in range(width)] for y in range(height)
    ]
    return mask * ~np.array(inner)


def encode(mask):
    return coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))


def rectangle(y0, x0, y1, x1, shape=(70, 110)):
    mask = np.zeros(shape, np.uint8)
    mask[y0:y1, x0:x1] = 1
    return mask


def test_scores_equal_those_of_the_authors_package():
    gt, results = make_case()
    metrics, golden = score(gt, None, results, rules=RULES), json.loads(GOLDEN.read_text())
    assert {name: metrics["boundary_" + name] for name in METRIC_NAMES} == golden["scores"]
    assert metrics["mask_AP"] > metrics["boundary_AP"] > 0.1
    of_categories = metrics["per_category"]
    for name, category_id in (("blob", "3"), ("spot", "8"), ("none", "9")):
        assert of_categories[name]["boundary_AP"] == golden["aps"][category_id]


def test_scores_of_real_masks_equal_those_of_the_authors_package():
    folder = shared("data/eval_oracle")
    results = load_results(folder / "instances_val2014_fakesegm100_results.json")
    metrics = score(folder / "instances_val2014_100.json", None, results, rules=RULES)
    assert {name: metrics["boundary_" + name] for name in METRIC_NAMES} == ORACLE


@pytest.mark.parametrize("shape", [(70, 110), (3, 300), (25, 26), (1, 1)])
def test_bands_have_the_pixels_near_the_outline(shape):
    rng = np.random.RandomState(len(shape) + shape[0])
    for density in (0.0, 0.5, 0.98, 0.999, 1.0):
        mask = (rng.random_sample(shape) < density).astype(np.uint8)
        found = band(encode(mask))
        np.testing.assert_array_equal(coco_mask.decode(found), slow_band(mask))


def test_the_edge_of_the_image_is_an_outline():
    mask = rectangle(0, 0, 40, 60)  # a band of 3 pixels
    assert coco_mask.area(band(encode(mask))) == 40 * 60 - 34 * 54


def test_the_lower_iou_counts_but_for_crowds():
    truth = [rectangle(10, 20, 60, 80), rectangle(10, 20, 60, 80), rectangle(0, 90, 60, 110)]
    found = [rectangle(11, 20, 60, 80), rectangle(10, 20, 60, 100)]
    codes = [[{"segmentation": encode(mask), "iscrowd": 0} for mask in m] for m in (found, truth)]
    codes[1][1]["iscrowd"] = 1
    ious = coco_mask.iou(*([e["segmentation"] for e in m] for m in codes), [0, 1, 0])
    by_bands = [[(a & b).sum() / (a | b).sum() for b in map(slow_band, truth)] for a in
                map(slow_band, found)]  # fmt: skip
    both = np.minimum(ious, by_bands)
    changed = lowered(ious, *codes, 0.5)
    assert both[0, 0] < ious[0, 0]
    np.testing.assert_allclose(changed[:, 0], both[:, 0], rtol=1e-12)
    np.testing.assert_array_equal(changed[:, 1:], ious[:, 1:])


def test_nothing_changes_beside_it():
    gt, results = make_case()
    plain = score(gt, None, results)
    metrics = score(gt, None, results, rules=RULES)
    assert not any(name.startswith("boundary") for name in plain)
    assert {name: metrics[name] for name in plain if name != "per_category"} == {
        name: value for name, value in plain.items() if name != "per_category"
    }
    boxes = [{**r, "bbox": coco_mask.toBbox(r["segmentation"]).tolist()} for r in results]
    of_boxes = score(gt, boxes, None, rules=RULES)
    assert "AP" in of_boxes and "boundary_AP" not in of_boxes


def test_without_results_or_objects_it_is_defined():
    gt, results = make_case()
    assert score(gt, None, [], rules=RULES)["boundary_AP"] == 0
    gt["annotations"] = []
    assert score(gt, None, results, rules=RULES)["boundary_AP"] == -1


def test_lvis_and_many_detections_have_it():
    gt, _, masks = lvis_case.make_case(1)
    metrics = score(gt, None, masks, rules=replace(RULES, protocol="lvis"))
    assert 0 < metrics["boundary_APr"] < metrics["mask_APr"]
    gt, results = make_case()
    gt["annotations"] = [{**gt["annotations"][3], "iscrowd": 0, "id": i + 1} for i in range(120)]
    metrics = score(gt, None, results, rules=RULES, detections_per_image=110)
    assert metrics["boundary_AP"] <= metrics["boundary_AP@110"]
    logged = logged_scores(metrics, of_categories=True)
    assert logged["ap/boundary"] == metrics["boundary_AP"]
    assert logged["ap/boundary_at_110"] == metrics["boundary_AP@110"]
    assert {name for name in logged if name.startswith("ap_class/boundary")}


def test_the_table_has_a_column():
    gt, results = make_case()
    metrics = score(gt, None, results, rules=RULES)
    lines = format_table(metrics).splitlines()
    assert lines[0].split() == ["mask", "boundary"]
    assert lines[1].split()[-2:] == [f"{metrics[n]:.3f}" for n in ("mask_AP", "boundary_AP")]
    assert len({len(line) for line in lines}) == 1
