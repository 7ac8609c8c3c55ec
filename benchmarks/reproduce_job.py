"""Reproduce the tables that NVIDIA published for its three Mask R-CNN examples.

    DATA=/data/coco WEIGHTS=/data/weights OUT=/runs/reproduce launch/reproduce.sh

A part is a program whose figures become a file in OUT/parts. One that is there is not repeated, so
the same command goes on where it was stopped; one that fails is named, and the others go on.
OUT/report.md has the published tables with ours beside them, see `reproduce`. Exit codes: 0
finished, 1 a part failed, 2 a user's mistake, 75 stopped early and to be started again, 130 Ctrl-C.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.reproduce import check_devices, report
from benchmarks.reproduce_parts import DATA, Part, Settings, check_weights, parts, read_settings

STOPPED_EARLY = os.EX_TEMPFAIL  # 75, also of a training


class Stopped(Exception):
    """The job ends here and can go on later."""


class Programs:
    """Runs one program at a time and passes on what tells the job to stop."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._running: subprocess.Popen | None = None

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        before = {
            number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: object) -> None:
        self.signal = number
        # SIGTERM also for Ctrl-C, of which a terminal tells the program itself.
        if self._running:
            self._running.terminate()

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Raise Stopped if the job or the program was told to stop, ValueError if it failed."""
        if self.signal is not None:
            raise Stopped
        self._running = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        if self.signal is not None:  # before there was a program to tell
            self._running.terminate()
        code, self._running = self._running.wait(), None
        if code and (self.signal is not None or code in (STOPPED_EARLY, -signal.SIGTERM)):
            raise Stopped
        if code:
            raise ValueError(f"exit code {code}")


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    settings = read_settings(arguments, environ)
    check_weights(settings)
    environment = environments(settings, environ)
    programs, before = Programs(), milestones(settings.out)
    with programs.stoppable():
        try:
            failed = run_parts(parts(settings), settings.out, programs, environment)
        except Stopped:
            if programs.signal == signal.SIGINT:
                return 128 + signal.SIGINT
            _say("stopped early; the same command goes on")
            requeue(environ, progress=bool(milestones(settings.out) - before))
            return STOPPED_EARLY
    if failed:
        print(f"error: failed: {' '.join(failed)}", file=sys.stderr)
        return 1
    _say(str(settings.out / "report.md"))
    return 0


def run_parts(
    todo: Iterable[Part],
    out: Path,
    programs: Programs,
    environment: Mapping[int, Mapping[str, str]],
) -> list[str]:
    """Run the parts that have no file, and keep the report; returns the names of those that failed.

    Args:
        environment: of a program for each number of GPUs.
    """
    failed = []
    for part in todo:
        file = out / "parts" / part.name
        if file.exists():
            continue
        _say(f"== {part.name}")
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            programs.run(part.command, environment[part.gpus])
            figures = part.figures()
            check_devices(part.name, figures, part.gpus)
        except (OSError, ValueError) as error:
            _say(f"FAILED: {part.name}: {error}")
            failed.append(part.name)
            if part.name == DATA:
                break  # nothing goes without it
            continue
        _write(file, json.dumps(figures, indent=1) + "\n")
        file.with_name(f"{file.name}.new").unlink(missing_ok=True)
        _write(out / "report.md", report(out / "parts"))
    return failed


def environments(settings: Settings, environ: Mapping[str, str]) -> dict[int, dict[str, str]]:
    """Environments in which a program has each number of GPUs, or as many devices of a CPU.

    ValueError if this machine has fewer; a program would take what there is.
    """
    if settings.rehearse:
        cpu = dict(environ) | {"JAX_PLATFORMS": "cpu"}
        return {gpus: cpu | {"JAX_NUM_CPU_DEVICES": str(gpus)} for gpus in settings.gpus}
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        shown = "nvidia-smi"
        found = re.findall(r"^GPU (\d+):", _output("nvidia-smi", "-L"), re.MULTILINE)
    else:
        shown = "CUDA_VISIBLE_DEVICES"
        found = [name for name in named.split(",") if name]
    if max(settings.gpus) > len(found):
        raise ValueError(f"GPUS has {max(settings.gpus)}, but {shown} names {len(found)}")
    return {
        gpus: dict(environ) | {"CUDA_VISIBLE_DEVICES": ",".join(found[:gpus])}
        for gpus in settings.gpus
    }


def _output(*command: str) -> str:
    """What a program prints, nothing if it is not there."""
    if not shutil.which(command[0]):
        return ""
    return subprocess.run(command, text=True, stdout=subprocess.PIPE).stdout


def milestones(out: Path) -> set[Path]:
    """The finished parts and all checkpoints: if none is new, a start has achieved nothing."""
    checkpoints = (out / "runs").glob("*/checkpoints/*")
    return {*(out / "parts").rglob("*.json"), *(p for p in checkpoints if p.name.isdigit())}


def requeue(environ: Mapping[str, str], progress: bool) -> None:
    """Put a batch job of Slurm back into its queue, unless it was canceled or makes no progress."""
    if "SLURM_JOB_ID" not in environ:
        return
    job = environ["SLURM_JOB_ID"]
    state = dict(re.findall(r"(\w+)=(\S*)", _output("scontrol", "show", "job", job)))
    # scancel sends SIGTERM, too, but such a job is no longer RUNNING.
    if state.get("JobState") != "RUNNING" or state.get("BatchFlag") != "1":
        return
    if progress or state.get("PreemptTime", "None") != "None":
        subprocess.run(["scontrol", "requeue", job])
    else:
        print("error: not requeued: no part or checkpoint since this start", file=sys.stderr)


def _write(file: Path, text: str) -> None:
    """Write a file at once or not at all."""
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.write_text(text)
    temporary.replace(file)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:], os.environ))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
