"""What happens to a run from outside, and what its records and checkpoints are afterwards."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data import workers
from mask_rcnn_jax.training import checkpoint, processes
from mask_rcnn_jax.training.loop import train
from tests.helpers import assert_tree_close
from tests.memory_set import ShapeSet
from tests.pair import Pair
from tests.training import stubbed_run
from tests.training.stubbed_run import STEPS, kept, patch, run, series, write_as_before
from tests.training.test_lock import birth
from tests.training.test_lock import write as write_lock

pytestmark = pytest.mark.usefixtures("stubbed")


@pytest.fixture
def stubbed(monkeypatch):
    patch(monkeypatch.setattr)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run and its last state."""
    with pytest.MonkeyPatch.context() as context:
        patch(context.setattr)
        workdir = tmp_path_factory.mktemp("whole") / "run"
        return workdir, run(workdir)


def check_equal(workdir, state, whole):
    assert_tree_close(state, whole[1])
    assert series(workdir) == series(whole[0])
    assert kept(workdir) == kept(whole[0])


def test_the_best_by_mask_ap_stays_with_the_last_two(whole):
    assert kept(whole[0]) == ["6", "10", "12"]
    assert not (whole[0] / "train.lock").exists()


@pytest.mark.parametrize("step", [3, pytest.param(6, marks=pytest.mark.slow), 12])
def test_an_evaluation_that_was_broken_off_is_made_up_for(step, whole, tmp_path, caplog):
    """By Ctrl-C in it; the step was saved before."""

    workdir = tmp_path / "run"
    with pytest.MonkeyPatch.context() as context:
        make = stubbed_run.validation()

        def make_broken(*arguments):
            validate = make(*arguments)

            def broken(state):
                if int(state.step) == step:
                    raise KeyboardInterrupt
                return validate(state)

            return broken

        context.setattr("mask_rcnn_jax.training.work.make_validation", make_broken)
        with pytest.raises(KeyboardInterrupt):
            run(workdir)
    assert str(step) in kept(workdir)
    with caplog.at_level("INFO"):
        state = run(workdir)
    assert f"the evaluation of step {step} was cut off and is made up for" in caplog.text
    check_equal(workdir, state, whole)


@pytest.mark.parametrize("step", [3, 5, pytest.param(12, marks=pytest.mark.slow)])
def test_sigterm_leaves_nothing_different(step, whole, tmp_path, caplog):
    """In the step: before the evaluation that is due after it, where there is one."""

    def stop(step_, metrics, images):
        if step_ == step and "loss/total" in metrics:
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with caplog.at_level("INFO"), pytest.raises(SystemExit) as stopped:
        run(tmp_path, [stop])
    assert stopped.value.code == 75 and signal.getsignal(signal.SIGTERM) == before
    assert f"in {tmp_path}" in caplog.text and "stopped by SIGTERM, saved step" in caplog.text
    assert "next:" not in caplog.text
    check_equal(tmp_path, run(tmp_path), whole)


def test_sigterm_before_there_is_anything_to_save(caplog):
    """Nothing of it stays behind in a process that goes on."""
    before = signal.getsignal(signal.SIGTERM)
    with processes.end_on_sigterm():
        pass
    assert signal.getsignal(signal.SIGTERM) == before
    with caplog.at_level("INFO"), pytest.raises(SystemExit) as stopped, processes.end_on_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert stopped.value.code == 75 and "stopped by SIGTERM, nothing to save" in caplog.text
    assert signal.getsignal(signal.SIGTERM) == before


def test_sigterm_in_an_evaluation_leaves_at_once(whole, tmp_path, monkeypatch, caplog):
    make = stubbed_run.validation()

    def make_slow(*arguments):
        validate = make(*arguments)

        def slow(state):
            if int(state.step) == 6:
                signal.raise_signal(signal.SIGTERM)
            return validate(state)

        return slow

    with monkeypatch.context() as context, caplog.at_level("INFO"):
        context.setattr("mask_rcnn_jax.training.work.make_validation", make_slow)
        with pytest.raises(SystemExit) as stopped:
            run(tmp_path)
    assert stopped.value.code == 75
    assert f"stopped by SIGTERM, saved step 6 in {tmp_path}" in caplog.text
    assert [r["step"] for r in series(tmp_path) if "ap/box" in r] == [3]
    check_equal(tmp_path, run(tmp_path), whole)


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(whole, tmp_path, caplog):
    workdir = shutil.copytree(whole[0], tmp_path / "run")
    files = [p for p in (workdir / "checkpoints" / "12").rglob("*") if p.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    (workdir / "checkpoints" / "99").mkdir()
    (workdir / "checkpoints" / "0099").write_text("")
    with caplog.at_level("INFO"):
        state = run(workdir)
    assert "checkpoints/12 is damaged: state/" in caplog.text
    assert "resuming at step 10 of 12" in caplog.text
    assert_tree_close(state, whole[1])
    assert series(workdir) == series(whole[0])
    left = {"0099", "damaged.12", "damaged.99"}
    assert set(kept(workdir)) == {*kept(whole[0]), *left}


def test_a_run_of_an_earlier_version_goes_on(whole, tmp_path):
    """Its config.json lacks entries that came later; they are at their defaults."""
    workdir = shutil.copytree(whole[0], tmp_path / "run")
    shutil.rmtree(workdir / "checkpoints" / "12")
    later = ("train.ema_decay", "train.patience", "optim.betas", "data.more_train")
    write_as_before(workdir, *later)
    check_equal(workdir, run(workdir), whole)
    write_as_before(workdir, *later, "train.ema_warmup")
    with pytest.raises(ValueError, match="train.ema_warmup was True and is False now"):
        run(workdir, ema_warmup=False)


def test_a_run_without_checkpoints_says_that_its_records_go(whole, tmp_path, caplog):
    workdir = shutil.copytree(whole[0], tmp_path / "run")
    shutil.rmtree(workdir / "checkpoints")
    with caplog.at_level("INFO"):
        state = run(workdir)
    assert f"{workdir} has no checkpoint: the run starts from the first step" in caplog.text
    check_equal(workdir, state, whole)


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"steps": 2 * STEPS}, {"epochs": 9.6}])
def test_a_finished_run_can_be_extended(change, whole, tmp_path, caplog):
    """Its rate follows the new length: 24 steps of the recipe's schedule, from step 13 on."""
    workdir = shutil.copytree(whole[0], tmp_path / "run")
    with caplog.at_level("INFO"):
        assert run(workdir, **change).step == 24
    assert "train.steps is 24, this run had 12: warm-up and decay are fractions" in caplog.text
    rates = [record["lr"] for record in series(workdir) if "lr" in record]
    longer = tmp_path / "longer"
    run(longer, **change)
    assert rates[12:] == [record["lr"] for record in series(longer) if "lr" in record][12:]
    assert f"learning rate of step 13 is {rates[12]:.3g} instead of" in caplog.text
    with pytest.raises(ValueError, match="train.(steps|epochs) was .* may only be raised"):
        run(workdir)


def test_a_second_run_is_refused_before_it_writes(whole, tmp_path):
    workdir = shutil.copytree(whole[0], tmp_path / "run")
    (workdir / "checkpoints" / "tmp.12").mkdir()
    other = subprocess.Popen(["sleep", "60"])
    try:
        write_lock(workdir, pid=other.pid, born=birth(other.pid))
        before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
        with pytest.raises(ValueError, match="is in use by another run"):
            run(workdir, steps=20)
        assert {path: path.stat().st_mtime_ns for path in workdir.rglob("*")} == before
    finally:
        other.kill()
        other.wait()


# Arrays that are still written complain of the end of Orbax's event loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("step", [5, 11])
def test_a_workdir_that_is_removed_ends_the_run(step, tmp_path):
    def remove(step_, metrics, images):
        if step_ == step:
            (tmp_path / "run").rename(tmp_path / "away")  # rmtree would race with what is written

    # The second where a checkpoint was being written just then.
    expected = "train.lock is gone or another run's|a checkpoint could not be written"
    with pytest.raises(OSError, match=expected) as error:
        run(tmp_path / "run", [remove])
    assert "\n" not in str(error.value)


def test_the_last_save_in_the_background_is_no_success_if_it_fails(tmp_path, monkeypatch):
    write = checkpoint.Checkpoints._write

    def full(self, step, *arguments):
        if step == STEPS:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder / "d" / "0"))
        write(self, step, *arguments)

    monkeypatch.setattr(checkpoint.Checkpoints, "_write", full)
    expected = rf"{tmp_path}/run/checkpoints: .*could not be written.* No space left .*/d/0"
    with pytest.raises(OSError, match=expected) as error:
        run(tmp_path / "run")
    assert "\n" not in str(error.value)
    assert str(STEPS) not in kept(tmp_path / "run")


@pytest.mark.parametrize(
    ("when", "name"),
    [
        (5, "metrics.jsonl"),
        *(pytest.param(*case, marks=pytest.mark.slow)
          for case in [(5, "config.json"), (12, "config.json"), (12, "metrics.jsonl")]),
    ],
)  # fmt: skip
def test_a_file_deleted_in_mid_run_is_written_again(when, name, whole, tmp_path, caplog):
    def remove(step, metrics, images):
        if step == when and "loss/total" in metrics:
            (tmp_path / name).unlink()

    with caplog.at_level("INFO"):
        state = run(tmp_path, [remove])
    assert f"{tmp_path / name} was deleted while the run was at work" in caplog.text
    check_equal(tmp_path, state, whole)
    assert (tmp_path / "config.json").read_text() == (whole[0] / "config.json").read_text()


@pytest.mark.slow
def test_a_run_whose_last_checkpoint_was_deleted_is_not_finished(whole, tmp_path):
    last = tmp_path / "checkpoints" / str(STEPS)

    def remove(step, metrics, images):
        if step == STEPS and "ap/box" in metrics:
            deadline = time.monotonic() + 60
            while not last.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            shutil.rmtree(last)

    with pytest.raises(OSError, match=f"{last} was deleted while the run was at work"):
        run(tmp_path, [remove])
    check_equal(tmp_path, run(tmp_path), whole)


@pytest.mark.skipif(not workers.SHARED.is_dir(), reason="needs Linux")
def test_a_start_with_nothing_to_train_removes_shared_memory_of_a_killed_one(whole, tmp_path):
    left = workers.SHARED / "mrcnn-00ddba11.lock"
    left.touch()
    try:
        run(shutil.copytree(whole[0], tmp_path / "run"))
        assert not left.exists()
    finally:
        left.unlink(missing_ok=True)


@pytest.mark.slow
def test_a_batch_that_is_not_finite_can_be_left_out(whole, tmp_path, monkeypatch):
    """The advice names it; all other batches are as they were."""
    seen = {}

    def make(*arguments):
        step = stubbed_run.make_step(*arguments)

        def watched(state, batch):
            number, index = int(state.step) + 1, np.asarray(batch.image_index)
            seen[number] = index.tolist()
            state, metrics = step(state, batch)
            if number == 8 and poisoned & set(index.tolist()):
                metrics["loss/total"] = np.float32("nan")
            return state, metrics

        return watched

    monkeypatch.setattr("mask_rcnn_jax.training.work.make_train_step", make)
    poisoned = set()
    run(tmp_path / "first", images=20)
    usual = dict(seen)
    poisoned = {usual[8][1]}
    with pytest.raises(FloatingPointError) as error:
        run(tmp_path / "run", images=20)
    ids = tuple(index + 1 for index in usual[8])
    assert f'leave these images out with --config.train.skip_images="{ids}"' in str(error.value)
    assert f"step 8: loss/total is not finite, images {list(ids)}" in str(error.value)
    seen.clear()
    run(tmp_path / "run", images=20, skip_images=ids)
    left_out = set(usual[8])
    assert sorted(seen) == list(range(7, 13))
    for step, indices in seen.items():
        assert not left_out & set(indices)
        pairs = zip(indices, usual[step], strict=True)
        assert all(a == b for a, b in pairs if b not in left_out)
    with pytest.raises(ValueError, match="train.skip_images has 99, expected ids of images of"):
        run(tmp_path / "other", skip_images=(99,))


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
@pytest.mark.parametrize("text", ["[]", "7", '{"step": "17"}', '{"step": 3, "lr": [1]}',
                                  '{"config": [], "categories": []}',
                                  '{"config": {}, "categories": 7, "step": null}'])  # fmt: skip
def test_files_of_wrong_types_are_named(name, text, whole, tmp_path):
    workdir = shutil.copytree(whole[0], tmp_path / "run")
    (workdir / name).write_text(text + "\n")
    record = "step" in text
    if name == "metrics.jsonl" and not record:  # as of a run that was killed
        run(workdir)
        return
    with pytest.raises(ValueError, match=name) as error:
        run(workdir)
    assert "\n" not in str(error.value)


def command(workdir, *pairs):
    arguments = ["-m", "tests.training.stubbed_run", "--compile_cache=off", str(workdir), *pairs]
    return [sys.executable, *arguments]


@pytest.mark.slow
def test_kill_9_in_an_evaluation_loses_nothing(whole, tmp_path):
    """The real process, killed once its second evaluation has begun."""
    log = tmp_path / "log"
    with open(log, "w") as file:
        line = command(tmp_path / "run", "seconds=20")
        environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}
        process = subprocess.Popen(line, env=environment, stdout=file, stderr=file)
    deadline = time.monotonic() + 300
    while not (tmp_path / "run" / "checkpoints" / "3").exists() or "evaluating" not in (
        log.read_text()
    ):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    with pytest.raises(ValueError, match=f"is in use by another run, process {process.pid} on"):
        run(tmp_path / "run")
    process.kill()
    process.wait()
    assert (tmp_path / "run" / "train.lock").exists()
    check_equal(tmp_path / "run", run(tmp_path / "run"), whole)


def two_processes(workdir, own):
    """How to start each of two processes, with an argument of its own."""

    def start(index, port):
        where = [f"--coordinator_address=localhost:{port}", "--num_processes=2"]
        flags = [*where, f"--process_id={index}"]
        line = command(workdir, own[index])
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        return [*line[:3], *flags, *line[3:]], environment

    return start


@pytest.mark.slow
def test_processes_of_one_run_compare_their_configs(tmp_path):
    workdir, said = tmp_path / "run", "train.seed is 0 on process 0 and 1 on process 1"
    with Pair(two_processes(workdir, ("seed=0", "seed=1")), tmp_path) as pair:
        assert pair.codes() == [2, 2], pair.said()
    assert all(said in text for text in pair.said()) and not workdir.exists()


def of_an_earlier_version(whole, workdir):
    """A run without checksums, whose config lacks an entry, to be finished."""
    shutil.copytree(whole[0], workdir)
    for path in workdir.glob("checkpoints/*/SHA256SUMS"):
        path.unlink()
    shutil.rmtree(workdir / "checkpoints" / str(STEPS))
    write_as_before(workdir, "train.skip_images")


def test_a_run_of_an_earlier_version_goes_on_by_its_own_config(whole, tmp_path):
    workdir = tmp_path / "run"
    of_an_earlier_version(whole, workdir)
    config = load_config(workdir, {"model.num_classes": 0})  # as given
    sets = {"train_set": ShapeSet("train", 10), "val_set": ShapeSet("val", 4)}
    check_equal(workdir, jax.device_get(train(config, workdir, **sets)), whole)


@pytest.mark.slow
def test_a_run_of_an_earlier_version_goes_on_in_two_processes(whole, tmp_path):
    workdir = tmp_path / "run"
    of_an_earlier_version(whole, workdir)
    with Pair(two_processes(workdir, ("seed=0", "seed=0")), tmp_path) as pair:
        assert pair.codes() == [0, 0], pair.said()
    assert "finished at step 12" in pair.said()[0]
    assert kept(workdir) == kept(whole[0]) and series(workdir)[-1]["step"] == STEPS
