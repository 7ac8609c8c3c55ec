"""Train, prune, distill and quantize a model on one dataset, and compare what comes out.

    python -m benchmarks.small_models shapes --weights resnet50.safetensors --output runs/small
    python -m benchmarks.small_models nuclei --weights resnet50.safetensors --data DATA \
        --output runs/small_nuclei

`shapes` are the README's generated images, `nuclei` a folder with train/, val/ and annotations/ in
COCO's format. Each row is a few of this package's own commands, printed as they run; what is there
already is not run again, so that the same line goes on after an interruption. `--time` then takes
the CPU time of each row's models, in turns; it needs the extras export and openvino, and a machine
with nothing else to do.

Writes table.json: parameters, multiply-adds, seconds, box and mask AP.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from mask_rcnn_jax.data.images import decode_image
from mask_rcnn_jax.data.options import canvas_size
from mask_rcnn_jax.exporting.images import on_canvas
from mask_rcnn_jax.predict.engines import load_exported
from mask_rcnn_jax.predict.live import LiveModel
from mask_rcnn_jax.pruning.channel_groups import count_operations, find_groups, find_operations
from mask_rcnn_jax.pruning.run import one_prediction
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.training.metrics import FILE_NAME
from mask_rcnn_jax.weights.restore import make_model, restore

SHARES = (0.7, 0.5, 0.3)  # of the multiply-adds that pruning keeps
# A ResNet-50 from ImageNet's weights with heads that two CPU cores train in minutes. Its schedule
# is long enough that another third of it gains little.
FULL = """
    model.backbone.depth=50 model.backbone.norm=frozen model.backbone.frozen_stages=2
    optim.learning_rate=0.0005 eval.loss_images=0 eval.pictures=0
""".split()
SMALL = ["model.backbone.depth=18", "model.backbone.norm=group", "model.backbone.frozen_stages=0"]
ENTRIES = {
    "shapes": ["train.steps=600", "train.eval_every=600"],
    "nuclei": """
        train.steps=450 train.eval_every=450 train.batch_size=2 optim.reference_batch=2
        data.image_size=(256,256) data.max_instances=128 model.anchors.sizes=(8,16,32,64,128)
        model.rpn.batch_size_per_image=256 model.rpn.pre_nms_topk_train=1000
        model.rpn.pre_nms_topk_test=1000 model.rpn.post_nms_topk_train=400
        model.rpn.post_nms_topk_test=400 model.sampling.batch_size_per_image=128
        model.fpn.channels=128 model.rpn.channels=128 model.mask_head.channels=64
        eval.pre_nms_topk=400 eval.detections_per_image=150 eval.batch_size=2
    """.split(),
}
# Of the trainings that start from a trained model.
AGAIN = ["train.steps=300", "train.eval_every=300", "model.backbone.frozen_stages=0"]
AGAIN += ["optim.learning_rate=0.00025"]
INT8 = ["model.quantization.int8=True"]
METRICS = ("AP", "mask_AP")
SCORES = "eval/*/metrics.json"
TURNS = 5
CALIBRATION = 40  # images


class Rows:
    """Runs of one dataset in `output`, made by the commands that a user would give."""

    def __init__(self, arguments: argparse.Namespace):
        self.output = Path(arguments.output).resolve()
        self.output.mkdir(parents=True, exist_ok=True)
        self.base = FULL + ENTRIES[arguments.set]
        self.data = Path(arguments.data).resolve()
        for part in ("train", "val"):
            self.base.append(f"data.{part}_json={self.data}/annotations/instances_{part}.json")
            self.base.append(f"data.{part}_images={self.data / part}")
        self.weights = f"model.init_from={Path(arguments.weights).resolve()}"

    def make(self) -> dict[str, Path]:
        """Run what is missing. Returns a run's or pruned model's folder for each row."""
        full = self.train("full", "quickstart", [*self.base, self.weights])
        from_full = [*AGAIN, f"model.init_from={full}"]
        rows = {"full": full, "full, trained on": self.train("on", full, from_full)}
        for share in SHARES:
            pruned = self.output / f"pruned_{share}"
            self.run("checkpoints/0", pruned, "prune", "--workdir", full, "--output", pruned,
                     "--target_operations", share)  # fmt: skip
            self.run(SCORES, pruned, "evaluate", "--workdir", pruned)
            rows[f"pruned to {share}"] = pruned
            rows[f"pruned to {share}, trained"] = self.train(f"retrained_{share}", pruned, AGAIN)
        small = [*self.base, *SMALL]
        rows["ResNet-18"] = self.train("small", "quickstart", small)
        teacher = f"distill.teacher={full}"
        rows["ResNet-18, distilled"] = self.train("distilled", "quickstart", [*small, teacher])
        inherited = [*small, teacher, "distill.inherit=True"]
        rows["the same, inheriting"] = self.train("inheriting", "quickstart", inherited)
        rows["full, trained on in int8"] = self.train("int8", full, [*from_full, *INT8])
        return rows

    def train(self, name: str, config: str | Path, entries: list[str]) -> Path:
        workdir = self.output / name
        flags = [f"--config.{entry}" for entry in entries]
        command = ("train", "--config", config, "--workdir", workdir, *flags)
        self.run(SCORES, workdir, *command)
        return workdir

    def export(self, row: Path) -> Path:
        """Export a run with an int8 model beside it, calibrated with some training images."""
        folder, chosen = self.output / "onnx" / row.name, self.output / "calibration"
        chosen.mkdir(exist_ok=True)
        images = sorted((self.data / "train").iterdir())
        for image in images[:: max(1, len(images) // CALIBRATION)]:
            if not (chosen / image.name).exists():
                (chosen / image.name).symlink_to(image)
        self.run("manifest.json", folder, "export", "--workdir", row, "--format", "onnx",
                 "--output", folder, "--int8", "--calibration", chosen)  # fmt: skip
        return folder

    def run(self, result: str, folder: Path, command: str, *flags: object) -> None:
        """Run a command of the package unless its result, a pattern, is in the folder."""
        if any(folder.glob(result)):
            return
        line = [sys.executable, "-m", f"mask_rcnn_jax.{command}", *map(str, flags)]
        print("+", *line[1:], flush=True)
        started = time.monotonic()
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
        print(f"  {time.monotonic() - started:.0f} s", flush=True)


def main(arguments: argparse.Namespace) -> None:
    rows = Rows(arguments)
    folders = rows.make()
    table = {name: describe(folder) for name, folder in folders.items()}
    print_table(table)
    if arguments.time:
        trained = [name for name in folders if (folders[name] / FILE_NAME).exists()]
        exported = {name: rows.export(folders[name]) for name in trained}
        for name, folder in exported.items():
            scores = json.loads((folder / "manifest.json").read_text())["ap"]["int8"]
            table[name] |= {f"int8 {metric}": scores[metric] for metric in METRICS}
        for name, seconds in take_times(folders, exported).items():
            table[name] |= seconds
        print_table(table)
    (rows.output / "table.json").write_text(json.dumps(table, indent=1) + "\n")


def describe(folder: Path) -> dict[str, float]:
    """Return the scores, parameters and multiply-adds of a run or pruned model."""
    [path] = folder.glob(SCORES)
    scores = json.loads(path.read_text())
    recipe, variables, _, _ = restore(None, folder)
    size = sum(np.size(leaf) for leaf in jax.tree.leaves(variables["params"]))
    return {
        **{name: scores[name] for name in METRICS},
        "parameters, M": size / 1e6,
        "multiply-adds, G": operations(recipe) / 1e9,
    }


def operations(recipe: Recipe) -> int:
    """Return the multiply-adds of a prediction on the recipe's canvas."""
    channels = {name: group.channels for name, group in find_groups(recipe.model).items()}
    terms = find_operations(recipe.model, one_prediction(recipe.data, recipe.eval))
    return sum(count_operations(terms, channels).values())


def take_times(folders: dict[str, Path], exported: dict[str, Path]) -> dict[str, dict[str, float]]:
    """Return the median CPU seconds of each model of each exported row on one image, in turns."""
    models: dict[tuple[str, str], Callable] = {}
    for name in exported:
        recipe, variables, _, _ = restore(None, folders[name])
        model = make_model(recipe, recipe.model.num_classes)
        models[name, "JAX"] = LiveModel(model, recipe.eval, variables)
        for engine in ("onnxruntime", "openvino"):
            for precision in ("float32", "int8"):
                wanted = None if precision == "float32" else precision
                loaded = load_exported(exported[name], engine, wanted)
                models[name, f"{engine} {precision}"] = loaded
    example, photo = recipe.data, min(Path(recipe.data.val_images).iterdir())
    [(image, size)] = on_canvas([decode_image(photo)], example, canvas_size(example), None)
    taken: dict[tuple[str, str], list[float]] = {key: [] for key in models}
    for turn in range(TURNS + 1):
        for key, model in models.items():
            started = time.process_time()
            jax.block_until_ready(model(image, size))
            if turn:  # the first one compiles
                taken[key].append(time.process_time() - started)
    table: dict[str, dict[str, float]] = {name: {} for name in exported}
    for (name, engine), seconds in taken.items():
        table[name][f"CPU s, {engine}"] = statistics.median(seconds)
    return table


def print_table(table: dict[str, dict[str, float]]) -> None:
    """Print rows with the columns that the first one has, in Markdown."""
    columns = list(next(iter(table.values())))
    print("| | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name, row in table.items():
        cells = (f"{row[column]:.3f}" if column in row else "" for column in columns)
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("set", choices=list(ENTRIES))
    parser.add_argument("--weights", required=True, help="a ResNet-50 of ImageNet")
    parser.add_argument("--data", default="data/shapes", help="folder of the dataset")
    parser.add_argument("--output", required=True, help="folder for the runs and table.json")
    parser.add_argument("--time", action="store_true", help="export, score int8 and take times")
    main(parser.parse_args())
