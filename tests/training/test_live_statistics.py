"""Batch norm that learns, in the training step: over devices, and beside norms that do not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.models.build import build_model, init_variables
from mask_rcnn_jax.training.step import (
    StepOptions,
    TrainState,
    make_train_step,
    replicate,
    shard_batch,
)
from tests.helpers import tiny_batch, tiny_config


def config_with(norm):
    """Norms that learn in pyramid and heads, fixed ones in the trunk."""
    config = tiny_config()
    config.model.update(
        backbone=dict(norm="frozen"),
        fpn=dict(norm=norm),
        box_head=dict(num_convs=1, conv_channels=32, num_fcs=1, norm=norm),
        mask_head=dict(norm=norm, num_convs=1),
    )
    return config


def start(model):
    """Variables with statistics that show a change of their last bit."""
    variables = init_variables(model, 0)
    rng = np.random.default_rng(0)
    fixed = variables["batch_stats"]["backbone"]
    fixed = jax.tree.map(lambda s: rng.uniform(0.9, 1.1, s.shape).astype(np.float32), fixed)
    return {**variables, "batch_stats": {**variables["batch_stats"], "backbone": fixed}}


def one_step(config, devices, batch):
    """State after one step on so many devices."""
    model, tx = build_model(config.model), optax.sgd(1e-3)
    variables = start(model)
    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])
    state = TrainState(jnp.int32(0), opt_state=tx.init(variables["params"]), **variables)
    options = StepOptions(as_recipe(config).loss, 0, 0.0)
    step = make_train_step(model, tx, None, mesh, options)
    state, metrics = step(replicate(state, mesh), shard_batch(batch, mesh))
    assert np.isfinite(metrics["loss/total"])
    return variables, jax.device_get(state)


@pytest.fixture(scope="module")
def synced():
    config = config_with("sync_batch")
    batch = jax.tree.map(lambda x: x[:2], tiny_batch(3))  # both with objects
    return {devices: one_step(config, devices, batch) for devices in (1, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["fpn", "box_head", "mask_head"])
def test_two_devices_have_the_statistics_of_one_with_both_images(synced, part):
    before, _ = synced[1]
    one, two = (synced[devices][1].batch_stats[part] for devices in (1, 2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), two, one)
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), two, before["batch_stats"][part])
    assert all(jax.tree.leaves(moved))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_fixed_statistics_stay_to_the_bit(synced, devices):
    before, after = synced[devices]
    jax.tree.map(
        np.testing.assert_array_equal,
        after.batch_stats["backbone"],
        before["batch_stats"]["backbone"],
    )


def test_which_models_move_statistics():
    assert build_model(config_with("batch").model).trains_batch_stats
    assert not build_model(config_with("group").model).trains_batch_stats
    assert not build_model(tiny_config().model).trains_batch_stats
