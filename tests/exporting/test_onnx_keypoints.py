"""Models of keypoints in ONNX, against JAX."""

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.evaluation.visualize import write_image
from mask_rcnn_jax.exporting import artifact, onnx
from mask_rcnn_jax.exporting.compare import compare
from mask_rcnn_jax.exporting.manifest import make_manifest
from mask_rcnn_jax.exporting.options import ArtifactOptions
from mask_rcnn_jax.models.keypoints import KeypointHead, KeypointTask
from tests.commands.command import ROOT
from tests.helpers import drawn
from tests.small_model import (
    CATEGORIES,
    SMALL_TRUNK,
    generated,
    predict_function,
    random_variables,
    small_config,
    write_artifact,
)

pytest.importorskip("onnxruntime")

from mask_rcnn_jax.exporting.onnx import OnnxInput, build_onnx  # noqa: E402
from mask_rcnn_jax.predict.engines import load_exported  # noqa: E402
from mask_rcnn_jax.predict.predictor import Predictor  # noqa: E402
from mask_rcnn_jax.predict.programs import load_onnx  # noqa: E402
from tests.exporting.test_onnx_static import DYNAMIC  # noqa: E402
from tests.jax_to_onnx.traced import convert, converted  # noqa: E402

NAMES = ("nose", "left_hand", "right_hand", "tail", "ear")
CANVAS = (64, 128)
CHANGES = SMALL_TRUNK | {
    "data__keypoints": NAMES,
    "model__keypoint_head__num_keypoints": len(NAMES),
    "model__keypoint_head__channels": 8,
    "model__keypoint_head__num_convs": 1,
}


def small(recipe="coco_keypoints"):
    return small_config(recipe, CANVAS, **CHANGES)


@pytest.mark.slow
def test_points_match_jax_in_any_batch():
    """More boxes than are computed at once, some with less than a pixel, and padding."""
    rng = np.random.default_rng(0)
    heatmaps = rng.normal(size=(2, 9, 2, 8, 8)).astype(np.float32)
    corners = rng.uniform(0, 40, (2, 9, 2))
    sides = rng.uniform(0.2, 60, (2, 9, 2))
    boxes = np.concatenate([corners, corners + sides], axis=-1).astype(np.float32)
    boxes[1, 7:] = 0
    find = partial(KeypointTask("softmax", 4.0).found, longest=104)
    nodes, run = convert(find, heatmaps, boxes, any_batch=True)
    assert not DYNAMIC & {node.op_type for node in nodes}
    expected = np.asarray(jax.jit(find)(heatmaps, boxes))
    for rows in (slice(0, 1), slice(0, 2)):
        (found,) = run(heatmaps[rows], boxes[rows])
        np.testing.assert_allclose(found, expected[rows], atol=1e-4)


def test_heatmaps_match_jax_with_one_transposed_convolution():
    head, rng = KeypointHead(3, 8, num_convs=2, roi_size=6), np.random.default_rng(0)
    features = rng.normal(size=(2, 3, 6, 6, 8)).astype(np.float32)
    classes = jnp.ones((2, 3), jnp.int32)
    made = drawn(head, features, classes)

    def heatmaps(features):
        return head.apply(made, features, classes)

    nodes, (found,) = converted(heatmaps, features)
    expected = np.asarray(jax.jit(heatmaps)(features))
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    layers = [node.op_type for node in nodes if node.op_type.startswith("Conv")]
    assert layers == ["Conv", "Conv", "ConvTranspose"]


def test_the_parser_of_deepstream_has_no_keypoints(tmp_path):
    options = ArtifactOptions(deepstream=True, picture_size=(64, 128))
    with pytest.raises(ValueError, match="^--deepstream: .* no keypoints$"):
        artifact.build_artifact(small(), {}, CATEGORIES, "onnx", options, tmp_path)


@pytest.mark.parametrize("recipe", ["coco_keypoints", "coco"])
def test_one_line_says_that_keypoints_are_looked_for_once(recipe, monkeypatch, caplog):
    def stop(*given, **options):
        raise InterruptedError

    config = small() if recipe == "coco_keypoints" else small_config(recipe, CANVAS, **SMALL_TRUNK)
    model, _ = predict_function(config)
    monkeypatch.setattr(onnx, "add_function", stop)
    with caplog.at_level("INFO"), pytest.raises(InterruptedError):
        build_onnx(model, {}, OnnxInput(CANVAS, CANVAS), opset=17, detect=config.eval)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (recipe == "coco_keypoints") and all("looks once" in text for text in said)


def test_the_client_has_points_in_pixels_of_the_image():
    spec = importlib.util.spec_from_file_location("detect", ROOT / "examples" / "detect.py")
    client = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(client)
    inputs = {"images": {"dtype": "uint8", "shape": [1, *CANVAS, 3]}}
    interface = artifact.ModelInterface(inputs, CANVAS, "float32")
    options: dict = dict(format="onnx", files=[], interface=interface, details={})
    manifest = make_manifest(small(), CATEGORIES, **options)
    shape = [1, small().eval.detections_per_image, len(NAMES), 3]
    assert manifest["outputs"]["keypoints"]["shape"] == shape and "masks" not in manifest["outputs"]
    points = np.arange(2 * len(NAMES) * 3, dtype=np.float32).reshape(1, 2, len(NAMES), 3)
    out = {
        "boxes": np.float32([[[10, 5, 40, 30], [0, 0, 0, 0]]]),
        "scores": np.float32([[0.9, 0]]),
        "classes": np.int32([[2, 0]]),
        "valid": np.array([[True, False]]),
        "keypoints": points,
    }
    (found,) = client.detect(lambda given: out, manifest, np.zeros((128, 256, 3), np.uint8))
    np.testing.assert_allclose(found.keypoints, points[0, 0] * (2, 2, 1))
    assert found.mask is None and client.draw(np.zeros((128, 256, 3), np.uint8), [found])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["coco_keypoints", "coco_keypoints:detectron2"])
@pytest.mark.parametrize("static", [False, True])
def test_detections_match_jax(recipe, static):
    config = small(recipe)
    variables = random_variables(config)
    model, predict = predict_function(config)
    inputs = generated(config, [CANVAS] * 2, CANVAS)
    source = OnnxInput(CANVAS, CANVAS, batch=1 if static else None, dtype=config.data.image_dtype)
    built = build_onnx(model, variables, source, opset=17, detect=config.eval, static=static)
    outputs = {value.name: value.type.tensor_type.shape.dim for value in built.graph.output}
    sizes = [size.dim_value for size in outputs["keypoints"]][1:]
    assert sizes == [config.eval.detections_per_image, len(NAMES), 3] and "masks" not in outputs
    run = load_onnx(built.SerializeToString())
    found = compare(partial(jax.jit(predict), variables), run, inputs, 0.05)
    assert found.detections >= 6 and found.within_tolerance, found
    assert found.keypoints is not None and found.keypoints < 1e-2 and found.masks is None


@pytest.mark.slow
def test_an_artifact_checks_itself_and_is_used_as_a_run_is(tmp_path, monkeypatch):
    config, photos = small(), tmp_path / "photos"
    photos.mkdir()
    rng = np.random.default_rng(0)
    for i in range(2):
        image = rng.integers(0, 256, (*CANVAS, 3), np.uint8)
        write_image(photos / f"{i}.png", image)
    options = dict(int8=True, calibration=str(photos), picture_size=CANVAS)
    model = config, random_variables(config)
    given = *model, CATEGORIES, "onnx", ArtifactOptions(**options), tmp_path
    made = artifact.build_artifact(*given)
    for check in made.self_check.values():
        assert "keypoints" in check["text"] and "masks" not in check["text"]
    monkeypatch.setattr(artifact, "build_artifact", lambda *given: made)
    folder = write_artifact(tmp_path / "out", model, "onnx", **options)
    for precision in (None, "int8"):
        exported = load_exported(folder, precision=precision)
        result = Predictor(exported.recipe, None, engine=exported)(image)
        assert len(result) and result.keypoints.shape == (len(result), len(NAMES), 3)
        assert result.keypoint_names == NAMES and result.masks is None
