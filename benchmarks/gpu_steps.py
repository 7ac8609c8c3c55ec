"""Run a stage of `benchmarks/gpu_check.sh`: its steps in turn, each within its own time limit.

    python -m benchmarks.gpu_steps 1 --out FOLDER --seconds 560

FOLDER receives `stage_1.log`, the output of all steps, and `stage_1.json`: the exit code, seconds
and figures of each step, rewritten as figures arrive, so that a machine taken away loses none. A
step that fails or exceeds its limit does not stop the others. The exit code, also in the JSON, is 0
if all that this machine can run succeeded, 1 if a step failed, and 3 if none did but the stage's
time did not suffice for all. `--rehearse` runs every step it can on a CPU, with a tiny model.
"""

import argparse
import contextlib
import gzip
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

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

    @property
    def log(self) -> Path:
        return self.out / f"stage_{self.number}.log"

    def save(self) -> None:
        """Write all results so far, atomically."""
        path = self.out / f"stage_{self.number}.json"
        draft = path.with_suffix(".part")
        results = {"rehearsal": self.rehearse, "exit_code": self.exit_code, "steps": self.steps}
        draft.write_text(json.dumps(results, indent=1))
        os.replace(draft, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("stage", type=int, choices=[1, 2, 3])
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--seconds", type=float, required=True, help="for the whole stage")
    parser.add_argument("--reference", type=Path, default=ROOT / ".firstday")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with a tiny model")
    parser.add_argument("--only", default="", help="run the steps whose names contain this text")
    flags = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the step too
    flags.out.mkdir(parents=True, exist_ok=True)
    stage = Stage(flags.stage, flags.out, time.monotonic() + flags.seconds, flags.rehearse)
    stage.log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        steps = gpu_stages.steps(flags.stage, Path(scratch), flags.reference, flags.rehearse)
        return run_stage(stage, [step for step in steps if flags.only in step.name])


def run_stage(stage: Stage, steps: list[Step]) -> int:
    """Run the steps and return the exit code of the stage."""
    for step in steps:
        reason = left_out(stage, step)
        if reason:
            stage.steps[step.name] = {"left_out": reason}
            print(f"left out: {step.name}: {reason}", flush=True)
            stage.save()
        elif not run_step(stage, step) and step.required:
            break
    results = stage.steps.values()
    stage.exit_code = 0
    if any(result.get("left_out") == NO_TIME for result in results):
        stage.exit_code = OUT_OF_TIME
    if any("failed" in result for result in results):
        stage.exit_code = 1
    stage.save()
    return stage.exit_code


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
    left = stage.until - time.monotonic()
    limit = left if stage.rehearse else min(left, step.limit)  # a CPU may take far longer
    result = stage.steps[step.name] = {"command": " ".join(step.command), "limit_s": round(limit)}
    print(f"== {step.name} (at most {limit:.0f} s)", flush=True)
    started = time.monotonic()
    with stage.log.open("ab") as log:
        log.write(f"\n==== {step.name}\n".encode())
        log.flush()
        begin = log.tell()
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
            while code is None and time.monotonic() - started < limit:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(timeout=1.0)
                read_figures(stage, step)
        finally:
            end_session(process)
    read_figures(stage, step)
    keep_trace(stage, step)
    output = stage.log.read_bytes()[begin:].decode(errors="replace")
    succeeded = step.error in output and code == 2 if step.error else code == 0
    result["seconds"] = round(time.monotonic() - started, 1)
    result["exit_code"] = code
    if code is None and limit == left:
        result["left_out"] = NO_TIME
    elif not succeeded:
        result["failed"] = f"exceeded {limit:.0f} s" if code is None else f"exit code {code}"
    stage.save()
    outcome = result.get("failed") or result.get("left_out") or "done"
    print(f"   {outcome} after {result['seconds']} s", flush=True)
    for line in output.splitlines()[-TAIL:]:
        print(f"   {line[:200]}", flush=True)
    return succeeded


def read_figures(stage: Stage, step: Step) -> None:
    """Add what the step has written so far to the results."""
    try:
        figures = json.loads(step.figures.read_text())
    except (OSError, ValueError):  # not written yet, or half of it
        return
    if stage.steps[step.name].get("figures") != figures:
        stage.steps[step.name]["figures"] = figures
        stage.save()


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
