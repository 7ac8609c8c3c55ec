"""Benchmark training, prediction, data loading and kernels, or compile for absent GPUs and TPUs.

    python -m mask_rcnn_jax.benchmark train --config configs/coco.py --config.train.batch_size=8
    python -m mask_rcnn_jax.benchmark train --config configs/coco.py --config.train.batch_size=64 \\
        --devices 1,2,4,8
    python -m mask_rcnn_jax.benchmark infer --config configs/coco.py --config.eval.batch_size=8
    python -m mask_rcnn_jax.benchmark data --config configs/coco.py
    python -m mask_rcnn_jax.benchmark kernels
    python -m mask_rcnn_jax.benchmark compile --target h100 --config configs/coco.py
    python -m mask_rcnn_jax.benchmark compile --mode infer --target h100 --config configs/coco.py

`train` and `infer` time warm steps on generated images; `--stages` also times each stage of the
model alone, and `--profile DIR` writes a trace and lists the costliest operations.
`train --devices` measures weak scaling: each number of devices in turn, with the same images on
each device, of which the largest number has `train.batch_size`. Both also run over several
processes, and the first prints. `data` reads and prepares batches. `kernels` needs a GPU. `compile`
needs none: it compiles the whole training step, or prediction, for GPUs or TPUs and gives its
memory, FLOPs and compile time. `--json` has every figure as soon as it is measured. Nothing
compiled is taken from `--compile_cache`, but on a GPU it keeps the fastest algorithms found by
XLA's autotuning.
"""

from mask_rcnn_jax.terminal import interrupts

if __name__ == "__main__":
    interrupts.begin()  # imports take seconds

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import jax
from absl import flags

from mask_rcnn_jax import cli, device
from mask_rcnn_jax.benchmarking import absent, kernels, profile, scaling, stages, steps
from mask_rcnn_jax.cli import processes
from mask_rcnn_jax.disk import write_whole
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.training.processes import gather

KINDS = ("train", "infer", "data", "kernels", "compile")


def _define_flags() -> None:
    cli.define_config(required=False)
    processes.define_processes()
    flags.DEFINE_string("json", None, "Write the figures to this file as one JSON object.")
    steps_help = "Number of timed steps (train, infer) or batches (data)."
    flags.DEFINE_integer("steps", 20, steps_help, lower_bound=1)
    flags.DEFINE_bool("stages", False, "train, infer: also time each stage of the model.")
    flags.DEFINE_string("profile", None, "train, infer: write a trace to this folder.")
    pictures_help = "data: number of JPEGs to generate; 0 reads the training set of --config."
    flags.DEFINE_integer("pictures", 64, pictures_help, lower_bound=0)
    workers_help = "data: worker process counts, measured in turn; data.num_workers if unset."
    flags.DEFINE_list("workers", None, workers_help)
    flags.DEFINE_string("only", "", "kernels: run only those whose name contains this text.")
    flags.DEFINE_enum("target", "h100", absent.targets(), "compile: target GPU or TPU.")
    mode_help = "compile: the training step, or prediction."
    flags.DEFINE_enum("mode", absent.MODES[0], absent.MODES, mode_help)
    flags.DEFINE_list("images", ["2", "8"], "compile: numbers of images per device.")
    devices_help = "train: numbers of devices, measured in turn. compile: 1,4 if unset."
    flags.DEFINE_list("devices", None, devices_help)


def main(positional: Sequence[str]) -> None:
    FLAGS = flags.FLAGS
    if len(positional) != 1 or positional[0] not in KINDS:
        raise ValueError(f"benchmark needs one of {', '.join(KINDS)}, got {list(positional)}")
    kind = positional[0]
    recipe = cast(Recipe, cli.given_recipe())  # kernels need none
    if kind != "kernels" and recipe is None:
        raise ValueError(f"benchmark {kind} needs --config")
    _check_combination(kind)
    if kind not in ("compile", "data"):
        device.log_devices()
    if FLAGS.json:
        Path(FLAGS.json).parent.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any]
    if kind == "compile":
        jax.config.update("jax_platforms", "cpu")  # do not look for a GPU
        jax.config.update("jax_enable_compilation_cache", False)
        images = _counts("images", FLAGS.images)
        devices = _counts("devices", FLAGS.devices or ["1", "4"])
        shapes = [(i, d) for d in devices for i in images]
        figures = {"target": FLAGS.target, "jax": jax.__version__, "programs": []}
        compiling = absent.compile_programs(recipe, FLAGS.target, shapes, FLAGS.mode)
        for program, _ in compiling:
            figures["programs"].append(program)
            _save(figures)
    elif kind == "kernels":
        _choose_cache()
        if jax.default_backend() != "gpu":
            raise ValueError("benchmark kernels needs a GPU, this machine has none")
        device.check_kernels("auto")
        figures = kernels.run(FLAGS.only, _save)
    elif kind == "data":
        from mask_rcnn_jax.benchmarking import loading  # imports image libraries

        workers = _counts("workers", FLAGS.workers or [str(recipe.data.num_workers)], 0)
        runs = []
        for count in workers:
            runs.append(loading.run(recipe, FLAGS.pictures, FLAGS.steps, count))
            figures = {"runs": runs} if len(workers) > 1 else runs[0]
            _save(figures)
    elif FLAGS.devices:
        _prepare_device(recipe)
        counts = _counts("devices", FLAGS.devices)
        for figures in scaling.weak_scaling(recipe, FLAGS.steps, counts):
            _save(figures)
    else:
        _prepare_device(recipe)
        figures = getattr(steps, kind)(recipe, FLAGS.steps, FLAGS.profile, save=_save)
        if FLAGS.stages:
            figures["stages"] = getattr(stages, kind)(
                recipe,
                FLAGS.steps,
                save=lambda times: _save(figures | {"stages": times}),
            )
    if jax.process_index() > 0:
        return
    text = _save(figures)
    if kind != "kernels":  # prints a line for each
        print(text, end="", flush=True)
    if "costliest" in figures:
        print(profile.table(figures["costliest"][:10]), flush=True)
    if figures.get("failures"):
        raise ValueError("; ".join(f"{k}: {v}" for k, v in figures["failures"].items()))


def _check_combination(kind: str) -> None:
    """Raise ValueError for flags that do not fit the kind of benchmark."""
    FLAGS = flags.FLAGS
    alone = [name for name in ("stages", "profile") if FLAGS[name].value]
    if FLAGS.devices and kind not in ("train", "compile"):
        raise ValueError(f"--devices is for train and compile, not for {kind}")
    if FLAGS["mode"].present and kind != "compile":
        raise ValueError(f"--mode is for compile, not for {kind}")
    if FLAGS.devices and kind == "train" and alone:
        raise ValueError(f"--{alone[0]} cannot be combined with --devices")
    if FLAGS.coordinator_address and (kind not in ("train", "infer") or alone):
        what = f"--{alone[0]}" if alone else kind
        raise ValueError(f"{what} runs in one process, leave out --coordinator_address")


def _prepare_device(recipe: Recipe) -> None:
    """Choose what the programs compute with, on all processes, and say it."""
    _choose_cache()
    device.log_precision(recipe.train.precision, gather)
    device.check_kernels(recipe.train.implementation, gather)


def _choose_cache() -> None:
    """Compile everything, since compile times are measured, but keep what autotuning found.

    JAX tells XLA to keep that below the folder of compiled programs if there is one.
    """
    kept = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if jax.default_backend() != "gpu" or not kept:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    folder = Path(kept) / "benchmark"
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)


def _save(figures: dict[str, Any]) -> str:
    """Write the figures to `--json`, if it is set, and return them as text.

    Only the first of several processes has all figures and writes them.
    """
    text = json.dumps(figures, indent=1) + "\n"
    if flags.FLAGS.json and jax.process_index() == 0:
        write_whole(flags.FLAGS.json, text)
    return text


def _counts(flag: str, texts: Sequence[str], lowest: int = 1) -> list[int]:
    for text in texts:
        if not text.isdigit() or int(text) < lowest:
            raise ValueError(f"--{flag} has {text!r}, expected whole numbers from {lowest}")
    return [int(text) for text in texts]


if __name__ == "__main__":
    cli.run(main, _define_flags, positional=True)
