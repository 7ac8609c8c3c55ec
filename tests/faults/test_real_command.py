"""The real command with a real model, killed or interrupted at random moments."""

import random
import signal
import subprocess
import sys
import time

import pytest

from tests.commands.command import environment
from tests.faults.harness import RECIPE, Run, assert_same, outcome
from tests.faults.test_signals import KILLS_A_RUN, interrupt, wait_for_a_moment

pytestmark = pytest.mark.faults


class RealRun(Run):
    """`python -m mask_rcnn_jax.train` in a process of its own."""

    def __init__(self, workdir, data, cache):
        log = workdir.with_name(f"{workdir.name}.{time.monotonic_ns()}.log")
        command = [sys.executable, "-m", "mask_rcnn_jax.train", f"--config={RECIPE}"]
        command += [f"--workdir={workdir}", *data]
        # A background job ignores Ctrl-C, and so would what it starts.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        with open(log, "w") as output:
            self._process = subprocess.Popen(
                command, env=environment(cache, devices=1), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        signal.signal(signal.SIGINT, before)
        super().__init__(self._process.pid, workdir, log)

    @property
    def code(self):
        return self._process.poll()


def test_kills_of_the_real_command_change_nothing(server, tmp_path, request, figure):
    """One kill for 16 of the stubbed command's, which is as much quicker."""
    wanted = max(1, request.config.getoption("--faults") // 16)

    def start(name):
        return RealRun(tmp_path / name, server.data, tmp_path / "cache")

    for name in ("compiles", "whole"):  # the second one takes its programs from the cache
        run = start(name)
        assert run.wait(300) == 0, run.said()[-1000:]
    seconds, reference = time.monotonic() - run.started, outcome(run.workdir)
    kills, wrong, rng = 0, [], random.Random(2026)
    for number in range(10 * wanted):
        if kills >= wanted:
            break
        killed = 0
        for _ in range(min(KILLS_A_RUN, wanted - kills)):
            run = start(f"run{number}")
            wait_for_a_moment(run, rng, seconds)
            killed += run.kill()
        run = start(f"run{number}")
        try:
            assert run.wait(300) == 0, run.said()[-1000:]
            assert_same(run.workdir, reference)
        except AssertionError as error:
            wrong.append((number, killed, str(error)))
        kills += killed
    lost = sum(killed for _, killed, _ in wrong)
    figure(f"kills of the real command survived bit for bit: {kills - lost} of {kills}")
    assert not wrong, wrong[0]


def test_a_ctrl_c_to_the_real_command_is_not_lost(server, tmp_path, request, figure):
    """From its imports on. Each compiles anew."""
    wanted = max(1, request.config.getoption("--faults") // 16)
    run = RealRun(tmp_path / "whole", server.data, tmp_path / "cache")
    assert run.wait(300) == 0, run.said()[-1000:]
    seconds = time.monotonic() - run.started

    def start(number):
        run = RealRun(tmp_path / f"run{number}", server.data, tmp_path / f"cache{number}")
        time.sleep(0.3)  # Python itself starts
        return run

    wrong = interrupt(start, seconds, wanted)
    figure(f"Ctrl-C that ended the real command in order: {wanted - len(wrong)} of {wanted}")
    assert not wrong, wrong[0]
