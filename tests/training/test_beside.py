"""Evaluations that are scored while training goes on leave what others leave."""

import json
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from mask_rcnn_jax.training import processes, validation, work
from mask_rcnn_jax.training.beside import Pending
from mask_rcnn_jax.training.metrics import read_metrics
from tests.pair import Pair
from tests.training import stubbed_run, test_tiled_scoring
from tests.training.stubbed_run import Scripted, beside, kept, patch, run, series
from tests.training.test_run_faults import check_equal, two_processes, whole
from tests.training.test_step import mesh_of
from tests.training.test_tiled_scoring import recipe

__all__ = ["recipe", "whole"]

pytestmark = pytest.mark.usefixtures("stubbed")
NEVER = 10**6  # looks
LATE = "the scores of step 6 are not there yet: the run will go on from that step"


@pytest.fixture
def stubbed(monkeypatch):
    patch(monkeypatch.setattr, make_validation=beside())


@pytest.fixture
def in_step(monkeypatch):
    """Has functions be called in a step: {step: function of its metrics}."""

    def use(actions):
        def make(*arguments):
            make_step = stubbed_run.make_step(*arguments)

            def step(state, batch):
                state, metrics = make_step(state, batch)
                actions.get(int(state.step), lambda metrics: None)(metrics)
                return state, metrics

            return step

        monkeypatch.setattr(work, "make_train_step", make)

    return use


@pytest.fixture
def scored_by(monkeypatch):
    """Has `make(step, scores)` give the scorer of a step."""
    return lambda make: monkeypatch.setattr(work, "make_validation", beside(make))


def terminate(metrics):
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("moment", ["next step", "first look", "third look"])
def test_nothing_depends_on_when_scores_come(moment, whole, tmp_path, scored_by, caplog):
    """In steps, or while the next checkpoint waits for them."""
    looks = {"first look": 1, "third look": 3}.get(moment, NEVER)
    scored_by(lambda step, scores: Scripted(scores, lambda: moment == "next step", looks))
    logged = []
    with caplog.at_level("INFO"):
        state = run(tmp_path, [lambda step, metrics, images: logged.append((step, [*metrics]))])
    check_equal(tmp_path, state, whole)
    assert [step for step, _ in logged] == [record["step"] for record in series(whole[0])]
    assert ("waiting for the scores of step 6" in caplog.text) == (moment != "next step")


class Late(Scripted):
    """Never has scores; whoever waits for them gets a SIGTERM."""

    def result(self, wait_s=None):
        signal.raise_signal(signal.SIGTERM)
        return None


def late_at_6(step, scores):
    return Late(scores) if step == 6 else Scripted(scores)


@pytest.mark.parametrize(("step", "saved"), [(7, {"6"}), (9, {"6", "8"})])
@pytest.mark.slow
def test_a_stopped_run_whose_scores_are_late_goes_on_from_their_step(
    step, saved, whole, tmp_path, in_step, caplog
):
    """In 7, or while the next evaluation waits for them."""
    with pytest.MonkeyPatch.context() as context:
        context.setattr(work, "make_validation", beside(late_at_6))
        in_step({step: terminate} if step == 7 else {})
        with caplog.at_level("INFO"), pytest.raises(SystemExit) as stopped:
            run(tmp_path)
    assert stopped.value.code == 75 and LATE in caplog.text
    assert f"stopped by SIGTERM, saved step 6 in {tmp_path}" in caplog.text
    assert {*kept(tmp_path)} == {"3", "4", *saved, "unscored"}
    assert series(tmp_path)[-1]["step"] == step  # until it goes on from 6
    in_step({})
    with caplog.at_level("INFO"):
        state = run(tmp_path)
    assert "resuming at step 6 of 12" in caplog.text
    assert "the evaluation of step 6 was cut off and is made up for" in caplog.text
    check_equal(tmp_path, state, whole)


@pytest.mark.parametrize("logged", [False, True])
@pytest.mark.slow
def test_a_run_killed_after_a_checkpoint_without_scores_does_not_count_it(
    logged, whole, tmp_path, in_step, caplog
):
    """Or with the record of the scores, but perhaps not those of the steps after it."""

    def interrupt(metrics):
        raise KeyboardInterrupt

    in_step({9: interrupt})
    with pytest.MonkeyPatch.context() as context:
        make = beside(lambda step, scores: Scripted(scores, looks=1 if step == 3 else NEVER))
        context.setattr(work, "make_validation", make)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    assert {*kept(tmp_path)} == {"3", "4", "6", "8", "unscored"}
    if logged:
        record = next(one for one in read_metrics(whole[0] / "metrics.jsonl")
                      if "ap/box" in one and one["step"] == 6)  # fmt: skip
        records = [one for one in read_metrics(tmp_path / "metrics.jsonl") if one["step"] <= 6]
        lines = [json.dumps(one) + "\n" for one in (*records, record)]
        (tmp_path / "metrics.jsonl").write_text("".join(lines))
    in_step({})
    with caplog.at_level("INFO"):
        state = run(tmp_path)
    assert "the scores of step 6 were not there when the run ended" in caplog.text
    assert "resuming at step 6 of 12" in caplog.text
    assert ("is made up for" in caplog.text) != logged
    check_equal(tmp_path, state, whole)


def test_a_stopped_run_whose_scores_come_in_time_is_saved(whole, tmp_path, in_step, caplog):
    in_step({7: terminate})
    with caplog.at_level("INFO"), pytest.raises(SystemExit) as stopped:
        run(tmp_path)
    assert stopped.value.code == 75 and "saved step 7" in caplog.text
    check_equal(tmp_path, run(tmp_path), whole)
    assert "was cut off" not in caplog.text


@pytest.mark.slow
def test_a_stop_before_the_next_step_waits_for_scores_too(whole, tmp_path, scored_by, caplog):
    def make(step, scores):
        if step == 6:
            signal.raise_signal(signal.SIGTERM)
        return Scripted(scores)

    with pytest.MonkeyPatch.context() as context:
        context.setattr(work, "make_validation", beside(make))
        with pytest.raises(SystemExit):
            run(tmp_path)
    assert series(tmp_path)[-1] == next(
        r for r in series(whole[0]) if "ap/box" in r and r["step"] == 6
    )
    check_equal(tmp_path, run(tmp_path), whole)


def test_a_run_without_checkpoints_has_no_scores_to_wait_for(whole, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "unscored").write_text("3")
    check_equal(tmp_path, run(tmp_path), whole)


@pytest.mark.parametrize("error", [ValueError("bad ground truth"), OSError("disk full")])
@pytest.mark.slow
def test_an_error_of_scoring_ends_the_run(error, whole, tmp_path, caplog):
    with pytest.MonkeyPatch.context() as context:
        context.setattr(work, "make_validation", beside(lambda step, scores: Scripted(error)))
        with pytest.raises(type(error), match=str(error)):
            run(tmp_path)
    assert {*kept(tmp_path)} == {"2", "3", "4", "unscored"}
    assert series(tmp_path)[-1]["step"] == 6
    check_equal(tmp_path, run(tmp_path), whole)


def test_steps_before_an_error_are_logged_although_scores_are_pending(whole, tmp_path, in_step):
    scorers = []

    def make(step, scores):
        scorers.append(Scripted(scores, looks=NEVER if step == 6 else 1))
        return scorers[-1]

    in_step({8: lambda metrics: metrics.update({"loss/total": np.float32("nan")})})
    with pytest.MonkeyPatch.context() as context:
        context.setattr(work, "make_validation", beside(make))
        with pytest.raises(FloatingPointError, match="step 8"):
            run(tmp_path)
    assert scorers[-1].looks is None  # closed
    assert [one["step"] for one in series(tmp_path)][-2:] == [6, 7]
    in_step({})
    check_equal(tmp_path, run(tmp_path), whole)


def test_other_processes_learn_that_scoring_could_not_start(monkeypatch):
    def start():
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        Pending(3, start, print, dict)
    monkeypatch.setattr(processes.jax, "process_index", lambda: 1)
    monkeypatch.setattr(processes, "from_first", lambda value: [None, "disk full"])
    with pytest.raises(ValueError, match="disk full"):
        Pending(3, start, print, dict)


@pytest.mark.slow
def test_two_processes_learn_the_scores_of_the_first(tmp_path):
    workdir = tmp_path / "run"
    with Pair(two_processes(workdir, ("beside=true", "beside=true")), tmp_path) as pair:
        assert pair.codes() == [0, 0], pair.said()
    records = series(workdir)
    assert [one["step"] for one in records if "ap/box" in one] == [3, 6, 9, 12]
    assert [one["step"] for one in records] == sorted(one["step"] for one in records)
    assert {*kept(workdir)} == {"6", "10", "12"}


@pytest.mark.parametrize(
    ("step", "rule", "fewest", "is_pending"),
    [(3, {}, 10, True), (3, {}, 11, False), (3, {"patience": 2}, 1, False),
     (3, {"stop_at_box_ap": 0.5}, 1, False), (10, {}, 1, False)],
)  # fmt: skip
def test_scores_are_pending_where_they_take_long_and_nothing_waits_for_them(
    step, rule, fewest, is_pending, recipe, tmp_path, monkeypatch
):
    """Six results of four images, in a run of ten steps."""
    monkeypatch.setattr(validation.step, "make_predict_step", lambda *_: test_tiled_scoring.predict)
    monkeypatch.setattr(validation.step, "make_loss_step", lambda *given, **options: None)
    monkeypatch.setattr(validation, "FEWEST_BESIDE", fewest)
    recipe = test_tiled_scoring.on_windows(recipe, (128, 128))
    recipe = replace(recipe, train=replace(recipe.train, steps=10, **rule))
    given = recipe, test_tiled_scoring.Rectangles(), None, mesh_of(2), tmp_path
    metrics, _ = validation.make_validation(*given)(SimpleNamespace(step=step, evaluated={}))
    assert isinstance(metrics, Pending) == is_pending
    if is_pending:
        metrics, pending = metrics.result(), metrics
        pending.close()
    assert metrics["ap/box"] == metrics["ap/mask"] == 1.0
    assert any(name.startswith("ap_class/mask/") for name in metrics)
    assert (tmp_path / "eval" / str(step) / "metrics.json").exists()
