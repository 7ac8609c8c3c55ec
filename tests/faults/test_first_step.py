"""Signals to a run that compiles, or is in its first step: nothing is to be saved."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.harness import wait_until
from tests.pair import Pair
from tests.training.stubbed_run import kept, run, stubbed

__all__ = ["stubbed"]

SECONDS = 20  # from a signal to the end, on a busy machine; it takes two on an idle one
COMMAND = [sys.executable, "-m", "tests.faults.blocked_run"]
QUIET = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
NOTHING = "stopped by SIGTERM, nothing to save (exit code 75: start it again to go on)"
ENDS = {signal.SIGTERM: (75, NOTHING), signal.SIGINT: (130, "error: interrupted")}


@contextmanager
def started(workdir: Path, log: Path):
    with open(log, "w") as output:
        process = subprocess.Popen(
            [*COMMAND, workdir], env=os.environ | QUIET, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def worker_of(log: Path) -> int:
    """The process id of the worker of a run that has begun its first step."""
    assert wait_until(lambda: "blocked:" in log.read_text(), 120), log.read_text()
    (said,) = (line for line in log.read_text().splitlines() if line.startswith("blocked:"))
    return int(said.split()[1])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_at_once_and_leaves_nothing(number, tmp_path):
    log = tmp_path / "log"
    with started(tmp_path / "run", log) as process:
        worker = worker_of(log)
        process.send_signal(number)
        assert process.wait(SECONDS) == ENDS[number][0]
    assert log.read_text().splitlines()[-1] == ENDS[number][1]
    assert "Traceback" not in log.read_text()
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert wait_until(lambda: not Path(f"/proc/{worker}").exists(), SECONDS)
    assert not list(Path("/dev/shm").glob(f"mrcnn-{process.pid}-*"))


@pytest.mark.slow
def test_a_resumed_run_ends_at_once_and_keeps_what_it_had(stubbed, tmp_path):
    def stop(step, metrics, images):
        if step == 3 and "loss/total" in metrics:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit):
        run(tmp_path / "run", [stop])
    before, log = kept(tmp_path / "run"), tmp_path / "log"
    with started(tmp_path / "run", log) as process:
        worker_of(log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 75
    assert "resuming at step 3" in log.read_text() and kept(tmp_path / "run") == before


@pytest.mark.slow
def test_a_sigterm_to_one_of_two_processes_ends_both(tmp_path):
    def start(index, port):
        where = [f"--coordinator_address=localhost:{port}", "--num_processes=2"]
        where += [f"--process_id={index}", "--compile_cache=off"]
        return [*COMMAND, tmp_path / "run", *where], os.environ | QUIET

    with Pair(start, tmp_path) as pair:
        for log in pair.logs:
            worker_of(log)
        pair.processes[1].send_signal(signal.SIGTERM)
        begin = time.monotonic()
        assert pair.codes(SECONDS) == [75, 75], pair.said()
    assert time.monotonic() - begin < SECONDS
    assert all(said.splitlines()[-1] == NOTHING for said in pair.said()), pair.said()
    assert not (tmp_path / "run" / "checkpoints").exists()
