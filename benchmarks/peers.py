"""A peer and this package on the same pictures, in turns, in one run.

    python benchmarks/peers.py --peer torchvision --python PEER_ENV/bin/python --mode train \
        --size 800,1216 --batch 1 --turns 3 --json ratio.json
    python benchmarks/peers.py --peer nvidia_tf2 --python PEER_ENV/bin/python --mode infer \
        --source DeepLearningExamples/TensorFlow2/Segmentation/MaskRCNN --size 832,1344

Each side lives in a process and an environment of its own; a few steps of ours, as many of theirs,
and so on, so that whatever else the machine does falls on both. The first of a turn is not timed:
after 15 idle seconds one of ours was seen to take half as long again, all of it the system's time.
Prints the median time of each and the median of the ratios of neighbours, with quartiles. Ours runs
the peer's recipe. Both start from random weights, with R-50-FPN, 1000 proposals, 100 detections, in
training 512 RoIs an image; masks are not pasted. `--precision bfloat16` is autocast on their side.
`--channels_last` and `--compile` are for torchvision.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np

TIMED = 2  # steps of a turn
HERE = Path(__file__).resolve().parent
RECIPES = {"torchvision": "coco_torchvision.py", "nvidia_tf2": "coco.py"}  # peer -> ours
SETTINGS = ("peer", "mode", "size", "batch", "objects", "precision", "channels_last", "compile",
            "source")  # fmt: skip


def main(arguments: argparse.Namespace) -> None:
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    sides = {
        "ours": Side([sys.executable, __file__, "--worker", json.dumps(settings)]),
        arguments.peer: Side(
            [arguments.python, HERE / f"peer_{arguments.peer}.py", json.dumps(settings)]
        ),
    }
    times = {name: [] for name in sides}
    for name, side in sides.items():
        print(f"{name}: {side.answer()}", flush=True)  # after its first steps
    for _ in range(arguments.turns):
        for name, side in sides.items():
            times[name] += side.take_turn()
    for side in sides.values():
        side.process.stdin.close()
        side.process.wait()
    del settings["source"]
    report = summary(times, arguments.peer) | settings | {"date": time.strftime("%Y-%m-%d")}
    print(json.dumps(report, indent=1))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")


class Side:
    """A process that says a line when it is ready, and takes a turn when it is sent one."""

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

    def take_turn(self) -> list[float]:
        """Seconds of its timed steps."""
        self.process.stdin.write("turn\n")
        self.process.stdin.flush()
        return [float(self.answer()) for _ in range(TIMED)]


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


def settings_of_peer() -> SimpleNamespace:
    """What `main` gives a peer's script; `height` and `width` are of the pictures."""
    settings = json.loads(sys.argv[1])
    height, width = map(int, settings["size"].split(","))
    return SimpleNamespace(**settings, height=height, width=width)


def canvas(height: int, width: int) -> tuple[int, int]:
    """The next multiples of 64, the stride of P6, which is what both sides want."""
    return height + -height % 64, width + -width % 64


def draw_boxes(settings: SimpleNamespace) -> np.ndarray:
    """[batch, objects, 4] float32 of the sizes that ours trains on; x1, y1, x2, y2 in pixels."""
    rng = np.random.default_rng(0)
    limit = np.float32([settings.width, settings.height])
    shape = settings.batch, settings.objects, 2
    centre = rng.uniform(0.1, 0.9, shape) * limit
    half = np.exp(rng.uniform(np.log(8), np.log(min(limit) / 3), shape))
    corners = np.maximum(centre - half, 0), np.minimum(centre + half, limit)
    return np.concatenate(corners, axis=2).astype(np.float32)


def serve(step: Callable[[], None], name: str) -> None:
    """Take two steps, say what runs them, and take a turn for each line that comes in.

    step: returns when its work is done.
    """
    for _ in range(2):
        step()
    print(name, flush=True)
    for _ in sys.stdin:
        step()
        for _ in range(TIMED):
            started = time.perf_counter()
            step()
            print(time.perf_counter() - started, flush=True)


def work(settings: dict) -> None:
    """Our side."""
    import jax

    from mask_rcnn_jax.benchmarking import inputs
    from mask_rcnn_jax.config import load_config
    from mask_rcnn_jax.models.build import init_variables
    from mask_rcnn_jax.models.detect import detect_options
    from mask_rcnn_jax.training.step import make_mesh, make_predict_step, replicate, shard_batch

    height, width = map(int, settings["size"].split(","))
    size = height, width
    if settings["peer"] == "nvidia_tf2":
        size = canvas(height, width)
    config = load_config(HERE.parent / "configs" / RECIPES[settings["peer"]], {
        "data.image_size": size, "train.precision": settings["precision"],
        "train.batch_size": settings["batch"],
    })  # fmt: skip
    config.eval.score_threshold = 0.0  # random weights are sure of nothing
    mesh, model = make_mesh(), inputs.recipe_model(config)
    variables = init_variables(model, 0)
    batch = inputs.synthetic_batch(
        config, settings["batch"], model.num_classes, objects=settings["objects"]
    )
    batch.image_sizes[:] = height, width
    batch = shard_batch(batch, mesh)
    if settings["mode"] == "train":
        train_step, tx = inputs.recipe_step(
            config, model, variables["params"], mesh, settings["batch"]
        )
        state = replicate(inputs.fresh_state(variables, tx), mesh)

        def step():
            nonlocal state
            state, metrics = train_step(state, batch)
            jax.block_until_ready(metrics)
    else:
        predict = make_predict_step(model, mesh, detect_options(config))
        variables = replicate(variables, mesh)

        def step():
            jax.block_until_ready(predict(variables, batch))

    device = jax.devices()[0].device_kind
    serve(step, f"JAX {jax.__version__}, {device}, canvas {batch.images.shape[1:3]}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", default="torchvision", choices=list(RECIPES))
    parser.add_argument("--python", default=sys.executable, help="of the peer's environment")
    parser.add_argument("--mode", default="train", choices=["train", "infer"])
    parser.add_argument("--size", default="800,1216", help="height,width of the pictures")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--objects", type=int, default=8, help="of each picture, in training")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--turns", type=int, default=4, help=f"of {TIMED} timed steps each")
    parser.add_argument("--channels_last", action="store_true")
    parser.add_argument("--compile", action="store_true", help="torch.compile of the backbone")
    parser.add_argument("--source", help="folder that has mrcnn_tf2 in it, for nvidia_tf2")
    parser.add_argument("--json", help="a file for the figures")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.peer == "nvidia_tf2" and not parsed.worker:
        if not Path(parsed.source or "", "mrcnn_tf2").is_dir():
            parser.error("--peer nvidia_tf2 wants --source, a folder that has mrcnn_tf2 in it")
        if parsed.precision != "float32":
            parser.error("--peer nvidia_tf2 runs in float32 only")
    return parsed


if __name__ == "__main__":
    parsed = parse()
    work(parsed.worker) if parsed.worker else main(parsed)
