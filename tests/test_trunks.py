"""Small detectors with other trunks, ViTDet with a cascade, ConvNeXt, Swin, DINO, RegNet and
MobileNetV4: trained, on two devices, in half precision, and exported."""

import functools

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import AxisType

from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.exporting.compare import compare
from mask_rcnn_jax.models.build import (
    abstract_variables,
    build_model,
    init_variables,
    named_section,
)
from mask_rcnn_jax.structures import Detections
from mask_rcnn_jax.training.optim import build_optimizer
from mask_rcnn_jax.training.step import (
    StepOptions,
    TrainState,
    make_train_step,
    replicate,
    shard_batch,
)
from tests.helpers import assert_finite_tree, tiny_batch, tiny_config

VIT = dict(width=32, depth=3, num_heads=2, global_blocks=(2,), window=3, image_size=64)
CONVNEXT = dict(depths=(1, 1, 1, 1), width=8, layer_scale=1.0, drop_path=0.5)
SWIN = dict(depths=(2, 1, 1, 1), width=8, num_heads=(1, 2, 2, 4), windows=(3, 3, 2, 2))
REGNET = dict(depth=6, initial_width=8, slope=8.0, multiplier=2.0, group_width=8, se_ratio=0.25)


def vitdet():
    config = tiny_config()
    config.data.max_instances = 4
    config.model.backbone = named_section("backbone", "vit", **VIT, pretrain_size=32, drop_path=0.5)
    config.model.fpn = named_section("fpn", "simple", channels=32)
    config.model.input.pad_multiple = 0
    config.model.box_head.update(num_convs=1, conv_channels=32, num_fcs=1, norm="layer")
    config.model.box_head.class_agnostic = True
    config.model.cascade.fg_iou_thresh = (0.6, 0.7)
    config.model.mask_head.update(norm="layer", num_convs=1)
    config.loss.update(rpn_cls_average="budget", rpn_box_average="budget")
    config.optim.update(name="adamw", layer_decay=0.8, weight_decay=0.1)
    config.optim.decay_on = ("kernel", "bias", "scale", "other")
    return config


def convnext(**changes):
    config = tiny_config()
    config.model.backbone = named_section("backbone", "convnext", **CONVNEXT | changes)
    config.loss.update(rpn_cls_average="budget", rpn_box_average="budget")
    config.optim.update(name="adamw", layer_decay=0.95, weight_decay=0.05, decay_on=("kernel",))
    return config


def swin(name="swin"):
    config = tiny_config()
    config.model.backbone = named_section("backbone", name, **SWIN, drop_path=0.5)
    config.optim.loss_scale = 2.0**8  # as for mobilenet
    config.loss.update(rpn_cls_average="budget", rpn_box_average="budget")
    config.optim.update(name="adamw", layer_decay=0.95, weight_decay=0.05)
    config.optim.decay_on = ("kernel", "bias", "scale", "other")
    return config


def swin_v2():
    return swin("swin_v2")


def dino():
    config = vitdet()
    trunk = dict(width=32, depth=2, num_heads=2, layer_scale=1.0, drop_path=0.5)
    config.model.backbone = named_section("backbone", "dino", **trunk, gated=True)
    config.model.cascade.fg_iou_thresh = ()
    return config


def regnet(norm="affine"):
    config = tiny_config()
    trunk = REGNET | dict(norm=norm, frozen_stages=0)
    config.model.backbone = named_section("backbone", "regnet", **trunk)
    config.loss.update(rpn_cls_average="budget", rpn_box_average="budget")
    return config


def mobilenet():
    config = tiny_config()
    trunk = dict(multiplier=0.1, norm="affine", frozen_stages=0)
    config.model.backbone = named_section("backbone", "mobilenetv4", **trunk)
    config.optim.loss_scale = 2.0**8  # in float16 the first step overflows at 2**16
    config.loss.update(rpn_cls_average="budget", rpn_box_average="budget")
    return config


def synced_regnet():
    return regnet("sync_batch")


every = pytest.mark.parametrize("trunk", [vitdet, convnext, dino, swin, swin_v2, regnet, mobilenet])


@functools.cache
def compiled(trunk, devices=1, remat="none", precision="float32"):
    """A step on so many devices and its first state."""
    config = trunk()
    config.train.precision = precision
    model = build_model(config.model, remat=remat, precision=precision)
    variables = init_variables(model, 0)
    tx = build_optimizer(as_recipe(config), lambda _: 1e-3, variables["params"], model.backbone)
    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])
    options = StepOptions(as_recipe(config).loss, 0, 0.0)
    state = jax.device_get(TrainState.start(variables, tx))  # a step takes its buffers
    return make_train_step(model, tx, None, mesh, options), state, mesh


def one_step(trunk, batch, at=0, **options):
    """Parameters and losses after a step, the run's number `at`."""
    step, state, mesh = compiled(trunk, **options)
    state = replicate(state.replace(step=np.int32(at)), mesh)
    state, metrics = step(state, shard_batch(batch, mesh))
    return jax.device_get((state.params, metrics))


@pytest.fixture(scope="module")
def batch():
    return jax.tree.map(lambda x: x[:2], tiny_batch(3))  # both with objects


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trunk", "trained"),
    [
        (vitdet, [("pos_embed",), ("block2", "attn", "rel_pos_h")]),
        (dino, [("cls_token",), ("block1", "gate", "kernel"), ("block0", "attn", "q_bias")]),
        (convnext, [("stem_conv", "kernel"), ("res5_0", "gamma"), ("output2_norm", "scale")]),
        (swin, [("res2_1", "attn", "position_bias"), ("down3_reduction", "kernel")]),
        (swin_v2, [("res2_1", "attn", "logit_scale"), ("res5_0", "attn", "q_bias")]),
    ],
)
def test_dropped_paths_are_a_function_of_the_step(trunk, trained, batch):
    params, first = one_step(trunk, batch)
    assert_finite_tree((params, first))
    _, again = one_step(trunk, batch)
    _, later = one_step(trunk, batch, at=1)
    assert first["loss/rpn_cls"] == again["loss/rpn_cls"] != later["loss/rpn_cls"]
    # Every image of its own, whatever its place.
    turned = jax.tree.map(lambda x: x[::-1], batch)
    _, other = one_step(trunk, turned)
    assert other["loss/rpn_cls"] == pytest.approx(float(first["loss/rpn_cls"]), rel=1e-4)
    before = flatten_dict(compiled(trunk)[1].params["backbone"])
    after = flatten_dict(params["backbone"])
    for name in trained:
        assert np.any(after[name] != before[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("trunk", [vitdet, convnext, dino, swin, synced_regnet])
def test_two_devices_drop_what_one_does(trunk, batch):
    (_, first), (_, second) = (one_step(trunk, batch, devices=n) for n in (1, 2))
    for name in ("loss/rpn_cls", "loss/rpn_box"):  # normalized alike on any number of devices
        assert second[name] == pytest.approx(float(first[name]), rel=1e-5), name


@pytest.mark.slow
@every
def test_recomputing_everything_changes_nothing(trunk, batch):
    (_, kept), (_, recomputed) = (one_step(trunk, batch, remat=r) for r in ("none", "all"))
    for name, value in kept.items():
        assert float(recomputed[name]) == pytest.approx(float(value), rel=3e-4), name


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@every
def test_half_precision_trains(trunk, batch, precision):
    _, exact = one_step(trunk, batch)
    params, metrics = one_step(trunk, batch, precision=precision)
    assert_finite_tree((params, metrics))
    assert float(metrics["loss/rpn_cls"]) == pytest.approx(float(exact["loss/rpn_cls"]), rel=0.05)


@pytest.mark.slow
@every
def test_it_exports_to_stablehlo(trunk):
    pytest.importorskip("flatbuffers")
    from mask_rcnn_jax.exporting.stablehlo import export_stablehlo
    from mask_rcnn_jax.predict.programs import load_stablehlo

    config = trunk()
    model = build_model(config.model, implementation="xla")
    variables = init_variables(model, 0)
    options = as_recipe(config).eval

    def predict(variables, images, sizes):
        return model.apply(variables, images, sizes, options, method="predict")

    program = export_stablehlo(predict, variables, canvas=(64, 128), batch=None, dtype=np.uint8)
    run = load_stablehlo(program)
    images = np.random.default_rng(0).integers(0, 256, (2, 64, 128, 3), np.uint8)
    sizes = np.array([[64, 128], [40, 100]], np.int32)
    found = compare(
        jax.jit(functools.partial(predict, variables)),
        lambda *inputs: Detections(**run(*inputs)),
        [(images, sizes)],
        0.0,
    )
    assert found.detections > 0 and found.within_tolerance


@pytest.mark.slow
@every
def test_it_exports_to_onnx(trunk):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from mask_rcnn_jax.exporting.onnx import OnnxInput, build_onnx
    from mask_rcnn_jax.predict.programs import load_onnx

    config = trunk()
    config.model.input.pad_multiple = 0
    model = build_model(config.model, implementation="xla")
    variables, options = init_variables(model, 0), as_recipe(config).eval
    source = OnnxInput((64, 128))
    built = build_onnx(model, variables, source, opset=17, detect=options)
    predict = functools.partial(model.apply, variables, detect=options, method="predict")
    images = np.random.default_rng(0).integers(0, 256, (2, 64, 128, 3), np.uint8)
    sizes = np.array([[64, 128], [40, 100]], np.int32)
    exported = load_onnx(built.SerializeToString())
    found = compare(jax.jit(predict), exported, [(images, sizes)], 0.0)
    assert found.detections > 0 and found.within_tolerance, found


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            "backbone",
            "model.fpn.name is 'simple', which takes a last map of stride 16; that of the",
        ),
        ("fpn", "model.fpn.name is 'fpn', which takes 4 maps; the backbone has 1"),
    ],
)
def test_backbone_and_pyramid_must_fit(part, message):
    config = vitdet()
    config.model[part] = tiny_config().model[part]
    with pytest.raises(ValueError, match=message):
        abstract_variables(build_model(config.model))


def test_its_maps_fit_the_pyramid_and_nothing_has_statistics():
    model = build_model(convnext().model)
    assert not model.trains_batch_stats
    variables = abstract_variables(model)
    assert variables["batch_stats"] == {}
    laterals = [variables["params"]["fpn"][f"fpn_lateral{i}"]["kernel"] for i in range(2, 6)]
    assert [kernel.shape[2] for kernel in laterals] == [8, 16, 32, 64]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depths": (1, 1, 1)}, r"model.backbone.depths is \(1, 1, 1\), expected 4 numbers"),
        ({"drop_path": 1}, "model.backbone.drop_path is 1, expected at least 0 and below 1"),
        ({"width": "96"}, "model.backbone.width is '96', expected int"),
        ({"depth": 50}, "model.backbone has no entry 'depth'"),
    ],
)
def test_a_wrong_entry_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        build_model(convnext(**changes).model)
