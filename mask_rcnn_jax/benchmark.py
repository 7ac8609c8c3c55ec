"""Measure the training step, the prediction, the input and the kernels, or what a GPU would run.

    python -m mask_rcnn_jax.benchmark train --config configs/coco.py --config.train.batch_size=8
    python -m mask_rcnn_jax.benchmark infer --config configs/coco.py --config.eval.batch_size=8
    python -m mask_rcnn_jax.benchmark data --config configs/coco.py
    python -m mask_rcnn_jax.benchmark kernels
    python -m mask_rcnn_jax.benchmark compile --target h100 --config configs/coco.py

`train` and `infer` run on generated pictures, in steady state; with `--stages` the stages of the
model are timed too, each alone, and with `--profile DIR` a trace is written and the costliest
operations are listed. `data` reads and prepares batches. `kernels` needs a GPU. `compile`
needs none: it compiles the whole training step for GPUs that are not there, prints memory, counts
and an estimate of the time, and with `--budgets FILE` fails if one of them is over its budget.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags

from mask_rcnn_jax import cli
from mask_rcnn_jax.benchmarking import (
    budgets,
    gpu_compile,
    kernels,
    profile,
    roofline,
    stages,
    steps,
)

KINDS = ("train", "infer", "data", "kernels", "compile")


def compile_for(target: str, config, shapes: Sequence[tuple[int, int]], budget_file: str | None):
    """Compile for each (images a device, devices), print a table; what is over budget fails."""
    limits = budgets.load(budget_file) if budget_file else {}
    programs, over = [], []
    for program in gpu_compile.compile_steps(config, target, shapes):
        programs.append(program)
        over += budgets.excesses(program, limits)
    print(budgets.table(target, programs), flush=True)
    for program in programs:
        print(f"\n{program.images_per_device} images on each of {program.devices} devices")
        print(roofline.report(program.estimates, program.costliest), flush=True)
    figures = [dataclasses.asdict(program) for program in programs]
    failures = {f"over the budget of {budget_file}": "; ".join(over)} if over else {}
    return {
        "target": target, "jax": jax.__version__, "programs": figures, "failures": failures,
    }  # fmt: skip


def _define_flags() -> None:
    cli.define_config(required=False)
    flags.DEFINE_string("json", None, "A file for the figures, one JSON object.")
    flags.DEFINE_integer(
        "steps", 20, "Timed steps of train and infer, batches of data.", lower_bound=1
    )
    flags.DEFINE_bool("stages", False, "Time the stages of train and infer, too.")
    flags.DEFINE_string("profile", None, "A folder for a trace of train or infer.")
    flags.DEFINE_integer(
        "pictures", 64, "For data: generated JPEGs; 0 takes config.data.train_json.", lower_bound=0
    )
    flags.DEFINE_list(
        "workers", None, "For data: numbers of worker processes, one measured after the other; "
        "config.data.num_workers if unset.",
    )  # fmt: skip
    flags.DEFINE_string("only", "", "Kernels and cases whose name has this in it.")
    flags.DEFINE_string("target", "h100", "The GPU to compile for: h100, h200 or a100.")
    flags.DEFINE_list("images", ["2", "8"], "Images a device to compile for.")
    flags.DEFINE_list("devices", ["1", "4"], "Numbers of devices to compile for.")
    flags.DEFINE_string("budgets", None, "A TOML file of limits for what compile counts.")


def main(positional: Sequence[str]) -> None:
    FLAGS = flags.FLAGS
    if len(positional) != 1 or positional[0] not in KINDS:
        raise ValueError(f"benchmark needs one of {', '.join(KINDS)}, got {list(positional)}")
    kind = positional[0]
    if kind != "kernels" and FLAGS.config is None:
        raise ValueError(f"benchmark {kind} needs --config")
    jax.config.update("jax_enable_compilation_cache", False)  # compiling is measured, too
    if kind == "compile":
        jax.config.update("jax_platforms", "cpu")  # JAX is not to look for a GPU
        images, devices = _counts("images", FLAGS.images), _counts("devices", FLAGS.devices)
        shapes = [(i, d) for d in devices for i in images]
        figures = compile_for(FLAGS.target, FLAGS.config, shapes, FLAGS.budgets)
    elif kind == "kernels":
        if jax.default_backend() != "gpu":
            raise ValueError("benchmark kernels needs a GPU, this machine has none")
        figures = kernels.run(FLAGS.only)
    elif kind == "data":
        from mask_rcnn_jax.benchmarking import loading  # reads pictures, with other libraries

        workers = _counts("workers", FLAGS.workers or [str(FLAGS.config.data.num_workers)], 0)
        runs = [loading.run(FLAGS.config, FLAGS.pictures, FLAGS.steps, n) for n in workers]
        figures = {"runs": runs} if len(runs) > 1 else runs[0]
        print(json.dumps(figures, indent=1), flush=True)
    else:
        run = {"train": steps.train, "infer": steps.infer}[kind]
        figures = run(FLAGS.config, FLAGS.steps, FLAGS.profile)
        if FLAGS.stages:
            of_stages = {"train": stages.train, "infer": stages.infer}[kind]
            figures["ms_of_stages"] = of_stages(FLAGS.config, FLAGS.steps)
        print(json.dumps(figures, indent=1), flush=True)
        if FLAGS.profile:
            print(profile.table(figures["costliest"]), flush=True)
    if FLAGS.json:
        _write(Path(FLAGS.json), figures)
    if figures.get("failures"):
        raise ValueError("; ".join(f"{k}: {v}" for k, v in figures["failures"].items()))


def _counts(flag: str, texts: Sequence[str], least: int = 1) -> list[int]:
    for text in texts:
        if not text.isdigit() or int(text) < least:
            raise ValueError(f"--{flag} has {text!r}, expected whole numbers from {least}")
    return [int(text) for text in texts]


def _write(path: Path, figures: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    cli.run(main, _define_flags)
