"""What a run is made of, before anything is written: its data, model and milestones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import optax
from absl import logging
from jax.sharding import Mesh

from mask_rcnn_jax.annotations.keypoints import mirror_places
from mask_rcnn_jax.data.augment import Kind
from mask_rcnn_jax.data.dataset import Dataset, dataset_name
from mask_rcnn_jax.data.kinds import resolve_augment
from mask_rcnn_jax.data.loader import TrainLoader
from mask_rcnn_jax.data.unused import unused_of
from mask_rcnn_jax.models.build import abstract_variables
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.recipe.options import TrainOptions
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.recipe.stopping import Metrics, comparable, main_ap
from mask_rcnn_jax.terminal import console
from mask_rcnn_jax.training.batches import make_train_loader
from mask_rcnn_jax.training.checks import (
    beyond_the_end,
    check_evaluated,
    check_keypoints,
    check_recipe,
    crops_larger,
    unused_keypoints,
)
from mask_rcnn_jax.training.distill import Distillation
from mask_rcnn_jax.training.freezing import check_freeze
from mask_rcnn_jax.training.limits import crowd_line, limit_lines
from mask_rcnn_jax.training.loggers import Logger, Loggers, open_loggers
from mask_rcnn_jax.training.low_rank import abstract_adapters
from mask_rcnn_jax.training.own_losses import OwnLoss, resolve_losses
from mask_rcnn_jax.training.setup import check_processes, image_counts, open_datasets, set_steps
from mask_rcnn_jax.training.step import StepOptions, TrainStep, make_train_step
from mask_rcnn_jax.training.step_log import StepLog
from mask_rcnn_jax.training.teacher import open_teacher
from mask_rcnn_jax.training.validation import Validation, make_validation
from mask_rcnn_jax.weights.restore import make_model


@dataclass(frozen=True)
class Work:
    """What a run is made of, before anything is written."""

    recipe: Recipe  # with all that data, arguments and teacher fill in
    kinds: tuple[Kind, ...]
    train_set: Dataset
    val_set: Dataset | None
    model: MaskRCNN
    schedule: optax.Schedule | None
    microbatches: int
    distillation: Distillation | None

    @property
    def milestones(self) -> "Milestones":
        return Milestones(self.recipe.train, self.val_set is not None)

    def batches(self, start: int) -> TrainLoader:
        data, train = self.recipe.data, self.recipe.train
        loader = make_train_loader(data, train, self.train_set, start, self.kinds)
        if line := crowd_line(self.recipe, self.train_set):
            logging.info("%s", line)
        for line in limit_lines(self.recipe, loader.counts, self.val_set):
            logging.warning("%s", line)
        return loader

    def loggers(self, workdir: Path, users: Sequence[Logger], start: int) -> Loggers:
        return open_loggers(workdir, self.recipe.to_dict(), users, resume_step=start)

    def validation(
        self, mesh: Mesh, workdir: Path, stop_requested: Callable[[], bool]
    ) -> Validation | None:
        if self.val_set is None:
            return None
        given = self.recipe, self.val_set, self.model, mesh, workdir
        return make_validation(*given, stop_requested)

    def step_log(self, log: Loggers, started: float) -> StepLog:
        lowest_scale, own = self.recipe.optim.loss_scale_floor, self.recipe.loss.added
        return StepLog(self.recipe.train, log, self.train_set, started, lowest_scale, own)

    def step(self, tx: optax.GradientTransformation, mesh: Mesh) -> TrainStep:
        loss, train, data = self.recipe.loss, self.recipe.train, self.recipe.data
        given = loss, train.seed, data.flip_probability, self.microbatches, train
        mirror = mirror_places(data.keypoints)
        options = StepOptions(*given, self.recipe.optim.freeze, mirror)
        return make_train_step(self.model, tx, self.schedule, mesh, options, self.distillation)


def prepare(
    recipe: Recipe,
    mesh: Mesh,
    sets: tuple[Dataset | None, Dataset | None],
    augment: Kind | Sequence[Kind] | None,
    optimizer: optax.GradientTransformation | None,
    losses: Sequence[tuple[str, OwnLoss]] | None = None,
) -> tuple[Work, tuple[dict, ...]]:
    """Read the data, build the model, and fill in the recipe.

    sets, augment, optimizer, losses: as `train` takes them.

    Returns the work, and the variables of a teacher, if there is one.
    """
    microbatches = check_recipe(recipe, mesh.size, optimizer)
    recipe = replace(recipe, loss=resolve_losses(recipe.loss, losses))
    kinds, data = resolve_augment(recipe.data, augment)
    with console.lasting("reading the data"):
        train_set, val_set, data = open_datasets(data, *sets, boxes_only=recipe.learns_boxes_only)
    check_keypoints(train_set, recipe)
    for line in unused_of(train_set):
        logging.warning("%s: %s", dataset_name(train_set), line)
    if line := unused_keypoints(train_set, recipe):
        logging.warning("%s", line)
    scored = {"learns_masks": not recipe.learns_boxes_only}
    scored |= {"finds_keypoints": recipe.model.has_keypoints}
    check_evaluated(recipe.train, val_set, **scored)
    if val_set is None:
        logging.info("data.val_json is empty: nothing is evaluated, the last checkpoints are kept")
    recipe = replace(recipe, data=data, train=set_steps(data, recipe.train, train_set))
    if line := crops_larger(data):
        logging.warning("%s", line)
    if optimizer is None and (line := beyond_the_end(recipe)):
        logging.warning("%s", line)
    counts = image_counts(recipe.model.classifier, data, train_set)
    model = make_model(recipe, len(train_set.class_names), recipe.train.remat, counts)
    if recipe.optim.freeze or recipe.optim.lora.rank:
        params = abstract_variables(model)["params"]
        params = abstract_adapters(params, recipe.optim.lora, model.backbone)
        check_freeze(recipe.optim.freeze, params)
    schedule = recipe.schedule() if optimizer is None else None
    distillation, teacher = open_teacher(recipe, model, train_set.class_names)
    if distillation is not None:
        recipe = replace(recipe, distill=distillation.options)
    check_processes(recipe.to_dict(), train_set)
    given = recipe, kinds, train_set, val_set, model, schedule, microbatches
    return Work(*given, distillation), teacher


@dataclass(frozen=True)
class Milestones:
    """The steps after which a run is saved, evaluated and ended."""

    train: TrainOptions
    evaluates: bool

    def is_evaluated(self, step: int) -> bool:
        if not self.evaluates:
            return False
        return step % self.train.eval_every == 0 or step == self.train.steps

    def is_due(self, step: int) -> bool:
        """Whether a step is saved even if nothing stops the run."""
        is_saved = step % self.train.checkpoint_every == 0 or step == self.train.steps
        return is_saved or self.is_evaluated(step)

    def is_last(self, step: int, aps: Metrics | None, evaluations: Sequence[Metrics] = ()) -> bool:
        """Whether a step ends the run: the last one, or one after which `StopRule` stops.

        If there is a set to evaluate, such a step has been evaluated. evaluations: all so far.
        """
        done, rule = step >= self.train.steps, self.train
        if aps is None:
            return not self.evaluates and done
        return done or rule.is_reached(aps) or rule.is_stalled(evaluations)

    def why(self, step: int, evaluations: list[dict], ended: str) -> str:
        """Why a run ended before its last step, for the log. ended: `Loggers.why_ended`."""
        if ended and step < self.train.steps:
            return f" of {self.train.steps}: {ended}; the same call goes on"
        if step >= self.train.steps or not self.train.is_stalled(evaluations):
            return ""
        rivals = comparable(evaluations)
        best, at = max((np.nan_to_num(main_ap(r), nan=-1.0), r["step"]) for r in rivals)
        found = f"the best AP is {best:.4f}, of step {at}"
        return f": {self.train.patience} evaluations in a row improved nothing, {found}"
