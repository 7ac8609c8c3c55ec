"""Train a recipe from several seeds, one after the other, to see how often a run diverges.

    python -m benchmarks.seeds --config finetune --seeds 0,1,2 --json seeds.json \\
        --config.data.train_json=train.json --config.data.train_images=train

A seed chooses the new weights, the order of the images, flips and samples; all seeds share one
compiled step. A run ends after `train.steps`, or at the first step with a loss that is not finite.
Nothing is evaluated or saved but the losses. Prints a table with a row per seed; the file has the
total loss and the gradient norm of every step.
"""

import json
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
from absl import flags

from mask_rcnn_jax import cli
from mask_rcnn_jax.data.kinds import build_augment
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.training import setup
from mask_rcnn_jax.training.checks import check_recipe
from mask_rcnn_jax.training.step import (
    compiler_options,
    make_mesh,
    make_train_step,
    replicate,
)
from mask_rcnn_jax.weights.restore import make_model

HEADER = (
    "| seed | steps | largest loss | last loss | largest gradient norm |\n|---|---|---|---|---|"
)
Losses = dict[str, list[float | None]]  # None: not finite


def train_seeds(recipe: Recipe, seeds: Sequence[int], report) -> None:
    """Call `report(seed, losses)` after each run, `losses` having a list per metric."""
    recipe, mesh = replace(recipe, data=replace(recipe.data, val_json="")), make_mesh()
    parts = check_recipe(recipe, mesh.size, None)
    dataset, _, data = setup.open_datasets(recipe.data, None, None)
    recipe = replace(recipe, train=setup.set_steps(data, recipe.train, dataset))
    counts = setup.image_counts(recipe.model.classifier, data, dataset)
    model = make_model(recipe, len(dataset.class_names), recipe.train.remat, counts)
    schedule, kinds = recipe.schedule(), build_augment(data)
    options = {"loss": recipe.loss, "averaging": recipe.train}
    options |= {"flip_probability": data.flip_probability, "accumulate_steps": parts}
    _, tx = setup.initial_state(recipe, model, schedule, None, resuming=False)

    @partial(jax.jit, compiler_options=compiler_options(mesh))
    def step(seed, state, batch):
        # Unwrapped: JAX takes compiler options at the outermost jit alone.
        step = make_train_step(model, tx, schedule, mesh, seed=seed, **options).__wrapped__
        return step(state, batch)

    for seed in seeds:
        train = replace(recipe.train, seed=seed)
        seeded = replace(recipe, train=train)
        state, _ = setup.initial_state(seeded, model, schedule, None, resuming=False)
        state, losses = replicate(state, mesh), {"loss/total": [], "grad_norm": []}
        with closing(setup.make_train_loader(data, train, dataset, 0, kinds)) as batches:
            for _ in range(train.steps):
                state, metrics = step(seed, state, next(batches))
                found = [float(metrics[name]) for name in losses]
                for values, value in zip(losses.values(), found, strict=True):
                    values.append(value if math.isfinite(value) else None)
                if losses["loss/total"][-1] is None:
                    break
        report(seed, losses)


def row(seed: int, losses: Losses) -> str:
    total, norms = losses["loss/total"], losses["grad_norm"]
    largest, norm = (max((v for v in of if v is not None), default=0.0) for of in (total, norms))
    last = "not finite" if total[-1] is None else f"{total[-1]:.3g}"
    return f"| {seed} | {len(total)} | {largest:.3g} | {last} | {norm:.3g} |"


def _define_flags() -> None:
    cli.define_config()
    flags.DEFINE_list("seeds", ["0", "1"], "Seeds, one run each.")
    flags.DEFINE_string("json", None, "Write the losses of all steps to this file.")


def main(_: Sequence[str]) -> None:
    runs: dict[int, Losses] = {}

    def report(seed: int, losses: Losses) -> None:
        runs[seed] = losses
        print(row(seed, losses), flush=True)
        if flags.FLAGS.json:
            Path(flags.FLAGS.json).write_text(json.dumps(runs, allow_nan=False) + "\n")

    print(HEADER)
    train_seeds(cli.given_recipe(), [int(seed) for seed in flags.FLAGS.seeds], report)


if __name__ == "__main__":
    cli.run(main, _define_flags)
