"""The parts of `reproduce_job`: what NVIDIA published for three examples, as programs to run."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.reproduce import COLUMNS
from mask_rcnn_jax.training.metrics import FILE_NAME, read_metrics


@dataclass(frozen=True)
class Recipe:
    """What the page of a recipe measured.

    Attributes:
        weights: file of its backbone, see docs/recipes.md.
        train: images per GPU in trainings; the first is that of the accuracies.
        infer: images per GPU in predictions.
    """

    weights: str
    train: Sequence[int]
    infer: Sequence[int]


RECIPES = {
    "coco": Recipe("nvidia_rn50_tf_amp.index", (4, 2), (6, 12, 24)),
    "coco_nvidia_tf1": Recipe("resnet-nhwc-2018-02-07/model.ckpt-112603.index", (4,), (2, 4, 8)),
    "coco_nvidia_pytorch": Recipe("R-50.pkl", (12,), (1, 2, 4, 8)),
}
DATA = "data.json"  # the part without which nothing goes
DEFAULTS = {
    "DATA": "data/coco", "WEIGHTS": "weights", "OUT": "runs/reproduce",
    "RECIPES": " ".join(RECIPES), "PRECISIONS": "tf32 float16", "GPUS": "1 4 8",
    "SEEDS": "0 1 2 3 4", "STEPS": "100",
}  # fmt: skip
REHEARSED = DEFAULTS | {"GPUS": "1 2", "SEEDS": "0 1", "STEPS": "2"}
# Entries of a rehearsal's model.
TINY = """
    data.image_size=(64,64) data.max_instances=8 data.num_workers=0 model.init_from=random
    model.backbone.depth=10 model.backbone.norm=group model.backbone.norm_eps=1e-5
    model.backbone.frozen_stages=0 model.fpn.channels=32 model.rpn.channels=32
    model.rpn.pre_nms_topk_train=50 model.rpn.pre_nms_topk_test=50
    model.rpn.post_nms_topk_train=50 model.rpn.post_nms_topk_test=50
    model.rpn.batch_size_per_image=16 model.sampling.batch_size_per_image=16
    model.box_head.channels=32 model.mask_head.channels=32
    train.batch_size=2 train.steps=2 train.log_every=1 train.checkpoint_every=2 train.eval_every=2
    eval.batch_size=2 eval.loss_images=0 eval.pictures=0 eval.pre_nms_topk=50
    eval.detections_per_image=5
    optim.learning_rate=0.001 optim.warmup_until=0.5
""".split()


@dataclass(frozen=True)
class Settings:
    """What the job is to do.

    Attributes:
        data: folder of COCO 2017, downloaded where it is missing.
        weights: folder of the backbones.
        out: folder of the parts, the runs and the report.
        recipes: the recipes by name.
        precisions: values of `train.precision`.
        gpus: numbers of GPUs.
        seeds: seeds of the accuracies; all but the first on the largest number of GPUs only.
        steps: timed steps of a throughput.
        rehearse: whether to run a tiny model over generated images on a CPU.
        flags: further flags of every training, benchmark and prediction.
    """

    data: Path
    weights: Path
    out: Path
    recipes: Mapping[str, Recipe]
    precisions: Sequence[str]
    gpus: Sequence[int]
    seeds: Sequence[int]
    steps: int
    rehearse: bool = False
    flags: Sequence[str] = ()


def read_settings(arguments: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Read the command line and the environment, of which an empty value counts as none."""
    rehearse = list(arguments[:1]) == ["--rehearse"]
    defaults = REHEARSED if rehearse else DEFAULTS
    given = {name: environ.get(name) or default for name, default in defaults.items()}
    data, weights, out = (Path(given[name]).resolve() for name in ("DATA", "WEIGHTS", "OUT"))
    recipes = {name: RECIPES[name] for name in _words(given, "RECIPES", list(RECIPES))}
    return Settings(
        out / "shapes" if rehearse else data,
        weights,
        out,
        {name: Recipe("", (1,), (1,)) for name in recipes} if rehearse else recipes,
        _words(given, "PRECISIONS", list(COLUMNS)),
        _numbers(given, "GPUS", 1),
        _numbers(given, "SEEDS", 0),
        _numbers(given, "STEPS", 1)[0],
        rehearse,
        tuple(arguments[rehearse:]),
    )


def _words(given: Mapping[str, str], name: str, allowed: Sequence[str]) -> list[str]:
    words = given[name].split()
    for word in words or [""]:
        if word not in allowed:
            raise ValueError(f"{name} has {word!r}, expected {', '.join(allowed)}")
    return list(dict.fromkeys(words))


def _numbers(given: Mapping[str, str], name: str, lowest: int) -> list[int]:
    words = given[name].split()
    if not words or not all(re.fullmatch("[0-9]+", word) and int(word) >= lowest for word in words):
        raise ValueError(f"{name} is {given[name]!r}, expected numbers from {lowest}")
    return list(dict.fromkeys(map(int, words)))


def check_weights(settings: Settings) -> None:
    for recipe in settings.recipes.values():
        path = settings.weights / recipe.weights
        if recipe.weights and not path.is_file():
            raise ValueError(f"{path} is missing, see docs/recipes.md for its address")


@dataclass(frozen=True)
class Part:
    """A program and what is kept of it.

    Attributes:
        name: of the file in OUT/parts.
        gpus: GPUs of the program.
        command: the program.
        figures: returns the content of the file after the program has ended well.
    """

    name: str
    gpus: int
    command: Sequence[str]
    figures: Callable[[], Mapping[str, Any]]


def parts(settings: Settings) -> Iterator[Part]:
    """The data, then the cheap parts: throughputs take minutes, trainings hours."""
    yield _data(settings)
    most = max(settings.gpus)
    settled = [(name, precision) for name in settings.recipes for precision in settings.precisions]
    for name, precision in settled:
        for images in settings.recipes[name].train:
            yield _training(settings, name, precision, images)
        for gpus in settings.gpus:
            for images in settings.recipes[name].infer:
                yield _prediction(settings, name, precision, gpus, images)
    for seed in settings.seeds:
        for name, precision in settled:
            for gpus in settings.gpus:
                if gpus == most or seed == settings.seeds[0]:
                    yield _accuracy(settings, name, precision, gpus, seed)


def _data(settings: Settings) -> Part:
    """Downloads what is missing and checks sums, sizes and counts."""
    kind = ["coco2017"]
    if settings.rehearse:
        kind = ["shapes", "--train=16", "--val=4", "--size=64"]
    command = [*_module("prepare"), *kind, f"--data_dir={settings.data}"]
    return Part(DATA, min(settings.gpus), command, lambda: {"data_dir": str(settings.data)})


def _training(settings: Settings, recipe: str, precision: str, images: int) -> Part:
    """Images/s over the numbers of GPUs."""
    name, most = f"{recipe}/{precision}/train-{images}.json", max(settings.gpus)
    devices = ",".join(map(str, settings.gpus))
    entries = [f"--config.train.batch_size={most * images}", f"--devices={devices}"]
    command = [*_module("benchmark"), "train", *_config(settings, recipe, precision), *entries]
    return _benchmark(settings, name, most, command)


def _prediction(settings: Settings, recipe: str, precision: str, gpus: int, images: int) -> Part:
    name = f"{recipe}/{precision}/infer-{gpus}-{images}.json"
    command = [*_module("benchmark"), "infer", *_config(settings, recipe, precision)]
    return _benchmark(settings, name, gpus, [*command, f"--config.eval.batch_size={images}"])


def _benchmark(settings: Settings, name: str, gpus: int, command: Sequence[str]) -> Part:
    file = settings.out / "parts" / f"{name}.new"
    command = [*command, f"--steps={settings.steps}", f"--json={file}", *settings.flags]
    return Part(name, gpus, command, lambda: json.loads(file.read_text()))


def _accuracy(settings: Settings, recipe: str, precision: str, gpus: int, seed: int) -> Part:
    """The AP after a whole training."""
    run = settings.out / "runs" / f"{recipe}-{precision}-{gpus}-{seed}"
    images = settings.recipes[recipe].train[0]
    entries = [f"--config.train.images_per_device={images}", f"--config.train.seed={seed}"]
    command = [*_module("train"), f"--workdir={run}", *_config(settings, recipe, precision)]
    name = f"{recipe}/{precision}/accuracy-{gpus}-{seed}.json"
    return Part(name, gpus, [*command, *entries, *settings.flags], lambda: result_of(run))


def result_of(run: Path) -> dict[str, Any]:
    """The metrics of the last evaluation, and the hours of all steps.

    The hours are from metrics.jsonl, which each start of a run continues; they are without
    compiling, evaluating and saving, and without what was lost between a checkpoint and an end.
    """
    newest = max((run / "eval").glob("*/metrics.json"), key=lambda path: int(path.parent.name))
    records = [r for r in read_metrics(run / FILE_NAME) if "perf/ms_per_step" in r]
    steps = pairwise([0, *(record["step"] for record in records)])
    times = [(b - a) * r["perf/ms_per_step"] for (a, b), r in zip(steps, records, strict=True)]
    return json.loads(newest.read_text()) | {"hours": sum(times) / 3.6e6}


def _module(name: str) -> list[str]:
    return [sys.executable, "-m", f"mask_rcnn_jax.{name}"]


def _config(settings: Settings, recipe: str, precision: str) -> list[str]:
    """The flags of a recipe over the data, with its weights."""
    data, year = settings.data, "" if settings.rehearse else "2017"
    entries = list(TINY)
    if not settings.rehearse:
        entries = [f"model.init_from={settings.weights / settings.recipes[recipe].weights}"]
    for split in ("train", "val"):
        entries.append(f"data.{split}_images={data / (split + year)}")
        entries.append(f"data.{split}_json={data}/annotations/instances_{split}{year}.json")
    entries.append(f"train.precision={precision}")
    platform = "cpu" if settings.rehearse else "gpu"  # without it JAX may fall back to the CPU
    return [f"--config={recipe}", f"--platform={platform}", *(f"--config.{e}" for e in entries)]
