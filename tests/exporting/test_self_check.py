"""The self-check of exported models."""

from dataclasses import replace

import numpy as np
import pytest

from mask_rcnn_jax.exporting import artifact
from mask_rcnn_jax.exporting.compare import Differences, compare
from mask_rcnn_jax.structures import Detections

FIELDS = ("boxes", "scores", "classes", "valid")


def test_a_self_check_without_detections_is_said(caplog):
    empty = Detections(
        boxes=np.zeros((1, 3, 4), np.float32),
        scores=np.zeros((1, 3), np.float32),
        classes=np.zeros((1, 3), np.int32),
        masks=None,
        valid=np.zeros((1, 3), bool),
    )

    def predict(images, sizes):
        return empty

    made = artifact.Artifact(artifact.ModelInterface({}, (6, 8), "float32"), (6, 8))
    made.predictors["float"] = predict
    inputs = [(np.zeros((1, 6, 8, 3), np.uint8), np.array([[6, 8]]))]
    artifact._check(predict, inputs, 0.05, made, "float")
    assert made.self_check["float"]["detections"] == 0
    assert "it compared no detection" in caplog.text


@pytest.mark.parametrize("field", ["boxes", "scores", "masks", "keypoints"])
@pytest.mark.parametrize("change", ["small", "not a number"])
def test_each_output_must_be_within_its_tolerance(field, change):
    rng = np.random.default_rng(0)
    corner = np.array([[[3, 4], [40, 9]]], np.float32)
    sound = dict(
        boxes=np.concatenate([corner, corner + [[[20, 11], [9, 30]]]], axis=-1).astype(np.float32),
        scores=np.array([[0.9, 0.6]], np.float32),
        classes=np.array([[2, 1]], np.int32),
        masks=rng.uniform(0, 0.8, (1, 2, 28, 28)).astype(np.float32),
        valid=np.ones((1, 2), bool),
        keypoints=rng.uniform(0, 40, (1, 2, 5, 3)).astype(np.float32),
    )
    changed = {**sound, field: sound[field].copy()}
    small = {"boxes": 0.2, "scores": 0.002, "masks": 0.15, "keypoints": 1.5}[field]
    changed[field][0, 0] += small if change == "small" else np.nan
    inputs = [(np.zeros((1, 48, 64, 3), np.uint8), np.array([[48, 64]]))]

    def made_of(fields):
        return lambda images, sizes: Detections(**fields)

    exact = compare(made_of(sound), made_of(sound), inputs, 0.05)
    assert exact.within_tolerance and exact.detections == 2
    found = compare(made_of(sound), made_of(changed), inputs, 0.05)
    assert not found.within_tolerance
    assert found.unmatched == 2 * (field == "boxes" and change == "not a number")


def test_one_of_many_detections_may_be_on_one_side_only():
    for detections, unmatched, allowed in ((400, 2, True), (400, 3, False), (100, 1, False)):
        found = Differences(detections=detections, unmatched=unmatched)
        assert found.within_tolerance == allowed


def test_only_outputs_that_there_are_are_said():
    corner = np.array([[[3, 4, 40, 30]]], np.float32)
    row = np.array([[0.9]], np.float32), np.array([[2]], np.int32)
    masks, keypoints = np.ones((1, 1, 28, 28), np.float32), np.ones((1, 1, 5, 3), np.float32)
    inputs = [(np.zeros((1, 48, 64, 3), np.uint8), np.array([[48, 64]]))]
    for given, said in (
        ((None, None), []),
        ((masks, None), ["masks"]),
        ((masks, keypoints), ["masks", "keypoints"]),
    ):
        sound = Detections(corner, *row, given[0], np.ones((1, 1), bool), given[1])
        found = compare(lambda *_, sound=sound: sound, lambda *_, sound=sound: sound, inputs, 0.05)
        assert found.within_tolerance and found.is_finite
        assert [name for name in ("masks", "keypoints") if f"{name} 0" in str(found)] == said


def test_float16_must_not_lose_what_the_original_finds():
    corner = np.array([[[3, 4, 40, 30], [9, 40, 50, 60]]], np.float32)
    scores, classes = np.array([[0.9, 0.6]], np.float32), np.array([[2, 1]], np.int32)
    found = Detections(corner, scores, classes, None, np.ones((1, 2), bool))
    lost = Detections(corner, scores, classes, None, np.zeros((1, 2), bool))
    made = artifact.Artifact(artifact.ModelInterface({}, (6, 8), "float16"), (6, 8))
    inputs = [(np.zeros((1, 6, 8, 3), np.uint8), np.array([[6, 8]]))]
    made.predictors["float"] = lambda images, sizes: lost
    with pytest.raises(RuntimeError, match="on one side only; .* too large for --float16"):
        artifact._check(lambda images, sizes: found, inputs, 0.05, made, "float")
    made.predictors["int8"] = lambda images, sizes: replace(found, scores=scores * np.nan)
    with pytest.raises(RuntimeError, match="the exported model is not the original"):
        artifact._check(lambda images, sizes: found, inputs, 0.05, made, "int8")
    made.predictors["float"] = lambda images, sizes: found
    artifact._check(lambda images, sizes: found, inputs, 0.05, made, "float")


@pytest.mark.parametrize("rows", ["batch", 1])
def test_a_model_for_any_batch_is_checked_with_one_image_and_with_several(rows):
    """As one whose graph has the batch of one somewhere, which only several images tell."""
    sound = Detections(
        boxes=np.array([[[3, 4, 30, 20]]], np.float32),
        scores=np.array([[0.9]], np.float32),
        classes=np.array([[2]], np.int32),
        masks=None,
        valid=np.ones((1, 1), bool),
    )

    def predict(images, sizes):
        last = np.arange(len(images))[:, None, None] == 2
        found = {name: np.repeat(getattr(sound, name), len(images), 0) for name in FIELDS}
        return Detections(
            **found | {"boxes": found["boxes"] + last.astype(np.float32), "masks": None}
        )

    inputs = {"images": {"shape": [rows, 6, 8, 3]}}
    made = artifact.Artifact(artifact.ModelInterface(inputs, (48, 64), "float32"), (48, 64))
    made.files["model.onnx"], made.predictors["float"] = b"", predict
    given = [(np.zeros((1, 48, 64, 3), np.uint8), np.array([[48, 64]]))] * 4
    if rows == 1:
        artifact._check(lambda images, sizes: sound, given, 0.05, made, "float")
    else:
        with pytest.raises(RuntimeError, match="1 px for boxes|boxes 1 px"):
            artifact._check(lambda images, sizes: sound, given, 0.05, made, "float")
    assert made.self_check["float"]["pictures"] == 4
