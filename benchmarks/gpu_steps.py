"""Run a stage of `benchmarks/gpu_check.sh`: its steps in turn, each within its own time limit.

    python -m benchmarks.gpu_steps 1 --out FOLDER --seconds 560

FOLDER receives `stage_1.log`, the output of all steps that ended, and `stage_1.json`: the exit
code, seconds and figures of each step, rewritten as figures arrive, so that a machine taken away
loses none. Steps that compare values run beside each other, steps that measure time alone. A step
that fails or exceeds its limit does not stop the others. The exit code, also in the JSON, is 0
if all that this machine can run succeeded, 1 if a step failed, 3 if none did but the stage's
time did not suffice for all, and 128 + N where signal N ended the stage. `--rehearse` runs every
step it can on a CPU, with a tiny model.
"""

import argparse
import contextlib
import gzip
import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import gpu_stages
from benchmarks.gpu_stages import Step

ROOT = Path(__file__).resolve().parents[1]
SHORTEST = 20  # seconds; with less left, a step is not started
PATIENCE = 5.0  # seconds between the request to end and the kill
NO_TIME = "no time left"
OUT_OF_TIME = 3  # exit code
TAIL = 4  # lines of a step's output in the summary


@dataclass
class Stage:
    """A stage under way: where its results go, and when it must end."""

    number: int
    out: Path
    until: float  # of time.monotonic()
    rehearse: bool = False
    steps: dict[str, dict] = field(default_factory=dict)
    exit_code: int | None = None  # None until it has ended
    signal: int | None = None  # that asked it to end
    lock: threading.Lock = field(default_factory=threading.Lock)  # of what follows

    @property
    def log(self) -> Path:
        return self.out / f"stage_{self.number}.log"

    def record(self, name: str = "", **values: Any) -> None:
        """Add values to the results of a step, and write all results so far, atomically."""
        path = self.out / f"stage_{self.number}.json"
        draft = path.with_suffix(".part")
        with self.lock:
            if name:
                self.steps.setdefault(name, {}).update(values)
            results = {"rehearsal": self.rehearse, "exit_code": self.exit_code, "steps": self.steps}
            draft.write_text(json.dumps(results, indent=1))
            os.replace(draft, path)

    def end(self, step: Step, output: bytes, outcome: str) -> None:
        """Keep the output of a step, and print its last lines."""
        last = output.decode(errors="replace").splitlines()[-TAIL:]
        with self.lock, self.log.open("ab") as log:
            log.write(f"\n==== {step.name}\n".encode() + output)
        self.say(f"== {step.name}: {outcome}", *(f"   {line[:200]}" for line in last))

    def say(self, *lines: str) -> None:
        """Print lines that no other step's come between."""
        with self.lock:
            print("\n".join(lines), flush=True)

    def stop(self, number: int, _) -> None:
        """Have no time left, since a signal said so: all steps end."""
        self.until, self.signal = time.monotonic(), number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("stage", type=int, choices=[1, 2, 3])
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--seconds", type=float, required=True, help="for the whole stage")
    parser.add_argument("--reference", type=Path, default=ROOT / ".firstday")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with a tiny model")
    parser.add_argument("--only", default="", help="run the steps whose names contain this text")
    flags = parser.parse_args()
    flags.out.mkdir(parents=True, exist_ok=True)
    stage = Stage(flags.stage, flags.out, time.monotonic() + flags.seconds, flags.rehearse)
    stage.log.unlink(missing_ok=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stage.stop)
    with tempfile.TemporaryDirectory() as scratch:
        steps = gpu_stages.steps(flags.stage, Path(scratch), flags.reference, flags.rehearse)
        return run_stage(stage, [step for step in steps if flags.only in step.name])


def run_stage(stage: Stage, steps: list[Step]) -> int:
    """Run the steps and return the exit code of the stage."""
    for _, group in itertools.groupby(steps, lambda step: bool(step.lane)):
        lanes: dict[str, list[Step]] = {}
        for step in group:
            lanes.setdefault(step.lane, []).append(step)
        with ThreadPoolExecutor(len(lanes)) as pool:
            running = [pool.submit(run_lane, stage, lane) for lane in lanes.values()]
            while wait(running, timeout=1.0).not_done:  # a signal may come just before it waits
                pass
            if not all(lane.result() for lane in running):
                break
    results = stage.steps.values()
    stage.exit_code = 0
    if any(result.get("left_out") == NO_TIME for result in results):
        stage.exit_code = OUT_OF_TIME
    if any("failed" in result for result in results):
        stage.exit_code = 1
    if stage.signal:
        stage.exit_code = 128 + stage.signal
    stage.record()
    return stage.exit_code


def run_lane(stage: Stage, steps: Iterable[Step]) -> bool:
    """Run steps one after the other; return False if one failed that the others require."""
    for step in steps:
        reason = left_out(stage, step)
        if reason:
            stage.record(step.name, left_out=reason)
            stage.say(f"left out: {step.name}: {reason}")
        elif not run_step(stage, step) and step.required:
            return False
    return True


def left_out(stage: Stage, step: Step) -> str | None:
    """Return why a step cannot run, or None."""
    if step.program and not shutil.which(step.program):
        return f"{step.program} is not here"
    if step.module and not importlib.util.find_spec(step.module):
        return f"{step.module} is not installed"
    if stage.rehearse and step.gpu_only:
        return "needs a GPU"
    if stage.until - time.monotonic() < SHORTEST:
        return NO_TIME
    return None


def run_step(stage: Stage, step: Step) -> bool:
    """Run a step and record it; return whether it succeeded."""
    started = time.monotonic()
    limit = stage.until - started
    if not stage.rehearse:  # a CPU may take far longer
        limit = min(limit, step.limit)
    stage.record(step.name, command=" ".join(step.command), limit_s=round(limit))
    stage.say(f"== {step.name} (at most {limit:.0f} s)")
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            env={**os.environ, **step.environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        code = None
        try:
            while code is None and time.monotonic() < min(started + limit, stage.until):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(timeout=1.0)
                read_figures(stage, step)
            out_of_time = code is None and time.monotonic() >= stage.until
        finally:
            end_session(process)
        log.seek(0)
        output = log.read()
    read_figures(stage, step)
    keep_trace(stage, step)
    succeeded = step.error.encode() in output and code == 2 if step.error else code == 0
    seconds, outcome = round(time.monotonic() - started, 1), {}
    if out_of_time:
        outcome = {"left_out": NO_TIME}
    elif not succeeded:
        outcome = {"failed": f"exceeded {limit:.0f} s" if code is None else f"exit code {code}"}
    stage.record(step.name, seconds=seconds, exit_code=code, **outcome)
    stage.end(step, output, f"{'; '.join(outcome.values()) or 'done'} after {seconds} s")
    return succeeded


def read_figures(stage: Stage, step: Step) -> None:
    """Add what the step has written so far to the results."""
    try:
        figures = json.loads(step.figures.read_text())
    except (OSError, ValueError):  # not written yet, or half of it
        return
    if stage.steps[step.name].get("figures") != figures:
        stage.record(step.name, figures=figures)


def end_session(process: subprocess.Popen) -> None:
    """End the process and all that it started, first politely."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=PATIENCE)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            pass


def keep_trace(stage: Stage, step: Step) -> None:
    """Copy the trace that a step wrote, if any, compressed."""
    traces = list(step.trace.rglob("*.xplane.pb")) if step.trace else []
    for trace in traces[:1]:
        path = stage.out / f"stage_{stage.number}_trace.xplane.pb.gz"
        path.write_bytes(gzip.compress(trace.read_bytes()))


if __name__ == "__main__":
    sys.exit(main())
