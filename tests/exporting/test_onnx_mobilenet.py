"""The edge recipe in ONNX, float and int8, with a narrow MobileNetV4."""

from functools import partial

import jax
import pytest
from flax.traverse_util import flatten_dict

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.exporting.compare import compare
from tests.small_model import SMALL, generated, predict_function, random_variables

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from mask_rcnn_jax.exporting.onnx import OnnxInput, build_onnx  # noqa: E402
from mask_rcnn_jax.exporting.quantize import quantize_onnx, quantized_layers  # noqa: E402
from mask_rcnn_jax.predict.programs import load_onnx, make_feeds  # noqa: E402

CANVAS = (64, 128)


@pytest.mark.slow
def test_float_is_exact_and_int8_has_every_convolution(tmp_path):
    entries = {name: value for name, value in SMALL.items() if name != "model.backbone.depth"}
    entries |= {"data.image_size": CANVAS, "model.backbone.multiplier": 0.25}
    config = load_config("edge", entries)
    (model, predict), variables = predict_function(config), random_variables(config)
    source = OnnxInput(CANVAS, dtype=config.data.image_dtype)
    built = build_onnx(model, variables, source, opset=17, detect=config.eval).SerializeToString()
    inputs = generated(config, [(64, 128), (60, 90), (64, 100)], CANVAS)
    reference, limit = partial(jax.jit(predict), variables), config.eval.score_threshold
    found = compare(reference, load_onnx(built), inputs, limit)
    assert found.detections > 3 and found.unmatched == 0, found
    assert found.boxes < 1e-2 and found.scores < 1e-4, found

    layers = quantized_layers(built)
    paths = flatten_dict(variables["params"], sep="/")
    kernels = {path.removesuffix("/kernel") for path in paths if path.endswith("kernel")}
    assert {path for path in kernels if path.startswith(("backbone", "fpn"))} < set(layers)
    graph = onnx.load_from_string(built).graph
    shape = [d.dim_value or "batch" for d in graph.input[0].type.tensor_type.shape.dim]
    feeds = [make_feeds(images, sizes, shape, config.data.image_dtype) for images, sizes in inputs]
    names = {one.name for one in graph.input}
    feeds = [{name: feed[name] for name in names} for feed in feeds]
    int8, _ = quantize_onnx(built, feeds, calibrator="minmax", cache=tmp_path / "cache.json")
    # Random weights score alike, so that int8 finds as many boxes, but not the same.
    found = compare(reference, load_onnx(int8), inputs, limit)
    assert found.detections > 3 and 0 < found.scores < 0.2, found
