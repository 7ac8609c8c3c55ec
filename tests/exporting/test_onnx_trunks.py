"""Trunks other than ResNet in ONNX against JAX: maps in every opset, detections, and int8."""

from functools import partial

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data.resize import resize_plan
from mask_rcnn_jax.exporting.compare import compare
from tests.small_model import SMALL, generated, predict_function, random_variables

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from mask_rcnn_jax.exporting.onnx import OnnxInput, build_onnx  # noqa: E402
from mask_rcnn_jax.exporting.quantize import quantize_onnx, quantized_layers  # noqa: E402
from mask_rcnn_jax.jax_to_onnx.graph import OPSETS  # noqa: E402
from mask_rcnn_jax.predict.programs import load_onnx, make_feeds  # noqa: E402
from tests.jax_to_onnx.traced import converted  # noqa: E402

pytestmark = pytest.mark.slow

CONVNEXT = dict(depths=(1, 1, 2, 1), width=8)
SWIN = dict(depths=(2, 1, 2, 1), width=8, num_heads=(1, 2, 2, 4), windows=(3, 3, 2, 2))
DINO = dict(width=32, depth=2, num_heads=2, layer_scale=1.0, layers=(0, 1))
# Stages of 1, 1, 3 and 1 blocks with 1, 2, 4 and 8 groups.
REGNET = dict(depth=6, initial_width=8, slope=8.0, multiplier=2.0, group_width=8, se_ratio=0.25)
REGNET |= dict(norm="affine")
REGNETY, MEAN = "coco_detectron2:lsj_100ep_regnety_4gf", {"model.fpn.maps": "mean"}
# Recipe, entries of the trunk and others, layers that are nodes of the graph.
TRUNKS = {
    "convnext": (
        *("coco_convnext", CONVNEXT, {"model.input.channel_order": "bgr"}),
        ("res4_1/dwconv", "res4_1/fc1"),
    ),
    "swin": ("coco_swin", SWIN | {"name": "swin"}, {}, ("stem_conv",)),
    "swin_v2": ("coco_swin", SWIN | {"name": "swin_v2"}, {}, ("stem_conv",)),
    # Of rotary positions and of a table.
    "dinov3": ("coco_dino:vit_splus", DINO, MEAN, ("patch_embed", "block1/attn/qkv")),
    "dinov2": ("coco_dino:v2_s_reg", DINO, MEAN, ("patch_embed", "block1/fc2")),
    # Means leave out cells beyond the images, and do not where none is.
    "regnet": (REGNETY, REGNET, {"model.input.pad_multiple": 32}, ("res4_2/b",)),
    "regnet_whole": (REGNETY, REGNET, {"model.input.pad_multiple": 0}, ("res4_2/b",)),
}


def small_config(recipe, trunk, others):
    entries = {name: value for name, value in SMALL.items() if not name.startswith("model.back")}
    entries |= {"data.short_sides": (), "data.image_size": (64, 100)}
    entries |= {f"model.backbone.{name}": value for name, value in trunk.items()}
    return load_config(recipe, entries | others)


@pytest.mark.parametrize("name", TRUNKS)
def test_maps_match_jax(name):
    """On a canvas of which images have a part, or all of it, in all opsets."""
    *arguments, layers = TRUNKS[name]
    config = small_config(*arguments)
    model, variables = predict_function(config)[0], random_variables(config)
    height, width = (64, 128) if name == "regnet_whole" else (32, 90)  # 32 x 96 are valid
    images = np.random.default_rng(3).integers(0, 256, (2, 64, 128, 3), dtype=np.uint8)
    sizes = np.array([[height, width]] * 2, np.int32)
    images[:, height:], images[:, :, width:] = 0, 0

    def pyramid(variables, images):
        return model.apply(variables, images, sizes, train=False, method="pyramid")[0]

    expected = jax.jit(pyramid)(variables, images)
    for opset in (OPSETS.start, 17, OPSETS.stop - 1):
        feed = images.astype(np.float32)
        nodes, found = converted(pyramid, feed, variables=variables, opset=opset)
        for ours, theirs in zip(found, map(np.asarray, expected), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())
    nodes = {node.name for node in nodes if node.op_type in ("Conv", "Gemm", "MatMul")}
    assert {*(f"backbone/{layer}" for layer in layers), "fpn/fpn_output3"} < nodes


@pytest.mark.parametrize("name", ["convnext", "swin", "swin_v2"])
def test_detections_match_jax(name):
    config = small_config(*TRUNKS[name][:3])
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


def test_mobilenet_is_exact_in_float_and_int8_has_every_convolution(tmp_path):
    """The recipe "edge"."""
    canvas = (64, 128)
    config = small_config("edge", {"multiplier": 0.25}, {"data.image_size": canvas})
    (model, predict), variables = predict_function(config), random_variables(config)
    source = OnnxInput(canvas, dtype=config.data.image_dtype)
    built = build_onnx(model, variables, source, opset=17, detect=config.eval).SerializeToString()
    inputs = generated(config, [(64, 128), (60, 90), (64, 100)], canvas)
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
