"""A small ViTDet with a cascade in the training step, in prediction and exported."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from mask_rcnn_jax.deploy.compare import compare
from mask_rcnn_jax.deploy.onnx import check_exportable
from mask_rcnn_jax.models.build import (
    abstract_variables,
    build_model,
    init_variables,
    named_section,
)
from mask_rcnn_jax.models.detect import detect_options
from mask_rcnn_jax.structures import Detections
from mask_rcnn_jax.training.optim import build_optimizer
from mask_rcnn_jax.training.step import (
    TrainState,
    loss_options,
    make_train_step,
    replicate,
    shard_batch,
)
from tests.helpers import assert_finite_tree, tiny_batch, tiny_config

SMALL = dict(width=32, depth=3, num_heads=2, global_blocks=(2,), window=3, image_size=64)


def small_config(drop_path=0.5):
    config = tiny_config()
    config.data.max_instances = 4
    config.model.backbone = named_section(
        "backbone", "vit", **SMALL, pretrain_size=32, drop_path=drop_path
    )
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


@functools.cache
def compiled(devices, remat="none", drop_path=0.5):
    """A step on so many devices and its first state."""
    config = small_config(drop_path)
    model = build_model(config.model, remat=remat)
    variables = jax.device_get(init_variables(model, 0))
    tx = build_optimizer(config, lambda _: 1e-3, variables["params"], model.backbone)
    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])
    options = dict(loss=loss_options(config), seed=0, flip_probability=0.0)
    state = jax.device_get(TrainState.start(variables, tx))  # a step takes its buffers
    return make_train_step(model, tx, None, mesh, **options), state, mesh


def one_step(batch, at=0, **options):
    """Parameters and losses after a step, the run's number `at`."""
    step, state, mesh = compiled(**options)
    state = replicate(state.replace(step=np.int32(at)), mesh)
    state, metrics = step(state, shard_batch(batch, mesh))
    return jax.device_get((state.params, metrics))


@pytest.fixture(scope="module")
def batch():
    return jax.tree.map(lambda x: x[:2], tiny_batch(3))  # both with objects


@pytest.mark.slow
def test_dropped_paths_are_a_function_of_the_step(batch):
    params, first = one_step(batch, devices=1)
    assert_finite_tree((params, first))
    _, again = one_step(batch, devices=1)
    _, later = one_step(batch, at=1, devices=1)
    assert first["loss/rpn_cls"] == again["loss/rpn_cls"] != later["loss/rpn_cls"]
    # Every image of its own, whatever its place.
    turned = jax.tree.map(lambda x: x[::-1], batch)
    _, other = one_step(turned, devices=1)
    assert other["loss/rpn_cls"] == pytest.approx(float(first["loss/rpn_cls"]), rel=1e-4)
    before = compiled(1)[1].params["backbone"]
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), params["backbone"], before)
    assert moved["pos_embed"] and moved["block2"]["attn"]["rel_pos_h"]


@pytest.mark.slow
def test_two_devices_drop_what_one_does(batch):
    (_, first), (_, second) = (one_step(batch, devices=n) for n in (1, 2))
    for name in ("loss/rpn_cls", "loss/rpn_box"):  # normalized alike on any number of devices
        assert second[name] == pytest.approx(float(first[name]), rel=1e-5), name


@pytest.mark.slow
def test_recomputing_everything_changes_nothing(batch):
    (_, kept), (_, recomputed) = (one_step(batch, devices=1, remat=r) for r in ("none", "all"))
    for name, value in kept.items():
        assert float(recomputed[name]) == pytest.approx(float(value), rel=1e-4), name


@pytest.mark.slow
def test_it_exports_to_stablehlo_and_says_that_it_does_not_to_onnx():
    pytest.importorskip("flatbuffers")
    from mask_rcnn_jax.deploy.stablehlo import export_stablehlo, load_stablehlo

    config = small_config()
    model = build_model(config.model, implementation="xla")
    variables = init_variables(model, 0)
    options = detect_options(config)

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
    with pytest.raises(ValueError, match="model.backbone is ViT, which it cannot convert; --form"):
        check_exportable(model, 1, (64, 128))


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
    config = small_config()
    config.model[part] = tiny_config().model[part]
    with pytest.raises(ValueError, match=message):
        abstract_variables(build_model(config.model))


def test_a_cascade_does_not_go_to_onnx():
    config = tiny_config()
    config.model.box_head.class_agnostic = True
    config.model.cascade.fg_iou_thresh = (0.6, 0.7)
    with pytest.raises(ValueError, match="model.cascade.fg_iou_thresh has stages, which it cannot"):
        check_exportable(build_model(config.model), 1, (64, 64))
