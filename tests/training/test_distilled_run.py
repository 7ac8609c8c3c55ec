"""Steps and runs with a teacher: divisions of a batch, float16, and what a student learns."""

import collections
import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import optax
import pytest

from mask_rcnn_jax.benchmarking import inputs
from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.models.build import build_model, init_variables
from mask_rcnn_jax.training import teacher as loading
from mask_rcnn_jax.training.distill import Distillation
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
from tests.bounds import kink_bound, sum_bound
from tests.helpers import assert_finite_tree, assert_tree_close, tiny_batch
from tests.training import own_run
from tests.training.test_distill import ALL, Trunk, small_config
from tests.training.test_step import DIVISIONS, mesh_of

pytestmark = pytest.mark.slow
# Sums one behind the other: trunk, pyramid, cells of the largest map, RoI features, heads.
TERMS = 48 + 3 * 32 + 8 + 72 + 16 * 16 + 7 * 7 * 8 + 8 + 72
LOSSES = [f"loss/distill_{name}" for name in ("features", "cls", "mask")]


@functools.cache
def step_of(devices: int, parts: int, precision: str = "float32", steps: int = 1):
    """The momentum and metrics after steps with a teacher, in the tests' equal images."""
    loss, sampling, _ = DIVISIONS["whole"]
    config = small_config()
    config.model.update(sampling=sampling, rpn=dict(nms_thresh=1.0))
    model = build_model(config.model, precision=precision).clone(backbone=Trunk())
    mesh, tx = mesh_of(devices), optax.sgd(1e-2, momentum=0.9)
    if precision == "float16":
        tx = dynamic_loss_scale(tx, 2.0**10, 2000, 1.0)
    given = StepOptions(loss, 0, 0.5, parts), Distillation(ALL, model, model, 10)
    step = make_train_step(model, tx, lambda _: 1e-2, mesh, *given)
    teacher = replicate(jax.tree.map(lambda x: 2 * x, init_variables(model, 1)), mesh)
    state = replicate(TrainState.start(init_variables(model, 0), tx), mesh)
    batch = shard_batch(jax.tree.map(lambda x: x[:4], tiny_batch(5)), mesh)
    for _ in range(steps):
        state, metrics = step(state, batch, teacher)
    assert step._cache_size() == 1
    return jax.device_get((state, metrics))


def assert_layers_close(actual, expected) -> None:
    """Gradients differ by `kink_bound` in every layer.

    Not in every array: a constant in a map changes no correlation, so that the gradient of a bias
    in the pyramid is a small difference of large numbers.
    """
    layers = collections.defaultdict(list)
    for (path, leaf), other in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(actual), strict=True
    ):
        layers[jax.tree_util.keystr(path[:-1])].append((np.float64(leaf), np.float64(other)))
    for name, pairs in layers.items():
        difference = sum(np.sum((a - b) ** 2) for a, b in pairs) ** 0.5
        size = sum(np.sum(a**2) for a, _ in pairs) ** 0.5
        assert difference <= kink_bound(TERMS) * size, f"{name}: {difference:.3g} of {size:.3g}"


@pytest.mark.parametrize(("devices", "parts"), [(2, 1), (1, 2), (2, 2)])
def test_devices_and_parts_of_a_batch_make_no_difference(devices, parts):
    (state, metrics), (expected, losses) = step_of(devices, parts), step_of(1, 1)
    assert_layers_close(state.opt_state[0].trace, expected.opt_state[0].trace)
    for name in metrics:
        if name.startswith("loss/"):
            # The divergence of objectness is a difference of numbers a thousand times as large.
            bound = {"rtol": sum_bound(TERMS), "atol": 1e-6}
            np.testing.assert_allclose(metrics[name], losses[name], **bound, err_msg=name)


def test_float16_is_finite_and_close_to_float32():
    state, metrics = step_of(2, 1, "float16", steps=3)
    assert metrics["skipped_steps"] == 0
    assert_finite_tree((state, metrics))
    _, expected = step_of(2, 1, "float32", steps=3)
    name = "loss/distill_features"
    np.testing.assert_allclose(metrics[name], expected[name], rtol=0.02)


def test_the_stages_of_two_cascades_are_compared_one_by_one():
    """Three stages double and triple the weights of the deltas; equal models agree in each."""
    config = small_config()
    config.model.cascade.fg_iou_thresh = (0.6, 0.7)
    config.model.box_head.class_agnostic = True
    cascade = build_model(config.model).clone(backbone=Trunk())

    @jax.jit
    def losses(student, teacher, batch):
        outputs = cascade.apply(student, batch, None, train=True, method="forward_train")
        distillation = Distillation(ALL, cascade, cascade, 10)
        terms = distillation.add({"loss/total": 0.0}, teacher, batch, outputs, 0)
        first = dataclasses.replace(outputs, stages=())
        return terms, distillation.add({"loss/total": 0.0}, teacher, batch, first, 0)

    student, batch = init_variables(cascade, 0), tiny_batch(2)
    for terms in losses(student, student, batch):
        assert all(abs(loss) < 1e-6 for loss in terms.values()), terms
    teacher = jax.tree.map(lambda x: 2 * x, init_variables(cascade, 1))
    whole, first = losses(student, teacher, batch)
    for name in ("loss/distill_cls", "loss/distill_box"):
        assert whole[name] > first[name] > 0, name
    assert whole["loss/distill_mask"] == first["loss/distill_mask"]


def test_benchmarks_lower_the_step_with_its_teacher(monkeypatch):
    config = small_config()
    alone = inputs.train_flops(as_recipe(config))
    model = inputs.recipe_model(as_recipe(config))
    monkeypatch.setattr(loading, "_load", lambda *_: (model, init_variables(model, 1), None))
    config.distill.teacher = "a run"
    assert 1.1 * alone < inputs.train_flops(as_recipe(config)) < 1.5 * alone


def student_config(teacher, **train):
    config = own_run.small_config(**train)
    config.model.fpn.channels = 16
    config.distill.update(teacher=str(teacher), feature_loss="attention", warmup_until=0.2)
    return config


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A teacher's run, and that of its student, which keeps an average of its weights."""
    folder = tmp_path_factory.mktemp("runs")
    config = own_run.small_config()
    config.train.update(steps=40, checkpoint_every=40, eval_every=40)
    train(config, folder / "teacher", **own_run.sets())
    config = student_config(folder / "teacher", ema_decay=0.9)
    config.train.update(steps=40, checkpoint_every=20, eval_every=40)
    state = train(config, folder / "student", **own_run.sets())
    return folder, config, jax.device_get(state)


def series(workdir):
    return [r for r in read_metrics(workdir / "metrics.jsonl") if "loss/total" in r]


def test_a_student_follows_its_teacher(runs):
    records = series(runs[0] / "student")
    assert all(record[name] > 0 for record in records for name in LOSSES)
    losses = [sum(record[name] for name in LOSSES) for record in records]
    # From the end of the warm-up, the eighth step, on. Single ones depend on the images of a step.
    assert np.mean(losses[-8:]) < 0.7 * np.mean(losses[7:11]), losses
    parts = [n for n in records[0] if n.startswith("loss/") and n != "loss/total"]
    assert records[0]["loss/total"] == pytest.approx(sum(records[0][n] for n in parts), rel=1e-5)


def test_the_run_goes_on_with_the_same_teacher_and_no_other(runs, tmp_path):
    folder, config, last = runs
    shutil.copytree(folder / "student", tmp_path / "student")
    shutil.rmtree(tmp_path / "student" / "checkpoints" / "40")
    # It may have moved.
    (tmp_path / "moved").mkdir()
    shutil.copytree(folder / "teacher", tmp_path / "moved" / "teacher")
    config = config.copy_and_resolve_references()
    config.distill.teacher = str(tmp_path / "moved" / "teacher")
    state = train(config, tmp_path / "student", **own_run.sets())
    assert_tree_close(jax.device_get(state), last)
    config.train.steps, config.distill.teacher = 50, str(folder / "student")
    expected = "config: distill.checksum was '[0-9a-f]{64}' and is '[0-9a-f]{64}' now"
    with pytest.raises(ValueError, match=expected):
        train(config, tmp_path / "student", **own_run.sets())


def test_a_student_is_used_without_its_teacher(runs, tmp_path):
    shutil.copytree(runs[0] / "student", tmp_path / "student")
    metrics = evaluate(tmp_path / "student", val_set=own_run.sets()["val_set"])
    content = json.loads((tmp_path / "student" / "eval" / "40" / "metrics.json").read_text())
    assert metrics == content
    saved = json.loads((tmp_path / "student" / "config.json").read_text())["config"]["distill"]
    assert len(saved["checksum"]) == 64
