"""Scores by LVIS's rules equal those of the lvis package, and follow the rules by hand."""

import copy
import json

import numpy as np
import pytest

from mask_rcnn_jax.evaluation import lvis
from mask_rcnn_jax.evaluation.coco import check_protocol, format_table, score
from mask_rcnn_jax.evaluation.options import Scoring
from tests.evaluation.lvis_case import GOLDEN, IDS, SEEDS, make_case, score_with_package

ENGINES = ("pycocotools", "hotcoco")


@pytest.fixture(params=ENGINES)
def engine(request):
    pytest.importorskip(request.param)
    return request.param


@pytest.mark.parametrize("seed", SEEDS)
def test_generated_results_score_as_with_the_package(seed, engine):
    gt, boxes, masks = make_case(seed)
    before = copy.deepcopy((gt, boxes, masks))
    metrics = score(gt, boxes, masks, rules=Scoring(engine, "lvis"))
    assert (gt, boxes, masks) == before
    golden = json.loads(GOLDEN.read_text())[seed]
    for prefix, kind in (("", "bbox"), ("mask_", "segm")):
        expected = {prefix + name: value for name, value in golden[kind]["scores"].items()}
        assert expected.keys() == {prefix + name for name in lvis.METRICS}
        found = {name: metrics[name] for name in expected}
        assert found == pytest.approx(expected, rel=0, abs=1e-9)
        aps = {str(i): metrics["per_category"][f"class {i}"][prefix + "AP"] for i in IDS}
        assert aps == pytest.approx(golden[kind]["aps"], rel=0, abs=1e-9)


def test_the_golden_tells_the_groups_apart():
    golden = [one[kind]["scores"] for one in json.loads(GOLDEN.read_text()) for kind in one]
    for scores in golden[:6]:
        groups = [scores[name] for name in ("APr", "APc", "APf", "APs", "APm", "APl")]
        assert min(groups) > 0 and len(set(groups)) == 6
    assert [scores["APr"] for scores in golden[6:]] == [-1, -1]


@pytest.mark.parametrize("seed", [11, 12])
def test_a_subset_of_images_scores_as_with_the_package(seed, engine):
    """Needs the package: any other seed of the generated sets does as well."""
    pytest.importorskip("lvis")
    gt, boxes, masks = make_case(seed)
    chosen = [image["id"] for image in gt["images"]][::2]
    images = [entry for entry in gt["images"] if entry["id"] in chosen]
    parts = {"categories": gt["categories"], "images": images}
    for kind, results, given in (("bbox", boxes, (boxes, None)), ("segm", masks, (None, masks))):
        own = [e for e in gt["annotations"] if e["image_id"] in chosen]
        found = [e for e in results if e["image_id"] in chosen]
        expected = score_with_package(parts | {"annotations": own}, found, kind)["scores"]
        metrics = score(gt, *given, rules=Scoring(engine, "lvis"), image_ids=chosen)
        prefix = "mask_" if kind == "segm" else ""
        actual = {name: metrics[prefix + name] for name in expected}
        assert actual == pytest.approx(expected, rel=0, abs=1e-9)


def small(absent=(), partial=(), **keys):
    """One image with an object of class 1 (frequent); class 2 is rare, 3 is common."""
    image = {"id": 1, "height": 100, "width": 150, "file_name": "1.jpg"}
    labels = {"neg_category_ids": list(absent), "not_exhaustive_category_ids": list(partial)}
    entry = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [10, 10, 40, 20], "area": 800}
    code = {"size": [100, 150], "counts": [1010, *[20, 80] * 39, 20, 10070]}
    annotation = entry | {"segmentation": code} | keys
    categories = [{"id": k + 1, "name": f, "frequency": f} for k, f in enumerate("frc")]
    return {"images": [image | labels], "categories": categories, "annotations": [annotation]}


def result(score, box=(10, 10, 40, 20), category_id=1):
    return {"image_id": 1, "category_id": category_id, "score": score, "bbox": list(box)}


AWAY = (80, 60, 30, 30)


@pytest.mark.parametrize(
    "gt, results, ap",
    [
        pytest.param(small(), [result(0.5)], 1.0, id="found"),
        pytest.param(small(), [result(0.9, AWAY), result(0.5)], 0.5, id="a mistake before"),
        pytest.param(small(partial=[1]), [result(0.9, AWAY), result(0.5)], 1.0, id="no mistake"),
        pytest.param(small(partial=[1]), [result(0.9, AWAY)], 0.0, id="not found"),
        pytest.param(small(), [result(0.9), result(0.8)], 1.0, id="twice"),
        pytest.param(small(partial=[1]), [result(0.9), result(0.8)], 1.0, id="twice, partial"),
        pytest.param(small(), [result(0.9, AWAY, 2), result(0.5)], 1.0, id="not searched for"),
        pytest.param(small(absent=[2]), [result(0.9, AWAY, 2), result(0.5)], 1.0, id="absent"),
        pytest.param(
            small(),
            [*(result(0.9, AWAY, 3) for _ in range(300)), result(0.5)],
            0.0,
            id="behind 300 of a class that is not scored",
        ),
        pytest.param(
            small(),
            [*(result(0.9, AWAY, 3) for _ in range(299)), result(0.5)],
            1.0,
            id="the last of 300",
        ),
        pytest.param(small(iscrowd=1), [result(0.5)], 1.0, id="a crowd is an object"),
        pytest.param(small(area=0), [result(0.5)], -1.0, id="an object without area"),
        pytest.param(small(), [result(0.9, (10, 10, 0, 20)), result(0.5)], 1.0, id="no area"),
        pytest.param(small(), [], 0.0, id="no results"),
    ],
)
def test_rules(gt, results, ap, engine):
    metrics = score(gt, results, None, rules=Scoring(engine, "lvis"))
    assert metrics["AP"] == metrics["APf"] == pytest.approx(ap, abs=1e-9)
    assert metrics["APr"] == metrics["APc"] == -1
    assert metrics["per_category"] == {"f": {"AP": metrics["AP"]}, "r": {"AP": -1}, "c": {"AP": -1}}


def test_absent_classes_and_classes_of_other_images_differ(engine):
    """The same detection is a mistake where the class is absent, and unknown elsewhere."""
    gt = small()
    other = gt["images"][0] | {"id": 2, "neg_category_ids": []}
    gt["images"].append(other)
    found = [result(0.9) | {"image_id": 2}, result(0.5)]
    assert score(gt, found, None, rules=Scoring(engine, "lvis"))["AP"] == pytest.approx(1)
    other["neg_category_ids"] = [1]
    assert score(gt, found, None, rules=Scoring(engine, "lvis"))["AP"] == pytest.approx(0.5)
    other["not_exhaustive_category_ids"] = [1]
    assert score(gt, found, None, rules=Scoring(engine, "lvis"))["AP"] == pytest.approx(1)


def without(gt, section, key):
    entries = [{k: v for k, v in entry.items() if k != key} for entry in gt[section]]
    return gt | {section: entries}


@pytest.mark.parametrize(
    "gt, words",
    [
        (without(small(), "images", "neg_category_ids"), r"images\[0\] lacks 'neg_category_ids'$"),
        (without(small(), "images", "not_exhaustive_category_ids"), "lacks 'not_exhaustive_cat"),
        (without(small(), "categories", "frequency"), r"\[0\] has frequency None, expected one of"),
        (small() | {"categories": [{"id": 1, "frequency": "x"}]}, "has frequency 'x', expected"),
        (small(absent=[5]), r"images\[0\] has 5 in neg_category_ids, which is not in 'categories'"),
        (small(partial=["a"]), r"images\[0\] has 'a' in not_exhaustive_category_ids, which is not"),
        (
            small(absent=[[1]]),
            r"has neg_category_ids \[\[1\]\], expected a list of category ids",
        ),
    ],
)
def test_a_set_without_labels_is_refused(gt, words, tmp_path):
    path = tmp_path / "set.json"
    path.write_text(json.dumps(gt))
    with pytest.raises(ValueError, match=words) as error:
        score(path, [result(0.5)], None, rules=Scoring(protocol="lvis"))
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_protocol_and_a_report_are_refused():
    with pytest.raises(ValueError, match="^eval.protocol is 'x', expected one of .'coco', 'lvis'"):
        check_protocol("x")
    with pytest.raises(ValueError, match="^eval.protocol is 'lvis', expected 'coco' for a report"):
        score(small(), [], None, rules=Scoring(protocol="lvis"), callback=print)


def test_the_table_has_the_groups_of_classes():
    gt, boxes, masks = make_case(0)
    metrics = score(gt, boxes, masks, rules=Scoring(protocol="lvis"))
    lines = format_table(metrics).splitlines()
    assert lines[0].split() == ["box", "mask"]
    assert [line.split()[0] for line in lines[1:]] == list(lvis.METRICS)
    (rare,) = [line for line in lines if line.startswith("APr")]
    assert rare.split()[-2:] == [f"{metrics[name]:.3f}" for name in ("APr", "mask_APr")]
    assert np.isfinite([metrics[name] for name in lvis.METRICS]).all()
