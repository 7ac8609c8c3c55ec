"""Prepare a run: its datasets, length, batches, first state and workdir."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from absl import logging

from mask_rcnn_jax import consent
from mask_rcnn_jax.config import named_code, read_workdir, write_workdir
from mask_rcnn_jax.data import dataset as datasets
from mask_rcnn_jax.data.coco import CocoDataset
from mask_rcnn_jax.data.dataset import Dataset
from mask_rcnn_jax.data.options import DataOptions, ExampleOptions
from mask_rcnn_jax.data.overview import (
    epoch_factors,
    image_ids,
    training_boxes,
    training_classes,
    training_counts,
)
from mask_rcnn_jax.data.source import load_train, load_val
from mask_rcnn_jax.models.build import abstract_variables, init_variables
from mask_rcnn_jax.models.detect import Detect
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.ops.classifier import Classifier
from mask_rcnn_jax.recipe.entries import flatten
from mask_rcnn_jax.recipe.options import EVAL_STEPS, TrainOptions
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.terminal.safe_text import cut
from mask_rcnn_jax.training import processes
from mask_rcnn_jax.training.low_rank import add_adapters
from mask_rcnn_jax.training.optim import build_optimizer
from mask_rcnn_jax.training.step import TrainState
from mask_rcnn_jax.training.teacher import inherit
from mask_rcnn_jax.weights import pretrained
from mask_rcnn_jax.weights.restore import entries_in_json

# Entries that a resumed run may change, beside `eval`; all others shape the parameters or the order
# of the data.
# The teacher may have moved: `distill.checksum` says whether it is the same.
FREE_TO_CHANGE = tuple(
    """
    data.num_workers distill.teacher optim.accumulate_steps train.checkpoint_every
    train.eval_every train.images_per_device train.implementation train.keep_checkpoints
    train.log_every train.loggers train.min_improvement train.patience train.remat
    train.skip_images train.stop_at_box_ap train.stop_at_keypoints_ap train.stop_at_mask_ap
    """.split()
)
# What a resumed run may change of `eval`, so that its APs are not those of before.
SCORING = tuple(
    f"eval.{name}"
    for name in (
        *("max_images", "paste", "protocol", "keypoint_sigmas"),
        *(field.name for field in fields(Detect)),
    )
)
LENGTH = ("train.steps", "train.epochs")  # a resumed run may raise them


def open_datasets(
    data: DataOptions,
    train_set: Dataset | None,
    val_set: Dataset | None,
    *,
    boxes_only: bool = False,
) -> tuple[Dataset, Dataset | None, DataOptions]:
    """Return the checked datasets to train on and to evaluate: the given ones, or the recipe's.

    The `data` section comes with them: it names a given dataset in place of the files that it
    replaces. There is none to evaluate, and `data.val_json` is empty, if none is given and that
    entry is empty.
    boxes_only: objects need no mask. Raises ValueError for a dataset that cannot be used, and if
    their classes differ.
    """
    given = {"train": train_set, "val": val_set}
    for split, dataset in given.items():
        if dataset is not None and type(dataset) is not CocoDataset:
            datasets.check_dataset(dataset, f"{split}_set")
    if train_set is None:
        train_set = load_train(data, boxes_only=boxes_only)
    else:  # it takes the place of all training sets
        data = replace(data, more_train=(), class_map=())
    classes, name = datasets.categories(train_set), datasets.dataset_name(train_set)
    if val_set is None and data.val_json:
        try:
            val_set = load_val(data, classes, boxes_only=boxes_only)
        except FileNotFoundError as error:
            if given["train"] is None:
                raise
            advice = "give val_set, or data.val_json='' to evaluate nothing"
            raise FileNotFoundError(f"{error}; {advice}") from error
    if val_set is not None:
        datasets.check_classes(val_set, classes, name)
        datasets.check_scored_keypoints(val_set, data.keypoints)
    for split, dataset in given.items():
        if dataset is None:
            continue
        files: dict[str, Any] = {
            f"{split}_json": f"{_full_name(type(dataset))}, given as {split}_set"
        }
        if isinstance(dataset, CocoDataset):
            files = {f"{split}_json": dataset.json_path, f"{split}_images": dataset.image_dir}
        data = replace(data, source="json", **files)
    return train_set, val_set, data


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def set_steps(data: DataOptions, train: TrainOptions, dataset: Dataset) -> TrainOptions:
    """Turn `train.epochs` into steps, and `train.eval_every=0` into those of an epoch or more.

    Raises ValueError where the set has no object to learn from, or, naming the entries, where no
    step would be left.
    """
    if not training_counts(dataset, data)[0].any():
        name = datasets.dataset_name(dataset)
        raise ValueError(f"{name}: no image has an object to train on (crowds are none)")
    factors = epoch_factors(dataset, data, data, keep_empty=data.keep_empty)
    num_images = round(float(factors.sum()))
    if train.epochs:
        train = replace(train, steps=round(train.epochs * num_images / train.batch_size))
        what = "windows" if data.windows.is_on else "images"
        values = train.epochs, num_images, what, train.steps
        few, enough = "", train.enough_epochs(num_images)
        if enough:
            steps = round(enough * num_images / train.batch_size)
            few = f": few for fine-tuning; --config.train.epochs={enough} gives {steps}"
        logging.info("train.epochs=%g with %d %s sets train.steps=%d%s", *values, few)
    if train.eval_every == 0:
        least = min(EVAL_STEPS, math.ceil(train.steps / 10))
        epoch = round(num_images / train.batch_size)
        train = replace(train, eval_every=max(1, epoch, least))
    if train.steps < 1:
        raise ValueError(
            f"train.epochs={train.epochs} and train.steps={train.steps} with {num_images} images "
            f"and train.batch_size={train.batch_size} give no step"
        )
    return train


def image_counts(
    classifier: Classifier, options: ExampleOptions, dataset: Dataset
) -> tuple[int, ...]:
    """Training images with each class, class 1 first; () where no loss asks for them."""
    if not classifier.federated_classes:
        return ()
    _, classes = training_classes(dataset, options)
    counts = np.bincount(classes, minlength=len(dataset.class_names) + 1)
    return tuple(counts[1:].tolist())


def initial_state(
    recipe: Recipe,
    model: MaskRCNN,
    schedule: optax.Schedule | None,
    optimizer: optax.GradientTransformation | None,
    teacher: Mapping[str, Any] | None = None,
    *,
    resuming: bool,
    accept_mismatch: bool = False,
) -> tuple[TrainState, optax.GradientTransformation]:
    """State of step 0, with the weights of `model.init_from`, and its optimizer.

    Args:
        teacher: variables, of which `distill.inherit` takes what `model.init_from` does not have.
        resuming: whether they are replaced by those of a checkpoint.
        accept_mismatch: that of `train`.
    """
    variables, source = abstract_variables(model), recipe.model.weights
    if teacher is not None and recipe.distill.inherit and not resuming:
        variables = inherit(variables, teacher)
    if source and not resuming:
        options = dict(raw=recipe.eval.weights == "raw", accept_mismatch=accept_mismatch)
        bands = recipe.data.bands.names
        variables = pretrained.initialize_from(variables, recipe.model, bands, **options)
    if resuming:
        variables = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), variables)
    else:
        variables = init_variables(model, recipe.train.seed, variables)
    lora, backbone = recipe.optim.lora, model.backbone
    params = add_adapters(variables["params"], lora, backbone, recipe.train.seed)
    variables = {**variables, "params": params}
    tx = build_optimizer(recipe, schedule, params, backbone, optimizer)
    return TrainState.start(variables, tx, recipe.train), tx


def check_processes(tree: Mapping[str, Any], dataset: Dataset) -> None:
    """Raise ValueError, naming the entry, if the processes of a run have different recipes or
    different datasets; they would train on a mixture."""
    entries = flatten(tree)
    entries.pop("data.num_workers")  # a matter of the machine
    images = hashlib.sha256(repr(image_ids(dataset)).encode()).hexdigest()
    data = {"the dataset's classes": list(dataset.class_names), "its images' ids": images}
    processes.check_equal(entries | data)


def fingerprint(dataset: Dataset, options: ExampleOptions) -> str:
    """Return what tells a training set from another in its place: counts, and a hash of the images'
    ids and of the objects' classes and boxes."""
    ids, boxes = image_ids(dataset), training_boxes(dataset, options).boxes
    digest = hashlib.sha256(repr(ids).encode())
    for array in (boxes, *training_classes(dataset, options)):
        digest.update(np.ascontiguousarray(array).tobytes())
    return f"{len(ids)} images, {len(boxes)} objects, {digest.hexdigest()[:12]}"


def open_workdir(
    workdir: str | Path,
    recipe: Recipe,
    categories: list[dict],
    *,
    resuming: bool,
    train_set: str = "",
) -> int:
    """Write `config.json`; when resuming, check before that the one there is of the same run, and
    say if its training set was another, see `fingerprint`.

    Returns the `train.steps` that the run was started with; it may be longer now.

    Raises ValueError if it is of another recipe or other classes, OSError if it cannot be written.
    """
    path, steps = Path(workdir) / "config.json", recipe.train.steps
    if resuming and path.exists():
        steps = check_same_run(workdir, recipe, categories)
        before = json.loads(path.read_bytes()).get("train_set")
        if isinstance(before, str) and before != train_set and train_set:
            text = "the training set changed since this run began: it was %s and is %s now"
            logging.warning(text, cut(before, 100), train_set)
    write_workdir(workdir, recipe, categories, train_set)
    return steps


def check_same_run(workdir: str | Path, recipe: Recipe, categories: list[dict]) -> int:
    """Return the `train.steps` of the run in a workdir, or at its address.

    Raises ValueError if it is of another recipe or other classes, OSError if it cannot be read.
    """
    try:
        with consent.allow_code(named_code(recipe.to_dict()).values()):
            old, old_categories = read_workdir(workdir)
    except ValueError as error:
        raise ValueError(f"{error}; choose another --workdir") from error
    before, now = map(entries_in_json, (old, recipe))
    longer = recipe.train.steps >= old.train.steps
    free = FREE_TO_CHANGE + (LENGTH if longer else ())
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name) and name not in free and not name.startswith("eval."):
            shorter = ", which may only be raised" if name in LENGTH else ""
            was, found = (cut(repr(entries.get(name))) for entries in (before, now))
            raise ValueError(
                f"{workdir} holds a run of another config: {name} was {was} and is {found} "
                f"now{shorter}; choose another --workdir or set it back"
            )
    if changed := [name for name in SCORING if before.get(name) != now.get(name)]:
        name, more = changed[0], f", and {len(changed) - 1} more" if changed[1:] else ""
        was, found = (cut(repr(entries.get(name))) for entries in (before, now))
        logging.warning(
            "%s was %s and is %s now%s: earlier APs of this run had other rules; the best "
            "checkpoint and train.patience compare them with new ones, except AP@K of another K",
            *(name, was, found, more),
        )
    if old_categories != json.loads(json.dumps(categories)):
        raise ValueError(f"{workdir} holds a run with other categories, choose another --workdir")
    return old.train.steps
