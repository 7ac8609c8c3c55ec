"""Scores of images that hold more objects of a class than the 100 that COCO's rules score."""

import contextlib
import io
import json

import cv2
import numpy as np
import pytest
from pycocotools import mask as coco_mask
from pycocotools.cocoeval import COCOeval

from mask_rcnn_jax import load_config
from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.evaluation import coco, engines
from mask_rcnn_jax.evaluation.options import Scoring
from mask_rcnn_jax.recipe.options import EvalOptions
from mask_rcnn_jax.report.analysis import analyze
from mask_rcnn_jax.report.page import write_report
from mask_rcnn_jax.report.training_section import training_section
from mask_rcnn_jax.training import evaluator
from mask_rcnn_jax.training.encoding import Found
from mask_rcnn_jax.training.scored_file import evaluate_results
from tests.evaluation.test_pycocotools import plain_pycocotools


def discs(images: int, side: int, radius: int = 6, pitch: int = 16) -> tuple[dict, list[dict]]:
    """Square images of side x side discs of one class, and results that are the ground truth."""
    size, annotations, results = side * pitch, [], []
    y, x = np.mgrid[:pitch, :pitch] - pitch // 2
    codes, pixels = [], np.zeros((size, size), np.uint8, order="F")
    for n in range(side * side):
        top, left = np.array(divmod(n, side)) * pitch
        place = np.s_[top : top + pitch, left : left + pitch]
        pixels[place] = np.hypot(x, y) <= radius
        codes.append(coco_mask.encode(pixels))
        pixels[place] = 0
    for image_id in range(1, images + 1):
        for code in codes:
            box = coco_mask.toBbox(code).tolist()
            text = {"size": code["size"], "counts": code["counts"].decode()}
            entry = {"image_id": image_id, "category_id": 1, "bbox": box, "segmentation": text}
            number = {"id": len(annotations) + 1, "iscrowd": 0}
            annotations.append(entry | number | {"area": float(coco_mask.area(code))})
            results.append(entry | {"score": 0.9})
    return {
        "images": [
            {"id": i + 1, "file_name": f"{i + 1}.png", "height": size, "width": size}
            for i in range(images)
        ],
        "categories": [{"id": 1, "name": "disc"}],
        "annotations": annotations,
    }, results


def crowded(seed: int) -> tuple[dict, list[dict]]:
    """Overlapping boxes of two classes, 250 objects in an image, with crowds, objects to ignore, an
    annotation 0 and equal scores."""
    rng = np.random.default_rng(seed)
    gt, _ = discs(2, 2)
    gt["categories"].append({"id": 2, "name": "other"})
    gt["annotations"], results = [], []
    for n in range(500):
        box = [*rng.uniform(0, 200, 2).round(1).tolist(), *rng.uniform(2, 90, 2).round(1).tolist()]
        place = {"image_id": 1 + n % 2, "category_id": 1 + int(rng.random() < 0.1)}
        own = {"id": n, "iscrowd": int(rng.random() < 0.05), "area": box[2] * box[3], "bbox": box}
        gt["annotations"].append(place | own)
        for _ in range(int(rng.integers(0, 3))):
            moved = [v + float(rng.choice([0, 0.5, 3])) for v in box]
            results.append(place | {"score": round(float(rng.random()), 1), "bbox": moved})
    return gt, results


@pytest.mark.parametrize("engine", ["pycocotools", "hotcoco"])
@pytest.mark.slow
def test_the_ground_truth_as_results_scores_one(engine):
    pytest.importorskip(engine)
    gt, results = discs(2, 40)
    metrics = coco.score(gt, results, results, rules=Scoring(engine), detections_per_image=1600)
    names = {"AP", "AP50", "AP75", "APs", "AR", "ARs"}
    for prefix in ("", "mask_"):
        assert metrics[f"{prefix}AP"] < 0.07 and metrics[f"{prefix}ARmax100"] == 1 / 16
        assert [metrics[f"{prefix}{name}@1600"] for name in names] == pytest.approx([1] * 6)
        assert metrics[f"{prefix}APl@1600"] == metrics[f"{prefix}ARm@1600"] == -1
        assert metrics["per_category"]["disc"][f"{prefix}AP@1600"] == pytest.approx(1)
    table = coco.format_table(metrics).splitlines()
    assert "AP@1600" in table[13] and table[13].split()[-2:] == ["1.000", "1.000"]
    assert ["AR@1600", "1600", "detections", "per", "image"] in [row.split()[:5] for row in table]
    assert table[-2].startswith("AP@1600 per category") and "1.000" in table[-1]


def test_fewer_detections_than_objects_are_named_so():
    gt, results = discs(1, 12)
    metrics = coco.score(gt, results, None, detections_per_image=120)
    assert metrics["AR@120"] == pytest.approx(120 / 144)
    assert coco.at_limit(metrics) == "@120"


@pytest.mark.parametrize("most", [1, 100, 1600])
def test_nothing_is_added_without_images_beyond_the_cap(most):
    """A hundred objects, of whatever number of images and classes, and a crowd."""
    gt, results = discs(2, 10)
    gt["annotations"].append(gt["annotations"][0] | {"id": 900, "iscrowd": 1})
    metrics = coco.score(gt, results, None, detections_per_image=most)
    assert metrics.keys() == {*coco.METRICS, "per_category"} and coco.at_limit(metrics) == ""
    gt, results = discs(2, 11)
    if most == 1600:  # the images that are scored count
        gt["annotations"] = [a for a in gt["annotations"] if a["image_id"] == 1]
        metrics = coco.score(gt, [], None, image_ids=[2], detections_per_image=most)
    else:
        metrics = coco.score(gt, results, None, detections_per_image=most)
    assert metrics.keys() == {*coco.METRICS, "per_category"}


@pytest.mark.parametrize("seed", range(3))
def test_cocos_own_numbers_stay_to_the_bit(seed):
    gt, results = crowded(seed)
    expected = plain_pycocotools(gt, results, "bbox")
    metrics = coco.score(gt, results, None, detections_per_image=400)
    assert [metrics[name] for name in coco.METRIC_NAMES] == expected
    assert metrics["AP@400"] != metrics["AP"]
    pytest.importorskip("hotcoco")
    rules = Scoring("hotcoco")
    assert coco.score(gt, results, None, rules=rules, detections_per_image=400) == metrics


@pytest.mark.parametrize("seed", range(3))
def test_matches_are_those_of_pycocotools(seed):
    gt, results = crowded(seed)
    found = [one | {"id": n, "area": 900.0, "iscrowd": 0} for n, one in enumerate(results, 1)]
    evaluations = []
    for kind in (COCOeval, engines.Evaluation):
        with contextlib.redirect_stdout(io.StringIO()):
            truth, detected = (engines.index_annotations(gt, e) for e in (gt["annotations"], found))
            evaluation = kind(truth, detected, "bbox")
            evaluation.params.useCats = seed % 2
            evaluation.evaluate()
        evaluations.append(evaluation.evalImgs)
    assert len(evaluations[0]) == len(evaluations[1])
    for expected, entry in zip(*evaluations, strict=True):
        assert (entry is None) == (expected is None)
        for name in expected or ():
            np.testing.assert_array_equal(entry[name], expected[name], err_msg=name)


def test_a_results_file_is_scored_at_detections_per_image(tmp_path, caplog, capsys):
    gt, results = discs(2, 12)
    (tmp_path / "images").mkdir()
    for image in gt["images"]:
        cv2.imwrite(str(tmp_path / "images" / image["file_name"]), np.zeros((192, 192), np.uint8))
    paths = [tmp_path / name for name in ("gt.json", "results.json")]
    for path, content in zip(paths, (gt, results), strict=True):
        path.write_text(json.dumps(content))
    entries = {"data.val_json": str(paths[0]), "data.val_images": str(tmp_path / "images")}
    recipe = load_config("quickstart", entries | {"eval.detections_per_image": 150})
    metrics = evaluate_results(paths[1], recipe, output=tmp_path / "out", report=True)
    assert metrics["mask_AP@150"] == pytest.approx(1) and metrics["mask_AP"] < 0.8
    assert json.loads((tmp_path / "out" / "metrics.json").read_text()) == metrics
    assert "AP@150" in capsys.readouterr().out
    lines = [line for line in caplog.messages if "objects of a class" in line]
    (line,) = lines
    assert "88 of 288 objects (30.6%)" in line and "AP@150" in line
    assert "eval.detections_per_image allows" not in line  # that is of models
    page = (tmp_path / "out" / "report.html").read_text()
    assert "AP@150" in page and "at most 150 detections" in page


def test_tiles_are_scored_by_all_that_they_find(tmp_path, caplog):
    gt, results = discs(1, 12)
    path = tmp_path / "gt.json"
    path.write_text(json.dumps(gt))
    cv2.imwrite(str(tmp_path / "1.png"), np.zeros((192, 192), np.uint8))
    found = Found(results, results, None, [1])
    metrics = evaluator.score(load_coco(path, tmp_path), found, EvalOptions(), most=144)
    assert metrics["mask_AP@144"] == pytest.approx(1) and metrics["mask_AP"] < 0.8
    assert "AP@144" in caplog.text and "eval.detections_per_image" not in caplog.text


def test_a_report_is_of_all_detections_that_are_scored(tmp_path):
    gt, results = discs(1, 12)
    found = []
    options = dict(detections_per_image=150, callback=lambda one: found.append(analyze(one)))
    metrics = coco.score(gt, results, None, **options)
    (analysis,) = found
    assert analysis.detections == 150 and analysis.num_true == 144
    assert analysis.stats["AP"] == metrics["AP@150"] and analysis.category_ap[0, 0] == 1
    write_report(tmp_path / "report.html", "one", {}, found, lambda _: None, [])
    page = (tmp_path / "report.html").read_text()
    assert "<span>AP50@150</span><b>1.000</b>" in page and "at most 150 detections" in page


def test_the_curve_of_a_run_is_of_all_detections_that_are_scored():
    records = [{"step": n, "loss/total": 1.0, "ap/box": n / 10} for n in (1, 9)]
    cut = [record | {"ap/box": 0.1, "ap/box_at_150": record["ap/box"]} for record in records]
    whole = training_section(records).replace("AP of boxes", "AP@150 of boxes")
    whole = whole.replace("box AP,", "box AP@150,")
    assert training_section(cut) == whole and "AP@150" not in training_section(records)
    assert training_section(records) != training_section(records[:1])
