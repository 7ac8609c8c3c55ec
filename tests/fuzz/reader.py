"""Read the cases of a parser in processes of limited memory and time, which may die of them.

    python -m tests.fuzz.reader "COCO json" 10000        reads so many cases, prints the outcomes
    python -m tests.fuzz.reader "COCO json" file PATH    reads a file that an outcome names

Without arguments, lines `["COCO json", 200]` are read from stdin; each is answered with an outcome.
"""

import json
import logging
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import cv2
from absl import logging as absl_logging
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.parsers import PARSERS, Parser, set_up

MEMORY = 1 << 30  # bytes beyond what the process has before the first case
# For a case: of the processor, which a busy machine does not change, and at all, for what waits.
CPU_SECONDS, SECONDS = 5, 30
GOOD = ("accepted", "refused")
LINE = 1500  # characters of a message, with the names of files


class Hang(BaseException):
    """Raised by the alarms; no reader catches it."""


def end_of(parser: Parser, path: Path) -> tuple[str, str]:
    """How the reading of a file ends, and details where it ends badly."""
    _set_alarms(CPU_SECONDS, SECONDS)
    try:
        parser.read(path)
        return "accepted", ""
    except AssertionError as error:
        return "wrong", f"{error} {_place(error)}"
    except (ValueError, OSError) as error:
        text = " ".join(str(error).split())
        if len(str(error)) > LINE:
            return "long", f"{type(error).__name__}: {text[:200]} {_place(error)}"
        if path.name in text or str(path.parent) in text:
            return "refused", ""
        return "unnamed", f"{type(error).__name__}: {text[:200]} {_place(error)}"
    except MemoryError as error:
        return "memory", _place(error)
    except Hang as error:
        return "hang", _place(error)
    except BaseException as error:
        return "traceback", f"{type(error).__name__}: {str(error)[:200]} {_place(error)}"
    finally:
        _set_alarms(0, 0)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "mask_rcnn_jax" in f.filename] or frames
    return f"({Path(ours[-1].filename).name}:{ours[-1].lineno})"


def read_cases(parser: Parser, count: int, skip: int, folder: Path, tell) -> None:
    """Read cases number `skip + 1` to `count` in a folder; `tell(number, end, details, path)` is
    called before each, with the end None, and after it."""
    number = 0

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(parser.cases)
    def draw(case):
        nonlocal number
        number += 1
        if number <= skip:
            return
        path = parser.write(folder, case)
        tell(number, None, "", path)
        tell(number, *end_of(parser, path), path)

    draw()


def _alarm(*_):
    raise Hang


def _set_alarms(cpu_seconds: float, seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, _alarm)
    signal.signal(signal.SIGPROF, _alarm)


def _child(parser: Parser, count: int, skip: int, folder: Path, pipe: int) -> None:
    """Never returns."""
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)  # decoders write there
        _limit()
        base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        def tell(number, end, details, path):
            peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) // 1024
            message = [number, end, details, str(path), peak]
            os.write(pipe, (json.dumps(message) + "\n").encode())

        read_cases(parser, count, skip, folder, tell)
        os._exit(0)
    except BaseException:
        message = [0, "harness", traceback.format_exc()[-1500:], "", 0]
        os.write(pipe, (json.dumps(message) + "\n").encode())
        os._exit(1)


def outcome(name: str, count: int) -> dict:
    """How many cases of a parser ended how, those that ended badly with a copy of their file, and
    peak memory in MiB."""
    ends: Counter[str] = Counter()
    bad, skip, peak, started = [], 0, 0, time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="fuzz"))
    set_up(folder)

    def note(number: int, end: str, details: str, path: str) -> None:
        ends[end] += 1
        if end not in GOOD:
            bad.append([number, end, details, _kept(name, number, path)])

    while skip < count and not ends["harness"]:
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            _child(PARSERS[name], count, skip, folder, writing)
        os.close(writing)
        end, current, path, buffer = "crash", skip, "", b""
        while True:
            # Cases that are skipped are drawn again, which takes time.
            patience = 2 * SECONDS if path else 2 * SECONDS + 0.1 * skip
            if not select.select([reading], [], [], patience)[0]:
                end = "hang"
                os.kill(pid, signal.SIGKILL)
                break
            data = os.read(reading, 1 << 16)
            if not data:
                break
            *lines, buffer = (buffer + data).split(b"\n")
            for number, reached, details, path, used in map(json.loads, lines):
                current, peak = number, max(peak, used)
                if reached is not None:
                    skip = number
                    note(number, reached, details, path)
        os.close(reading)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status == 0:
            break
        if skip < current and not ends["harness"]:
            note(current, end, f"signal {-status}", path)
        skip = max(current, skip)
    shutil.rmtree(folder, ignore_errors=True)
    seconds = round(time.monotonic() - started, 1)
    return {"ends": dict(ends), "bad": bad, "peak": peak, "seconds": seconds}


def _kept(name: str, number: int, path: str) -> str:
    """A copy of a file, with others whose names begin as its does."""
    if not path:
        return ""
    folder = Path(tempfile.gettempdir()) / "fuzz_bad" / name.replace(" ", "_") / str(number)
    folder.mkdir(parents=True, exist_ok=True)
    for file in Path(path).parent.glob(f"{Path(path).name}*"):
        shutil.copy(file, folder)
    return str(folder / Path(path).name)


def _one(name: str, path: str) -> None:
    """Read a copy of a file beside what files refer to, and show how that ends."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz"))
    set_up(folder)
    for file in Path(path).parent.glob(f"{Path(path).name}*"):
        shutil.copy(file, folder)
    _limit()
    _set_alarms(CPU_SECONDS, SECONDS)
    PARSERS[name].read(folder / Path(path).name)
    print("accepted")


def main() -> None:
    warnings.simplefilter("ignore")
    absl_logging.set_verbosity(absl_logging.FATAL)
    logging.disable(logging.CRITICAL)
    cv2.setNumThreads(1)
    match sys.argv[1:]:
        case [name, "file", path]:
            _one(name, path)
        case [name, count]:
            print(json.dumps(outcome(name, int(count)), indent=1))
        case _:
            read_cases(PARSERS["images"], 1, 1, Path(), None)  # prepares Hypothesis for all forks
            for line in sys.stdin:
                print(json.dumps(outcome(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
