"""One run at a time in a workdir, also across machines; a lock that was left is taken over."""

import itertools
import json
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from mask_rcnn_jax.training import lock
from mask_rcnn_jax.training.lock import locked

sleep = time.sleep


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.05)
    monkeypatch.setattr(lock, "STALE", 1.0)
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(seconds / 5))


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def write(workdir, **changes):
    """The lock of this process, changed."""
    with locked(workdir):
        owner = json.loads((workdir / "train.lock").read_text())
    (workdir / "train.lock").write_text(json.dumps(owner | changes))


def birth(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def elsewhere(workdir):
    write(workdir, host="node7", space="another machine", pid=os.getpid())


def held_here(workdir):
    """Whether the lock can be had."""
    with locked(workdir):
        return json.loads((workdir / "train.lock").read_text())["pid"] == os.getpid()


def test_a_second_run_is_refused_and_changes_nothing(tmp_path):
    workdir = tmp_path / "run"
    with locked(workdir) as check:
        text = (workdir / "train.lock").read_text()
        with pytest.raises(ValueError, match="is in use by another run, process") as error:
            with locked(workdir):
                pass
        assert f"{workdir} is in use" in str(error.value) and str(os.getpid()) in str(error.value)
        assert "\n" not in str(error.value)
        assert (workdir / "train.lock").read_text() == text
        check()
    assert not list(workdir.iterdir())


def test_a_link_to_nothing_is_no_lock(tmp_path):
    (tmp_path / "train.lock").symlink_to("gone")
    with pytest.raises(OSError, match=r"train.lock is a link to nothing; delete it"):
        held_here(tmp_path)


def test_an_error_gives_it_back(tmp_path):
    with pytest.raises(KeyboardInterrupt), locked(tmp_path):
        raise KeyboardInterrupt
    assert held_here(tmp_path)


def test_a_run_at_work_here_is_seen_until_it_ends(tmp_path, sleeper):
    write(tmp_path, pid=sleeper.pid, born=birth(sleeper.pid))
    with pytest.raises(ValueError, match=f"process {sleeper.pid} on"):
        held_here(tmp_path)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # a zombie, as under a careless init
    started = time.monotonic()
    assert held_here(tmp_path)
    assert time.monotonic() - started < lock.STALE


def test_a_later_process_of_the_same_number_is_another(tmp_path, sleeper):
    write(tmp_path, pid=sleeper.pid, born="1")
    assert held_here(tmp_path)


def test_a_run_at_work_on_another_machine_is_seen_by_its_beat(tmp_path, caplog):
    elsewhere(tmp_path)
    end = threading.Event()

    def beat():
        while not end.wait(lock.BEAT):
            os.utime(tmp_path / "train.lock")

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with caplog.at_level("INFO"), pytest.raises(ValueError, match="on node7, started 20"):
            held_here(tmp_path)
    finally:
        end.set()
        thread.join()
    assert "to see if the run on node7 is alive" in caplog.text


def test_a_lock_that_nobody_touches_is_taken_over(tmp_path, caplog):
    elsewhere(tmp_path)
    with caplog.at_level("INFO"):
        assert held_here(tmp_path)
    assert "was left by a process that is gone" in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("hours", [0.01, 24])
@pytest.mark.parametrize("text", [None, ""])
def test_what_the_clock_of_another_machine_says_does_not_matter(text, hours, tmp_path):
    """Ahead of ours by less or more than it takes to wait."""
    elsewhere(tmp_path)
    if text is not None:
        (tmp_path / "train.lock").write_text(text)
    then = time.time() + hours * 3600
    os.utime(tmp_path / "train.lock", (then, then))
    started = time.monotonic()
    assert held_here(tmp_path)
    assert time.monotonic() - started < 20 * lock.STALE


@pytest.mark.parametrize("hours", [0, 24])
def test_a_run_at_work_is_seen_whatever_its_clock_says(hours, tmp_path):
    elsewhere(tmp_path)
    path, end, start = tmp_path / "train.lock", threading.Event(), time.time() + hours * 3600

    def beat():
        for number in itertools.count():
            os.utime(path, (start + number, start + number))
            if end.wait(lock.BEAT):
                return

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(ValueError, match="is in use by another run"):
            held_here(tmp_path)
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize("text", [None, "", '{"host": "no', "[]", '{"pid": "one"}'])
def test_one_that_was_left_long_ago_is_taken_over_at_once(text, tmp_path):
    elsewhere(tmp_path)
    if text is not None:
        (tmp_path / "train.lock").write_text(text)
    then = time.time() - 100
    os.utime(tmp_path / "train.lock", (then, then))
    started = time.monotonic()
    assert held_here(tmp_path)
    assert time.monotonic() - started < lock.STALE
    assert not list(tmp_path.iterdir())


def test_its_holder_touches_it(tmp_path):
    with locked(tmp_path):
        first, end = (tmp_path / "train.lock").stat().st_mtime_ns, time.monotonic() + 20
        while (tmp_path / "train.lock").stat().st_mtime_ns == first:
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.mark.parametrize("loss", ["removed", "taken"])
def test_its_loss_is_noticed_and_the_new_one_stays(loss, tmp_path):
    with locked(tmp_path) as check:
        (tmp_path / "train.lock").unlink()
        if loss == "taken":
            elsewhere(tmp_path)
        with pytest.raises(OSError, match="train.lock is gone or another run's"):
            check()
    assert (tmp_path / "train.lock").exists() == (loss == "taken")


def test_of_many_who_find_a_stale_lock_one_has_it(tmp_path, monkeypatch):
    """As when jobs start together after a machine was lost; it is held until all have seen it."""
    monkeypatch.setattr(time, "sleep", sleep)
    write(tmp_path, pid=2**22 + 1, born="1")
    gate, seen, got, refused = threading.Barrier(8), threading.Barrier(8, timeout=60), [], []

    def take():
        gate.wait()
        try:
            with locked(tmp_path):
                got.append(1)
                seen.wait()
        except ValueError:
            refused.append(1)
            seen.wait()

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 7)
