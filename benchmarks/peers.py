"""A peer and this package on the same pictures, in turns, in one run.

    python benchmarks/peers.py --peer torchvision --python PEER_ENV/bin/python --mode train \
        --size 800,1216 --batch 1 --steps 7 --json ratio.json

Each side lives in a process and an environment of its own; one step of ours, one of theirs, and so
on, so that whatever else the machine does falls on both. Prints the median time of each and the
median of the ratios of neighbours, with quartiles. Both start from random weights, with R-50-FPN,
91 classes, 1000 proposals, in training 512 RoIs an image and 8 objects; masks are not pasted.
`--precision bfloat16` is autocast on their side. `--channels_last` and `--compile` are theirs too.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent


def main(arguments: argparse.Namespace) -> None:
    given = [
        f"--{name}={getattr(arguments, name)}" for name in ("mode", "size", "batch", "precision")
    ]
    theirs = [f"--{name}" for name in ("channels_last", "compile") if getattr(arguments, name)]
    sides = {
        "ours": Side([sys.executable, __file__, "--worker", *given]),
        arguments.peer: Side(
            [arguments.python, HERE / f"peer_{arguments.peer}.py", *given, *theirs]
        ),
    }
    times = {name: [] for name in sides}
    for name, side in sides.items():
        print(f"{name}: {side.answer()}", flush=True)  # after its first steps
    for _ in range(arguments.steps):
        for name, side in sides.items():
            times[name].append(float(side.ask()))
    for side in sides.values():
        side.process.stdin.close()
        side.process.wait()
    problem = {name: getattr(arguments, name) for name in ("mode", "size", "batch", "precision")}
    report = summary(times, arguments.peer) | problem | {"theirs": theirs}
    report["date"] = time.strftime("%Y-%m-%d")
    print(json.dumps(report, indent=1))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")


class Side:
    """A process that says one line when it is ready and one for every line that it is sent."""

    def __init__(self, command: list):
        self.process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=HERE.parent,
        )  # fmt: skip

    def answer(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"error: {self.process.args[:2]} ended with {self.process.wait()}")
        return line.strip()

    def ask(self) -> str:
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return self.answer()


def summary(times: dict[str, list[float]], peer: str) -> dict:
    """Seconds of each side, and theirs as a multiple of ours."""

    def quartiles(values):
        low, median, high = np.percentile(values, (25, 50, 75)).round(4).tolist()
        return {"low": low, "median": median, "high": high}

    ratios = np.array(times[peer]) / np.array(times["ours"])
    return {
        **{f"{name}_s": quartiles(values) for name, values in times.items()},
        f"{peer}_over_ours": quartiles(ratios),
        "steps": len(ratios),
    }


def serve(step) -> None:
    """Answer every line of the standard input with the seconds of one step."""
    for _ in sys.stdin:
        started = time.perf_counter()
        step()
        print(time.perf_counter() - started, flush=True)


def work(arguments: argparse.Namespace) -> None:
    """Our side."""
    import jax

    from mask_rcnn_jax.benchmarking import inputs
    from mask_rcnn_jax.models.build import predict_options
    from mask_rcnn_jax.training.run import load_config
    from mask_rcnn_jax.training.step import (
        init_variables,
        make_mesh,
        make_predict_step,
        replicate,
        shard_batch,
    )

    config = load_config(HERE.parent / "configs" / "coco_torchvision.py", {
        "data.image_size": tuple(map(int, arguments.size.split(","))),
        "train.precision": arguments.precision, "train.batch_size": arguments.batch,
    })  # fmt: skip
    config.eval.score_threshold = 0.0
    mesh, model = make_mesh(), inputs.recipe_model(config)
    variables = init_variables(model, 0)
    batch = inputs.synthetic_batch(config, arguments.batch, model.num_classes)
    height, width = map(int, arguments.size.split(","))
    batch.image_sizes[:] = height, width
    batch = shard_batch(batch, mesh)
    if arguments.mode == "train":
        train_step, tx = inputs.recipe_step(
            config, model, variables["params"], mesh, arguments.batch
        )
        state = replicate(inputs.fresh_state(variables, tx), mesh)

        def step():
            nonlocal state
            state, metrics = train_step(state, batch)
            jax.block_until_ready(metrics)
    else:
        predict = make_predict_step(model, mesh, **predict_options(config.eval))
        variables = replicate(variables, mesh)

        def step():
            jax.block_until_ready(predict(variables, batch))

    for _ in range(2):
        step()
    device = jax.devices()[0].device_kind
    print(f"JAX {jax.__version__}, {device}, canvas {batch.images.shape[1:3]}", flush=True)
    serve(step)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", default="torchvision", choices=["torchvision"])
    parser.add_argument("--python", default=sys.executable, help="of the peer's environment")
    parser.add_argument("--mode", default="train", choices=["train", "infer"])
    parser.add_argument("--size", default="800,1216", help="height,width of the pictures")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each side")
    parser.add_argument("--channels_last", action="store_true")
    parser.add_argument("--compile", action="store_true", help="torch.compile of the backbone")
    parser.add_argument("--json", help="a file for the figures")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    parsed = parse()
    (work if parsed.worker else main)(parsed)
