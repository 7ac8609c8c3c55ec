"""Measure how step time and memory grow with images, size, objects and other counts.

    python benchmarks/growth.py --mode train --size 512,768 --steps 5 --json growth.json
    python benchmarks/growth.py --mode infer --axes images,classes

Each point changes one setting of the base: configs/coco.py in float32 with one image, 10 objects
and 80 classes. Each runs in a separate process, so that peak memory is measured per point. Prints a
table: median milliseconds and their multiple of the base, XLA's planned memory, the process's peak
memory (including Python, libraries and compilation), and FLOPs.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SIZES = ((256, 384), (512, 768), (832, 1344))
MAX_INSTANCES = 100  # more if there are more objects


def axes(mode: str) -> dict[str, dict[Any, dict[str, Any]]]:
    """Return {axis: {value: config changes}} for the axes that affect `mode`."""
    kind = {"train": "train", "infer": "test"}[mode]
    batch = {"train": "train", "infer": "eval"}[mode]

    def entry(name, *values):
        return {value: {name: value} for value in values}

    found = {
        "images": entry(f"{batch}.batch_size", 1, 2, 4),
        "size": {"x".join(map(str, size)): {"data.image_size": size} for size in SIZES},
        "candidates": entry(f"model.rpn.pre_nms_topk_{kind}", 500, 1000, 2000, 4000),
        "proposals": entry(f"model.rpn.post_nms_topk_{kind}", 250, 500, 1000, 2000),
        "classes": entry("model.num_classes", 1, 80, 1000),
    }
    if mode == "train":
        found["rois"] = entry("model.sampling.batch_size_per_image", 128, 256, 512, 1024)
        found["objects"] = {
            count: {"objects": count, "data.max_instances": max(count, MAX_INSTANCES)}
            for count in (1, 10, 100, 500)
        }
    else:
        found["detections"] = entry("eval.detections_per_image", 25, 50, 100, 200, 400)
    return found


def base(mode: str, size: tuple[int, int]) -> dict[str, Any]:
    """Return the config changes of the base point."""
    from_recipe = {
        "train": {
            "train.batch_size": 1,
            "model.rpn.pre_nms_topk_train": 2000,
            "model.rpn.post_nms_topk_train": 1000,
            "model.sampling.batch_size_per_image": 512,
        },
        "infer": {
            "eval.batch_size": 1,
            "model.rpn.pre_nms_topk_test": 1000,
            "model.rpn.post_nms_topk_test": 1000,
            "eval.detections_per_image": 100,
        },
    }
    common = {
        "train.precision": "float32",
        "data.image_size": size,
        "data.max_instances": MAX_INSTANCES,
        "model.num_classes": 80,
        "objects": 10,
    }
    return common | from_recipe[mode]


def points(mode: str, size: tuple[int, int], wanted: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, config changes) per row: the base first, then each point that differs."""
    start = base(mode, size)
    rows = [("base", start)]
    for axis in wanted:
        for value, change in axes(mode)[axis].items():
            if start | change != start:
                rows.append((f"{axis} {value}", start | change))
    return rows


def main(arguments: argparse.Namespace) -> None:
    known = axes(arguments.mode)
    wanted = arguments.axes.split(",") if arguments.axes else list(known)
    size = tuple(int(side) for side in arguments.size.split(","))
    if unknown := set(wanted) - set(known):
        raise SystemExit(f"error: --axes has {sorted(unknown)}, expected some of {sorted(known)}")
    started, rows, first = time.strftime("%Y-%m-%d"), [], None
    print("\n".join(header(arguments.mode)), flush=True)
    for name, point in points(arguments.mode, size, wanted):
        figures = measure(arguments.mode, point, arguments.steps)
        first = first or figures
        rows.append({"name": name, "point": point, **figures})
        print(line(name, figures, first), flush=True)
    if arguments.json:
        report = {"mode": arguments.mode, "date": started, "rows": rows}
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    if failed := [row["name"] for row in rows if "failed" in row]:
        raise SystemExit(f"error: failed: {', '.join(failed)}")


def measure(mode: str, point: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return the benchmark's figures for a point, or {"failed": reason}."""
    problem = json.dumps({"mode": mode, "point": point, "steps": steps})
    command = [sys.executable, __file__, "--worker", problem]
    done = subprocess.run(command, text=True, capture_output=True, cwd=HERE.parent)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [""]
        return {"failed": f"exit code {done.returncode} {last[0]}".strip()}
    return json.loads(done.stdout.splitlines()[-1])


def header(mode: str) -> list[str]:
    names = [mode, "ms", "quartiles", "times base", "planned MB", "process MB", "GFLOP an image"]
    return [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]


def line(name: str, figures: dict[str, Any], first: dict[str, Any]) -> str:
    """Format a table row; `first` holds the base's figures."""
    if "failed" in figures:
        return f"| {name} | {figures['failed']} | | | | | |"
    ms, base_ms = figures["ms_per_step"], first.get("ms_per_step")
    cells = [
        name,
        f"{ms:.0f}",
        f"{figures['ms_per_step_25']:.0f} to {figures['ms_per_step_75']:.0f}",
        f"{ms / base_ms:.2f}" if base_ms else "",
        f"{figures['planned_peak_memory_mb']:,.0f}",
        f"{figures['peak_rss_mb']:,.0f}",
        f"{figures['gflop_per_image']:,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def work(problem: dict[str, Any]) -> None:
    """Measure one point in this process and print its figures as json."""
    from mask_rcnn_jax.benchmarking import steps
    from mask_rcnn_jax.config import load_config

    overrides = dict(problem["point"])
    objects = overrides.pop("objects")
    overrides["data.image_size"] = tuple(overrides["data.image_size"])
    recipe = load_config(HERE.parent / "configs" / "coco.py", overrides)
    if problem["mode"] == "train":
        figures = steps.train(recipe, problem["steps"], objects=objects)
    else:
        figures = steps.infer(recipe, problem["steps"])
    print(json.dumps(figures))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", default="train", choices=["train", "infer"])
    parser.add_argument("--size", default="512,768", help="height,width of the base canvas")
    parser.add_argument("--axes", help="comma-separated axes; all if unset")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per point")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    parsed = parse()
    work(json.loads(parsed.worker)) if parsed.worker else main(parsed)
