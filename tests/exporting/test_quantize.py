"""int8: hand-computed values for single layers, ranges and their cache, small models."""

import json
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from mask_rcnn_jax.exporting.artifact import _add_tensorrt
from mask_rcnn_jax.exporting.compare import compare
from mask_rcnn_jax.exporting.options import ArtifactOptions
from mask_rcnn_jax.exporting.quantize_jax import measure_ranges, quantize_jax
from mask_rcnn_jax.models.conv import Dense, UpConv
from tests.small_model import generated, predict_function, random_variables, small_config

CANVAS = (64, 128)


def conv_model(kernel: np.ndarray) -> bytes:
    """images float32 [1, 1, 4, 4] through one 1x1 convolution."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from mask_rcnn_jax.jax_to_onnx.graph import Graph, make_model_proto

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


@pytest.mark.parametrize(
    ("runtime", "images", "layer"),
    # Of both feeds; outputs are inputs times 0.5 and -3. Symmetric for TensorRT.
    [("tensorrt", [-4, 4], [-12, 12]), ("cpu", [-1, 4], [-12, 3])],
)
def test_ranges_steps_and_cache(tmp_path, runtime, images, layer):
    model = conv_model(np.array([0.5, -3.0], np.float32).reshape(2, 1, 1, 1))
    from mask_rcnn_jax.exporting.quantize import quantize_onnx

    cache = tmp_path / "new" / "calibration.json"
    feeds = [feed(2.0), feed(4.0)]
    options = dict(calibrator="minmax", cache=cache, runtime=runtime)
    int8, cached = quantize_onnx(model, feeds, **options)
    assert not cached
    ranges = json.loads(cache.read_text())["ranges"]
    assert ranges["images"] == images and ranges["layer"] == layer
    # TensorRT's int8 is used from -127 to 127, uint8 from 0 to 255; both channels' weights exact.
    steps = {"tensorrt": 254, "cpu": 255}[runtime]
    step_in, step_out = ((high - low) / steps for low, high in (images, layer))
    found, exact = run_onnx(int8, feed(4.0)), run_onnx(model, feed(4.0))
    assert 0 < np.abs(found - exact).max() < 3 * step_in / 2 + step_out / 2 + 1e-5
    np.testing.assert_allclose(found / step_out, np.round(found / step_out), atol=1e-3)

    repeated, cached = quantize_onnx(model, feeds, **options)
    assert cached and repeated == int8
    _, cached = quantize_onnx(model, [feed(5.0)], **options)
    assert not cached
    other = {"cpu": "tensorrt", "tensorrt": "cpu"}[runtime]
    _, cached = quantize_onnx(model, [feed(5.0)], **options | {"runtime": other})
    assert not cached
    cache.write_text("{")
    with pytest.raises(ValueError, match="is not a calibration cache"):
        quantize_onnx(model, feeds, **options)


@pytest.mark.parametrize(("runtime", "low"), [("tensorrt", -2.0), ("cpu", -1.0)])
def test_trained_ranges_take_the_place_of_measured_ones(tmp_path, runtime, low):
    """Of inputs from -1 to 4, those above 2 are clipped, as in training."""
    model = conv_model(np.ones((1, 1, 1, 1), np.float32))
    from mask_rcnn_jax.exporting.quantize import quantize_onnx

    options = dict(calibrator="minmax", cache=tmp_path / "c.json", runtime=runtime)
    trained = {"layer": 2.0, "other": 9.0}
    int8, _ = quantize_onnx(model, [feed(4.0)], trained=trained, **options)
    assert json.loads((tmp_path / "c.json").read_text())["ranges"]["images"][1] == 4.0
    found = run_onnx(int8, feed(4.0))
    steps = {"tensorrt": 254, "cpu": 255}[runtime]
    output_step = {"tensorrt": 8.0, "cpu": 5.0}[runtime] / steps
    exact = np.clip(feed(4.0)["images"], low, 2.0)
    np.testing.assert_allclose(found, exact, atol=(2.0 - low) / steps / 2 + output_step / 2 + 1e-6)


def test_a_calibration_cache_has_the_trained_ranges(tmp_path):
    model, cache = conv_model(np.ones((1, 1, 1, 1), np.float32)), tmp_path / "c.json"
    cache.write_text(json.dumps({"ranges": {"images": [-1.0, 4.0], "layer": [-1.0, 5.08]}}))
    made = SimpleNamespace(files={"model.onnx": model}, details={})
    _add_tensorrt(made, ArtifactOptions(int8=True), cache, {"layer": 2.54, "other": 9.0})
    lines = made.files["calibration.cache"].decode().splitlines()[1:]
    scales = {
        name: np.frombuffer(bytes.fromhex(bits), ">f4").item()
        for name, bits in (line.split(": ") for line in lines)
    }
    assert scales == pytest.approx({"images": 0.02, "layer": 0.04})


def test_a_range_of_zero_rounds_no_inputs():
    init = jax.nn.initializers.ones
    layer, x = Dense(1, init, init, name="layer"), np.array([[0.3, -5.0]], np.float32)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return layer.clone(parent=self)(x)

    model = Model()
    variables = model.init(jax.random.key(0), x)

    def predict(variables, images, _):
        return model.apply(variables, images)

    for limit, expected in ((0.0, 0.3 - 5.0 + 1), (1.27, 0.3 - 1.27 + 1)):
        quantized, packed = quantize_jax(predict, variables, {"layer": limit}, (x, None))
        np.testing.assert_allclose(quantized(packed, x, None), [[expected]], rtol=1e-5)


def test_an_upsampling_layer_has_a_scale_for_each_output_channel():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return UpConv(3, jnp.float32, nn.initializers.normal(1.0), name="up2_first")(x)

    model, x = Model(), jnp.ones((1, 2, 3, 5))
    variables = model.init(jax.random.key(0), x)

    def predict(variables, images, _):
        return model.apply(variables, images)

    _, packed = quantize_jax(predict, variables, {"up2_first": 0.0}, (x, None))
    assert packed["params"]["up2_first"]["kernel"]["scale"].shape == (1, 1, 3, 1)


def test_layers_of_nodes():
    from mask_rcnn_jax.jax_to_onnx.graph import Graph, strip_number

    graph = Graph(17)
    names = [graph.unique("rpn_head/conv") for _ in range(3)] + [graph.unique("layer_2")]
    assert names == ["rpn_head/conv", "rpn_head_2/conv", "rpn_head_3/conv", "layer_2"]
    assert [strip_number(name) for name in names] == ["rpn_head/conv"] * 3 + ["layer_2"]


def residual_model() -> bytes:
    """images float32 [1, 2, 4, 8] through two convolutions, a sum and what follows in a trunk."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from mask_rcnn_jax.jax_to_onnx.graph import Graph, floats, make_model_proto

    graph, rng = Graph(), np.random.default_rng(0)

    def conv(x, name):
        kernel = rng.normal(size=(2, 2, 1, 1)).astype(np.float32)
        return graph.op("Conv", x, kernel, name=name, kernel_shape=[1, 1])

    x = graph.op("Relu", conv("images", "stem"))
    x = graph.op("Relu", graph.op("Add", x, conv(x, "branch")))
    x = graph.op("MaxPool", x, kernel_shape=[1, 1], strides=[2, 2])
    attributes = {"mode": "nearest", "nearest_mode": "floor"}
    attributes["coordinate_transformation_mode"] = "asymmetric"
    x = graph.op("Resize", x, "", floats(1.0, 1.0, 2.0, 2.0), **attributes)
    x = conv(x, "after")
    graph.op("Add", conv(x, "objectness_logits"), floats(1.0), name="out")  # in float
    inputs, outputs = {"images": ("FLOAT", [1, 2, 4, 8])}, {"out": ("FLOAT", [1, 2, 4, 8])}
    return make_model_proto(graph, "test", inputs, outputs, 17).SerializeToString()


@pytest.mark.parametrize("calibrator", ["minmax", pytest.param("entropy", marks=pytest.mark.slow)])
def test_onnxruntime_computes_all_but_last_layers_in_int8(tmp_path, calibrator):
    model = residual_model()
    import onnx
    import onnxruntime

    from mask_rcnn_jax.exporting.quantize import quantize_onnx

    images = np.random.default_rng(1).normal(size=(1, 2, 4, 8)).astype(np.float32)
    feeds = [{"images": images}]
    options = dict(calibrator=calibrator, cache=tmp_path / "c.json")
    int8, _ = quantize_onnx(model, feeds, **options)
    session = onnxruntime.SessionOptions()
    session.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(int8, session, providers=["CPUExecutionProvider"])
    nodes = onnx.load(tmp_path / "optimized.onnx").graph.node
    types = [node.op_type for node in nodes]
    assert types.count("QLinearConv") == 3 and types.count("QLinearAdd") == 1
    # Only the last layer, whatever onnxruntime makes of it and of the sum behind it, is float.
    assert len([kind for kind in types if kind in ("Conv", "FusedConv")]) == 1
    assert "Relu" not in types and types.count("QuantizeLinear") == 1
    if calibrator == "minmax":
        found, exact = run_onnx(int8, feeds[0]), run_onnx(model, feeds[0])
        assert 0 < np.abs(found - exact).max() < 0.05 * np.abs(exact).max()


@pytest.mark.parametrize("runtime", ["cpu", "tensorrt"])
def test_layers_that_stay_in_float(tmp_path, runtime):
    """Their kernels and inputs are not rounded; with all of them, the model is that before."""
    model = residual_model()
    import onnx

    from mask_rcnn_jax.exporting.quantize import quantize_onnx, quantized_layers

    assert quantized_layers(model) == ["stem", "branch", "after"]
    feeds = [{"images": np.random.default_rng(1).normal(size=(1, 2, 4, 8)).astype(np.float32)}]
    options = dict(calibrator="minmax", cache=tmp_path / "c.json", runtime=runtime)
    int8, _ = quantize_onnx(model, feeds, in_float=["branch"], **options)
    nodes = onnx.load_from_string(int8).graph.node
    rounded = {name for node in nodes if node.op_type == "DequantizeLinear" for name in node.output}
    inputs = {node.name: node.input[:2] for node in nodes if node.op_type == "Conv"}
    assert inputs.keys() == {"stem", "branch", "after", "objectness_logits"}
    assert rounded.isdisjoint(inputs["branch"]) and inputs["objectness_logits"][1] not in rounded
    assert rounded.issuperset([*inputs["stem"], *inputs["after"]])
    difference = np.abs(run_onnx(int8, feeds[0]) - run_onnx(model, feeds[0])).max()
    assert 0 < difference < 0.5

    int8, _ = quantize_onnx(model, feeds, in_float=["stem", "branch", "after"], **options)
    np.testing.assert_array_equal(run_onnx(int8, feeds[0]), run_onnx(model, feeds[0]))


def test_entropy_clips_an_outlier(tmp_path):
    model = conv_model(np.ones((1, 1, 1, 1), np.float32))
    from mask_rcnn_jax.exporting.quantize import quantize_onnx

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
    from mask_rcnn_jax.exporting.quantize import quantize_onnx

    with pytest.raises(ValueError, match="--calibrator is 'max', expected one of"):
        quantize_onnx(model, [feed(1.0)], calibrator="max", cache=tmp_path / "c.json")
    with pytest.raises(ValueError, match="no calibration images"):
        quantize_onnx(model, [], calibrator="minmax", cache=tmp_path / "c.json")


@pytest.fixture(scope="module")
def small():
    config = small_config("coco", CANVAS)
    variables = random_variables(config)
    _, predict = predict_function(config)
    inputs = generated(config, [(64, 128), (96, 64)], CANVAS)
    return config, variables, predict, inputs, measure_ranges(predict, variables, inputs)


def test_jax_weights_are_int8(small):
    config, variables, predict, inputs, ranges = small
    # All convolutions and dense layers except five; the RPN runs on five levels but counts once.
    assert len(ranges) == 12 + 8 + 1 + 2 + 5
    mean, std = np.array(config.model.input.mean), config.model.input.std
    stem = max(np.abs((x - mean) / std)[:, : s[0, 0], : s[0, 1]].max() for x, s in inputs)
    assert ranges["backbone/stem_conv"] == pytest.approx(stem, rel=1e-5)

    _, packed = quantize_jax(predict, variables, ranges, inputs[0])
    kernel = packed["params"]["fpn"]["fpn_output3"]["kernel"]
    original = variables["params"]["fpn"]["fpn_output3"]["kernel"]
    assert kernel["int8"].dtype == np.int8 and kernel["scale"].shape == (1, 1, 1, 16)
    assert np.abs(kernel["int8"]).max(axis=(0, 1, 2)).min() == 127
    gap = np.abs(kernel["int8"] * kernel["scale"] - original)
    assert np.all(gap <= kernel["scale"] / 2 * 1.001)
    up = packed["params"]["mask_head"]["mask_deconv"]["kernel"]
    assert up["scale"].shape == (1, 1, 8, 1)
    assert isinstance(packed["params"]["box_head"]["cls_score"]["kernel"], np.ndarray)


@pytest.mark.slow
def test_detections_with_int8_weights_are_close(small):
    config, variables, predict, inputs, ranges = small
    quantized, packed = quantize_jax(predict, variables, ranges, inputs[0])
    reference = partial(jax.jit(predict), variables)
    int8 = partial(jax.jit(quantized), packed)
    found = compare(reference, int8, inputs, config.eval.score_threshold)
    assert found.detections >= 6
    assert 0 < found.boxes and found.scores < 0.2, found
    assert found.unmatched <= found.detections / 2, found


def test_jax_needs_calibration_images():
    config = small_config("coco", CANVAS)
    with pytest.raises(ValueError, match="no calibration images"):
        measure_ranges(predict_function(config)[1], {}, [])
