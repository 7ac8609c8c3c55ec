"""A small run on generated pictures: what it is started with, and what training leaves behind."""

from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data.dataset import categories
from mask_rcnn_jax.data.source import load_split
from mask_rcnn_jax.formats.shapes import write_shapes
from mask_rcnn_jax.training.checkpoint import Checkpoints
from mask_rcnn_jax.training.setup import open_workdir
from mask_rcnn_jax.training.step import TrainState
from tests.commands.command import SMALL, STEPS, config_flags, data_entries
from tests.small_model import random_variables

RECIPE = Path(__file__).with_name("small_recipe.py")


class Run(NamedTuple):
    """A finished run and what it was started with."""

    workdir: Path
    data_dir: Path
    log: str = ""
    entries: tuple = ()  # pairs of a name and a value that are not those of SMALL

    @property
    def overrides(self) -> dict:
        pairs = [
            (self.data_dir / "annotations" / f"instances_{split}.json", self.data_dir / split)
            for split in ("train", "val")
        ]
        return SMALL | data_entries(*pairs) | dict(self.entries)

    @property
    def flags(self) -> list[str]:
        return self.changed({})

    def changed(self, entries: dict) -> list[str]:
        """The flags with other entries."""
        return config_flags(self.overrides | entries, RECIPE)


def write_data(folder: Path) -> None:
    write_shapes(folder, train=14, val=4, size=(64, 64))


def untrained_run(folder: Path, *entries: tuple) -> Run:
    """A workdir with a config and random weights as training leaves it, without the training."""
    run = Run(folder / "run", folder / "shapes", entries=entries)
    write_data(run.data_dir)
    leave_untrained(run)
    return run


def leave_untrained(run: Run) -> None:
    """Write what `untrained_run` has in its workdir, for data that is there."""
    config = load_config(RECIPE, run.overrides)
    classes = categories(load_split(config.data, "train"))
    open_workdir(str(run.workdir), config, classes, resuming=False)
    variables = {"batch_stats": {}, **random_variables(config.with_classes(len(classes)))}
    checkpoints = Checkpoints(run.workdir, keep=1)
    checkpoints.save(TrainState(step=jnp.int32(STEPS), opt_state=(), **variables))
    checkpoints.close()
