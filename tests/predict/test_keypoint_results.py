"""Keypoints of results: selected, written, drawn, and brought to the pixels of the image."""

import csv
import json
from dataclasses import replace
from pathlib import PurePosixPath

import numpy as np
import pytest
from ml_collections import ConfigDict

from mask_rcnn_jax.annotations.keypoints import PERSON, skeleton_of
from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data.coco import load_categories
from mask_rcnn_jax.data.resize import ResizePlan
from mask_rcnn_jax.evaluation import visualize
from mask_rcnn_jax.exporting.manifest import ModelInterface, make_manifest
from mask_rcnn_jax.models.build import name_part
from mask_rcnn_jax.predict import outputs
from mask_rcnn_jax.predict.batches import PreparedImage, _detections
from mask_rcnn_jax.predict.inputs import Input
from mask_rcnn_jax.predict.saving import ResultFiles
from mask_rcnn_jax.predict.tiles import as_view, merge_tiles
from mask_rcnn_jax.recipe.manifest import read_manifest
from mask_rcnn_jax.serving.answers import to_entries
from mask_rcnn_jax.structures import Detections
from mask_rcnn_jax.weights.saved_model import saved_categories
from tests.keypoint_set import NAMES, figure_json
from tests.predict.stub_predictor import StubPredictor
from tests.predict.test_result import make_result
from tests.small_model import small_config

POINTS = np.array([[(20, 30, 0.9), (40, 32, 0.5), (30.5, 22, 0.1)]] * 4, np.float32)
LINES = [
    {"id": 3, "name": "a", "keypoints": list(NAMES), "skeleton": [[1, 2]]},
    {"id": 8, "name": "b"},
]


def keypoint_result(**changes):
    fields = dict(keypoints=POINTS, keypoint_names=NAMES, categories=LINES)
    return make_result(**fields | changes)


def test_rows_are_selected_and_entries_have_pixels_of_coco():
    result = keypoint_result(keypoint_offset=0.5)
    moved = POINTS + np.arange(4)[:, None, None]
    some = keypoint_result(keypoints=moved)[[2, 0]]
    np.testing.assert_array_equal(some.keypoints, moved[[2, 0]])
    entry = result.to_coco(7)[0]
    assert list(entry)[3:] == ["bbox", "keypoints", "keypoint_scores", "segmentation"]
    assert entry["keypoints"] == [19.5, 29.5, 1, 39.5, 31.5, 1, 30, 21.5, 1]
    assert entry["keypoint_scores"] == [0.9, 0.5, 0.1]
    assert json.loads(json.dumps(entry)) == entry
    assert to_entries(result, "none")[0]["keypoints"] == entry["keypoints"]
    assert "keypoints" not in make_result().to_coco()[0]
    for number in (np.int64(7), np.uint16(7)):
        assert json.loads(json.dumps(result.to_coco(number)[0])) == entry


def test_lines_of_the_skeleton_and_dots_are_drawn():
    image = np.full((60, 90, 3), 128, np.uint8)
    options = dict(labels=False, boxes=False, masks=False, min_side=0)

    def drawn(**changes):
        picture = keypoint_result(image=image, **changes)[:1].plot(**options)
        return (picture != 128).any(axis=2)

    with_lines, dots = drawn(), drawn(categories=[{"id": 1, "name": "a"}] * 2)
    assert with_lines[31, 30] and not dots[31, 30]  # between the first two
    for x, y, _ in POINTS[0]:
        assert dots[int(y), int(x)] and with_lines[int(y), int(x)]
    assert dots.sum() < 200
    assert (
        not keypoint_result(image=image)[:1]
        .plot(keypoints=False, **options)
        .tobytes()
        .strip(b"\x80")
    )
    person = np.tile(POINTS[:, :1], (1, 17, 1))
    person[:, :, 0] += np.arange(17)
    keypoint_result(keypoints=person, keypoint_names=PERSON).plot()
    assert not drawn(keypoints=np.full_like(POINTS, np.nan)).any()
    large = drawn(keypoints=np.full_like(POINTS, 1e30))  # of a diverged model
    assert not large.any()


def test_keypoints_below_the_threshold_are_not_drawn_nor_lines_to_them():
    image = np.full((60, 90, 3), 128, np.uint8)
    options = dict(labels=False, boxes=False, masks=False, min_side=0)
    result = keypoint_result(image=image, keypoint_threshold=0.3)[:1]

    def drawn(picture):
        return (picture != 128).any(axis=2)

    (a, b, unsure), middle = POINTS[0, :, :2].astype(int), (30, 31)
    for threshold, expected in (
        (None, [True, True, False, True]),  # scores are 0.9, 0.5 and 0.1
        (0.1, [True, True, True, True]),
        (0.6, [True, False, False, False]),
    ):
        shown = drawn(result.plot(keypoint_threshold=threshold, **options))
        assert [bool(shown[y, x]) for x, y in (a, b, unsure, middle)] == expected
    detections = Detections(
        *(result.boxes, result.scores, result.classes, None, np.ones(1, bool), result.keypoints)
    )
    plain = visualize.draw_detections(image, detections, ["a", "b"], min_side=0)
    some = visualize.draw_detections(
        image, detections, ["a", "b"], min_side=0, keypoint_threshold=0.3
    )
    x, y = unsure
    assert (plain[y, x] == 255).all() and not (some[y, x] == 255).all()


def test_the_threshold_is_that_of_the_kind_of_score():
    for recipe, expected in (("coco_keypoints", 2.0), ("coco_keypoints:detectron2", 0.05)):
        assert load_config(recipe).keypoint_threshold == expected


class Probabilities:
    score = "softmax"


def some_head() -> Probabilities:
    return Probabilities()


@pytest.mark.parametrize("name, expected", [("Probabilities", 0.05), ("some_head", -np.inf)])
def test_points_of_a_head_of_ones_own_are_not_all_left_out(name, expected):
    recipe = load_config("coco_keypoints")
    head = name_part("keypoint_head", ConfigDict({"name": f"{__name__}:{name}"}))
    recipe = replace(recipe, model=replace(recipe.model, keypoint_head=head))
    assert recipe.keypoint_threshold == expected


def test_tables_have_a_column_for_each_number_and_other_files_a_line(tmp_path, monkeypatch, caplog):
    result = keypoint_result()
    with ResultFiles(tmp_path, ["csv"], NAMES) as files:
        files.add(files.write(result, Input("a.png", "a.png", PurePosixPath("a.png")), 1))
    head, *rows = csv.reader((tmp_path / "detections.csv").read_text().splitlines())
    assert head[-10:-5] == ["mask_area", "nose_x", "nose_y", "nose_score", "left_hand_x"]
    assert len(rows) == len(result) and {len(row) for row in rows} == {len(head)}
    assert list(map(float, rows[0][-9:])) == pytest.approx(
        [20, 30, 0.9, 40, 32, 0.5, 30.5, 22, 0.1]
    )
    monkeypatch.setattr(outputs.annotate, "annotate_images", lambda *given: (x for x in ()))
    predictor = StubPredictor()
    for names in (NAMES, ()):
        predictor.keypoint_names, kinds = names, ["csv", "yolo", "labelme", "masks"]
        outputs.write_images(predictor, [], tmp_path, kinds, None, print)
        said = "--save yolo,labelme: without keypoints" in caplog.text
        assert said == bool(names)
        caplog.clear()


def test_supervision_gets_them_beside_the_boxes():
    pytest.importorskip("supervision")
    found = keypoint_result().to_supervision()[[2, 0]]
    np.testing.assert_array_equal(found.data["keypoints"], POINTS[[2, 0]])


def test_exported_models_and_files_of_weights_know_the_lines(tmp_path):
    """The json of a set, and manifests beside weights and models, keep them to be drawn."""
    content = figure_json()
    (tmp_path / "val.json").write_text(json.dumps(content))
    listed = load_categories(tmp_path / "val.json")
    lines = skeleton_of(listed, NAMES)
    assert lines == ((0, 1), (0, 2))
    recipe = small_config("coco_keypoints", (64, 96))
    interface = ModelInterface({"images": {"shape": [1, 64, 96, 3]}}, (64, 96), "float32")
    given: dict = dict(files=["model.stablehlo"], details={})
    exported = make_manifest(recipe, listed, format="stablehlo", interface=interface, **given)
    (tmp_path / "manifest.json").write_text(json.dumps(exported))
    assert skeleton_of(read_manifest(tmp_path).categories, NAMES) == lines
    beside = make_manifest(
        recipe, listed, format="safetensors", files=["w.safetensors"], interface=None, details={}
    )
    (tmp_path / "w.manifest.json").write_text(json.dumps(beside))
    assert skeleton_of(saved_categories(tmp_path / "w.safetensors"), NAMES) == lines
    damaged = [{"keypoints": [["nose"]] * 3, "skeleton": [[1, 2]]}]
    assert skeleton_of(damaged, NAMES) == ()


def test_enlarged_pictures_have_their_points_in_place():
    image = np.full((60, 90, 3), 128, np.uint8)
    options = dict(labels=False, boxes=False, masks=False, min_side=240)
    picture = keypoint_result(image=image, categories=[{"id": 1, "name": "a"}] * 2)[:1].plot(
        **options
    )
    assert picture.shape == (240, 360, 3)
    for x, y, _ in POINTS[0]:
        assert (picture[int(4 * y), int(4 * x)] == 255).all()


def test_ground_truth_shows_labeled_points_alone():
    image = np.full((60, 90, 3), 128, np.uint8)
    points = np.array([[(20, 30, 2), (0, 0, 0)]])
    given = image, np.array([[5.0, 5, 70, 50]]), np.array([1]), None, ["a"]
    plain = visualize.draw_ground_truth(*given, min_side=0)
    picture = visualize.draw_ground_truth(*given, min_side=0, keypoints=(points, ((0, 1),)))
    rows, columns = np.nonzero((picture != plain).any(axis=2))
    assert (rows.min(), columns.min()) > (25, 15) and (rows.max(), columns.max()) < (35, 25)


def found(points=POINTS):
    boxes = np.float32([[8, 10, 40, 44]] * len(points))
    scores, valid = np.linspace(0.9, 0.6, len(points), dtype=np.float32), np.ones(len(points), bool)
    classes = np.ones(len(points), np.int32)
    return Detections(boxes, scores, classes, None, valid, np.array(points))


def test_network_pixels_become_those_of_the_image():
    plan = ResizePlan((64, 128), (60, 120), (2.0, 1.5))
    image = PreparedImage(np.zeros((30, 80, 3), np.uint8), np.zeros((64, 128, 3), np.uint8), plan)
    batch = Detections(*(None if x is None else x[None] for x in vars(found()).values()))
    (one,) = _detections([image], batch)
    np.testing.assert_allclose(one.keypoints, POINTS / (1.5, 2, 1), rtol=1e-6)


def test_points_in_tiles_become_those_of_the_image():
    windows = [(0, 0, 200, 100), (0, 0, 100, 100), (100, 0, 200, 100)]
    none = found(POINTS[:0])
    views = [
        as_view(one, window, "continuous")
        for one, window in zip([none, none, found(POINTS[:1])], windows, strict=True)
    ]
    fields = merge_tiles(windows, views, "continuous")
    np.testing.assert_allclose(fields["keypoints"], POINTS[:1] + (100, 0, 0))
    assert fields["keypoints"].dtype == np.float32
    without = [view._replace(keypoints=None) for view in views]
    assert merge_tiles(windows, without, "continuous")["keypoints"] is None
    with pytest.raises(IndexError):
        keypoint_result()[9]
