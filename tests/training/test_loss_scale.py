"""Loss scaling: the rule on numbers worked by hand, and a step that overflows float16."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mask_rcnn_jax import parts
from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.models.build import build_model, init_variables
from mask_rcnn_jax.models.rpn import RPN
from mask_rcnn_jax.ops.boxes import BoxCoder
from mask_rcnn_jax.recipe.optimizer import OptimOptions
from mask_rcnn_jax.recipe.options import TrainOptions
from mask_rcnn_jax.training import step
from mask_rcnn_jax.training.loggers import Loggers
from mask_rcnn_jax.training.loss_scale import dynamic_loss_scale
from mask_rcnn_jax.training.step import (
    StepOptions,
    TrainState,
    make_mesh,
    make_train_step,
    replicate,
    shard_batch,
)
from mask_rcnn_jax.training.step_log import StepLog
from tests.helpers import tiny_batch, tiny_config


def scaled(inner=None, init_scale=8.0, growth_interval=3, floor=2.0):
    inner = inner or optax.sgd(0.5, momentum=0.9)
    return dynamic_loss_scale(inner, init_scale, growth_interval, floor)


def play(gradients, **options):
    """(parameter, scale, skipped) after each of these gradients of the unscaled loss."""
    tx = scaled(**options)
    value = jnp.float32(1.0)
    state = tx.init(value)
    played = []
    for gradient in gradients:
        updates, state = tx.update(gradient * state.scale, state, value)
        value = optax.apply_updates(value, updates)
        played.append((float(value), float(state.scale), int(state.skipped)))
    return played


def test_the_scale_cancels_out():
    (value, _, _), *_ = play([0.25])
    assert value == 1.0 - 0.5 * 0.25


@pytest.mark.parametrize("overflow", [np.inf, -np.inf, np.nan])
def test_an_overflow_changes_nothing_but_the_scale(overflow):
    """The velocity too: with it untouched, the second good step is 0.9 of the first and itself."""
    played = play([0.25, overflow, 0.25])
    assert played[1] == (played[0][0], 4.0, 1)
    assert played[2][0] == pytest.approx(played[1][0] - 0.5 * (0.9 * 0.25 + 0.25))


def test_the_scale_doubles_after_good_steps_in_a_row():
    scales = [scale for _, scale, _ in play([1, 1, np.inf, 1, 1, 1, 1, 1, 1, 1])]
    assert scales == [8, 8, 4, 4, 4, 8, 8, 8, 16, 16]


def test_the_scale_stays_above_its_floor_and_finite():
    assert [scale for _, scale, _ in play([np.inf] * 4)] == [4, 2, 2, 2]
    largest = 2.0**127
    assert play([0.0, 0.0], init_scale=largest, growth_interval=1)[-1][1] == largest


@pytest.mark.parametrize(
    "options",
    [{"loss_scale_floor": 0.0}, {"loss_scale_floor": 2.0**17}, {"loss_scale_growth": 0},
     {"loss_scale": -1.0}],
)  # fmt: skip
def test_scales_without_meaning_are_refused(options):
    with pytest.raises(ValueError, match="^optim.loss_scale"):
        parts.build(OptimOptions, options, "optim")


def stub_model():
    """Its loss is w times the mean of the batch's scales, and its statistics add that mean."""

    def apply(variables, batch, keys, *, method, train, mutable):
        mean = jnp.mean(batch.scales)
        stats = {"mean": variables["batch_stats"]["mean"] + mean}
        return jnp.sum(variables["params"]["w"]) * mean, {"batch_stats": stats}

    parts = {"mask_targets": SimpleNamespace(kind="crop"), "rpn": RPN(), "box_coder": BoxCoder()}
    return SimpleNamespace(apply=apply, backbone=None, trains_batch_stats=True, **parts)


@pytest.mark.parametrize("scale, overflows", [(2.0**15, False), (2.0**127, True)])
def test_a_step_logs_the_unscaled_norm_and_keeps_statistics_of_good_steps_alone(
    scale, overflows, monkeypatch
):
    """The mean is 3 on one device and 5 on the other, so that both weights have a gradient of 4."""
    monkeypatch.setattr(step, "loss_terms", lambda outputs, *_: {"loss/total": outputs})
    tx, mesh = scaled(optax.sgd(0.5), init_scale=scale), make_mesh()
    params, stats = {"w": jnp.ones(2)}, {"mean": jnp.float32(7.0)}
    state = TrainState(jnp.int32(0), params, stats, tx.init(params))
    batch = tiny_batch(2)
    batch = batch.replace(scales=np.array([[3, 3], [5, 5]], np.float32))
    options = StepOptions(as_recipe(tiny_config()).loss, 0, 0.0)
    run = make_train_step(stub_model(), tx, None, mesh, options)
    state, metrics = run(replicate(state, mesh), shard_batch(batch, mesh))
    assert float(metrics["loss_scale"]) == scale and metrics["skipped_steps"] == overflows
    if overflows:
        assert not np.isfinite(metrics["grad_norm"])
        assert state.batch_stats["mean"] == 7.0 and state.params["w"].tolist() == [1.0, 1.0]
    else:
        assert float(metrics["grad_norm"]) == pytest.approx(4 * 2**0.5)
        assert state.batch_stats["mean"] == 11.0 and state.params["w"].tolist() == [-1.0, -1.0]


@pytest.mark.slow
def test_a_step_that_overflows_float16_leaves_everything_as_it_was():
    """With batch statistics, two parts a device and two devices."""
    config = tiny_config()
    config.model.update(backbone=dict(norm="batch"))
    model = build_model(config.model, precision="float16")
    tx = scaled(optax.sgd(1e-3, momentum=0.9), init_scale=2.0**60, growth_interval=2, floor=1.0)
    mesh = make_mesh()
    variables = init_variables(model, 0)
    state = replicate(
        TrainState(step=jnp.int32(0), opt_state=tx.init(variables["params"]), **variables), mesh
    )
    options = StepOptions(as_recipe(config).loss, 0, 0.5, 2)
    step = make_train_step(model, tx, lambda count: 1e-3 / (1 + count), mesh, options)
    batch = shard_batch(tiny_batch(4), mesh)

    before = jax.device_get(state)
    state, metrics = step(state, batch)
    after = jax.device_get(state)
    assert not np.isfinite(metrics["grad_norm"])
    assert float(metrics["loss_scale"]) == 2.0**60 and int(metrics["skipped_steps"]) == 1
    assert after.step == 1 and after.opt_state.scale == 2.0**59
    for name in ("params", "batch_stats"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(before, name))
    jax.tree.map(np.testing.assert_array_equal, after.opt_state.inner, before.opt_state.inner)

    after = after.replace(opt_state=after.opt_state._replace(scale=np.float32(2.0**8)))
    state = replicate(after, mesh)
    for scale in (2.0**8, 2.0**8, 2.0**9):
        state, metrics = step(state, batch)
        assert float(metrics["loss_scale"]) == scale
        assert np.isfinite(metrics["grad_norm"]) and int(metrics["skipped_steps"]) == 1
    assert float(metrics["lr"]) == pytest.approx(1e-3 / 3)  # the third that did something
    moved = jax.device_get(state)
    for name in ("params", "batch_stats"):
        pairs = jax.tree.leaves(
            jax.tree.map(lambda a, b: np.any(a != b), getattr(moved, name), getattr(before, name))
        )
        assert all(pairs), name


@pytest.mark.parametrize("scale, stops", [(4.0, False), (2.0, True)])
def test_an_overflow_at_the_floor_stops_the_run(scale, stops):
    dataset = type("Images", (), {"images": []})
    log = StepLog(TrainOptions(), Loggers((), ()), dataset, 0.0, lowest_scale=2.0)
    metrics = {"loss/total": np.inf, "grad_norm": np.nan, "loss_scale": scale, "skipped_steps": 1}
    log.finish_previous(7, {name: jnp.float32(v) for name, v in metrics.items()}, np.array([-1]))
    if stops:
        with pytest.raises(FloatingPointError, match="step 7: .*floor=2, .*=bfloat16"):
            log.finish()
    else:
        log.finish()
