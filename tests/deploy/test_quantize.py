"""int8: hand-computed values for single layers, ranges and their cache, small models."""

import json
from functools import partial

import jax
import numpy as np
import pytest

from mask_rcnn_jax.deploy.compare import compare
from mask_rcnn_jax.deploy.quantize_jax import measure_ranges, quantize_jax
from tests.deploy.small_model import generated, predict_function, random_variables, small_config

CANVAS = (64, 128)


def conv_model(kernel: np.ndarray) -> bytes:
    """images float32 [1, 1, 4, 4] through one 1x1 convolution."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from mask_rcnn_jax.deploy.onnx_graph import Graph, make_model_proto

    graph = Graph()
    graph.op("Conv", "images", kernel, name="layer", kernel_shape=[1, 1])
    graph.op("Identity", "layer", name="out")
    inputs = {"images": ("FLOAT", [1, 1, 4, 4])}
    outputs = {"out": ("FLOAT", [1, len(kernel), 4, 4])}
    return make_model_proto(graph, "test", inputs, outputs, 17).SerializeToString()


def feed(largest: float) -> dict:
    return {"images": np.linspace(-1, largest, 16, dtype=np.float32).reshape(1, 1, 4, 4)}


def run_onnx(model: bytes, inputs: dict) -> np.ndarray:
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]


def test_ranges_steps_and_cache(tmp_path):
    model = conv_model(np.array([0.5, -3.0], np.float32).reshape(2, 1, 1, 1))
    from mask_rcnn_jax.deploy.quantize import quantize_onnx

    cache = tmp_path / "new" / "calibration.json"
    feeds = [feed(2.0), feed(4.0)]
    int8, cached = quantize_onnx(model, feeds, calibrator="minmax", cache=cache)
    assert not cached
    ranges = json.loads(cache.read_text())["ranges"]
    assert ranges["images"] == [-4, 4]  # symmetric, over both feeds
    assert ranges["layer"] == [-12, 12]
    # Inputs in steps of 4 / 127, outputs in steps of 12 / 127; both channels' weights exact.
    found, exact = run_onnx(int8, feed(4.0)), run_onnx(model, feed(4.0))
    assert 0 < np.abs(found - exact).max() < 3 * (4 / 127) / 2 + (12 / 127) / 2 + 1e-5
    steps = found * 127 / 12
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-3)

    repeated, cached = quantize_onnx(model, feeds, calibrator="minmax", cache=cache)
    assert cached and repeated == int8
    _, cached = quantize_onnx(model, [feed(5.0)], calibrator="minmax", cache=cache)
    assert not cached
    cache.write_text("{")
    with pytest.raises(ValueError, match="is not a calibration cache"):
        quantize_onnx(model, feeds, calibrator="minmax", cache=cache)


def test_entropy_clips_an_outlier(tmp_path):
    model = conv_model(np.ones((1, 1, 1, 1), np.float32))
    from mask_rcnn_jax.deploy.quantize import quantize_onnx

    rng = np.random.default_rng(0)
    feeds = [{"images": rng.normal(0, 1, (1, 1, 4, 4)).astype(np.float32)} for _ in range(60)]
    feeds[0]["images"][0, 0, 0, 0] = 50.0
    highest = {}
    for calibrator in ("minmax", "entropy"):
        cache = tmp_path / f"{calibrator}.json"
        quantize_onnx(model, feeds, calibrator=calibrator, cache=cache)
        highest[calibrator] = json.loads(cache.read_text())["ranges"]["images"][1]
    assert highest["minmax"] == 50
    assert highest["entropy"] < 25


def test_onnx_mistakes(tmp_path):
    model = conv_model(np.ones((1, 1, 1, 1), np.float32))
    from mask_rcnn_jax.deploy.quantize import quantize_onnx

    with pytest.raises(ValueError, match="--calibrator is 'max', expected one of"):
        quantize_onnx(model, [feed(1.0)], calibrator="max", cache=tmp_path / "c.json")
    with pytest.raises(ValueError, match="no calibration images"):
        quantize_onnx(model, [], calibrator="minmax", cache=tmp_path / "c.json")


def test_jax_weights_are_int8_and_detections_close():
    config = small_config("coco", CANVAS)
    variables = random_variables(config)
    _, predict = predict_function(config)
    inputs = generated(config, [(64, 128), (96, 64)], CANVAS)
    ranges = measure_ranges(predict, variables, inputs)
    # All convolutions and dense layers except five; the RPN runs on five levels but counts once.
    assert len(ranges) == 12 + 8 + 1 + 2 + 5
    mean, std = np.array(config.model.input.mean), config.model.input.std
    stem = max(np.abs((x - mean) / std)[:, : s[0, 0], : s[0, 1]].max() for x, s in inputs)
    assert ranges["backbone/stem_conv"] == pytest.approx(stem, rel=1e-5)

    quantized, packed = quantize_jax(predict, variables, ranges)
    kernel = packed["params"]["fpn"]["fpn_output3"]["kernel"]
    original = variables["params"]["fpn"]["fpn_output3"]["kernel"]
    assert kernel["int8"].dtype == np.int8 and kernel["scale"].shape == (1, 1, 1, 16)
    assert np.abs(kernel["int8"]).max(axis=(0, 1, 2)).min() == 127
    gap = np.abs(kernel["int8"] * kernel["scale"] - original)
    assert np.all(gap <= kernel["scale"] / 2 * 1.001)
    up = packed["params"]["mask_head"]["mask_deconv"]["kernel"]
    assert up["scale"].shape == (1, 1, 8, 1)
    assert isinstance(packed["params"]["box_head"]["cls_score"]["kernel"], np.ndarray)

    reference = jax.jit(partial(predict, variables))
    int8 = jax.jit(partial(quantized, packed))
    found = compare(reference, int8, inputs, config.eval.score_threshold)
    assert found.detections >= 6
    assert 0 < found.boxes and found.scores < 0.2, found
    assert found.unmatched <= found.detections / 2, found


def test_jax_needs_calibration_images():
    config = small_config("coco", CANVAS)
    with pytest.raises(ValueError, match="no calibration images"):
        measure_ranges(predict_function(config)[1], {}, [])
