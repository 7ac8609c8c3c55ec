"""Scores and pictures of keypoints, with a detector that finds what is labeled."""

import json
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import optax
import pytest

from mask_rcnn_jax.annotations.keypoints import NO_KEYPOINTS as NONE
from mask_rcnn_jax.benchmarking.inputs import synthetic_batch
from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.data.dataset import categories
from mask_rcnn_jax.data.eval_loader import EvalLoader
from mask_rcnn_jax.data.options import DataOptions
from mask_rcnn_jax.evaluation import coco
from mask_rcnn_jax.models.build import named_section
from mask_rcnn_jax.recipe.options import EvalOptions
from mask_rcnn_jax.recipe.stopping import measure
from mask_rcnn_jax.report.preview import preview_sheet
from mask_rcnn_jax.structures import Detections
from mask_rcnn_jax.training import evaluator, scoring
from mask_rcnn_jax.training.checks import check_keypoints, unused_keypoints
from mask_rcnn_jax.training.encoding import Rules
from mask_rcnn_jax.training.scored_file import evaluate_results
from mask_rcnn_jax.training.state import TrainState
from mask_rcnn_jax.training.step import make_mesh
from mask_rcnn_jax.training.validation import logged_scores
from tests.data.test_keypoints import load
from tests.helpers import tiny_config
from tests.keypoint_set import NAMES, figure_json

RULES = Rules("continuous", False, False, True, keypoint_offset=0.5)


def predict(_, batch):
    truth = batch.targets
    scores = np.where(truth.valid, np.float32(0.9), 0)
    return Detections(truth.boxes, scores, truth.classes, None, truth.valid, truth.keypoints)


@pytest.fixture
def figures(tmp_path):
    """The set, and batches of it."""
    sizes = {"image_size": (128, 192), "resize": "fit", "max_instances": 3}
    options = DataOptions(**sizes, keypoints=NAMES, keypoint_offset=0.5)
    dataset = load(tmp_path, offset=0.5)
    return dataset, EvalLoader(dataset, options, batch_size=2, num_workers=0)


def test_what_is_found_is_scored_and_written_in_pixels_of_the_json(figures, tmp_path):
    dataset, loader = figures
    found = evaluator.detect(predict, {}, loader, dataset, make_mesh(), RULES)
    assert not any("keypoints" in entry for entry in found.boxes)
    for entry, given in zip(found.keypoints, figure_json()["annotations"], strict=True):
        labeled = np.reshape(given["keypoints"], (3, 3))[:, 2] > 0
        points = np.reshape(entry["keypoints"], (3, 3))[labeled, :2]
        expected = np.reshape(given["keypoints"], (3, 3))[labeled, :2]
        np.testing.assert_allclose(points, expected, atol=2e-3)  # rounded
    metrics = evaluator.score_and_write(dataset, found, tmp_path / "out", EvalOptions())
    assert metrics["keypoints_AP"] == metrics["keypoints_ARmax20"] == 1.0
    assert logged_scores(metrics, of_categories=True)["ap/keypoints"] == 1.0
    assert metrics == json.loads((tmp_path / "out/metrics.json").read_text())
    config = tiny_config()
    config.data.update(val_json=str(tmp_path / "figures.json"), val_images=str(tmp_path))
    results = tmp_path / "out/keypoints_results.json"
    for names in (NAMES, ()):  # of the recipe, or of the json
        config.data.keypoints = names
        again = evaluate_results(results, config)
        assert {name: metrics[name] for name in again if name != "per_category"} == {
            name: value for name, value in again.items() if name != "per_category"
        }
    assert "AP50" not in again and "OKS" in coco.format_table(again)


@pytest.mark.parametrize("has_keypoints", [True, False])
def test_whether_there_is_an_ap_depends_on_the_model_where_it_detects_nothing(
    figures, has_keypoints
):
    dataset, loader = figures

    def predict_nothing(_, batch):
        truth = batch.targets
        points = truth.keypoints if has_keypoints else None
        none = np.zeros_like(truth.valid)
        scores = np.zeros(truth.valid.shape, np.float32)
        return Detections(truth.boxes, scores, truth.classes, None, none, points)

    rules = RULES._replace(has_keypoints=has_keypoints)
    found = evaluator.detect(predict_nothing, {}, loader, dataset, make_mesh(), rules)
    assert found.boxes == [] and found.keypoints == ([] if has_keypoints else None)
    logged = logged_scores(evaluator.score(dataset, found, EvalOptions()), of_categories=True)
    assert logged["ap/box"] == 0 and logged.get("ap/keypoints") == (0 if has_keypoints else None)
    assert measure(logged) == ("ap/keypoints" if has_keypoints else "ap/box")


def test_a_line_says_that_a_model_without_a_head_does_not_use_them(figures):
    dataset = figures[0]
    config = tiny_config()
    config.data.update(keypoints=NAMES)
    line = unused_keypoints(dataset, as_recipe(config))
    assert "its 3 keypoints (nose, ..) are not used" in line and "keypoint_head is none" in line
    assert not unused_keypoints(replace(dataset, keypoints=NONE), as_recipe(config))
    config.model.keypoint_head = named_section("keypoint_head", "conv_deconv", num_keypoints=3)
    assert not unused_keypoints(dataset, as_recipe(config))


@pytest.mark.parametrize("names", [NAMES[::-1], NAMES[:2], ()])
def test_a_training_set_has_the_keypoints_of_the_recipe_in_their_order(figures, names):
    dataset, config = figures[0], tiny_config()
    config.data.update(keypoints=NAMES)
    config.model.keypoint_head = named_section("keypoint_head", "conv_deconv", num_keypoints=3)
    check_keypoints(dataset, as_recipe(config))
    others = replace(dataset, keypoints=dataset.keypoints._replace(names=names))
    with pytest.raises(ValueError, match="has the keypoints .*, data.keypoints is"):
        check_keypoints(others, as_recipe(config))
    config.model.keypoint_head = named_section("keypoint_head", "none")
    check_keypoints(others, as_recipe(config))


def test_results_say_which_sigmas_are_ours_and_the_report_has_their_ap(
    figures, tmp_path, monkeypatch
):
    points = [{"image_id": 1, "category_id": 4, "score": 0.5, "keypoints": [30, 15, 1] * 3}]
    (tmp_path / "points.json").write_text(json.dumps(points))
    config, lines = tiny_config(), []
    config.data.update(val_json=str(tmp_path / "figures.json"), val_images=str(tmp_path))
    monkeypatch.setattr(scoring.logging, "warning", lambda text, *given: lines.append(text % given))
    for names in (NAMES, ()):
        config.data.keypoints = names
        metrics = evaluate_results(tmp_path / "points.json", config, output=tmp_path, report=True)
        assert [line for line in lines if "all are 0.05" in line]
        lines.clear()
    page = (tmp_path / "report.html").read_text()
    assert "Keypoints AP" in page and f"{metrics['keypoints_AP']:.3f}" in page


def test_sets_with_points_in_another_order_are_not_scored(figures):
    dataset = figures[0]
    recipe = as_recipe(tiny_config())
    for names, is_refused in ((NAMES, False), ((), False), (NAMES[::-1], True)):
        given = replace(recipe, data=replace(recipe.data, keypoints=names))
        expected = pytest.raises(ValueError, match="has the keypoints .*data.keypoints is")
        with expected if is_refused else nullcontext():
            scoring._val_set(given, dataset, categories(dataset), "a model", known=True)


def test_pictures_show_points_on_both_sides(figures, tmp_path):
    dataset, loader = figures
    given = {}, loader, dataset, make_mesh()
    drawn = evaluator.draw_pictures(predict, *given, tmp_path / "with")

    def without(_, batch):
        return replace(predict(_, batch), keypoints=None)

    plain = evaluator.draw_pictures(without, *given, tmp_path / "without")
    for name, picture in drawn.items():
        differs = (picture != plain[name]).any(axis=(0, 2))
        middle = len(differs) // 2
        assert differs[middle:].any() and not differs[:middle].any()
        white = (picture == 255).all(axis=2)[:, : middle - 8]
        assert white.any()  # dots of the ground truth, on gray


def test_previews_show_points_as_they_are_trained_on(figures):
    dataset, loader = figures
    given = {"image_size": (128, 192), "resize": "fit", "max_instances": 3, "flip_probability": 0}
    plain = DataOptions(**given, augment=("horizontal_flip",), keypoints=NAMES)
    sheet = preview_sheet(plain, dataset, 2)
    without = preview_sheet(replace(plain, keypoints=()), replace(dataset, keypoints=NONE), 2)
    assert (sheet != without).any(axis=2).sum() > 100


def test_synthetic_batches_have_points_in_their_boxes():
    config = tiny_config()
    plain = synthetic_batch(as_recipe(config), 2).targets
    config.data.keypoints = NAMES
    targets = synthetic_batch(as_recipe(config), 2).targets
    np.testing.assert_array_equal(targets.boxes, plain.boxes)
    assert plain.keypoints is None and targets.keypoints.dtype == np.float32
    valid, places = targets.valid, targets.keypoints[..., :2]
    low, high = targets.boxes[:, :, None, :2], targets.boxes[:, :, None, 2:]
    assert ((places >= low) & (places <= high)).all()
    np.testing.assert_array_equal(
        targets.keypoints[..., 2], np.repeat(2.0 * valid[..., None], 3, -1)
    )


def test_recipes_refuse_what_does_not_go_with_keypoints():
    config = tiny_config()
    config.data.keypoints = NAMES
    assert as_recipe(config).data.keypoints == NAMES
    config.eval.keypoint_sigmas = (0.1, 0.1)
    with pytest.raises(ValueError, match="2 values, expected one for each of the 3 names"):
        as_recipe(config)
    config.eval.keypoint_sigmas = ()
    config.eval.tta_flip = True
    with pytest.raises(ValueError, match="expected neither with data.keypoints"):
        as_recipe(config)
    config.eval.tta_flip = False
    config.data.keypoints = ("nose", "nose")
    with pytest.raises(ValueError, match="'nose' twice"):
        as_recipe(config)


def test_a_state_shows_its_ap():
    state = TrainState.start({"params": {"a": np.zeros(3)}, "batch_stats": {}}, optax.sgd(0.1))
    text = repr(state.with_metrics({"ap/box": 0.25, "ap/keypoints": 0.5, "lr": 1.0}))
    assert text == "TrainState(step 0, 3 parameters, ap/box 0.25, ap/keypoints 0.5)"
