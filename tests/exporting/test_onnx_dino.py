"""DINO's trunks in ONNX against JAX: maps in every opset, and int8."""

import jax
import numpy as np
import pytest

from mask_rcnn_jax.config import load_config
from tests.small_model import SMALL, predict_function, random_variables

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from mask_rcnn_jax.jax_to_onnx.graph import OPSETS  # noqa: E402
from tests.jax_to_onnx.traced import converted  # noqa: E402

TRUNK = {
    "model.backbone.width": 32,
    "model.backbone.depth": 2,
    "model.backbone.num_heads": 2,
    "model.backbone.layer_scale": 1.0,
    "model.backbone.layers": (0, 1),
    "model.fpn.maps": "mean",
}


def small_config(variant):
    left_out = ("model.backbone.", "model.fpn.", "model.box_head.")
    entries = {name: value for name, value in SMALL.items() if not name.startswith(left_out)}
    entries |= {"data.short_sides": (), "data.image_size": (64, 96), "model.fpn.channels": 16}
    return load_config(f"coco_dino:{variant}", entries | TRUNK)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["vit_splus", "v2_s_reg"])
def test_maps_match_jax(variant):
    """On a map that is not square, of rotary positions and of a table."""
    config = small_config(variant)
    model, variables = predict_function(config)[0], random_variables(config)
    images = np.random.default_rng(3).integers(0, 256, (2, 64, 96, 3), dtype=np.uint8)
    sizes = np.array([[64, 96], [40, 90]], np.int32)

    def pyramid(variables, images):
        return model.apply(variables, images, sizes, train=False, method="pyramid")[0]

    expected = jax.jit(pyramid)(variables, images)
    for opset in (OPSETS.start, 17, OPSETS.stop - 1):
        feed = images.astype(np.float32)
        nodes, found = converted(pyramid, feed, variables=variables, opset=opset)
        for ours, theirs in zip(found, map(np.asarray, expected), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())
    layers = {node.name for node in nodes if node.op_type in ("Conv", "Gemm")}
    assert {"backbone/patch_embed", "backbone/block1/attn/qkv", "backbone/block1/fc2"} < layers
