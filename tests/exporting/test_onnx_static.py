"""ONNX models of fixed shapes, against JAX."""

from functools import partial

import jax
import numpy as np
import pytest

from mask_rcnn_jax.data.resize import resize_plan
from mask_rcnn_jax.exporting.compare import compare
from mask_rcnn_jax.ops.extent import STRIDES
from mask_rcnn_jax.ops.nms import nms
from mask_rcnn_jax.ops.roi_align import RoIAlign, roi_align
from tests.bounds import assert_within, pooling_bound
from tests.helpers import random_boxes
from tests.small_model import (
    SMALL_TRUNK,
    generated,
    predict_function,
    random_variables,
    small_config,
)

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from mask_rcnn_jax.exporting.onnx import OnnxInput, build_onnx, export_canvas  # noqa: E402
from mask_rcnn_jax.exporting.onnx_static import ROUNDS  # noqa: E402
from mask_rcnn_jax.predict.programs import load_onnx  # noqa: E402
from tests.jax_to_onnx.traced import converted  # noqa: E402

DYNAMIC = {"NonMaxSuppression", "NonZero", "ScatterND", "Loop", "If", "Unique", "Compress"}


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_nms_matches_jax_in_several_tiles(offset):
    rng = np.random.default_rng(1)
    boxes = np.stack([random_boxes(rng, 300, 60), random_boxes(rng, 300, 200)])
    boxes[:, ::9, 2] = boxes[:, ::9, 0] - 0.7  # inverted
    boxes[:, 1::9, 2:] = boxes[:, 1::9, :2]  # empty
    boxes[:, 40] = boxes[:, 2]  # duplicate
    valid = rng.random((2, 300)) > 0.2
    classes = rng.integers(1, 4, (2, 300)).astype(np.int32)

    def both(boxes, valid, classes):
        options = dict(iou_thresh=0.4, offset=offset)
        return nms(boxes, valid, **options), nms(boxes, valid, groups=classes, **options)

    nodes, found = converted(both, boxes, valid, classes, num_classes=3, static=True)
    expected = jax.jit(both)(boxes, valid, classes)
    assert not DYNAMIC & {node.op_type for node in nodes}
    for mask, keep in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mask > 0, keep)
        assert 20 < keep.sum() < 0.9 * valid.sum()


def test_nms_of_long_chains_loses_no_box():
    """Of boxes that each overlap the next, every second one survives; beyond that too many may."""
    start = np.arange(100, dtype=np.float32)
    boxes = np.stack([start, 0 * start, start + 2, 0 * start + 1], axis=1)[None]
    valid = np.ones((1, 100), bool)
    keep = partial(nms, iou_thresh=0.3)
    _, (found,) = converted(keep, boxes, valid, static=True)
    found, expected = found[0] > 0, np.arange(100) % 2 == 0
    np.testing.assert_array_equal(found[: ROUNDS + 1], expected[: ROUNDS + 1])
    assert found[expected].all()


@pytest.mark.parametrize(
    ("aligned", "sampling", "min_size"), [(False, 2, 1.0), (True, 0, 0.0), (False, 5, 1.0)]
)
def test_roi_align_matches_jax(aligned, sampling, min_size):
    rng = np.random.default_rng(2)
    options = RoIAlign(5, sampling, 16, aligned, "zero", min_size)
    side = 576  # large enough for boxes of P5
    boxes = np.stack([random_boxes(rng, 12, side), random_boxes(rng, 12, 80.0)])
    boxes[0, 0] = 0, 0, side, side
    maps = [
        rng.normal(size=(2, -(-side // stride), -(-side // stride), 3)).astype(np.float32)
        for stride in STRIDES
    ]

    def pool(boxes, *maps):
        return roi_align(maps, boxes, options, output_size=(7, 5), level_offset=1.0)

    nodes, (pooled,) = converted(pool, boxes, *maps, static=True)
    assert not DYNAMIC & {node.op_type for node in nodes}
    bound = 2 * pooling_bound(side / 4, max(float(np.abs(m).max()) for m in maps))
    assert_within(pooled, np.asarray(jax.jit(pool)(boxes, *maps)), bound)


MODELS = {
    "quickstart": ("quickstart", (64, 128), None),
    "any size": ("coco_torchvision", (64, 100), None),  # whose maps end at the image
    "adaptive sampling": ("coco_detectron2", (64, 100), (64, 96)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "quickstart")) for n in MODELS]
)
def test_detections_are_the_default_models_and_all_shapes_are_fixed(name):
    recipe, size, fixed = MODELS[name]
    config = small_config(recipe, size, **SMALL_TRUNK)
    variables = random_variables(config)
    model, _ = predict_function(config)
    plan = resize_plan(*(fixed or (64, 96)), config.data)
    resized = plan.size if fixed else None
    canvas = export_canvas(model, plan.canvas, resized)
    source = OnnxInput(canvas, resized, batch=1, dtype=config.data.image_dtype)
    built, default = (
        build_onnx(model, variables, source, opset=17, detect=config.eval, static=static)
        for static in (True, False)
    )
    assert not DYNAMIC & {node.op_type for node in built.graph.node}
    assert not dynamic_values(built)
    sizes = [fixed] * 2 if fixed else [(60, 96), (96, 64)]
    inputs = generated(config, sizes, plan.canvas)
    exported, reference = (load_onnx(each.SerializeToString()) for each in (built, default))
    found = compare(reference, exported, inputs, config.eval.score_threshold)
    assert found.detections >= 6 and not found.unmatched, found
    assert found.boxes < 1e-4 and found.scores < 1e-5 and found.masks < 1e-4, found


def dynamic_values(model) -> list[str]:
    """Return the names of values whose shapes inference does not know as numbers."""
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph
    fixed = {
        value.name
        for value in (*graph.value_info, *graph.output)
        if value.type.tensor_type.HasField("shape")
        and all(size.HasField("dim_value") for size in value.type.tensor_type.shape.dim)
    }
    return [name for node in graph.node for name in node.output if name not in fixed]


def test_adaptive_sampling_of_images_of_any_size_is_refused():
    config = small_config("coco_detectron2", (64, 100), **SMALL_TRUNK)
    model, _ = predict_function(config)
    source = OnnxInput(resize_plan(64, 96, config.data).canvas, batch=1)
    with pytest.raises(ValueError, match="maps that end at each image .* use --picture_size"):
        build_onnx(
            model, random_variables(config), source, opset=17, detect=config.eval, static=True
        )
