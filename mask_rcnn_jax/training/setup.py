"""Prepare a run: its config, datasets, length, batches, first state and workdir."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from mask_rcnn_jax.config import expand_none, flatten, load_config, read_workdir, write_workdir
from mask_rcnn_jax.data import dataset as datasets
from mask_rcnn_jax.data.augment import Kind
from mask_rcnn_jax.data.coco import CocoDataset
from mask_rcnn_jax.data.dataset import Dataset
from mask_rcnn_jax.data.loader import EvalLoader, TrainLoader, TrainOrder
from mask_rcnn_jax.data.options import (
    ExampleOptions,
    example_options,
    train_options,
)
from mask_rcnn_jax.data.overview import (
    epoch_factors,
    image_ids,
    training_classes,
    training_counts,
)
from mask_rcnn_jax.data.repeat import repeats
from mask_rcnn_jax.data.source import learns_boxes_only, load_train, load_val
from mask_rcnn_jax.data.tile_loader import TileLoader
from mask_rcnn_jax.data.tiles import Tiles
from mask_rcnn_jax.data.transforms import empty_batch
from mask_rcnn_jax.data.views import scaled_options
from mask_rcnn_jax.models.build import init_variables
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.structures import Batch
from mask_rcnn_jax.training import processes
from mask_rcnn_jax.training.averaging import weight_average
from mask_rcnn_jax.training.distill import distill_options
from mask_rcnn_jax.training.optim import build_optimizer, make_schedule
from mask_rcnn_jax.training.step import TrainState
from mask_rcnn_jax.training.teacher import inherit
from mask_rcnn_jax.training.views import view_options
from mask_rcnn_jax.weights import pretrained
from mask_rcnn_jax.weights.restore import run_entries, takes_raw

# Entries that a resumed run may change; all others shape the parameters or the order of the data.
# The teacher may have moved: `distill.checksum` says whether it is the same.
FREE_TO_CHANGE = tuple(
    """
    data.num_workers distill.teacher eval. optim.accumulate_steps train.checkpoint_every
    train.eval_every train.images_per_device train.implementation train.keep_checkpoints
    train.log_every train.loggers train.min_improvement train.patience train.remat
    train.skip_images train.stop_at_box_ap train.stop_at_mask_ap
    """.split()
)
LENGTH = ("train.steps", "train.epochs")  # a resumed run may raise them


def resolve_config(config: ConfigDict | str | Path) -> ConfigDict:
    """Return a recipe's config by name or path, or a copy of a config, which training fills in."""
    if isinstance(config, str | Path):
        return load_config(config)
    if not isinstance(config, ConfigDict):
        raise ValueError(
            f"config is {type(config).__name__}, expected a ConfigDict or the name of a recipe"
        )
    return expand_none(config.copy_and_resolve_references())


def open_datasets(
    config: ConfigDict, train_set: Dataset | None, val_set: Dataset | None
) -> tuple[Dataset, Dataset | None]:
    """Return the checked datasets to train on and to evaluate: the given ones, or the config's.

    The config then names a given dataset in place of the files that it replaces. There is none to
    evaluate, and `data.val_json` is empty, if none is given and that entry is empty.
    Raises ValueError for a dataset that cannot be used, and if their classes differ.
    """
    given = {"train": train_set, "val": val_set}
    for split, dataset in given.items():
        if dataset is not None and type(dataset) is not CocoDataset:
            datasets.check_dataset(dataset, f"{split}_set")
    boxes_only = learns_boxes_only(config)
    if train_set is None:
        train_set = load_train(config.data, boxes_only=boxes_only)
    else:  # it takes the place of all training sets
        merging = ("more_train", "class_map")
        config.data.update({name: () for name in merging if name in config.data})
    classes, name = datasets.categories(train_set), datasets.dataset_name(train_set)
    if val_set is None and config.data.val_json:
        val_set = load_val(config.data, classes, boxes_only=boxes_only)
    if val_set is not None:
        datasets.check_classes(val_set, classes, name)
    for split, dataset in given.items():
        if isinstance(dataset, CocoDataset):
            files = {f"{split}_json": dataset.json_path, f"{split}_images": dataset.image_dir}
            config.data.update(source="json", **files)
        elif dataset is not None:
            name = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
            config.data.update(source="json", **{f"{split}_json": f"{name}, given as {split}_set"})
    return train_set, val_set


def set_steps(config: ConfigDict, dataset: Dataset) -> None:
    """Turn `train.epochs` into steps, and `train.eval_every=0` into one epoch.

    Raises ValueError where the set has no object to learn from, or, naming the entries, where no
    step would be left.
    """
    keep_empty, options = config.data.keep_empty, example_options(config)
    if not training_counts(dataset, options)[0].any():
        name = datasets.dataset_name(dataset)
        raise ValueError(f"{name}: no image has an object to train on (crowds are none)")
    factors = epoch_factors(dataset, options, repeats(config), keep_empty=keep_empty)
    num_images = round(float(factors.sum()))
    train = config.train
    if train.epochs:
        train.steps = round(train.epochs * num_images / train.batch_size)
        values = train.epochs, num_images, train.steps
        logging.info("train.epochs=%g with %d images sets train.steps=%d", *values)
    if train.eval_every == 0:
        train.eval_every = max(1, round(num_images / train.batch_size))
    if train.steps < 1:
        raise ValueError(
            f"train.epochs={train.epochs} and train.steps={train.steps} with {num_images} images "
            f"and train.batch_size={train.batch_size} give no step"
        )


def image_counts(config: ConfigDict, dataset: Dataset) -> tuple[int, ...]:
    """Training images with each class, class 1 first; () where no loss asks for them."""
    if not config.model.get("classifier", {}).get("federated_classes", 0):
        return ()
    _, classes = training_classes(dataset, example_options(config))
    counts = np.bincount(classes, minlength=len(dataset.class_names) + 1)
    return tuple(counts[1:].tolist())


def make_train_loader(
    config: ConfigDict, dataset: Dataset, start_step: int, augment: Sequence[Kind]
) -> TrainLoader:
    """This process' share of the training batches from a step on."""
    rows, keep_empty = config.train.batch_size // jax.process_count(), config.data.keep_empty
    skip = _places(dataset, config.train.skip_images)
    order = TrainOrder(
        config.train.seed,
        rows,
        start_step,
        keep_empty=keep_empty,
        skip=skip,
        repeats=repeats(config),
        **_share(),
    )
    options, workers = train_options(config), config.data.num_workers
    return TrainLoader(dataset, options, order, num_workers=workers, augment=augment)


def abstract_train_batch(config: ConfigDict, canvas: tuple[int, int], mesh: Mesh) -> Batch:
    """Shapes, dtypes and shardings of a training batch of all processes."""
    sharding, size = NamedSharding(mesh, PartitionSpec("data")), config.train.batch_size
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype, sharding=sharding),
        empty_batch(1, canvas, train_options(config)),
    )


def _places(dataset: Dataset, ids: Sequence[int | str]) -> frozenset[int]:
    place = {image_id: index for index, image_id in enumerate(image_ids(dataset))}
    unknown = [image_id for image_id in ids if image_id not in place]
    if unknown:
        raise ValueError(
            f"train.skip_images has {unknown[0]!r}, expected ids of images of "
            f"{datasets.dataset_name(dataset)}"
        )
    return frozenset(place[image_id] for image_id in ids)


def make_eval_loader(
    config: ConfigDict,
    dataset: Dataset,
    max_images: int,
    *,
    fill: bool = False,
    options: ExampleOptions | None = None,
) -> EvalLoader:
    """Batches of the first `max_images` images (0: all), this process' share.

    fill: take smaller batches rather than one that is not full. options: those of the config, if
    None.
    """
    per_device = config.eval.batch_size
    if fill:
        num_images = min(max_images or len(dataset.images), len(dataset.images))
        per_device = max(1, min(per_device, num_images // jax.device_count()))
    rows = per_device * jax.local_device_count()
    numbers = {"batch_size": rows, "max_images": max_images, **_share()}
    options, workers = options or example_options(config), config.data.num_workers
    return EvalLoader(dataset, options, num_workers=workers, **numbers)


def make_tile_loader(config: ConfigDict, dataset: Dataset, tiles: Tiles) -> TileLoader:
    """Batches of the tiles of the first `eval.max_images` images, this process' share."""
    rows, limit = config.eval.batch_size * jax.local_device_count(), config.eval.max_images
    numbers = {"batch_size": rows, "max_images": limit, **_share()}
    return TileLoader(dataset, example_options(config), tiles, **numbers)


def _share() -> dict[str, int]:
    return {"process_index": jax.process_index(), "process_count": jax.process_count()}


def initial_state(
    config: ConfigDict,
    model: MaskRCNN,
    schedule: optax.Schedule | None,
    optimizer: optax.GradientTransformation | None,
    teacher: Mapping[str, Any] | None = None,
    *,
    resuming: bool,
) -> tuple[TrainState, optax.GradientTransformation]:
    """State of step 0, with the weights of `model.init_from`, and its optimizer.

    teacher: variables, of which `distill.inherit` takes what `model.init_from` does not have.
    """
    variables = init_variables(model, config.train.seed)
    norm = config.model.backbone.get("norm")
    if not (config.model.init_from or resuming) and norm in ("frozen", "affine"):
        logging.warning(
            "model.backbone.norm is %r and the weights are random: this will hardly learn; set "
            "model.init_from, or model.backbone.norm=group and model.backbone.frozen_stages=0",
            norm,
        )
    if teacher is not None and distill_options(config).inherit and not resuming:
        variables = inherit(variables, teacher)
    if config.model.init_from and not resuming:
        variables = pretrained.initialize_from(variables, config.model, raw=takes_raw(config))
    tx = build_optimizer(config, schedule, variables["params"], model.backbone, optimizer)
    return TrainState.start(variables, tx, weight_average(config)), tx


def view_sizes(config: ConfigDict) -> list[ExampleOptions]:
    """Options of the images in each size of `eval.tta_scales`; ValueError names a wrong entry."""
    options = example_options(config)
    return [scaled_options(options, scale) for scale in view_options(config).tta_scales]


def check_processes(config: ConfigDict, dataset: Dataset) -> None:
    """Raise ValueError, naming the entry, if the processes of a run have different configs or
    different datasets; they would train on a mixture."""
    entries = flatten(config.to_dict())
    entries.pop("data.num_workers")  # a matter of the machine
    images = hashlib.sha256(repr(image_ids(dataset)).encode()).hexdigest()
    data = {"the dataset's classes": list(dataset.class_names), "its images' ids": images}
    processes.check_equal(entries | data)


def open_workdir(
    workdir: str | Path, config: ConfigDict, categories: list[dict], *, resuming: bool
) -> int:
    """Write `config.json`; when resuming, check before that the one there is of the same run.

    Returns the `train.steps` that the run was started with; it may be longer now.

    Raises ValueError if it is of another config or other classes, OSError if it cannot be written.
    """
    path, steps = Path(workdir) / "config.json", config.train.steps
    if resuming and path.exists():
        steps = _check_same_run(path, config, categories)
    write_workdir(workdir, config, categories)
    return steps


def log_extension(
    config: ConfigDict, schedule: optax.Schedule | None, old_steps: int, step: int
) -> None:
    """Log how the learning rate changes because a run is longer than when it was started."""
    effect = "the schedule of your own optimizer does not know"
    if schedule is not None:
        shorter = config.copy_and_resolve_references()
        shorter.train.steps = old_steps
        rates = float(make_schedule(shorter)(step)), float(schedule(step))
        effect = "warm-up and decay are fractions of it, so that the learning rate of step %d is "
        effect = (effect + "%.3g instead of %.3g") % (step + 1, rates[1], rates[0])
    steps = config.train.steps
    logging.info("train.steps is %d, this run had %d: %s", steps, old_steps, effect)


def _check_same_run(path: Path, config: ConfigDict, categories: list[dict]) -> int:
    try:
        old, old_categories = read_workdir(path.parent)
        before, now = (run_entries(c, config) for c in (old, config))
        steps = before["train.steps"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{error}; choose another --workdir") from error
    free = FREE_TO_CHANGE + (LENGTH if now["train.steps"] >= steps else ())
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name) and not name.startswith(free):
            shorter = ", which may only be raised" if name in LENGTH else ""
            raise ValueError(
                f"{path.parent} holds a run of another config: {name} was {before.get(name)!r} and "
                f"is {now.get(name)!r} now{shorter}; choose another --workdir or set it back"
            )
    if old_categories != json.loads(json.dumps(categories)):
        raise ValueError(
            f"{path.parent} holds a run with other categories, choose another --workdir"
        )
    return steps
