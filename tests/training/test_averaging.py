"""The average of the weights: numbers, devices, float16, checkpoints and whole runs."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import struct

from mask_rcnn_jax import parts
from mask_rcnn_jax.config import as_recipe, load_config
from mask_rcnn_jax.models.quantization import RANGE
from mask_rcnn_jax.models.rpn import RPN
from mask_rcnn_jax.ops.boxes import BoxCoder
from mask_rcnn_jax.recipe.averaging import NO_AVERAGE, WeightAverage
from mask_rcnn_jax.recipe.options import TrainOptions
from mask_rcnn_jax.training import setup
from mask_rcnn_jax.training import step as step_module
from mask_rcnn_jax.training.checkpoint import Checkpoints
from mask_rcnn_jax.training.loop import train
from mask_rcnn_jax.training.loss_scale import dynamic_loss_scale
from mask_rcnn_jax.training.metrics import read_metrics
from mask_rcnn_jax.training.scoring import evaluate
from mask_rcnn_jax.training.step import (
    StepOptions,
    TrainState,
    make_train_step,
    replicate,
    shard_batch,
)
from mask_rcnn_jax.weights.restore import load_variables
from mask_rcnn_jax.weights.run_checkpoint import load_checkpoint
from tests.helpers import assert_tree_close, tiny_batch, tiny_config
from tests.training.own_run import STEPS, sets, small_config
from tests.training.test_step import mesh_of


def slow_average(values, decay: float, warmup: bool) -> float:
    average = values[0]
    for t, value in enumerate(values[1:]):
        kept = min(decay, (1 + t) / (10 + t)) if warmup else decay
        average = kept * average + (1 - kept) * value
    return average


@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("decay", [0.5, 0.99])
def test_the_average_is_its_definition(decay, warmup):
    averaging = WeightAverage(decay, warmup)
    values = np.random.default_rng(0).normal(size=40).astype(np.float32)
    average = averaging.start({"w": jnp.float32(values[0])})
    for t, value in enumerate(values[1:]):
        average = averaging.update(average, {"w": jnp.float32(value)}, jnp.int32(t))
    expected = slow_average(values.astype(np.float64), decay, warmup)
    np.testing.assert_allclose(average["w"], expected, rtol=1e-5, atol=1e-6)


def test_the_first_steps_by_hand():
    """Nine tenths of the first, then nine elevenths of the second step's weights are taken."""
    averaging = WeightAverage(0.999)
    average = averaging.update(averaging.start({"w": jnp.zeros(1)}), {"w": jnp.ones(1)}, 0)
    np.testing.assert_allclose(average["w"], 0.9, rtol=1e-6)
    average = averaging.update(average, {"w": 12 * jnp.ones(1)}, 1)
    np.testing.assert_allclose(average["w"], 0.9 * 2 / 11 + 12 * 9 / 11, rtol=1e-6)


def test_what_stays_is_not_rounded_and_counters_are_taken():
    averaging, rng = WeightAverage(0.9), np.random.default_rng(0)
    frozen = jnp.asarray(rng.normal(size=1000), jnp.float32)
    average = averaging.start({"frozen": frozen, "seen": jnp.int32(0)})
    for t in range(50):
        average = averaging.update(average, {"frozen": frozen, "seen": jnp.int32(t)}, jnp.int32(t))
    np.testing.assert_array_equal(average["frozen"], frozen)
    assert average["seen"] == 49 and average["seen"].dtype == jnp.int32


@pytest.mark.parametrize("warmup", [False, True])
def test_ranges_of_int8_are_taken_as_they_are(warmup):
    """They start at 0, which stands for no range, and would stay far too small."""
    averaging = WeightAverage(0.999, warmup)
    stats = {"conv": {RANGE: jnp.float32(0.0), "mean": jnp.float32(0.0)}}
    average = averaging.start(stats)
    stats = {"conv": {RANGE: jnp.float32(3.0), "mean": jnp.float32(3.0)}}
    average = averaging.update(average, stats, jnp.int32(0))
    assert average["conv"][RANGE] == 3.0 and average["conv"]["mean"] < 3.0


def test_no_average_costs_nothing():
    assert NO_AVERAGE.start({"w": jnp.ones(3)}) == {}
    state = TrainState.start({"params": {"w": jnp.ones(3)}, "batch_stats": {}}, optax.sgd(1.0))
    assert state.average == {} and state.evaluated == state.variables
    assert len(jax.tree.leaves(state)) == 2


@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan")])
def test_decays_without_meaning_are_refused(decay):
    with pytest.raises(ValueError, match="^train.ema_decay is .* expected from 0 to below 1"):
        parts.build(TrainOptions, {"ema_decay": decay, "steps": 3}, "train")


def stub_model():
    """Its loss is w times the mean of the batch's scales, and its statistics add that mean."""

    def apply(variables, batch, keys, *, method, train, mutable):
        mean = jnp.mean(batch.scales)
        stats = {"mean": variables["batch_stats"]["mean"] + mean}
        return jnp.sum(variables["params"]["w"]) * mean, {"batch_stats": stats}

    parts = {"mask_targets": SimpleNamespace(kind="crop"), "rpn": RPN(), "box_coder": BoxCoder()}
    return SimpleNamespace(apply=apply, backbone=None, trains_batch_stats=True, **parts)


def average_after(devices: int, steps: int, *, scale: float = 0.0) -> tuple[TrainState, list]:
    """Each step has a gradient of 4, and adds 4 to the statistics. scale: that of float16."""
    tx = optax.sgd(0.5)
    if scale:
        tx = dynamic_loss_scale(tx, scale, 2000, 1.0)
    averaging, mesh = WeightAverage(0.9), mesh_of(devices)
    variables = {"params": {"w": jnp.ones(2)}, "batch_stats": {"mean": jnp.float32(7.0)}}
    state = replicate(TrainState.start(variables, tx, averaging), mesh)
    options = StepOptions(as_recipe(tiny_config()).loss, 0, 0.0, averaging=averaging)
    run = make_train_step(stub_model(), tx, None, mesh, options)
    batch = tiny_batch(4)
    batch = batch.replace(scales=np.array([[2, 2], [4, 4], [3, 3], [7, 7]], np.float32))
    skipped = []
    for _ in range(steps):
        state, metrics = run(state, shard_batch(batch, mesh))
        skipped.append(int(metrics.get("skipped_steps", 0)))
    return state, skipped


@pytest.fixture
def stubbed(monkeypatch):
    monkeypatch.setattr(step_module, "loss_terms", lambda outputs, *_: {"loss/total": outputs})


def check_average(devices: int) -> None:
    state, _ = average_after(devices, 3)
    weights, means = [1.0, -1.0, -3.0, -5.0], [7.0, 11.0, 15.0, 19.0]
    np.testing.assert_allclose(state.params["w"], weights[-1])
    expected = slow_average(weights, 0.9, True), slow_average(means, 0.9, True)
    np.testing.assert_allclose(state.average["params"]["w"], expected[0], rtol=1e-6)
    np.testing.assert_allclose(state.average["batch_stats"]["mean"], expected[1], rtol=1e-6)
    assert state.evaluated is state.average


@pytest.mark.parametrize("devices", [1, 2])
def test_a_step_averages_parameters_and_statistics(devices, stubbed):
    check_average(devices)


@pytest.mark.slow
def test_four_devices_average_alike():
    program = """
import jax
jax.config.update("jax_num_cpu_devices", 4)
from mask_rcnn_jax.training import step
from tests.training.test_averaging import check_average
step.loss_terms = lambda outputs, *_: {"loss/total": outputs}
check_average(4)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_step_that_overflows_float16_is_not_averaged(stubbed):
    """The sum of two times 4 is infinite at 2^127, 2^126 and 2^125. A good step is the first."""
    state, skipped = average_after(2, 5, scale=2.0**127)
    assert skipped == [1, 2, 3, 3, 3]
    weights = [1.0, -1.0, -3.0]
    expected = slow_average(weights, 0.9, True)
    np.testing.assert_allclose(state.params["w"], weights[-1])
    np.testing.assert_allclose(state.average["params"]["w"], expected, rtol=1e-6)
    one, _ = average_after(2, 2, scale=2.0**127)
    np.testing.assert_array_equal(one.average["params"]["w"], 1.0)


def state_of(step: int, averaging: WeightAverage = NO_AVERAGE) -> TrainState:
    params = {"head": {"kernel": jnp.full((2, 3), float(step))}}
    variables = {"params": params, "batch_stats": {"norm": {"scale": jnp.full(3, -float(step))}}}
    state = TrainState.start(variables, optax.sgd(0.1, momentum=0.9), averaging)
    average = jax.tree.map(lambda x: x / 2, state.average)
    return state.replace(step=jnp.int32(step), average=average)


def saved(workdir, state: TrainState) -> None:
    checkpoints = Checkpoints(workdir, keep=1)
    checkpoints.save(state)
    checkpoints.close()


def restored(workdir, like: TrainState) -> TrainState:
    checkpoints = Checkpoints(workdir, keep=1)
    try:
        return checkpoints.restore(like)
    finally:
        checkpoints.close()


def test_the_average_is_saved_and_taken_unless_the_raw_weights_are_wanted(tmp_path, caplog):
    state = state_of(4, WeightAverage(0.9))
    saved(tmp_path, state)
    assert_tree_close(restored(tmp_path, state_of(0, WeightAverage(0.9))), state)
    with caplog.at_level("INFO"):
        assert_tree_close(load_checkpoint(tmp_path), state.average)
    assert "the average of the weights; eval.weights=raw takes the last ones" in caplog.text
    assert_tree_close(load_checkpoint(tmp_path, raw=True), state.variables)


@pytest.mark.parametrize("weights", ["average", "raw"])
def test_a_run_starts_from_the_weights_that_are_wanted(weights, tmp_path, monkeypatch):
    state, config = state_of(4, WeightAverage(0.9)), tiny_config()
    saved(tmp_path, state)
    config.model.init_from, config.eval.weights = str(tmp_path), weights
    abstract = jax.eval_shape(lambda: state_of(0).variables)
    monkeypatch.setattr(setup, "abstract_variables", lambda model: abstract)
    monkeypatch.setattr(setup, "init_variables", lambda model, seed, given: given)
    model = SimpleNamespace(backbone=None)
    started, _ = setup.initial_state(
        as_recipe(config), model, lambda step: 0.1, None, resuming=False
    )
    expected = state.average if weights == "average" else state.variables
    assert_tree_close(started.variables, expected)


@pytest.mark.parametrize("raw", [False, True])
def test_without_an_average_a_checkpoint_is_laid_out_as_ever(tmp_path, raw, caplog):
    saved(tmp_path, state_of(4))
    folder = tmp_path / "checkpoints" / "4" / "state"
    tree = ocp.StandardCheckpointer().metadata(folder).item_metadata.tree
    assert sorted(tree) == ["batch_stats", "opt_state", "params", "step"]
    with caplog.at_level("INFO"):
        assert_tree_close(load_checkpoint(tmp_path, raw=raw), state_of(4).variables)
    assert "eval.weights" not in caplog.text


@struct.dataclass
class StateOfBefore:
    """A state as it was before averages."""

    step: jax.Array
    params: dict
    batch_stats: dict
    opt_state: optax.OptState


def test_a_checkpoint_of_before_is_restored(tmp_path):
    state = state_of(6)
    old = StateOfBefore(state.step, state.params, state.batch_stats, state.opt_state)
    handler = ocp.CompositeCheckpointHandler(state=ocp.StandardCheckpointHandler())
    with ocp.Checkpointer(handler) as checkpointer:
        item = ocp.args.StandardSave(jax.tree.map(np.asarray, old))
        checkpointer.save(tmp_path / "checkpoints" / "6", ocp.args.Composite(state=item))
    assert_tree_close(restored(tmp_path, state_of(0)), state)
    assert_tree_close(load_checkpoint(tmp_path), state.variables)


@pytest.mark.slow
def test_a_run_is_evaluated_on_its_average_and_resumes_bit_for_bit(tmp_path):
    workdir, config = tmp_path / "run", small_config(ema_decay=0.9)
    config.eval.update(loss_images=0, pictures=0)
    state = jax.device_get(train(config, workdir, **sets()))
    assert_tree_close(load_checkpoint(workdir), state.average)
    assert np.abs(
        state.average["params"]["box_head"]["cls_score"]["kernel"]
        - state.params["box_head"]["cls_score"]["kernel"]
    ).max() > 1e-5  # fmt: skip
    written = json.loads((workdir / "eval" / str(STEPS) / "bbox_results.json").read_text())
    for weights in ("average", "raw"):
        taken = load_config(workdir, {"eval.weights": weights})
        output = tmp_path / weights
        evaluate(workdir, taken, val_set=sets()["val_set"], output=output)
        found = json.loads((output / "bbox_results.json").read_text())
        assert (found == written) == (weights == "average")
        variables = load_variables(workdir, taken)
        assert_tree_close(variables, state.average if weights == "average" else state.variables)

    series = read_metrics(workdir / "metrics.jsonl")
    shutil.rmtree(workdir / "checkpoints" / str(STEPS))
    again = jax.device_get(train(config, workdir, **sets()))
    assert_tree_close(again, state)
    losses = [r["loss/total"] for r in read_metrics(workdir / "metrics.jsonl") if "lr" in r]
    assert losses == [r["loss/total"] for r in series if "lr" in r]
