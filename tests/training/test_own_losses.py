"""Losses of a user's own: by hand on a stub, against gradients taken apart, and in a run."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.models.build import build_model, init_variables
from mask_rcnn_jax.ops.losses import AddedLoss, LossOptions
from mask_rcnn_jax.recipe.options import TrainOptions
from mask_rcnn_jax.training import step as step_module
from mask_rcnn_jax.training.loggers import Loggers
from mask_rcnn_jax.training.metrics import read_metrics
from mask_rcnn_jax.training.own_losses import resolve_losses
from mask_rcnn_jax.training.step import (
    StepOptions,
    TrainState,
    make_mesh,
    make_train_step,
    replicate,
    shard_batch,
)
from mask_rcnn_jax.training.step_log import StepLog
from tests.helpers import assert_tree_close, tiny_batch, tiny_config
from tests.memory_set import ShapeSet
from tests.training.own_run import sets, small_config
from tests.training.test_distill import Trunk
from tests.training.test_distill import small_config as smallest_config
from tests.training.test_loss_scale import scaled, stub_model

LOSS = as_recipe(tiny_config()).loss


def squared(outputs, targets, batch):
    return outputs**2


def confident(outputs, targets, batch):
    """Grows with the certainty of the mask head's foreground, and with the number of objects."""
    shares = jax.nn.sigmoid(outputs.mask_logits) * outputs.mask_rois.foreground[:, None, None]
    return jnp.mean(shares) * jnp.sum(targets.valid) / len(batch.images)


def nothing(outputs, targets, batch):
    return 0.0


@pytest.fixture
def stubbed(monkeypatch):
    monkeypatch.setattr(step_module, "loss_terms", lambda outputs, *_: {"loss/total": outputs})


def stub_step(loss, parts=1, tx=None, distillation=None):
    """A step of w = (1, 1) on two devices, whose images have scales 3, 1 and 5, 7."""
    tx, mesh = tx or optax.sgd(1.0), make_mesh()
    params = {"w": jnp.ones(2)}
    state = TrainState(jnp.int32(0), params, {"mean": jnp.float32(0.0)}, tx.init(params))
    scales = np.repeat(np.array([[3], [1], [5], [7]], np.float32), 2, axis=1)
    batch = tiny_batch(4).replace(scales=scales)
    options = StepOptions(loss, 0, 0.0, parts)
    run = make_train_step(stub_model(), tx, None, mesh, options, distillation)
    teacher = () if distillation is None else (replicate(jnp.float32(100.0), mesh),)
    return jax.device_get(run(replicate(state, mesh), shard_batch(batch, mesh), *teacher))


@pytest.mark.parametrize(
    ("parts", "squares", "gradient"),
    # By device and part: the mean m of the scales, a loss 2 m, and its square with gradient 4 m^2.
    [(1, (4 * 4 + 4 * 36) / 2, 4 + 0.5 * (4 * 4 + 4 * 36) / 2),
     (2, 4 * (9 + 1 + 25 + 49) / 4, 4 + 0.5 * 4 * (9 + 1 + 25 + 49) / 4)],
)  # fmt: skip
@pytest.mark.parametrize("scale", [None, 2.0**15])
def test_a_loss_is_added_with_its_weight(parts, squares, gradient, scale, stubbed):
    loss = resolve_losses(replace(LOSS, own_weights=(0.5,)), [("squared", squared)])
    tx = scaled(optax.sgd(1.0), init_scale=scale) if scale else None
    state, metrics = stub_step(loss, parts, tx)
    assert metrics["loss/squared"] == 0.5 * squares
    assert metrics["loss/total"] == 8 + 0.5 * squares
    assert state.params["w"].tolist() == [1 - gradient] * 2
    assert metrics["grad_norm"] == pytest.approx(gradient * 2**0.5)


def step_of_smallest(loss):
    """The model, and state and metrics after one step on two devices."""
    model = build_model(smallest_config().model).clone(backbone=Trunk())
    tx, mesh = optax.sgd(1e-2, momentum=0.9), make_mesh()
    state = replicate(TrainState.start(init_variables(model, 0), tx), mesh)
    run = make_train_step(model, tx, None, mesh, StepOptions(loss, 0, 0.0))
    return model, jax.device_get(run(state, shard_batch(tiny_batch(4), mesh)))


@pytest.mark.slow
def test_the_gradient_is_the_sum_of_two_and_a_loss_of_zero_changes_no_bit():
    model, (plain, metrics) = step_of_smallest(LOSS)
    _, (zero, zero_metrics) = step_of_smallest(resolve_losses(LOSS, [("nothing", nothing)]))
    assert zero_metrics.pop("loss/nothing") == 0.0
    assert_tree_close((zero, zero_metrics), (plain, metrics))
    _, (both, both_metrics) = step_of_smallest(resolve_losses(LOSS, [("confident", confident)]))

    @jax.jit
    @partial(jax.value_and_grad)
    def alone(params, batch):
        _, keys = step_module._image_keys(0, jnp.int32(0), batch)
        forward = partial(model.apply, train=True, mutable=[], method="forward_train")
        outputs, _ = forward({"params": params, "batch_stats": {}}, batch, keys)
        return confident(outputs, batch.targets, batch)

    params, batch = init_variables(model, 0)["params"], tiny_batch(4)
    halves = jax.tree.map(lambda x: x[:2], batch), jax.tree.map(lambda x: x[2:], batch)
    values, gradients = zip(*(alone(params, half) for half in halves), strict=True)
    assert both_metrics["loss/confident"] == pytest.approx(np.mean(values), rel=1e-5)
    total = metrics["loss/total"] + np.mean(values)
    assert both_metrics["loss/total"] == pytest.approx(total, rel=1e-5)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *gradients)
    expected = jax.tree.map(np.add, plain.opt_state[0].trace, mean)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(mean["mask_head"])) > 1e-4
    assert_tree_close(both.opt_state[0].trace, expected, rtol=1e-3, atol=1e-6)


def raises(outputs, targets, batch):
    raise KeyError("no\nsuch output")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda outputs, targets, batch: batch.scales, r"returned float32 \[2, 2\], expected one"),
        (lambda outputs, targets, batch: None, "loss 'own' (failed: |returned )"),
        (lambda outputs, targets, batch: len(batch.scales), r"returned int32 \[\], expected one"),
        (lambda outputs, targets, batch: float(outputs), "failed: ConcretizationTypeError: "),
        (raises, "loss 'own' failed: KeyError: no such output"),
    ],
)
def test_what_is_not_one_number_ends_in_a_line(function, message, stubbed):
    with pytest.raises(ValueError, match=message) as error:
        stub_step(resolve_losses(LOSS, [("own", function)]))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "changes", "message"),
    [
        ([("own", lambda outputs, targets: 0.0)], {}, "loss 'own' is .*, expected a function of"),
        ([("own", 3)], {}, "loss 'own' is 3, expected a function of"),
        ([squared], {}, 'losses has <function squared .*, expected pairs'),
        (squared, {}, 'expected pairs'),
        ([("total", squared)], {}, "two losses are named 'total'"),
        ([("distill_x", squared)], {}, "two losses are named 'distill_x'"),
        ([("a", squared), ("a", nothing)], {}, "two losses are named 'a'"),
        ([("a b", squared)], {}, "a loss is named 'a b', expected letters"),
        ([("a", squared)], {"own_weights": (1.0, 2.0)}, r"loss.own_weights is \(1.0, 2.0\), exp"),
        (None, {"own": ("squared",)}, "loss.own has 'squared', expected package.module:function"),
        (None, {"own": ("no.such:loss",)}, "loss.own is 'no.such:loss': No module named"),
        (None, {"own_weights": (1.0,)}, r"loss.own_weights is \(1.0,\), expected 0 numbers"),
    ],
)  # fmt: skip
def test_what_is_no_loss_is_refused_at_once(given, changes, message):
    with pytest.raises(ValueError, match=message):
        resolve_losses(replace(LossOptions(), **changes), given)


def test_a_recipe_names_functions():
    name = f"{__name__}:squared"
    loss = resolve_losses(LossOptions(own=(name, f"{__name__}:nothing"), own_weights=(2.0, 1.0)))
    assert loss.added == (AddedLoss("squared", squared, 2.0), AddedLoss("nothing", nothing, 1.0))
    assert resolve_losses(LossOptions(), [("squared", squared)]).own == (name,)
    noted = (f"{name}, given as losses",)
    assert resolve_losses(LossOptions(), [("other", squared)]).own == noted
    assert resolve_losses(LossOptions(own=(name,)), []).added == ()


def test_one_that_is_not_finite_is_named():
    def message(broken):
        loss = resolve_losses(LOSS, [("mine", squared)])
        log = StepLog(TrainOptions(), Loggers((), ()), ShapeSet("train", 2), 0.0, 1.0, loss.added)
        values = dict.fromkeys(("loss/total", "loss/mask", "loss/mine", "grad_norm"), 1.0)
        log.finish_previous(1, values | dict.fromkeys(broken, np.nan), np.array([0]))
        with pytest.raises(FloatingPointError) as error:
            log.finish()
        return str(error.value)

    assert "loss/mine, of your own, is not finite" in message(["loss/mine", "loss/total"])
    both = message(["loss/mine", "loss/mask", "loss/total"])
    assert "of your own" not in both and "learning_rate" in both


@pytest.mark.slow
def test_a_run_logs_it_and_resumes_with_it_alone(tmp_path):
    config = small_config()
    config.train.update(steps=2, checkpoint_every=1, eval_every=2)
    config.eval.loss_images = 2
    losses = [("sure", confident)]
    state = mrcnn.train(config, tmp_path, **sets(), losses=losses)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["loss/sure"] > 0 for record in records[:2]] == [True, True]
    parts = [value for name, value in records[0].items() if name.startswith("loss/")]
    assert records[0]["loss/total"] == pytest.approx(sum(parts) / 2, rel=1e-5)
    assert records[2]["val_loss/sure"] > 0 and state.metrics["loss/sure"] > 0
    entries = json.loads((tmp_path / "config.json").read_text())["config"]["loss"]
    assert entries["own"] == [f"{__name__}:confident, given as losses"]
    with pytest.raises(ValueError, match="a run of another config: loss.own was"):
        mrcnn.train(config, tmp_path, **sets())
    assert int(mrcnn.train(config, tmp_path, **sets(), losses=losses).step) == 2


def test_a_teachers_losses_come_on_top(stubbed):
    class Teacher:
        def add(self, terms, teacher, batch, outputs, step):
            return {**terms, "loss/total": terms["loss/total"] + teacher, "loss/distill_x": teacher}

    loss = resolve_losses(LOSS, [("squared", squared)])
    _, metrics = stub_step(loss, distillation=Teacher())
    assert metrics["loss/squared"] == 80.0 and metrics["loss/distill_x"] == 100.0
    assert metrics["loss/total"] == 8 + 80 + 100
