"""A logger ends a run with StopTraining, and `train` returns what was measured last."""

import json
import math
import signal

import jax
import numpy as np
import pytest

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.training import work
from mask_rcnn_jax.training.metrics import last_metrics
from mask_rcnn_jax.training.state import TrainState
from tests.memory_set import ShapeSet
from tests.pair import Pair
from tests.training.own_run import sets, small_config
from tests.training.stubbed_run import (
    APS,
    EVERY,
    STEPS,
    Scripted,
    beside,
    kept,
    run,
    series,
    stubbed,
)
from tests.training.test_run_faults import check_equal, two_processes, whole

__all__ = ["stubbed", "whole"]

pytestmark = pytest.mark.usefixtures("stubbed")


HOPELESS = mrcnn.StopTraining("AP is hopeless")


class Pruner:
    """Ends the run at the first record, of a step or later, that has a metric."""

    def __init__(self, step, metric="loss/total", error=HOPELESS):
        self.step, self.metric, self.error, self.calls, self.closed = step, metric, error, [], 0

    def __call__(self, step, metrics, images):
        self.calls.append(step)
        if step >= self.step and self.metric in metrics:
            raise self.error

    def close(self):
        self.closed += 1


@pytest.mark.parametrize(
    ("step", "metric", "last"),
    [(1, "loss/total", 2), (4, "loss/total", 4), (5, "loss/total", 6), (6, "ap/mask", 6),
     (STEPS, "ap/mask", STEPS)],
)  # fmt: skip
def test_a_logger_ends_a_run_and_the_same_call_goes_on(step, metric, last, whole, tmp_path, caplog):
    """What a step lost is known one later, or before it is saved; no evaluation is made then."""
    pruner = Pruner(step, metric)
    with caplog.at_level("INFO"):
        state = run(tmp_path, [pruner])
    assert int(state.step) == last and str(last) in kept(tmp_path) and pruner.closed == 1
    assert pruner.calls[-1] == last and (tmp_path / "report.html").exists()
    reason = f"finished at step {last} of 12: logger Pruner ended it: AP is hopeless; the same call"
    assert (reason in caplog.text) == (last < STEPS) and "failed" not in caplog.text
    check_equal(tmp_path, run(tmp_path), whole)


def test_scores_beside_training_are_waited_for(tmp_path, monkeypatch, caplog):
    """Those of step 6 come when 9 waits for them; only then the logger hears of step 7."""
    monkeypatch.setattr(work, "make_validation", beside(lambda *given: Scripted(given[1], looks=5)))
    with caplog.at_level("INFO"):
        state = run(tmp_path, [Pruner(7)])
    assert int(state.step) == 9 and [r["step"] for r in series(tmp_path) if "ap/box" in r] == [3, 6]
    assert "waiting for the scores of step 6" in caplog.text and "SIGTERM" not in caplog.text
    assert not (tmp_path / "checkpoints" / "unscored").exists()


@pytest.mark.slow
def test_a_logger_may_end_it_at_an_evaluation_that_is_made_up_for(whole, tmp_path):
    def cut_off(step, metrics, images):
        if step == 3 and "loss/total" in metrics:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit):
        run(tmp_path, [cut_off])
    assert int(run(tmp_path, [Pruner(3, "ap/box")]).step) == 3
    check_equal(tmp_path, run(tmp_path), whole)


def test_a_sigterm_is_not_forgotten_beside_it(whole, tmp_path):
    def both(step, metrics, images):
        if step == 4:
            signal.raise_signal(signal.SIGTERM)
            raise mrcnn.StopTraining

    with pytest.raises(SystemExit) as stopped:
        run(tmp_path, [both])
    assert stopped.value.code == 75
    check_equal(tmp_path, run(tmp_path), whole)


def test_other_errors_of_a_logger_end_nothing(whole, tmp_path, caplog):
    with caplog.at_level("INFO"):
        state = run(tmp_path, [Pruner(2, error=StopIteration("no more"))])
    assert "logger Pruner failed, the run goes on: StopIteration: no more" in caplog.text
    check_equal(tmp_path, state, whole)


class Exhausted(ShapeSet):
    """A dataset that takes StopTraining for its own, too."""

    def decode(self, index):
        if index == 7:
            raise mrcnn.StopTraining("no more images")
        return super().decode(index)


def exhaust(example, rng):
    raise mrcnn.StopTraining("no more images")


LOGGERS = "not raised by a logger, as expected: no more images"


@pytest.mark.parametrize(
    "num_workers, train_set, augment, said",
    [
        (0, Exhausted, None, LOGGERS),
        pytest.param(2, Exhausted, None, LOGGERS, marks=pytest.mark.slow),
        (0, ShapeSet, exhaust, "image '.*': augment failed: StopTraining: no more images"),
    ],
    ids=["dataset", "dataset in workers", "augmentation"],
)
def test_only_a_logger_ends_a_run(num_workers, train_set, augment, said, tmp_path):
    config = small_config()
    config.data.update(num_workers=num_workers, val_json="")
    with pytest.raises(ValueError, match=said):
        mrcnn.train(config, tmp_path, train_set=train_set("train", 10), augment=augment)


@pytest.mark.slow
def test_two_processes_end_at_the_same_step(tmp_path):
    """Only the first one has loggers."""
    start = two_processes(tmp_path / "run", ("ends_at=4", "ends_at=4"))
    with Pair(start, tmp_path) as pair:
        assert pair.codes() == [0, 0], pair.said()
    assert [said.splitlines()[-1] for said in pair.said()] == ["returned step 4"] * 2
    assert "finished at step 4 of 12: logger end ended it: enough" in pair.said()[0]


def test_the_last_metrics_come_back(whole, tmp_path):
    config = small_config()
    config.train.update(EVERY)
    state = mrcnn.train(config, tmp_path, **sets())
    assert state.metrics.keys() == {"loss/total", "lr", "ap/box", "ap/mask"}
    assert state.metrics["ap/mask"] == APS[3]
    again = mrcnn.train(config, tmp_path, **sets())  # nothing to do
    assert again.metrics == state.metrics and int(again.step) == STEPS
    assert repr(again).startswith("TrainState(step 12, 600 parameters, loss/total ")
    assert repr(again).endswith(", ap/box 0.4, ap/mask 0.4)")
    assert type(again) is TrainState and jax.tree.map(np.negative, again).metrics == {}


def test_a_value_that_was_no_number_is_none_either(tmp_path):
    records = [{"step": 1, "a": 1, "perf/x": 2.0}, {"step": 2, "a": None}, {"step": 3, "b": 0.5}]
    assert last_metrics(tmp_path) == {}
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(text)
    found = last_metrics(tmp_path)
    assert found.keys() == {"a", "b"} and math.isnan(found["a"]) and found["b"] == 0.5
