"""Time torchvision and this package in alternation on images of the same size.

    python benchmarks/peers.py --python PEER_ENV/bin/python --mode train \
        --size 800,1216 --batch 1 --turns 3 --json ratio.json

Each side runs in its own process and environment. The sides take turns of a few steps, so that
other load on the machine affects both. The first step of a turn is not timed: after 15 idle
seconds, one of ours took half as long again, all of it system time. Prints the medians of elapsed
and of processor seconds per step, and of the ratios of neighboring steps, with quartiles. Our side
runs the peer's recipe. Both use R-50-FPN with random weights and fixed batch norm, 1000 proposals
and 100 detections, in training 512 RoIs per image; masks are not pasted. Random weights propose no
foreground, so that every object is one foreground RoI: by default, there are as many as a trained
model samples. `--precision bfloat16` is autocast on the peer's side; `auto` is autocast there and
`train.precision=auto` on ours. `--channels_last` and `--compile` apply to torchvision.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np

TIMED = 2  # steps per turn
FOREGROUND = 28  # RoIs per image that trained models sample of COCO: 25 to 31
# Instructions of a processor that decide how fast a precision is.
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
HERE = Path(__file__).resolve().parent
RECIPE = HERE.parent / "configs" / "coco_torchvision.py"  # of our side
PEER = "torchvision"
SETTINGS = "mode size batch objects precision channels_last compile".split()


def main(arguments: argparse.Namespace) -> None:
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    commands = {
        "ours": [sys.executable, __file__, "--worker", json.dumps(settings)],
        PEER: [arguments.python, HERE / f"peer_{PEER}.py", json.dumps(settings)],
    }
    times = {name: [] for name in commands}
    with ExitStack() as stack:
        sides = {name: stack.enter_context(Side(command)) for name, command in commands.items()}
        for name, side in sides.items():
            print(f"{name}: {side.answer()}", flush=True)  # after its first steps
        for _ in range(arguments.turns):
            for name, side in sides.items():
                times[name] += side.take_turn()
            report = summary(times, PEER) | settings | processor()
            report["date"] = time.strftime("%Y-%m-%d")
            if arguments.json:
                Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


class Side:
    """A process that prints a line when ready, and runs a turn for each line it reads."""

    def __init__(self, command: list):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [str(part) for part in command]
        self.process = subprocess.Popen(command, text=True, cwd=HERE.parent, **pipes)

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *exception) -> None:
        """Close the pipes, which ends the process, and wait for it."""
        with suppress(BrokenPipeError):  # it has ended
            self.process.__exit__(*exception)

    def answer(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"error: {self.process.args[:2]} ended with {self.process.wait()}")
        return line.strip()

    def take_turn(self, steps: int = TIMED) -> list[tuple[float, float]]:
        """Return the elapsed and the processor seconds of each timed step."""
        with suppress(BrokenPipeError):  # `answer` tells that it has ended
            self.process.stdin.write("turn\n")
            self.process.stdin.flush()
        lines = [self.answer().split() for _ in range(steps)]
        return [(float(elapsed), float(cpu)) for elapsed, cpu in lines]


def processor() -> dict[str, str]:
    """Return the processor's name and those of `FLAGS` that it has, where Linux tells."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        entries = dict(re.split(r"\s*:\s*", line, maxsplit=1) for line in lines if ":" in line)
        found = set(entries.get("flags", "").split())
        flags = " ".join(name for name in FLAGS if name in found)
        return {"processor": entries.get("model name", ""), "processor_flags": flags}
    return {}


def summary(times: dict[str, list[tuple[float, float]]], peer: str) -> dict:
    """Return seconds per side, and the peer's as a multiple of ours, elapsed and of processors."""

    def quartiles(values):
        low, median, high = np.percentile(values, (25, 50, 75)).round(4).tolist()
        return {"low": low, "median": median, "high": high}

    columns = {name: np.array(values).T for name, values in times.items()}
    report: dict = {}
    for row, kind in enumerate(("", "cpu_")):
        report |= {f"{name}_{kind}s": quartiles(values[row]) for name, values in columns.items()}
        ratios = columns[peer][row] / columns["ours"][row]
        report[f"{peer}_over_ours_{kind}".rstrip("_")] = quartiles(ratios)
    return report | {"steps": len(ratios)}


def peer_settings() -> SimpleNamespace:
    """Read the settings `main` passes to a peer's script; adds the image `height` and `width`."""
    settings = json.loads(sys.argv[1])
    height, width = map(int, settings["size"].split(","))
    return SimpleNamespace(**settings, height=height, width=width)


def draw_boxes(settings: SimpleNamespace) -> np.ndarray:
    """Draw [batch, objects, 4] float32 boxes x1, y1, x2, y2, sized as in our synthetic batch."""
    rng = np.random.default_rng(0)
    limit = np.float32([settings.width, settings.height])
    shape = settings.batch, settings.objects, 2
    center = rng.uniform(0.1, 0.9, shape) * limit
    half = np.exp(rng.uniform(np.log(8), np.log(min(limit) / 3), shape))
    corners = np.maximum(center - half, 0), np.minimum(center + half, limit)
    return np.concatenate(corners, axis=2).astype(np.float32)


def serve(step: Callable[[], None], name: str) -> None:
    """Run two steps, print `name`, then run a turn for each line on stdin.

    step: returns when its work is done.
    """
    for _ in range(2):
        step()
    print(name, flush=True)
    for _ in sys.stdin:
        step()
        for _ in range(TIMED):
            started, cpu = time.perf_counter(), time.process_time()
            step()
            print(time.perf_counter() - started, time.process_time() - cpu, flush=True)


def work(settings: dict) -> None:
    """Run our side."""
    import jax

    from mask_rcnn_jax.benchmarking import inputs
    from mask_rcnn_jax.config import load_config
    from mask_rcnn_jax.models.build import init_variables
    from mask_rcnn_jax.training.step import make_mesh, make_predict_step, replicate, shard_batch

    height, width = map(int, settings["size"].split(","))
    entries = {"data.image_size": (height, width), "train.precision": settings["precision"]}
    entries |= {"train.batch_size": settings["batch"]}
    entries |= {"eval.score_threshold": 0.0}  # random weights give low scores
    recipe = load_config(RECIPE, entries)
    mesh, model = make_mesh(), inputs.recipe_model(recipe)
    variables = init_variables(model, 0)
    batch = inputs.synthetic_batch(recipe, settings["batch"], settings["objects"])
    batch.image_sizes[:] = height, width
    batch = shard_batch(batch, mesh)
    if settings["mode"] == "train":
        train_step, tx = inputs.recipe_step(
            recipe, model, variables["params"], mesh, settings["batch"]
        )
        state = replicate(inputs.TrainState.start(variables, tx), mesh)

        def step():
            nonlocal state
            state, metrics = train_step(state, batch)
            jax.block_until_ready(metrics)
    else:
        predict = make_predict_step(model, mesh, recipe.eval)
        variables = replicate(variables, mesh)

        def step():
            jax.block_until_ready(predict(variables, batch))

    device = jax.devices()[0].device_kind
    serve(step, f"JAX {jax.__version__}, {device}, canvas {batch.images.shape[1:3]}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="Python of the peer's environment")
    parser.add_argument("--mode", default="train", choices=["train", "infer"])
    parser.add_argument("--size", default="800,1216", help="height,width of the images")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--objects", type=int, default=FOREGROUND, help="per image, in training")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16", "auto"])
    parser.add_argument("--turns", type=int, default=4, help=f"turns of {TIMED} timed steps")
    parser.add_argument("--channels_last", action="store_true")
    parser.add_argument("--compile", action="store_true", help="torch.compile the backbone")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    parsed = parse()
    work(parsed.worker) if parsed.worker else main(parsed)
