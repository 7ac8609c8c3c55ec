"""Measure how many operations a processor core can do: the yardstick of figures on a CPU.

    python -m benchmarks.core_peak --json peak.json

Compiles `core_peak.c`, loops of multiply-adds whose data stay in registers, and runs it alone and
then once for each core at the same time. Rates are billions of operations per processor second, a
multiply-add being two, so that other load on the machine hardly matters. A precision that the
processor has no instruction for is left out. Needs a C compiler (`cc`, or what CC names).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.peers import processor

SOURCE = Path(__file__).with_suffix(".c")


def build(folder: str | os.PathLike) -> Path:
    """Compile the loops for this processor.

    Raises ValueError if there is no compiler, or it does not know the instructions.
    """
    compiler, program = os.environ.get("CC", "cc"), Path(folder) / "core_peak"
    command = [compiler, "-O2", "-march=native", "-o", str(program), str(SOURCE)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ValueError(f"{compiler}: no such C compiler; CC may name another") from error
    except subprocess.CalledProcessError as error:
        first = (error.stderr.splitlines() or [""])[0]
        raise ValueError(f"{compiler} cannot compile {SOURCE.name}: {first}") from error
    return program


def measure(program: Path, copies: int) -> list[dict[str, float]]:
    """Run copies at the same time; return for each its rate by precision."""
    options = {"stdout": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([program], **options) for _ in range(copies)]
    outputs = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise ValueError(f"{SOURCE.name} ended with {[p.returncode for p in running]}")
    lines = [[line.split() for line in output.splitlines()] for output in outputs]
    return [{precision: float(rate) for precision, rate in one} for one in lines]


def figures(cores: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        program = build(folder)
        [alone], together = measure(program, 1), measure(program, cores)
    return {
        "one_core": alone,
        "all_cores": {name: round(sum(one[name] for one in together), 1) for name in alone},
        "cores": cores,
        **processor(),
        "date": time.strftime("%Y-%m-%d"),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", help="write the figures to this file")
    json_file = parser.parse_args(arguments).json
    try:
        text = json.dumps(figures(len(os.sched_getaffinity(0))), indent=1)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(text)
    if json_file:
        Path(json_file).write_text(text + "\n")


if __name__ == "__main__":
    main()
