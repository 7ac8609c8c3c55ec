"""Seconds from a command's start to its end, or to a line of its output, with no program compiled
before and with those that are.

    python -m benchmarks.cold_start [--until TEXT] [--times N] -- COMMAND...

NEW in COMMAND becomes a folder of its own in each start. Each of the N times (3), the command
starts with an empty `--compile_cache` and then with the same one. Prints seconds, and those of the
processor, of each start, and the medians. With --until, the command receives a SIGTERM at that
line, and the processor's seconds include its end.

    python -m benchmarks.cold_start -- infer --weights W --input photo.jpg --output NEW
    python -m benchmarks.cold_start --until "step 1 of" -- train --config finetune --workdir NEW ..
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from statistics import median


def start(command: list[str], until: str) -> tuple[float, float]:
    """Return seconds, and seconds of the processor, of one start."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout
    lines = []
    for line in process.stdout:
        lines.append(line)
        if until and until in line:
            break
    elapsed = time.perf_counter() - started
    if is_there := bool(until) and until in "".join(lines[-1:]):
        process.terminate()
    process.communicate()
    if not is_there and (until or process.returncode):
        sys.exit("".join(lines[-5:]) or f"no output of {command}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = sum(getattr(after, f) - getattr(before, f) for f in ("ru_utime", "ru_stime"))
    return elapsed, processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--until", default="")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {"cold": [], "warm": []}
    for _ in range(args.times):
        with tempfile.TemporaryDirectory() as scratch:
            for state, figures in found.items():
                given = [part.replace("NEW", f"{scratch}/{state}") for part in args.command]
                cache = f"--compile_cache={scratch}/compiled"
                command = [sys.executable, "-m", "mask_rcnn_jax", *given, cache]
                figures.append(start(command, args.until))
                print(f"{state}: {figures[-1][0]:.1f} s, {figures[-1][1]:.1f} of the processor")
    for state, figures in found.items():
        elapsed, processor = map(median, zip(*figures, strict=True))
        print(f"{state}, median of {args.times}: {elapsed:.1f} s, {processor:.1f} of the processor")


if __name__ == "__main__":
    main()
