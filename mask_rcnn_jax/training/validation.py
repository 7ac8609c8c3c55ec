"""The evaluation of a run: its scores as metrics, losses, and annotated validation images."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh

from mask_rcnn_jax.data.dataset import Dataset
from mask_rcnn_jax.data.eval_loader import EvalLoader
from mask_rcnn_jax.data.tiles import Tiles
from mask_rcnn_jax.evaluation import cells
from mask_rcnn_jax.evaluation import coco as coco_evaluation
from mask_rcnn_jax.evaluation.engines import announce_engine
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.structures import Batch
from mask_rcnn_jax.training import evaluator, processes, step
from mask_rcnn_jax.training.batches import make_eval_loader, make_tile_loader
from mask_rcnn_jax.training.beside import Pending
from mask_rcnn_jax.training.compiling import announce_compiling
from mask_rcnn_jax.training.encoding import Found, Rules
from mask_rcnn_jax.training.metrics import PER_CLASS
from mask_rcnn_jax.training.step import TrainState, shard_batch
from mask_rcnn_jax.training.tiles import detect_in_tiles

LossStep = Callable[[dict, Batch], dict[str, jax.Array]]
Validation = Callable[[TrainState], tuple[dict[str, float] | Pending, dict[str, np.ndarray]]]

# Fewer results and images are scored in the process itself, in about a second.
FEWEST_BESIDE = 5000

GROUPS = {"": "", "_rare": "r", "_common": "c", "_frequent": "f"}
# With the prefixes of their scores.
KINDS = {"box": "", "mask": "mask_", "boundary": "boundary_", "keypoints": "keypoints_"}
# Names in metrics.jsonl and in the scores.
LOGGED = {
    f"ap/{kind}{group}": f"{prefix}AP{letter}"
    for kind, prefix in KINDS.items()
    for group, letter in GROUPS.items()
}


def make_validation(
    recipe: Recipe,
    val_set: Dataset,
    model: MaskRCNN,
    mesh: Mesh,
    workdir: Path,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Validation:
    """`validate(state) -> (metrics, images)`; everything is also written below `eval/<step>/`.

    metrics: `ap/box`, `ap/mask` if masks are scored, both with `_at_K` where K detections are
    scored, with LVIS's protocol also both with `_rare`, `_common` and `_frequent`, otherwise
    `ap_class/box/CATEGORY` and `ap_class/mask/CATEGORY`, `ap/keypoints` if they are scored, and,
    where asked for, `val_loss/...`. With `eval.boundary`, `ap/boundary` and so on, too.
    images: by file name, ground truth beside detections.
    Many results are scored by a process of its own, which the metrics are `Pending` of, unless a
    rule of `recipe.train` or the run's last step waits for them.
    With `data.windows`, images are cut into tiles of that size, and neither drawn nor in losses.
    Raises `Stopped` before the next batch once `stop_requested()`.
    """

    def stoppable(run_batch):
        def run_or_stop(*arguments):
            if stop_requested():
                raise processes.Stopped
            return run_batch(*arguments)

        return run_or_stop

    wanted = recipe.eval
    announce_engine(wanted.engine)
    evaluator.check_scorable(val_set, wanted)
    predict = step.make_predict_step(model, mesh, wanted)
    predict = stoppable(announce_compiling("detector", predict))
    loss_step = step.make_loss_step(model, mesh, loss=recipe.loss, seed=recipe.train.seed)
    loss_step = stoppable(announce_compiling("validation losses", loss_step))
    options = evaluator.evaluation_options(recipe, val_set)
    numbers: dict[str, Any] = {"batch_size": wanted.batch_size}
    numbers["num_workers"] = recipe.data.num_workers
    load = partial(make_eval_loader, val_set, options, **numbers)

    # LVIS has over a thousand categories.
    metrics_of = partial(logged_scores, of_categories=wanted.protocol != "lvis")
    windows = recipe.data.windows
    if windows.is_on and (wanted.loss_images or wanted.pictures):
        text = "eval.loss_images and eval.pictures are of whole images: none with data.windows"
        logging.warning(text)

    def found_in(state: TrainState) -> Found:
        given = val_set, mesh, Rules.of(recipe)
        if not windows.is_on:
            loader = load(max_images=wanted.max_images)
            return evaluator.detect(predict, state.evaluated, loader, *given)
        limits = {"batch_size": wanted.batch_size, "max_images": wanted.max_images}
        tiles = make_tile_loader(val_set, recipe.data, Tiles(max(windows.size)), **limits)
        return detect_in_tiles(predict, state.evaluated, tiles, *given)

    def losses_and_pictures(state: TrainState, output: Path) -> tuple[dict, dict]:
        losses, images = {}, {}
        if wanted.loss_images and not windows.is_on:
            images_of = partial(make_eval_loader, val_set, recipe.data, **numbers)
            loader = images_of(max_images=wanted.loss_images, fill=True)
            losses = mean_losses(loss_step, state.evaluated, loader, mesh)
        if wanted.pictures and not windows.is_on:
            loader = load(max_images=wanted.pictures)
            folder = output / "pictures"
            images = evaluator.draw_pictures(
                *(predict, state.evaluated, loader, val_set, mesh, folder),
                keypoint_threshold=recipe.keypoint_threshold,
            )
            logging.info("annotated images: %s", folder)
        return losses, images

    def validate(state: TrainState) -> tuple[dict[str, float] | Pending, dict[str, np.ndarray]]:
        at, needed = int(state.step), bool(recipe.train.needs_evaluation())
        output, found = workdir / "eval" / str(at), found_in(state)
        is_quick = len(found.boxes) + len(found.image_ids) < FEWEST_BESIDE
        if needed or is_quick or at >= recipe.train.steps:
            metrics = metrics_of(evaluator.score_and_write(val_set, found, output, wanted))
            losses, images = losses_and_pictures(state, output)
            return metrics | losses, images
        start = partial(evaluator.start_scorer, val_set, found, output, wanted)
        pending = Pending(at, start, evaluator.say_scores, metrics_of)
        with ExitStack() as on_error:
            on_error.callback(pending.close)
            pending.others, images = losses_and_pictures(state, output)
            on_error.pop_all()
        return pending, images

    return validate


def logged_scores(scores: Mapping[str, Any], *, of_categories: bool) -> dict[str, float]:
    """The metrics of `LOGGED`, `ap/box_at_K` and `ap/mask_at_K` (services refuse "@"), `cells/f1`
    and so on, and `category_metrics`."""
    metrics = {name: scores[key] for name, key in LOGGED.items() if key in scores}
    if at := coco_evaluation.at_limit(scores):
        names = {f"ap/{kind}_at_{at[1:]}": f"{prefix}AP{at}" for kind, prefix in KINDS.items()}
        metrics |= {name: scores[key] for name, key in names.items() if key in scores}
    metrics |= cells.logged(scores["cells"]) if "cells" in scores else {}
    return metrics | (category_metrics(scores["per_category"]) if of_categories else {})


def category_metrics(per_category: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Metrics `ap_class/box/NAME` and so on of categories that have objects: AP@K where it exists,
    or else AP.

    Characters that a logger's service may refuse become underscores; of two names that become
    equal, the second gets a number.
    """
    metrics, taken = {}, Counter()
    for name, aps in per_category.items():
        name = re.sub(r"[^\w .-]", "_", name)
        taken[name] += 1
        name += f"_{taken[name]}" if taken[name] > 1 else ""
        at = coco_evaluation.at_limit(aps)
        for kind, prefix in KINDS.items():
            ap = aps.get(f"{prefix}AP{at}", aps.get(f"{prefix}AP", -1))
            if ap >= 0:
                metrics[f"{PER_CLASS}{kind}/{name}"] = ap
    return metrics


def mean_losses(
    loss_step: LossStep, variables: dict, batches: EvalLoader, mesh: Mesh
) -> dict[str, float]:
    """Losses averaged over the full batches, named `val_loss/...`; empty if there is none.

    A batch that was filled up is left out: its padding images would count as empty ones.
    """
    full = (batch for batch, is_full in zip(batches, batches.is_full, strict=True) if is_full)
    losses = [loss_step(variables, shard_batch(batch, mesh)) for batch in full]
    if not losses:
        return {}
    means = jax.tree.map(lambda *values: float(np.mean(values)), *jax.device_get(losses))
    return {f"val_{name}": value for name, value in means.items()}
