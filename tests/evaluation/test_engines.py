"""hotcoco scores as pycocotools to the bit, on the public oracle and on degenerate sets."""

import copy
import json
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from pycocotools.cocoeval import COCOeval

from mask_rcnn_jax.evaluation.coco import score
from mask_rcnn_jax.evaluation.engines import check_engine, resolve
from mask_rcnn_jax.evaluation.options import Scoring
from tests.evaluation import lvis_case
from tests.evaluation.test_pycocotools import cases, one_object
from tests.helpers import shared

pytest.importorskip("hotcoco")


def check_equal(*arguments, protocol="coco", **options):
    expected = score(*arguments, **options, rules=Scoring("pycocotools", protocol))
    assert len(expected) >= 13
    given = copy.deepcopy(arguments)
    assert score(*given, **options, rules=Scoring("hotcoco", protocol)) == expected


def test_the_public_results_score_the_same():
    folder = shared("data/eval_oracle")
    name = "instances_val2014_{}100_results.json"
    boxes, masks = (
        json.loads((folder / name.format(kind)).read_text()) for kind in ("fakebbox", "fakesegm")
    )
    check_equal(str(folder / "instances_val2014_100.json"), boxes, masks)


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(cases())
def test_any_file_scores_the_same(case):
    """Strings as ids, annotations with id 0, crowds, equal scores, boxes without area."""
    gt, boxes, masks = case
    check_equal(gt, boxes, masks)
    check_equal(gt, boxes, None, image_ids=[gt["images"][0]["id"]])


def test_more_detections_score_the_same():
    gt, boxes, masks = lvis_case.make_case(0)
    one = gt["annotations"][0]
    gt["annotations"] += [one | {"id": 1000 + n} for n in range(101)]
    check_equal(gt, boxes, masks, detections_per_image=200)


@pytest.mark.parametrize("seed", range(3))
def test_lvis_scores_the_same(seed):
    check_equal(*lvis_case.make_case(seed), protocol="lvis")


def degenerate():
    gt, results = one_object()
    yield "no results", gt, []
    yield "no results and no objects", gt | {"annotations": []}, []
    yield "no objects", gt | {"annotations": []}, results
    yield "no annotations and no images", gt | {"annotations": [], "images": []}, []
    yield "another category", gt, [results[0] | {"category_id": 99}]
    other = {
        "id": 8,
        "image_id": 1,
        "category_id": 5,
        "iscrowd": 0,
        "bbox": [9, 5, 9, 9],
        "area": 81,
    }
    yield (
        "an object of an unlisted category",
        gt | {"annotations": [*gt["annotations"], other]},
        results,
    )
    yield "more than 100 results", gt, [results[0] | {"score": 1 - n / 200} for n in range(150)]
    yield "only a crowd", one_object(iscrowd=1)[0], results
    yield "negative scores", gt, [results[0] | {"score": s} for s in (-3, -1e200, 1e200)]
    yield "bare", {**gt, "images": [{"id": 1}], "categories": [{"id": 1}]}, results


@pytest.mark.parametrize("gt, results", [pytest.param(*c[1:], id=c[0]) for c in degenerate()])
def test_degenerate_sets_score_the_same(gt, results):
    check_equal(gt, results, None)


def test_a_callback_gets_the_evaluation_of_pycocotools():
    """The report reads what only pycocotools keeps."""
    gt, results = one_object()
    found = []
    score(gt, results, None, rules=Scoring("hotcoco"), callback=found.append)
    assert isinstance(found[0], COCOeval) and np.size(found[0].evalImgs)


def test_an_engine_that_is_not_there_is_named(monkeypatch):
    with pytest.raises(ValueError, match="^eval.engine is 'x', expected one of "):
        check_engine("x")
    monkeypatch.setitem(sys.modules, "hotcoco", None)
    with pytest.raises(ValueError, match="^eval.engine=hotcoco needs hotcoco: pip install "):
        check_engine("hotcoco")


def test_auto_takes_hotcoco_if_it_is_there(monkeypatch):
    assert resolve("auto") == "hotcoco"
    monkeypatch.setitem(sys.modules, "hotcoco", None)
    assert resolve("auto") == "pycocotools"
    gt, results = one_object()
    assert score(gt, results, None) == score(gt, results, None, rules=Scoring("pycocotools"))
