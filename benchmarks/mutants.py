"""Faults put into the package one at a time, and how many of them the tests catch.

python -m benchmarks.mutants list              the faults that a seed draws, as a table
python -m benchmarks.mutants reach --out DIR   run the default suite, note the lines of each file
python -m benchmarks.mutants run --reach DIR --json FILE [--slow]    test each fault

A fault changes one expression or statement inside a function; mutant_kinds.py says which and how.
The draw goes around all pairs of package and kind and depends on the seed and the sources alone.
`--again FILE` takes the faults of an earlier run instead and starts with the tests that caught them
then; it finds them by function and edit, so files may have moved. Each fault is tested in a copy of
the repository by the test files that run its line, those named after its module and package first,
until the first test fails. `reach` needs Python 3.12 (sys.monitoring); `--slow` adds slow tests.

Tools such as mutmut and cosmic-ray know no axes, masks, normalizers or gradients, and run all tests
for each fault.
"""

import argparse
import atexit
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.mutant_kinds import PACKAGE, ROOT, Fault, draw, find_again

LIMITS = 300, 3600  # seconds for one test and for all of one fault
STARTED = time.time_ns()  # of this process: two may have one number
RUN: dict[str, set] = defaultdict(set)  # lines that this process runs, for each test file


def watch() -> None:
    """Note the lines of the package that this process runs; once for each test file."""
    tool, here = sys.monitoring.COVERAGE_ID, str(ROOT / PACKAGE)

    def line_runs(code, line):
        if code.co_filename.startswith(here):
            test = os.environ.get("MUTANTS_TEST", "")
            RUN[test].add((os.path.relpath(code.co_filename, ROOT), line))
        return sys.monitoring.DISABLE

    sys.monitoring.use_tool_id(tool, "mutants")
    sys.monitoring.register_callback(tool, sys.monitoring.events.LINE, line_runs)
    sys.monitoring.set_events(tool, sys.monitoring.events.LINE)
    atexit.register(save)


def save() -> None:
    """Write what `watch` noted so far; a later call replaces it."""
    path = Path(os.environ["MUTANTS_REACH"], f"{STARTED}-{os.getpid()}.json")
    path.write_text(json.dumps({test: sorted(found) for test, found in RUN.items()}))


def pytest_runtest_logstart(nodeid, location):
    """As a plugin of `reach`: tell `watch` which test file runs from here on."""
    test = nodeid.partition("::")[0]
    if os.environ.get("MUTANTS_TEST") != test:
        os.environ["MUTANTS_TEST"] = test
        sys.monitoring.restart_events()


def pytest_sessionfinish():
    """As a plugin of `reach`: workers of pytest-xdist need not end by `atexit`."""
    save()


def reach(folder: Path, jobs: int) -> int:
    """Run the default suite and write what `reaching` reads; returns pytest's exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.json"):  # of an earlier run
        path.unlink()
    with tempfile.TemporaryDirectory() as start:
        hook = "from benchmarks import mutants\nmutants.watch()\n"
        Path(start, "sitecustomize.py").write_text(hook)  # every process of the tests imports it
        environment = os.environ | {
            "MUTANTS_REACH": str(folder.resolve()),
            "PYTHONPATH": os.pathsep.join((start, str(ROOT))),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.mutants"]
        command += ["-W", "ignore:Module already imported"]  # this one, by the hook
        # JAX's profiler does not survive sys.monitoring.
        command += ["--ignore", "tests/benchmarking/test_profile.py"]
        options = ["-n", str(jobs), "--dist", "loadfile", "--durations=0", "-vv"]
        with open(folder / "log", "w") as output:
            return subprocess.run(
                [*command, *options], cwd=ROOT, env=environment, stdout=output, stderr=output
            ).returncode


def reaching(folder: Path) -> dict[tuple[str, int], set[str]]:
    """The test files that run each line (path, number)."""
    files = defaultdict(set)
    for path in folder.glob("*.json"):
        for test, lines in json.loads(path.read_text()).items():
            for source, line in lines if test else ():
                files[source, line].add(test)
    return files


def in_order(fault: Fault, tests: set[str], seconds: dict[str, float], caught: str) -> list[str]:
    """What caught it before, files named after the module, then its package; quick ones first."""
    name = Path(fault.path).stem.split("_")[0]

    def rank(test: str):
        parts = Path(test).parts
        at_home = fault.package in parts
        named = at_home and name in parts[-1]
        return (f" {test}::" not in caught, not named, not at_home, seconds.get(test, 0.0))

    return sorted(tests, key=rank)


def seconds_of(log: Path) -> dict[str, float]:
    """Seconds of each test file, from pytest's list of durations."""
    seconds: dict[str, float] = defaultdict(float)
    for line in log.read_text().splitlines():
        words = line.split()
        if len(words) == 3 and words[0].endswith("s") and words[1] in ("call", "setup", "teardown"):
            seconds[words[2].partition("::")[0]] += float(words[0][:-1])
    return seconds


def first_failure(tests: list[str], copy: Path, cache: Path, slow: bool) -> str | None:
    """The first test that fails in a copy of the repository, as pytest reports it.

    Raises RuntimeError if pytest ends in another way.
    """
    environment = os.environ | {
        "PYTHONPATH": str(copy),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "MASK_RCNN_SHARED": os.environ.get("MASK_RCNN_SHARED", str(ROOT.parent / "shared")),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += [f"--timeout={LIMITS[0]}", "--tb=no", "-rfE", *["--slow"] * slow, *tests]
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMITS[1]
        )
    except subprocess.TimeoutExpired:
        return f"no end within {LIMITS[1]} s"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode and not failed:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    return failed[0] if done.returncode else None


def test_fault(fault: Fault, tests: list[str], copy: Path, cache: Path, slow: bool) -> dict:
    """Run the test files on a copy of the repository with this fault.

    Raises RuntimeError for a failure that is there without the fault, too.
    """
    target, started = copy / fault.path, time.monotonic()
    original = target.read_bytes()
    before, _, after = fault.span(original.splitlines(True))
    try:
        target.write_bytes(before + fault.new.encode() + after)
        caught = first_failure(tests, copy, cache, slow) if tests else None
    finally:
        target.write_bytes(original)
    if caught and caught.startswith(("FAILED", "ERROR")):
        name = caught.partition(" ")[2].partition(" - ")[0]
        if first_failure([name], copy, cache, slow):
            raise RuntimeError(f"{name} fails without a fault")
    return {"caught": caught, "files": len(tests), "seconds": time.monotonic() - started}


def run(
    faults: list[Fault], folder: Path, out: Path, jobs: int, slow: bool, earlier: dict[tuple, str]
) -> None:
    """Test all faults, in as many copies as there are jobs, and write what caught each."""
    files, seconds = reaching(folder), seconds_of(folder / "log")
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    results: dict[int, dict] = {}
    with tempfile.TemporaryDirectory() as folder_of_copies:
        base = Path(folder_of_copies)
        free = [base / str(job) for job in range(jobs)]
        for copy in free:
            copy.mkdir()
            archive = subprocess.run(
                ["tar", "c", *listed], cwd=ROOT, check=True, capture_output=True
            )
            subprocess.run(["tar", "x"], cwd=copy, input=archive.stdout, check=True)

        def one(number: int) -> None:
            fault, copy = faults[number], free.pop()
            first, last = fault.reached
            places = [(fault.path, line) for line in range(first, last + 1)]
            found = {test for place in places for test in files.get(place, ())}
            found = {name for name in found if (copy / name).exists()}
            tests = in_order(fault, found, seconds, earlier.get(fault.edit) or "")
            try:
                result = test_fault(fault, tests, copy, base / "compiled", slow)
            finally:
                free.append(copy)
            named = {"fault": str(fault), "path": fault.path, "edit": fault.edit}
            results[number] = named | result
            print(f"{result['seconds']:4.0f} s  {fault}\n        {result['caught']}", flush=True)
            out.write_text(json.dumps([results[k] for k in sorted(results)], indent=1) + "\n")

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, range(len(faults))))
    caught = sum(result["caught"] is not None for result in results.values())
    print(f"{caught} of {len(faults)} caught")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("list", "reach", "run"))
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reach", type=Path, help="folder written by `reach`")
    parser.add_argument("--out", type=Path, help="folder that `reach` writes")
    parser.add_argument("--json", type=Path, default=Path("mutants.json"))
    parser.add_argument("--again", type=Path, metavar="JSON", help="faults of an earlier run")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--slow", action="store_true", help="with the slow tests, as nightly")
    options = parser.parse_args()
    needed = {"reach": "out", "run": "reach"}.get(options.action)
    if needed and not getattr(options, needed):
        parser.error(f"{options.action} needs --{needed}")
    if options.action == "reach":
        return reach(options.out, options.jobs)
    earlier = json.loads(options.again.read_text()) if options.again else []
    faults = find_again(earlier) if options.again else draw(options.count, options.seed)
    if options.action == "list":
        print("\n".join(map(str, faults)))
    else:
        caught = {tuple(entry["edit"]): entry["caught"] for entry in earlier}
        run(faults, options.reach, options.json, options.jobs, options.slow, caught)
    return 0


if __name__ == "__main__":
    sys.exit(main())
