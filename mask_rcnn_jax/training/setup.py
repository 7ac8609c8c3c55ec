"""Prepare a run: its length, its evaluation batches and the config.json of its workdir."""

import json
import os
from pathlib import Path

import jax
from absl import logging
from ml_collections import ConfigDict

from mask_rcnn_jax.config import flatten
from mask_rcnn_jax.data.coco import CocoDataset
from mask_rcnn_jax.data.loader import EvalLoader
from mask_rcnn_jax.data.options import example_options
from mask_rcnn_jax.data.transforms import training_objects

# Entries that a resumed run may change; all others shape the parameters or the order of the data.
FREE_TO_CHANGE = (
    "data.num_workers", "eval.", "train.log_every", "train.checkpoint_every", "train.eval_every",
    "train.implementation", "train.keep_checkpoints", "train.stop_at_box_ap",
    "train.stop_at_mask_ap",
    # How the same global batch is worked through, on more devices or fewer.
    "optim.accumulate_steps", "train.images_per_device", "train.remat",
)  # fmt: skip


def set_steps(config: ConfigDict, dataset: CocoDataset) -> None:
    """Turn `train.epochs` into steps, and `train.eval_every=0` into one epoch.

    Raises ValueError, naming the entries, where no step would be left.
    """
    num_images, options = len(dataset.images), example_options(config)
    if not config.data.keep_empty:
        num_images = sum(bool(training_objects(i.annotations, options)) for i in dataset.images)
    epoch = max(1, round(num_images / config.train.batch_size))
    if config.train.epochs:
        config.train.steps = round(config.train.epochs * num_images / config.train.batch_size)
        logging.info(
            "train.epochs=%g with %d images sets train.steps=%d", config.train.epochs, num_images,
            config.train.steps,
        )  # fmt: skip
    if config.train.eval_every == 0:
        config.train.eval_every = epoch
    if config.train.steps < 1:
        raise ValueError(
            f"train.epochs={config.train.epochs} and train.steps={config.train.steps} with "
            f"{num_images} images and train.batch_size={config.train.batch_size} give no step"
        )


def make_eval_loader(config: ConfigDict, dataset: CocoDataset, max_images: int) -> EvalLoader:
    """Batches of the first `max_images` images (0: all), this process' share."""
    devices = jax.device_count()
    rows = -(-config.eval.batch_size // devices) * jax.local_device_count()
    return EvalLoader(
        dataset,
        example_options(config),
        batch_size=rows,
        num_workers=config.data.num_workers,
        max_images=max_images,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )


def open_workdir(
    workdir: str, config: ConfigDict, categories: list[dict], *, resuming: bool
) -> None:
    """Write `config.json`, on the first process; when resuming, check before that the one there is
    of the same run.

    Raises ValueError if it is of another config or other classes, OSError if it cannot be written.
    """
    path = Path(workdir) / "config.json"
    content = json.loads(json.dumps({"config": config.to_dict(), "categories": categories}))
    if resuming and path.exists():
        _check_same_run(path, content)
    if jax.process_index() != 0:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(content, indent=1))
    os.replace(draft, path)


def _check_same_run(path: Path, content: dict) -> None:
    try:
        old = json.loads(path.read_text())
        before, now = (flatten(c["config"]) for c in (old, content))
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path} cannot be read, choose another --workdir: {error}") from error
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name) and not name.startswith(FREE_TO_CHANGE):
            raise ValueError(
                f"{path.parent} holds a run of another config: {name} was {before.get(name)!r} and "
                f"is {now.get(name)!r} now; choose another --workdir or set it back"
            )
    if old.get("categories") != content["categories"]:
        raise ValueError(
            f"{path.parent} holds a run with other categories, choose another --workdir"
        )
