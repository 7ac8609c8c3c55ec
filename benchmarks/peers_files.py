"""Time torchvision and this package in alternation on a folder of JPEGs of any sizes.

    python -m benchmarks.peers_files --python TORCH_ENV/bin/python --weights model.pth \
        --mode infer --images photos --output out
    python -m benchmarks.peers_files --python TORCH_ENV/bin/python --weights model.pth \
        --mode evaluate --images val2017 --json instances_val2017.json --limit 40 --output out

`predict`: decoded images to boxes, scores and masks of 28 x 28. `infer`: files to annotated
images and detections.json with RLE masks. `evaluate`: files to results in COCO's format and their
AP. Both sides read and write in threads beside the network, one image at a time, and resize
images as torchvision does; ours places them on the canvases that `infer` and `evaluate` choose,
for a folder of `--like` such images. `--weights` is a state dict of maskrcnn_resnet50_fpn with
any number of classes, see `peer_weights.py` for one that needs no training.

The first pass over the folder has the start: imports, weights, compilation. The sides take it one
after the other, then they take turns, one pass each. Prints medians and quartiles of the seconds
and processor seconds per image, and of the ratios, and by how much the detections differ.
"""

import argparse
import io
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.peers import HERE, Side, processor, summary

RECIPE = HERE.parent / "configs" / "coco_torchvision.py"
THRESHOLDS = {"predict": 0.05, "infer": 0.5, "evaluate": 0.05}  # scores of what is found
PEER = "torchvision"
SAME_PX = 1.0  # boxes of a class that are closer are the same object


def main(arguments: argparse.Namespace) -> None:
    output = Path(arguments.output).resolve()
    settings = chosen(arguments, output)
    scripts = {
        "ours": [sys.executable, "-m", "benchmarks.peers_files", "--worker"],
        PEER: [arguments.python, "-m", "benchmarks.peer_torchvision_files"],
    }
    count, times, first = len(settings["files"]), {name: [] for name in scripts}, {}
    with ExitStack() as stack:
        sides = {}
        for name, script in scripts.items():
            folder, started = output / name, time.perf_counter()
            folder.mkdir(parents=True, exist_ok=True)
            command = [*script, json.dumps(settings | {"output": str(folder)})]
            side = sides[name] = stack.enter_context(Side(command))
            print(f"{name}: {side.answer()}", flush=True)
            cpu = float(side.answer())
            first[name] = time.perf_counter() - started, cpu
        report = agreement(output / "ours", output / PEER)
        print(json.dumps(report), flush=True)
        for _ in range(arguments.turns):
            for name, side in sides.items():
                [passed] = side.take_turn(1)
                times[name].append(tuple(seconds / count for seconds in passed))
            report |= summary(times, PEER) | processor()
            for name, seconds in first.items():
                for kind, value in zip(("s", "cpu_s"), seconds, strict=True):
                    steady = count * report[f"{name}_{kind}"]["median"]
                    report[f"{name}_start_{kind}"] = round(value - steady, 1)
            report |= {name: settings[name] for name in ("mode", "precision", "channels_last")}
            report |= {"images": count, "date": time.strftime("%Y-%m-%d")}
            (output / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def chosen(arguments: argparse.Namespace, output: Path) -> dict:
    """Return the settings of both sides, with the files of a run and their annotations."""
    folder, limit = Path(arguments.images).resolve(), arguments.limit or None
    settings = {name: getattr(arguments, name) for name in ("mode", "precision", "channels_last")}
    settings |= {"threshold": THRESHOLDS[arguments.mode], "json": "", "images": str(folder)}
    settings["size"] = list(map(int, arguments.size.split(",")))
    settings["weights"] = str(Path(arguments.weights).resolve())
    if arguments.mode == "evaluate":
        content = json.loads(Path(arguments.json).read_text())
        content["images"] = content["images"][:limit]
        kept = {image["id"] for image in content["images"]}
        content["annotations"] = [a for a in content["annotations"] if a["image_id"] in kept]
        output.mkdir(parents=True, exist_ok=True)
        settings["json"] = str(output / "annotations.json")
        Path(settings["json"]).write_text(json.dumps(content))
        names = [image["file_name"] for image in content["images"]]
    else:
        found = (path for path in folder.iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))
        names = sorted(path.name for path in found)[:limit]
    if not names:
        raise SystemExit(f"error: --images {arguments.images} has no .jpg")
    settings["files"] = names
    return settings | {"like": max(arguments.like, len(names))}


def agreement(ours: Path, theirs: Path) -> dict:
    """Pair the objects that both sides found: of one class in an image, the closest boxes first.

    Only pairs within SAME_PX pixels count. The differences are the largest of the pairs.
    """
    found = [_read_results(folder) for folder in (ours, theirs)]
    pixels, scores = [], []
    for key in found[0].keys() & found[1].keys():
        (boxes, values), (other_boxes, other_values) = (side[key] for side in found)
        distances = np.abs(boxes[:, None] - other_boxes[None]).max(axis=2)
        while distances.size and (smallest := distances.min()) <= SAME_PX:
            i, j = np.unravel_index(distances.argmin(), distances.shape)
            pixels.append(smallest)
            scores.append(abs(values[i] - other_values[j]))
            distances[i], distances[:, j] = np.inf, np.inf
    counts = [sum(len(scores) for _, scores in side.values()) for side in found]
    report = {"found": counts, "found_by_both": len(pixels)}
    if pixels:
        report["box_difference_px"] = round(float(max(pixels)), 4)
        report["score_difference"] = round(float(max(scores)), 6)
    for name in ("AP", "mask_AP"):
        metrics = [folder / "metrics.json" for folder in (ours, theirs)]
        if all(path.exists() for path in metrics):
            report[name] = [round(json.loads(path.read_text())[name], 5) for path in metrics]
    return report


def _read_results(folder: Path) -> dict:
    """Return corners [n, 4] and scores [n] by image and category."""
    path = folder / "bbox_results.json"
    path = path if path.exists() else folder / "detections.json"
    rows = defaultdict(list)
    for entry in json.loads(path.read_text()):
        image = entry.get("file_name") or entry["image_id"]
        x, y, width, height = entry["bbox"]
        corners = x, y, x + width, y + height, entry["score"]
        rows[image, entry["category_id"]].append(corners)
    arrays = {key: np.array(values, np.float64) for key, values in rows.items()}
    return {key: (array[:, :4], array[:, 4]) for key, array in arrays.items()}


def serve_passes(step: Callable[[], None], name: str) -> None:
    """Take a pass, print `name` and its processor seconds, then a pass for each line on stdin.

    step: may print; a line of its own would be taken for a time.
    """

    def quiet() -> None:
        with redirect_stdout(io.StringIO()):
            step()

    quiet()
    print(name, time.process_time(), sep="\n", flush=True)
    for _ in sys.stdin:
        started, cpu = time.perf_counter(), time.process_time()
        quiet()
        print(time.perf_counter() - started, time.process_time() - cpu, flush=True)


def work(settings: dict) -> None:
    """Run our side."""
    import jax

    from mask_rcnn_jax.config import load_config
    from mask_rcnn_jax.data.canvases import evaluation_options
    from mask_rcnn_jax.images.decode import upright_size
    from mask_rcnn_jax.weights.restore import restore

    folder = Path(settings["images"])
    entries = {"train.precision": settings["precision"], "eval.batch_size": 1}
    entries |= {"data.image_size": tuple(settings["size"]), "data.val_images": str(folder)}
    if settings["mode"] == "evaluate":
        entries["data.val_json"] = settings["json"]
    restored = restore(load_config(RECIPE, entries), settings["weights"])
    recipe = restored.recipe.with_score_threshold(settings["threshold"])
    limits = {"most": recipe.eval.canvases, "multiple": recipe.model.input.pad_multiple}
    sizes = [upright_size(folder / name) for name in settings["files"]]
    share = len(sizes) / settings["like"]
    options = evaluation_options(recipe.data, sizes, rows=1, share=share, **limits)
    restored = restored._replace(recipe=replace(recipe, data=options))
    steps = {"predict": prediction, "infer": inference, "evaluate": evaluation}
    step = steps[settings["mode"]](restored, settings)
    serve_passes(step, f"JAX {jax.__version__}, {len(options.canvases)} canvases more")


def prediction(restored, settings: dict) -> Callable[[], None]:
    from mask_rcnn_jax.images.decode import decode_image
    from mask_rcnn_jax.predict.predictor import Predictor

    recipe, variables, categories, _ = restored
    predictor = Predictor(recipe, variables, 1, categories)
    folder = Path(settings["images"])
    files = {name: decode_image(folder / name, upright=True) for name in settings["files"]}

    def step() -> None:
        entries = []
        prepared = ((name, predictor.prepare(image)) for name, image in files.items())
        for name, _, found in predictor.stream(prepared):
            rows = np.flatnonzero(found.valid)
            ids = [categories[k - 1]["id"] for k in found.classes[rows]]
            entries += box_entries(name, found.boxes[rows], found.scores[rows], ids)
        Path(settings["output"], "detections.json").write_text(json.dumps(entries))

    return step


def box_entries(name: str, boxes: np.ndarray, scores: np.ndarray, ids: list) -> list[dict]:
    """Return results in COCO's format of an image's boxes [n, 4], x1, y1, x2, y2."""
    sizes = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)
    rows = zip(sizes.tolist(), scores.tolist(), ids, strict=True)
    return [
        {"file_name": name, "category_id": int(k), "bbox": box, "score": score}
        for box, score, k in rows
    ]


def inference(restored, settings: dict) -> Callable[[], None]:
    from mask_rcnn_jax.predict.annotate import annotate_images
    from mask_rcnn_jax.predict.inputs import find_inputs
    from mask_rcnn_jax.predict.predictor import Predictor
    from mask_rcnn_jax.predict.saving import ResultFiles

    recipe, variables, categories, _ = restored
    predictor = Predictor(recipe, variables, 1, categories)
    folder = Path(settings["output"])
    images, _ = find_inputs([str(Path(settings["images"], n)) for n in settings["files"]], folder)

    def fail(error: Exception) -> None:
        raise error

    def step() -> None:
        with ResultFiles(folder) as lists:
            for records in annotate_images(predictor, images, folder, lists, {}, fail):
                lists.add(records)

    return step


def evaluation(restored, settings: dict) -> Callable[[], None]:
    from mask_rcnn_jax.data.dataset import check_classes
    from mask_rcnn_jax.data.source import load_split
    from mask_rcnn_jax.training import evaluator
    from mask_rcnn_jax.training.batches import make_eval_loader
    from mask_rcnn_jax.training.encoding import Rules
    from mask_rcnn_jax.training.step import make_mesh, make_predict_step, replicate
    from mask_rcnn_jax.weights.restore import make_model

    recipe, variables, categories, _ = restored
    model, mesh, data = make_model(recipe, len(categories)), make_mesh(), recipe.data
    val_set, variables = load_split(data, "val"), replicate(variables, mesh)
    check_classes(val_set, categories, settings["weights"])
    predict = make_predict_step(model, mesh, recipe.eval)
    numbers = {"batch_size": 1}

    def step() -> None:
        workers = data.num_workers
        loader = make_eval_loader(val_set, data, max_images=0, num_workers=workers, **numbers)
        rules = Rules.of(recipe)
        found = evaluator.detect(predict, variables, loader, val_set, mesh, rules)
        evaluator.score_and_write(val_set, found, Path(settings["output"]), recipe.eval)

    return step


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="Python of the peer's environment")
    parser.add_argument("--weights", required=True, help="state dict, .pth or .safetensors")
    parser.add_argument("--mode", default="infer", choices=list(THRESHOLDS))
    parser.add_argument("--images", required=True, help="folder of JPEGs")
    parser.add_argument("--json", help="evaluate: annotations in COCO's format")
    parser.add_argument("--output", required=True, help="folder for results and report.json")
    parser.add_argument("--limit", type=int, default=0, help="number of images; 0: all")
    parser.add_argument("--like", type=int, default=0, help="images that canvases are chosen for")
    parser.add_argument("--size", default="800,1333", help="short side, longest side")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16", "auto"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--channels_last", action="store_true")
    parsed = parser.parse_args(arguments)
    if parsed.mode == "evaluate" and not parsed.json:
        parser.error("--mode evaluate needs --json")
    return parsed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(json.loads(sys.argv[2]))
    else:
        main(parse())
