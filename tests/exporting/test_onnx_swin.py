"""Swin in ONNX against JAX: its maps in every opset, and detections of the recipe."""

from functools import partial

import jax
import numpy as np
import pytest

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data.resize import resize_plan
from mask_rcnn_jax.exporting.compare import compare
from tests.small_model import SMALL, generated, predict_function, random_variables

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from mask_rcnn_jax.exporting.onnx import OnnxInput, build_onnx  # noqa: E402
from mask_rcnn_jax.jax_to_onnx.graph import OPSETS  # noqa: E402
from mask_rcnn_jax.predict.programs import load_onnx  # noqa: E402
from tests.jax_to_onnx.traced import converted  # noqa: E402

TRUNK = {"depths": (2, 1, 2, 1), "width": 8, "num_heads": (1, 2, 2, 4), "windows": (3, 3, 2, 2)}
both = pytest.mark.parametrize("name", ["swin", "swin_v2"])


def small_config(name, **changes):
    entries = {key: value for key, value in SMALL.items() if not key.startswith("model.backbone.")}
    entries |= {"data.short_sides": (), "data.image_size": (64, 100), "model.backbone.name": name}
    entries |= {f"model.backbone.{key}": value for key, value in TRUNK.items()}
    return load_config("coco_swin", entries | changes)


@pytest.mark.slow
@both
def test_maps_match_jax(name):
    """On a canvas of which an image has a part, in all opsets."""
    config = small_config(name)
    model, variables = predict_function(config)[0], random_variables(config)
    images = np.random.default_rng(3).integers(0, 256, (1, 64, 128, 3), dtype=np.uint8)
    sizes = np.array([[32, 90]], np.int32)  # 32 x 96 are valid
    images[:, 32:], images[:, :, 90:] = 0, 0

    def pyramid(variables, images):
        return model.apply(variables, images, sizes, train=False, method="pyramid")[0]

    expected = jax.jit(pyramid)(variables, images)
    for opset in (OPSETS.start, 17, OPSETS.stop - 1):
        feed = images.astype(np.float32)
        nodes, found = converted(pyramid, feed, variables=variables, opset=opset)
        for ours, theirs in zip(found, map(np.asarray, expected), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())
    layers = {node.name for node in nodes if node.op_type in ("Conv", "Gemm", "MatMul")}
    assert {"backbone/stem_conv", "fpn/fpn_output3"} < layers


@pytest.mark.slow
@both
def test_detections_match_jax(name):
    config = small_config(name)
    variables = random_variables(config)
    model, predict = predict_function(config)
    canvas = resize_plan(64, 96, config.data).canvas
    source = OnnxInput(canvas, batch=1, dtype=config.data.image_dtype)
    built = build_onnx(model, variables, source, opset=17, detect=config.eval)
    inputs = generated(config, [(60, 96), (96, 64), (90, 90)], canvas)
    reference = partial(jax.jit(predict), variables)
    exported = load_onnx(built.SerializeToString())
    found = compare(reference, exported, inputs, config.eval.score_threshold)
    assert found.detections >= 9, found
    assert found.within_tolerance and found.masks < 1e-2, found
