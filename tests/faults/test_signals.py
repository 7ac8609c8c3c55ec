"""Runs that are killed, stopped and continued leave what an uninterrupted run leaves."""

import random
import signal
import time

import pytest

from tests.faults.harness import assert_same, kept_steps, wait_until

KILLS_A_RUN = 5


def wait_for_a_moment(run, rng, seconds):
    """A random time, a moment of a save or a moment of an evaluation."""
    kind = rng.choice(["any time", "any time", "save", "evaluation"])
    if kind == "any time":
        wait_until(lambda: run.code is not None, rng.uniform(0.1, seconds))
        return
    before = {path.name for path in run.workdir.glob("eval/*")}
    saves, seen = rng.randint(1, 3), set()

    def reached():
        seen.update(path.name for path in run.workdir.glob("checkpoints/*tmp*"))
        if kind == "save":
            return len(seen) >= saves
        return bool({path.name for path in run.workdir.glob("eval/*")} - before)

    wait_until(lambda: reached() or run.code is not None, 2 * seconds)
    time.sleep(rng.uniform(0, 0.1))


@pytest.mark.faults
def test_kills_at_random_moments_change_nothing(
    server, whole, reference, tmp_path, request, figure
):
    wanted = request.config.getoption("--faults")
    seconds = float((whole.parent / "seconds").read_text())
    kills, wrong = 0, []
    rng = random.Random(2026)
    for number in range(10 * wanted):
        if kills >= wanted:
            break
        workdir, log = tmp_path / f"run{number}", tmp_path / f"run{number}.log"
        killed = 0
        for _ in range(min(KILLS_A_RUN, wanted - kills)):
            run = server.start(workdir, log=tmp_path / f"run{number}.{killed}.log")
            wait_for_a_moment(run, rng, seconds)
            killed += run.kill()
        run = server.start(workdir, log=log)
        try:
            assert run.wait() == 0, run.said()[-1000:]
            assert_same(workdir, reference)
        except AssertionError as error:
            wrong.append((number, killed, str(error)))
        kills += killed
    lost = sum(killed for _, killed, _ in wrong)
    figure(f"kills survived bit for bit: {kills - lost} of {kills}")
    assert not wrong, wrong[0]


@pytest.mark.slow
def test_scores_beside_training_change_nothing(server, reference, tmp_path):
    run = server.start(tmp_path / "run", FEWEST_BESIDE="1000000")
    assert run.wait() == 0 and "was scored beside the training" not in run.said()
    assert_same(run.workdir, reference)


INTERRUPTS = 3  # without --faults


def interrupt(start, seconds, wanted):
    """Send a Ctrl-C to so many runs, each at another moment of its first `seconds`; returns what
    those said that did not end in order.

    start: starts the run of a number.
    """
    rng, sent, wrong = random.Random(2026), 0, []
    for number in range(10 * wanted):
        if sent >= wanted:
            break
        run = start(number)
        if rng.random() < 0.5:  # half of the others are in steps, which are interrupted anywhere
            wait_until(lambda run=run: run.code is not None, rng.uniform(0, seconds / 2))
        else:
            wait_for_a_moment(run, rng, seconds)
        run.send(signal.SIGINT)
        code, said = run.wait(), run.said()
        if "finished at step" in said:
            continue
        sent += 1
        in_order = code == 130 and said.endswith("error: interrupted\n")
        if not in_order or "Traceback" in said or said.count("interrupted") > 1:
            wrong.append((number, code, said[-1000:]))
    assert sent == wanted
    return wrong


def test_a_ctrl_c_is_not_lost(server, whole, reference, tmp_path, request, figure):
    wanted = request.config.getoption("--faults") or INTERRUPTS
    seconds = float((whole.parent / "seconds").read_text())
    wrong = interrupt(lambda number: server.start(tmp_path / f"run{number}"), seconds, wanted)
    figure(f"Ctrl-C that ended a stubbed run in order: {wanted - len(wrong)} of {wanted}")
    assert not wrong, wrong[0]


def saved(step):
    return lambda workdir: (workdir / "checkpoints" / str(step)).exists()


def evaluating(step):
    return lambda workdir: (workdir / "eval" / str(step)).exists()


CASES = {
    "TERM": (saved(6), [signal.SIGTERM], (75,)),
    "INT while evaluating": (evaluating(16), [signal.SIGINT], (130,)),
    "TERM while evaluating": (evaluating(16), [signal.SIGTERM], (75,)),
    "TERM twice": (saved(6), [signal.SIGTERM, 0.01, signal.SIGTERM], (75,)),
    "INT": (saved(6), [signal.SIGINT], (130,)),
    "INT twice": (saved(6), [signal.SIGINT, 0.05, signal.SIGINT], (130, -signal.SIGINT)),
    "HUP": (saved(6), [signal.SIGHUP], (-signal.SIGHUP,)),
    "STOP and CONT": (saved(6), [signal.SIGSTOP, 1.0, signal.SIGCONT], (0,)),
}
FEW = ("INT while evaluating",)  # others are seen in tests/commands and tests/training


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.faults) for n in CASES]
)
def test_a_signal_ends_a_run_in_order(name, server, reference, tmp_path, figure):
    reached, signals, codes = CASES[name]
    run = server.start(tmp_path / "run")
    assert wait_until(lambda: reached(run.workdir)), run.said()
    before = kept_steps(run.workdir)[-1]
    sent = time.monotonic()
    for number in signals:
        time.sleep(number) if isinstance(number, float) else run.send(number)
    assert run.wait() in codes, run.said()
    seconds = time.monotonic() - sent
    assert "Traceback" not in run.said()
    if name.startswith("TERM"):
        assert kept_steps(run.workdir)[-1] > before or "stopped" in run.said()
        figure(f"seconds from SIGTERM to saved and ended ({name}): {seconds:.2f}")
    again = server.start(run.workdir)
    assert again.wait() == 0, again.said()
    assert_same(run.workdir, reference)
