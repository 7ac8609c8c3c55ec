"""RegNet in ONNX against JAX: maps, whose means leave out cells beyond the images."""

import jax
import numpy as np
import pytest

from mask_rcnn_jax.config import load_config
from tests.deploy.small_model import SMALL, predict_function, random_variables

pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from mask_rcnn_jax.deploy.onnx_graph import OPSETS, Graph, Map, make_model_proto  # noqa: E402
from mask_rcnn_jax.deploy.onnx_layers import Extent  # noqa: E402
from mask_rcnn_jax.deploy.onnx_regnet import RegNetTrunk  # noqa: E402

# Stages of 1, 1, 3 and 1 blocks with 1, 2, 4 and 8 groups.
TRUNK = dict(depth=6, initial_width=8, slope=8.0, multiplier=2.0, group_width=8, se_ratio=0.25)
TRUNK |= dict(norm="affine")


@pytest.mark.parametrize("image", [None, (32, 90)])
def test_maps_match_jax(image):
    """On a canvas that an image fills, and on one of which it has a part, 32 x 96 cells."""
    trunk = {f"model.backbone.{name}": value for name, value in TRUNK.items()}
    multiple = {"model.input.pad_multiple": 32 if image else 0}
    config = load_config("coco_detectron2:lsj_100ep_regnety_4gf", SMALL | trunk | multiple)
    model, variables = predict_function(config)[0], random_variables(config)
    height, width = image or (64, 128)
    images = np.random.default_rng(3).integers(0, 256, (2, 64, 128, 3), dtype=np.uint8)
    sizes = np.array([[height, width]] * 2, np.int32)
    normalized = (images - np.array(model.input.mean)) / np.array(model.input.std)
    for each in (images, normalized):
        each[:, height:], each[:, :, width:] = 0, 0
    feed = normalized.transpose(0, 3, 1, 2).astype(np.float32).copy()

    @jax.jit
    def pyramid(variables):
        return model.apply(variables, images, sizes, train=False, method="pyramid")[0]

    expected = pyramid(variables)
    for opset in (OPSETS.start, OPSETS.stop - 1):
        graph = Graph()
        valid = graph.constant(np.array([[32, 96]] * 2)) if image else None
        maps = RegNetTrunk(graph, model, variables, Extent(graph, valid)).pyramid(
            Map("images", 64, 128)
        )
        inputs = {"images": ("FLOAT", list(feed.shape))}
        outputs = {each.name: ("FLOAT", [None] * 4) for each in maps}
        proto = make_model_proto(graph, "test", inputs, outputs, opset).SerializeToString()
        session = onnxruntime.InferenceSession(proto, providers=["CPUExecutionProvider"])
        for ours, theirs in zip(
            session.run(list(outputs), {"images": feed}), expected, strict=True
        ):
            theirs = np.asarray(theirs).transpose(0, 3, 1, 2)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())
