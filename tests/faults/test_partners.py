"""Loader workers that die or lose their parent, and partner processes that die or stop."""

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from mask_rcnn_jax.cli.processes import LOST
from tests.faults.harness import assert_same, wait_until

pytestmark = pytest.mark.faults
LOST_AFTER = 5  # seconds


def descendants(pid):
    """Processes below `pid`, without trackers of resources."""
    found = []
    for child in _children(pid):
        command = Path(f"/proc/{child}/cmdline").read_bytes()
        found += [] if b"resource_tracker" in command else [child]
        found += descendants(child)
    return found


def _children(pid):
    paths = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in paths for child in path.read_text().split()]


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def shared_memory(pids):
    """Files of shared memory that these processes have mapped."""
    found = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found.update(re.findall(r"/dev/shm/\S+", maps))
    return found


@pytest.fixture
def with_workers(server, tmp_path):
    """A run with two loader workers that has saved, its workers and their shared memory."""
    run = server.start(tmp_path / "run", "--config.data.num_workers=2", log=tmp_path / "log")
    assert wait_until(lambda: run.has_saved(3), 120), run.said()
    workers = descendants(run.pid)
    assert len(workers) >= 2
    yield run, workers
    for pid in (run.pid, *workers):
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_killed_worker_ends_the_run_in_one_line(server, reference, tmp_path):
    run = server.start(tmp_path / "run", "--config.data.num_workers=2", log=tmp_path / "log")
    # At once: what the worker has made before is still used.
    assert wait_until(lambda: len(descendants(run.pid)) >= 2, 120), run.said()
    os.kill(descendants(run.pid)[0], signal.SIGKILL)
    assert run.wait(30) in (1, 2), run.said()
    assert "Traceback" not in run.said(), run.said()
    assert run.last_line().startswith("error: ")
    again = server.start(run.workdir)
    assert again.wait() == 0, again.said()
    assert_same(run.workdir, reference)


@pytest.mark.parametrize("number", ["KILL", "HUP", "INT", "TERM"])
def test_a_run_leaves_no_worker_and_no_shared_memory(number, with_workers, figure):
    run, workers = with_workers
    memory = shared_memory([run.pid, *workers])
    sent = time.monotonic()
    run.send(signal.Signals[f"SIG{number}"])
    run.wait()
    assert wait_until(lambda: not any(map(is_alive, workers)), 10), "workers outlive their run"
    seconds = time.monotonic() - sent
    assert wait_until(lambda: not any(map(os.path.exists, memory)), 5), "shared memory is left"
    if number in ("INT", "TERM"):  # after the others, the resource tracker frees it and says so
        assert "leaked" not in run.said()
    figure(f"seconds from SIG{number} of a run to the end of its loader workers: {seconds:.2f}")


def start_pair(server, workdir, logs):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = [f"--coordinator_address=localhost:{port}", "--num_processes=2"]
    flags += [f"--lost_after={LOST_AFTER}", "--config.train.steps=2000"]
    return [
        server.start(workdir, *flags, f"--process_id={index}", log=logs / f"log{index}")
        for index in range(2)
    ]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("number", ["KILL", "STOP", "INT"])
def test_a_dead_or_stopped_partner_ends_the_other(victim, number, server, tmp_path, figure):
    pair = start_pair(server, tmp_path / "run", tmp_path)
    try:
        assert wait_until(lambda: pair[0].has_saved(6), 120), [run.said() for run in pair]
        sent = time.monotonic()
        pair[victim].send(signal.Signals[f"SIG{number}"])
        other = pair[1 - victim]
        code = other.wait(LOST_AFTER + 30)
        seconds = time.monotonic() - sent
    finally:
        for run in pair:
            run.send(signal.SIGCONT)
            run.send(signal.SIGKILL)
    which = "first" if victim == 0 else "second"
    figure(f"seconds from SIG{number} of the {which} of two processes to the other's end, with "
           f"--lost_after={LOST_AFTER}: {seconds:.1f}")  # fmt: skip
    assert code == 1, (code, other.said()[-2000:])
    assert "Traceback" not in other.said()
    assert other.last_line() == f"error: {LOST}", other.said()[-2000:]


def test_a_slow_partner_is_waited_for(server, tmp_path):
    pair = start_pair(server, tmp_path / "run", tmp_path)
    assert wait_until(lambda: pair[0].has_saved(6), 120), [run.said() for run in pair]
    pair[1].send(signal.SIGSTOP)
    time.sleep(LOST_AFTER / 2)
    pair[1].send(signal.SIGCONT)
    pair[1].send(signal.SIGTERM)
    codes = [run.wait() for run in pair]
    assert codes == [75, 75], [run.said()[-500:] for run in pair]
