"""Two real processes tell each other things, stop together and end together."""

import os
import signal
import sys
from pathlib import Path

import pytest

from mask_rcnn_jax.cli.processes import LOST
from tests.pair import Pair


def started(mode: str, workdir: Path, *flags: str) -> Pair:
    """Two processes of `two_processes.py` with two devices each."""

    def start(index, port):
        where = [
            f"--coordinator_address=localhost:{port}", "--num_processes=2",
            f"--process_id={index}", "--compile_cache=off", *flags,
        ]  # fmt: skip
        command = [sys.executable, "-m", "tests.training.two_processes", mode, workdir, *where]
        return command, os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}

    return Pair(start, workdir)


def test_they_tell_each_other_what_they_have_and_a_sigterm_to_one_stops_both(tmp_path):
    """At the same step. The rows are 1 and 2, so that every step adds 1.5 on both."""
    with started("run", tmp_path) as pair:
        pair.wait_for(tmp_path / "checkpoints" / "3")
        pair.processes[1].send_signal(signal.SIGTERM)
        assert pair.codes() == [0, 0], pair.said()
    first, second = pair.said()
    assert "told: 1 of 1" in first and "told: 1 of 1" not in second
    assert "every process says this" in first and "every process says this" in second
    first, second = (text.splitlines()[-1] for text in pair.said())
    assert first == second
    step = int(first.split()[2])
    assert first == f"stopped at {step} with {1.5 * step}"
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir()) == [3, step]


@pytest.mark.slow
def test_the_others_wait_for_what_the_first_has_left_to_do(tmp_path):
    """Longer than JAX's five minutes."""
    with started("late", tmp_path) as pair:
        assert pair.codes() == [0, 0], pair.said()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_the_death_of_one_ends_the_other(victim, tmp_path):
    with started("run", tmp_path, "--lost_after=2") as pair:
        pair.wait_for(tmp_path / "checkpoints" / "3")
        pair.processes[victim].kill()
        assert pair.processes[1 - victim].wait(60) == 1
    said = pair.said()[1 - victim]
    assert said.splitlines()[-1] == f"error: {LOST}"
    assert "Traceback" not in said and "@ 0x" not in said
