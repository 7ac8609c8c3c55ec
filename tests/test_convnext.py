"""A small detector with a ConvNeXt: built from a config, trained, on two devices, and exported."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from mask_rcnn_jax.deploy.compare import compare
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

SMALL = dict(depths=(1, 1, 1, 1), width=8, layer_scale=1.0, drop_path=0.5)


def small_config(**changes):
    config = tiny_config()
    config.model.backbone = named_section("backbone", "convnext", **SMALL | changes)
    config.loss.update(rpn_cls_average="budget", rpn_box_average="budget")
    config.optim.update(name="adamw", layer_decay=0.95, weight_decay=0.05, decay_on=("kernel",))
    return config


@functools.cache
def compiled(devices, remat="none", precision="float32"):
    """A step on so many devices and its first state."""
    config = small_config()
    config.train.precision = precision
    model = build_model(config.model, remat=remat, precision=precision)
    variables = jax.device_get(init_variables(model, 0))
    tx = build_optimizer(config, lambda _: 1e-3, variables["params"], model.backbone)
    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])
    options = dict(loss=loss_options(config), seed=0, flip_probability=0.0)
    state = jax.device_get(TrainState.start(variables, tx))  # a step takes its buffers
    return make_train_step(model, tx, None, mesh, **options), state, mesh


def one_step(batch, **options):
    """Parameters and losses after a step."""
    step, state, mesh = compiled(**options)
    state, metrics = step(replicate(state, mesh), shard_batch(batch, mesh))
    return jax.device_get((state.params, metrics))


@pytest.fixture(scope="module")
def batch():
    return jax.tree.map(lambda x: x[:2], tiny_batch(3))  # both with objects


@pytest.mark.slow
def test_two_devices_drop_what_one_does(batch):
    (params, first), (_, second) = (one_step(batch, devices=n) for n in (1, 2))
    assert_finite_tree((params, first))
    for name in ("loss/rpn_cls", "loss/rpn_box"):  # normalized alike on any number of devices
        assert second[name] == pytest.approx(float(first[name]), rel=1e-5), name
    before = compiled(1)[1].params["backbone"]
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), params["backbone"], before)
    assert moved["stem_conv"]["kernel"] and moved["res5_0"]["gamma"]
    assert moved["output2_norm"]["scale"]


@pytest.mark.slow
def test_recomputing_everything_changes_nothing(batch):
    (_, kept), (_, recomputed) = (one_step(batch, devices=1, remat=r) for r in ("none", "all"))
    for name, value in kept.items():
        assert float(recomputed[name]) == pytest.approx(float(value), rel=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_trains(batch, precision):
    _, exact = one_step(batch, devices=1)
    params, metrics = one_step(batch, devices=1, precision=precision)
    assert_finite_tree((params, metrics))
    assert float(metrics["loss/rpn_cls"]) == pytest.approx(float(exact["loss/rpn_cls"]), rel=0.05)


@pytest.mark.slow
def test_it_exports_to_stablehlo():
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


def test_its_maps_fit_the_pyramid_and_nothing_has_statistics():
    model = build_model(small_config().model)
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
        build_model(small_config(**changes).model)
