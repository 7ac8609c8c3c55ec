"""Scores of keypoints: as pycocotools has them, by hand, and what becomes of names and files."""

import contextlib
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from mask_rcnn_jax.annotations.keypoints import PERSON
from mask_rcnn_jax.annotations.reader import read_ground_truth
from mask_rcnn_jax.evaluation import coco, keypoints
from mask_rcnn_jax.evaluation.encode import ImageDetections, encode_image
from mask_rcnn_jax.evaluation.merge import merge_views
from mask_rcnn_jax.evaluation.options import Scoring
from mask_rcnn_jax.evaluation.scorer import Job
from tests.keypoint_set import NAMES, figure_json


def crowded(count=17, images=7):
    """Ground truth of people with some points hidden or unlabeled, and noisy results."""
    rng = np.random.default_rng(3)
    truth, results = [], []
    for n in range(60):
        x, y, w, h = rng.uniform(10, 300, 4).tolist()
        points = np.column_stack([rng.uniform(x, x + w, count), rng.uniform(y, y + h, count)])
        v = rng.choice([0, 1, 2], count, p=[0.3, 0.2, 0.5]) * (n % 9 > 0)
        given = np.column_stack([points * (v > 0)[:, None], v]).round(2)
        entry = {"image_id": 1 + n % images, "category_id": 1, "iscrowd": int(n % 20 == 1)}
        entry |= {"id": n + 1, "bbox": [x, y, w, h], "area": 0.6 * w * h}
        entry |= {"num_keypoints": int((v > 0).sum()), "keypoints": given.ravel().tolist()}
        truth.append(entry | {"segmentation": [[x, y, x + w, y, x + w, y + h]]})
        for _ in range(rng.integers(0, 3)):
            noise = rng.normal(0, rng.choice([1, 6, 30]), points.shape)
            found = np.column_stack([points + noise, np.ones(count)]).ravel().tolist()
            kept = {key: entry[key] for key in ("image_id", "category_id")}
            results.append(kept | {"keypoints": found, "score": float(rng.random())})
    ids = range(1, images + 2)
    pictures = [{"id": i, "height": 700, "width": 700, "file_name": f"{i}.png"} for i in ids]
    person = {"id": 1, "name": "person", "keypoints": list(PERSON[:count]), "skeleton": []}
    return {"images": pictures, "annotations": truth, "categories": [person]}, results


def pycocotools_scores(truth, results, sigmas=None, image_ids=None):
    with contextlib.redirect_stdout(io.StringIO()):
        gt = COCO()
        gt.dataset = json.loads(json.dumps(truth))
        gt.createIndex()
        evaluation = COCOeval(gt, gt.loadRes(json.loads(json.dumps(results))), "keypoints")
        if sigmas is not None:
            evaluation.params.kpt_oks_sigmas = np.array(sigmas)
        if image_ids is not None:
            evaluation.params.imgIds = image_ids
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats.tolist()


@pytest.mark.parametrize("image_ids", [None, [1, 2, 5, 8]])
def test_scores_are_those_of_pycocotools(image_ids):
    truth, results = crowded()
    metrics = coco.score(truth, None, None, keypoint_results=results, image_ids=image_ids)
    ours = [metrics[f"keypoints_{name}"] for name in keypoints.METRICS]
    assert ours == pycocotools_scores(truth, results, image_ids=image_ids)
    assert 0.1 < ours[0] < 0.9 and len(set(ours)) > 7
    assert metrics["per_category"] == {"person": {"keypoints_AP": ours[0]}}
    table = coco.format_table(metrics)
    assert f"{ours[0]:.3f}" in table and "OKS 0.50:0.95" in table and "IoU" not in table


def test_other_points_have_sigmas_of_the_recipe():
    truth, results = crowded(count=3)
    truth["categories"][0]["keypoints"] = list(NAMES)
    sigmas = (0.1, 0.05, 0.2)
    for rules, expected in (
        (Scoring(keypoint_sigmas=sigmas), sigmas),
        (Scoring(), [keypoints.UNKNOWN_SIGMA] * 3),
    ):
        metrics = coco.score(truth, None, None, keypoint_results=results, rules=rules)
        ours = [metrics[f"keypoints_{name}"] for name in keypoints.METRICS]
        assert ours == pycocotools_scores(truth, results, expected)
    assert "'nose'" not in keypoints.sigmas_of(NAMES, ())[1]  # which COCO has
    assert "'left_hand'" in keypoints.sigmas_of(NAMES, ())[1]
    assert keypoints.sigmas_of(PERSON[3:5], ())[0].tolist() == pytest.approx([0.035, 0.035])
    with pytest.raises(ValueError, match="2 values, expected one for each of 3"):
        keypoints.sigmas_of(NAMES, (0.1, 0.1))


def test_similarity_by_hand():
    """One object of area 1600, one point off by d: exp(-d^2 / (2 * 1600 * (2 sigma)^2)), 0.61 here;
    the hidden point is exact, the unlabeled one does not count: OKS is 0.80, so AP is 7 / 10."""
    truth = figure_json()
    truth["annotations"] = truth["annotations"][:1]
    truth["annotations"][0] |= {"area": 1600, "keypoints": [30, 15, 2, 22, 30, 1, 0, 0, 0]}
    off = 40 * 0.2  # sqrt(area) * 2 sigma: exp(-1 / 2) = 0.607
    found = {"image_id": 1, "category_id": 4, "score": 0.5}
    found["keypoints"] = [30 + off, 15, 1, 22, 30, 1, 90, 60, 1]
    rules = Scoring(keypoint_sigmas=(0.1, 0.1, 0.1))
    metrics = coco.score(truth, None, None, keypoint_results=[found], rules=rules)
    assert metrics["keypoints_AP"] == pytest.approx(0.7, abs=1e-6)
    assert (metrics["keypoints_AP75"], metrics["keypoints_APl"]) == (pytest.approx(1), -1)


def test_names_of_the_recipe_choose_and_order_the_points_of_the_json():
    truth, results = crowded(count=5)
    order = [3, 0, 4]
    names = tuple(PERSON[n] for n in order)
    picked = [np.reshape(r["keypoints"], (-1, 3))[order].ravel().tolist() for r in results]
    chosen = [r | {"keypoints": p} for r, p in zip(results, picked, strict=True)]
    gt = read_ground_truth(truth, scoring=True, keypoints=names)
    metrics = coco.score(gt, None, None, keypoint_results=chosen)
    for entry in truth["annotations"]:
        points = np.reshape(entry["keypoints"], (-1, 3))[order]
        entry |= {
            "keypoints": points.ravel().tolist(),
            "num_keypoints": int((points[:, 2] > 0).sum()),
        }
    sigmas = keypoints.sigmas_of(names, ())[0]
    expected = pycocotools_scores(truth, chosen, sigmas)
    assert [metrics[f"keypoints_{name}"] for name in keypoints.METRICS] == expected


def test_without_detections_the_score_is_zero_and_without_points_unknown():
    truth, _ = crowded()
    assert coco.score(truth, None, None, keypoint_results=[])["keypoints_AP"] == 0
    for entry in truth["annotations"]:
        entry |= {"keypoints": [0] * 51, "num_keypoints": 0}
    assert coco.score(truth, None, None, keypoint_results=[])["keypoints_AP"] == -1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"keypoints": [1, 2, 1]}, "entry 0 has keypoints .*expected 51 numbers"),
        ({"keypoints": [float("nan")] * 51}, "entry 0 has the value nan"),
        ({"image_id": 99}, "entry 0 refers to image 99"),
    ],
)
def test_faulty_results_are_refused(change, reason):
    truth, results = crowded()
    results[0] |= change
    with pytest.raises(ValueError, match=reason):
        coco.score(truth, None, None, keypoint_results=results)


def detections():
    points = np.array([[(30, 15, 0.9), (22, 30, 0.5), (58, 31.5, 0.25)]] * 2)
    points[1, :, 0] += 2
    boxes = np.array([[20.0, 10, 60, 50], [22, 10, 62, 50]])
    return ImageDetections(1, 64, 96, boxes, np.float32([0.9, 0.5]), [4, 4], None, points)


def test_results_of_an_image_and_the_files_of_a_job(tmp_path):
    entries, _ = encode_image(detections(), "continuous", False)
    assert entries[0]["keypoints"] == [30, 15, 1, 22, 30, 1, 58, 31.5, 1]
    assert entries[0]["keypoint_scores"] == [0.9, 0.5, 0.25]
    source = figure_json()
    reading = {"scoring": True, "keypoints": NAMES}
    lines: list[str] = []
    boxes, points = keypoints.split(entries)
    job = Job(source, reading, boxes, None, [1, 2], Scoring(), None, 100, points)
    job.write(tmp_path)
    scores = job.score(lines.append)
    assert [line for line in lines if "keypoint_sigmas" in line]
    found = json.loads((tmp_path / "keypoints_results.json").read_text())
    assert set(found[0]) == {"image_id", "category_id", "score", "keypoints", "keypoint_scores"}
    plain = json.loads((tmp_path / "bbox_results.json").read_text())
    assert set(plain[0]) == {"image_id", "category_id", "score", "bbox"}
    expected = pycocotools_scores(source, found, [keypoints.UNKNOWN_SIGMA] * 3, [1, 2])
    assert [scores[f"keypoints_{name}"] for name in keypoints.METRICS] == expected
    assert scores["AP"] == coco.score(source, plain, None)["AP"]
    again = coco.load_results(tmp_path / "keypoints_results.json")
    assert coco.split_results(again) == (None, None)


@pytest.mark.parametrize("finds_some", [True, False])
def test_detections_of_a_model_without_keypoints_have_no_such_scores(finds_some, tmp_path):
    """Nor has it where it detects nothing, while a model of keypoints then has an AP of 0."""
    given = figure_json(), {"scoring": True, "keypoints": NAMES}
    boxes = encode_image(detections()._replace(keypoints=None), "continuous", False)[0]
    job = Job(*given, boxes if finds_some else [], None, [1], Scoring(), None, 100)
    job.write(tmp_path)
    assert not (tmp_path / "keypoints_results.json").exists()
    assert not [name for name in job.score(lambda line: None) if name.startswith("keypoints")]
    assert replace(job, keypoints=[]).score(lambda line: None)["keypoints_AP"] == 0


def test_keypoints_that_the_ground_truth_lacks_are_written_and_not_scored(tmp_path):
    boxes, points = keypoints.split(encode_image(detections(), "continuous", False)[0])
    job = Job(figure_json(), {"scoring": True}, boxes, None, [1], Scoring(), None, 100, points)
    job.write(tmp_path)
    assert len(json.loads((tmp_path / "keypoints_results.json").read_text())) == 2
    assert "keypoints_AP" not in job.score(lambda line: None)


def test_pieces_in_tiles_give_each_point_from_where_it_is_surest():
    """An object across two tiles: neither sees all of it."""
    size = 100, 100
    whole = ImageDetections(
        1, *size, np.zeros((0, 4)), np.zeros(0, np.float32), [], None, np.zeros((0, 2, 3))
    )
    left = np.array([[(40.0, 50, 0.9), (59, 50, 0.1)]])
    right = np.array([[(1.0, 50, 0.2), (30, 51, 0.8)]])
    views = [
        whole,
        ImageDetections(
            1, 100, 60, np.array([[20.0, 40, 60, 60]]), np.float32([0.7]), [4], None, left
        ),
        ImageDetections(
            1, 100, 60, np.array([[0.0, 40, 40, 60]]), np.float32([0.6]), [4], None, right
        ),
    ]
    windows = [(0, 0, 100, 100), (0, 0, 60, 100), (40, 0, 100, 100)]
    merged = merge_views(views, windows, "continuous")
    np.testing.assert_allclose(merged.boxes, [[20, 40, 80, 60]])
    np.testing.assert_allclose(merged.keypoints, [[(40, 50, 0.9), (70, 51, 0.8)]])
