"""Measure import times and the time from command start to first result.

    python benchmarks/cold_start.py --size 832,1344 --repeats 3 --json cold.json

Prints two tables: import times; and seconds from process start to the end of the first training
step and to the end of `infer` with one image, with an empty compile cache and with the cache filled
by that run. Runs the user's commands with configs/coco.py in float32, batch size 1 and generated
images. Values are medians over fresh processes; files have been read before, so disk speed matters
little.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mask_rcnn_jax.benchmarking.loading import write_images

ROOT = Path(__file__).resolve().parents[1]
ENTRIES = ("", ".train", ".evaluate", ".infer", ".export", ".prepare")
MODULES = ["jax", *(f"mask_rcnn_jax{entry}" for entry in ENTRIES)]
FIRST_STEP = "first step done"  # logged by `train`


def main(arguments: argparse.Namespace) -> None:
    imports = {name: times(import_seconds, name, arguments.repeats) for name in MODULES}
    print("| import | s |\n|---|---|")
    for name, values in imports.items():
        print(f"| `{name}` | {text(values)} |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        starts = first_results(Path(folder), arguments.size, arguments.repeats)
    print("\n| s from the start to | compile cache empty | filled |\n|---|---|---|")
    for name, (empty, filled) in starts.items():
        print(f"| {name} | {text(empty)} | {text(filled)} |", flush=True)
    if arguments.json:
        starts = {n: {"empty": empty, "filled": filled} for n, (empty, filled) in starts.items()}
        report = {"date": time.strftime("%Y-%m-%d"), "size": arguments.size}
        report |= {"import_s": imports, "start_s": starts}
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")


def times(measure, name: str, repeats: int) -> list[float]:
    measure(name)  # load the files into the page cache
    return [measure(name) for _ in range(repeats)]


def import_seconds(module: str) -> float:
    """Time an import in a new interpreter, excluding interpreter startup."""
    program = (
        "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
    )
    return float(subprocess.check_output([sys.executable, "-c", program.format(module)], cwd=ROOT))


def first_results(
    folder: Path, size: str, repeats: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Return {name: (seconds with an empty cache, seconds with a filled cache)}."""
    json_path = write_images(folder, 4)
    recipe = ["--config=configs/coco.py", "--config.train.precision=float32"]
    recipe += [f"--config.data.image_size=({size})", "--config.data.num_workers=0"]
    recipe += ["--config.train.batch_size=1", "--config.train.steps=1"]
    recipe += ["--config.eval.batch_size=1", "--config.eval.max_images=1"]
    recipe += ["--config.eval.loss_images=0", "--config.eval.pictures=0"]
    for split in ("train", "val"):
        recipe += [f"--config.data.{split}_json={json_path}"]
        recipe += [f"--config.data.{split}_images={folder}"]
    run = folder / "run"
    run_command("train", *recipe, f"--workdir={run}", f"--compile_cache={folder / 'unused'}")

    steps, predictions = ([], []), ([], [])
    for repeat in range(repeats):
        for filled in (0, 1):
            cache = f"--compile_cache={folder / f'cache_{repeat}'}"
            workdir = f"--workdir={folder / f'run_{repeat}_{filled}'}"
            steps[filled].append(until_first_step("train", *recipe, workdir, cache))
        for filled in (0, 1):
            cache = f"--compile_cache={folder / f'infer_cache_{repeat}'}"
            paths = f"--workdir={run}", f"--input={folder / '0.jpg'}", f"--output={folder / 'out'}"
            started = time.perf_counter()
            run_command("infer", *paths, cache)
            predictions[filled].append(time.perf_counter() - started)
    return {"the first training step": steps, "the end of `infer`, one image": predictions}


def run_command(entry: str, *arguments: str) -> None:
    command = [sys.executable, "-m", f"mask_rcnn_jax.{entry}", *arguments]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"error: {entry} ended with {done.returncode}: {done.stderr.strip()}")


def until_first_step(entry: str, *arguments: str) -> float:
    """Return seconds until `train` logs its first step, then kill it."""
    command = [sys.executable, "-m", f"mask_rcnn_jax.{entry}", *arguments]
    started = time.perf_counter()
    log = []
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        for line in process.stderr:
            log.append(line)
            if FIRST_STEP in line:
                seconds = time.perf_counter() - started
                process.kill()
                return seconds
    raise SystemExit(f"error: {entry} ended with {process.returncode}: {''.join(log).strip()}")


def text(values: list[float]) -> str:
    """Format the median, followed by the extremes if there are several values."""
    median = f"{statistics.median(values):.2f}"
    return median if len(values) == 1 else f"{median} ({min(values):.2f} to {max(values):.2f})"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="832,1344", help="height,width of the canvas")
    parser.add_argument("--repeats", type=int, default=3, help="processes per measurement")
    parser.add_argument("--json", help="write the figures to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(parse())
