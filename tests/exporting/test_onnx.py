"""ONNX against JAX: operators, layers, whole recipes and rejected models."""

from functools import partial

import jax
import numpy as np
import pytest

from mask_rcnn_jax.data.coco import decode_image
from mask_rcnn_jax.data.resize import resize_plan
from mask_rcnn_jax.exporting.artifact import build_artifact
from mask_rcnn_jax.exporting.compare import compare
from mask_rcnn_jax.exporting.images import on_canvas
from mask_rcnn_jax.exporting.options import ArtifactOptions
from mask_rcnn_jax.models.detect import Detect
from mask_rcnn_jax.ops.extent import STRIDES
from mask_rcnn_jax.ops.nms import nms
from mask_rcnn_jax.ops.roi_align import RoIAlign, roi_align
from tests.bounds import assert_within, pooling_bound
from tests.helpers import random_boxes, shared
from tests.small_model import (
    SMALL_TRUNK,
    generated,
    predict_function,
    random_variables,
    small_config,
)

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from mask_rcnn_jax.exporting.onnx import OnnxInput, build_onnx, export_canvas, takes_batches  # noqa: E402
from mask_rcnn_jax.jax_to_onnx.graph import OPSETS  # noqa: E402
from mask_rcnn_jax.predict.programs import load_onnx  # noqa: E402
from tests.jax_to_onnx.traced import converted  # noqa: E402

SIZES = [(60, 96), (96, 64), (90, 90)]
RECIPES = {
    "quickstart": (64, 128),
    "coco": (64, 128),
    "coco_nvidia_tf1": (64, 128),
    "coco_tao": (64, 128),
    "coco_torchvision": (64, 100),
    "coco_nvidia_pytorch": (64, 100),
    "coco_detectron2": (64, 100),
}


def export(config, variables, **changes):
    model, _ = predict_function(config)
    plan = resize_plan(*(changes.pop("size", None) or (64, 96)), config.data)
    opset = changes.pop("opset", 17)
    most = None if takes_batches(model, changes.get("image_size")) else 1
    options = {"dtype": config.data.image_dtype, "batch": most} | changes
    canvas = export_canvas(model, plan.canvas, options.get("image_size"))
    source, detect = OnnxInput(canvas, **options), config.eval
    built = build_onnx(model, variables, source, opset=opset, detect=detect)
    return load_onnx(built.SerializeToString()), plan.canvas


@pytest.mark.parametrize(("offset", "opset"), [(0.0, OPSETS.start), (1.0, OPSETS.stop - 1)])
def test_nms_matches_jax(offset, opset):
    rng = np.random.default_rng(1)
    boxes = np.stack([random_boxes(rng, 80, 60), random_boxes(rng, 80, 60)])
    boxes[:, ::9, 2] = boxes[:, ::9, 0] - 0.7  # inverted
    boxes[:, 1::9, 2:] = boxes[:, 1::9, :2]  # empty
    boxes[:, 40] = boxes[:, 2]  # duplicate
    valid = rng.random((2, 80)) > 0.2
    classes = rng.integers(1, 4, (2, 80))
    options = dict(iou_thresh=0.4, offset=offset)

    def both(boxes, valid, classes):
        keep = nms(boxes, valid, max_out=7, **options)
        return keep, nms(boxes, valid, groups=classes, max_out=7, **options)

    given = boxes, valid, classes.astype(np.int32)
    _, (kept, grouped) = converted(both, *given, opset=opset, num_classes=3)
    expected, of_classes = jax.jit(
        lambda boxes, valid, classes: (
            nms(boxes, valid, max_out=7, **options),
            nms(boxes, valid, groups=classes, **options),
        )
    )(*given)
    np.testing.assert_array_equal(kept > 0, expected)
    # ONNX keeps seven per class, JAX limits all classes together: compare seven of each class.
    of_classes = np.asarray(of_classes)
    for c in (1, 2, 3):
        class_expected = of_classes & (classes == c)
        class_expected &= np.cumsum(class_expected, axis=1) <= 7
        np.testing.assert_array_equal((grouped > 0) & (classes == c), class_expected)


@pytest.mark.parametrize(
    ("aligned", "sampling", "border", "min_size"),
    [
        (False, 1, "clamp", 0.0),  # NVIDIA TensorFlow, TAO
        (False, 2, "zero", 1.0),  # torchvision, NVIDIA PyTorch
        (True, 0, "zero", 0.0),  # detectron2
        (True, 2, "clamp", 0.0),  # quickstart
    ],
)
@pytest.mark.parametrize("max_level", [5, 6])
def test_roi_align_matches_jax(aligned, sampling, border, min_size, max_level):
    rng = np.random.default_rng(2)
    options = RoIAlign(max_level, sampling, 16, aligned, border, min_size)
    side = 576  # large enough for boxes of P5
    boxes = np.stack([random_boxes(rng, 12, side), random_boxes(rng, 12, 80.0)])
    boxes[0, 0] = 0, 0, side, side
    boxes[0, 1] = side - 0.5, side - 3, side, side  # tiny, in the corner
    boxes[0, 2] = 0
    boxes[0, 3] = 100, 100, 212, 211  # 113 x 112 with inclusive pixels
    maps = [
        rng.normal(size=(2, -(-side // stride), -(-side // stride), 3)).astype(np.float32)
        for stride in STRIDES
    ]

    def pool(boxes, *maps):
        return roi_align(maps, boxes, options, output_size=(7, 5), level_offset=1.0)

    _, (pooled,) = converted(pool, boxes, *maps)
    expected = jax.jit(pool)(boxes, *maps)
    bound = 2 * pooling_bound(side / 4, max(float(np.abs(m).max()) for m in maps))
    assert_within(pooled, np.asarray(expected), bound)


@pytest.mark.slow
@pytest.mark.parametrize("stride_in", ["1x1", "3x3"])
def test_bottlenecks_match_jax(stride_in):
    config = small_config(
        "coco",
        (64, 64),
        model__backbone__depth=50,
        model__backbone__stride_in=stride_in,
        model__backbone__norm="affine",
        model__backbone__norm_eps=1e-3,
        model__input__channel_order="bgr",
    )
    model, variables = predict_function(config)[0], random_variables(config)
    rng = np.random.default_rng(3)
    images = rng.integers(0, 256, (1, 64, 64, 3), dtype=np.uint8)
    sizes = np.array([[64, 64]], np.int32)

    def pyramid(variables, images):
        return model.apply(variables, images, sizes, train=False, method="pyramid")[0]

    _, found = converted(pyramid, images.astype(np.float32), variables=variables)
    expected = jax.jit(pyramid)(variables, images)
    for jax_map, onnx_map in zip(expected, found, strict=True):
        jax_map = np.asarray(jax_map)
        np.testing.assert_allclose(onnx_map, jax_map, atol=1e-4 * np.abs(jax_map).max())


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "coco")) for name in RECIPES],
)
def test_detections_match_jax(recipe):
    depth = {"model__backbone__depth": 10}
    if recipe == "coco_torchvision":
        depth["model__backbone__norm_eps"] = 1e-5
    config = small_config(recipe, RECIPES[recipe], **depth)
    variables = random_variables(config)
    _, predict = predict_function(config)
    exported, canvas = export(config, variables)
    inputs = generated(config, SIZES, canvas)
    reference = partial(jax.jit(predict), variables)
    found = compare(reference, exported, inputs, config.eval.score_threshold)
    assert found.detections >= 9, found
    assert found.within_tolerance and found.masks < 1e-2, found


STRONG = {
    "v2": ("coco_torchvision:v2", {}),
    "class-agnostic boxes": ("coco_detectron2:lsj_100ep", {"model.box_head.class_agnostic": True}),
    "boxes alone": ("coco_torchvision:v2", {"model.mask_head.name": "none"}),
    "larger masks": ("coco", {"model.mask_head.roi_size": 7, "model.mask_head.num_convs": 2}),
    "masks of 56 x 56": ("coco", {"model.mask_head.roi_size": 28, "model.box_head.roi_size": 14}),
    "pointrend": (
        "coco_detectron2:pointrend",
        {
            "model.mask_head.fc_channels": 32,
            "model.mask_head.point_channels": 32,
            "model.mask_head.subdivisions": 3,
            "model.mask_head.subdivision_points": 60,
        },
    ),
    "sigmoid per class": ("coco", {"model.classifier.kind": "sigmoid"}),
    "groups of channels": (
        "coco",
        {
            "model.backbone.depth": 50,
            "model.backbone.groups": 32,
            "model.backbone.width_per_group": 4,
        },
    ),
    "group norm": (
        "coco",
        {
            "model.backbone.norm": "group",
            "model.fpn.norm": "group",
            "model.mask_head.norm": "group",
        },
    ),
    "group norm of a part of the canvas": ("coco_torchvision", {"model.fpn.norm": "group"}),
    "layer norm": ("coco", {"model.fpn.norm": "layer", "model.backbone.norm": "layer"}),
    "no hidden layer": ("coco", {"model.box_head.num_fcs": 0}),
    "blue first": ("coco", {"model.input.channel_order": "bgr"}),
    "cascade": (
        "coco_torchvision",
        {"model.box_head.class_agnostic": True, "model.cascade.fg_iou_thresh": (0.6, 0.7)},
    ),
    "cascade of sigmoids": (
        "coco",
        {
            "model.box_head.class_agnostic": True,
            "model.cascade.fg_iou_thresh": (0.6,),
            "model.cascade.weight_factors": (2.0,),
            "model.classifier.kind": "sigmoid",
        },
    ),
}


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [pytest.param(*STRONG[n], id=n, marks=[pytest.mark.slow] * (n != "v2")) for n in STRONG],
)
@pytest.mark.slow
def test_strong_models_match_jax(recipe, changes):
    heads = {"model.fpn.channels": 32, "model.mask_head.channels": 32} | changes
    heads = {name.replace(".", "__"): value for name, value in heads.items()}
    config = small_config(recipe, RECIPES[recipe.partition(":")[0]], **heads)
    variables = random_variables(config)
    _, predict = predict_function(config)
    exported, canvas = export(config, variables)
    inputs = generated(config, SIZES[:2], canvas)
    reference = partial(jax.jit(predict), variables)
    found = compare(reference, exported, inputs, config.eval.score_threshold)
    assert found.detections >= 2 and found.within_tolerance and (found.masks or 0) < 1e-2, found
    if config.model.mask_head.name == "none":
        assert reference(*inputs[0]).masks is None and exported(*inputs[0]).masks is None


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["quickstart", "coco_torchvision"])
def test_fixed_size_in_planar_batches(recipe):
    config = small_config(recipe, RECIPES[recipe], data__image_dtype="uint8", **SMALL_TRUNK)
    variables = random_variables(config)
    _, predict = predict_function(config)
    reference = partial(jax.jit(predict), variables)
    plan = resize_plan(48, 80, config.data)
    options = {"image_size": plan.size, "planar": True, "dtype": "float32"}
    exported, canvas = export(config, variables, size=(48, 80), **options)
    inputs = generated(config, [(48, 80)] * 3, canvas)
    found = compare(reference, exported, inputs, config.eval.score_threshold)
    assert found.detections >= 9 and found.within_tolerance, found
    # Batches match single images.
    images, sizes = (np.concatenate(parts) for parts in zip(*inputs[:2], strict=True))
    together = exported(images, sizes)
    for row in range(2):
        alone = exported(images[row : row + 1], sizes[row : row + 1])
        np.testing.assert_allclose(together.boxes[row], alone.boxes[0], atol=1e-3)
        np.testing.assert_allclose(together.scores[row], alone.scores[0], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["coco", "coco_torchvision"])
def test_fifty_coco_images(recipe):
    size = (256, 384)
    paths = sorted(shared("data/coco_mini/val2017").glob("*.jpg"))[:50]
    config = small_config(recipe, size)
    variables = random_variables(config)
    _, predict = predict_function(config)
    exported, canvas = export(config, variables, size=(256, 384))
    decoded = (decode_image(path) for path in paths)
    inputs = on_canvas(decoded, config.data, canvas, None)
    reference = partial(jax.jit(predict), variables)
    found = compare(reference, exported, inputs, config.eval.score_threshold)
    assert found.pictures == 50 and found.detections >= 100
    assert found.within_tolerance, found


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (
            {"model__roi_align__border": "clamp", "model__roi_align__min_size": 1.0},
            {},
            "has no RoiAlign in ONNX",
        ),
        ({"model__input__pad_multiple": 32}, {"batch": 2}, "use --batch=1, or --picture_size"),
        ({"model__input__pad_multiple": 32}, {"batch": None}, "--batch is any, but .* maps end at"),
        ({}, {"opset": 15}, "--opset is 15, expected 16 to 21"),
        ({}, {"opset": 30}, "--opset is 30, expected 16 to 21"),
    ],
)
def test_models_without_exact_form_are_rejected(changes, options, message):
    config = small_config("coco", (64, 64), **changes)
    with pytest.raises(ValueError, match=message):
        export(config, {}, **options)


@pytest.mark.slow
def test_deepstream_is_told_the_outputs_of_a_model_of_boxes_alone(tmp_path):
    config = small_config("quickstart", (64, 64), model__mask_head__name="none", **SMALL_TRUNK)
    categories = [{"id": k, "name": f"class {k}"} for k in (1, 2, 3)]
    options = ArtifactOptions(picture_size=(64, 64), deepstream=True)
    given = random_variables(config), categories, "onnx", options, tmp_path
    files = build_artifact(config, *given).files
    model, parsed = (
        onnx.load_from_string(files[f"{name}.onnx"]) for name in ("model", "deepstream")
    )
    assert "masks" not in [output.name for output in model.graph.output]
    outputs = [output.name for output in parsed.graph.output]
    assert f"\noutput-blob-names={';'.join(outputs)}\n" in files["nvinfer.txt"].decode()
    assert b"\noutput-instance-mask=0\n" in files["nvinfer.txt"]


def test_the_canvas_ends_with_the_image():
    config = small_config("coco_torchvision", (64, 100))
    model, _ = predict_function(config)
    assert export_canvas(model, (64, 128), (60, 90)) == (64, 96)
    assert export_canvas(model, (64, 128), None) == (64, 128)


def test_soft_nms_is_refused():
    options = Detect(nms="gaussian")
    with pytest.raises(ValueError, match="eval.nms is 'gaussian', expected 'hard' for an ONNX"):
        build_onnx(None, {}, None, opset=17, detect=options)


@pytest.mark.parametrize("static", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_float16_keeps_the_detections_and_the_types_of_inputs_and_outputs(static):
    config = small_config("quickstart", (64, 128), **SMALL_TRUNK)
    model, variables = predict_function(config)[0], random_variables(config)
    source = OnnxInput((64, 128), batch=1 if static else None, dtype=config.data.image_dtype)
    options = dict(opset=17, detect=config.eval)
    default = build_onnx(model, variables, source, **options)
    half = build_onnx(model, variables, source, **options, static=static, float16=True)
    assert list(half.graph.input) == list(default.graph.input)
    assert list(half.graph.output) == list(default.graph.output)
    types = {array.name: array.data_type for array in half.graph.initializer}
    kinds = ("Conv", "Gemm", "ConvTranspose")
    layers = [node for node in half.graph.node if node.op_type in kinds]
    assert {types[node.input[1]] for node in layers} == {onnx.TensorProto.FLOAT16}
    runs = [load_onnx(each.SerializeToString()) for each in (default, half)]
    inputs = generated(config, SIZES, (64, 128))
    found = compare(*runs, inputs, config.eval.score_threshold)
    assert found.detections >= 9 and 0 < found.boxes < 0.5 and found.scores < 1e-2, found
