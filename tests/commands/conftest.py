"""A set of generated pictures and one trained run, made once."""

from pathlib import Path
from typing import NamedTuple

import pytest

from mask_rcnn_jax.data.shapes import write_shapes
from tests.commands.command import SMALL, check_done, config_flags, data_entries, run


class Run(NamedTuple):
    """A finished run and what it was started with."""

    workdir: Path
    data_dir: Path
    overrides: dict
    log: str

    @property
    def flags(self) -> list[str]:
        return config_flags(self.overrides)


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    """What was compiled, for all processes of these tests."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="session")
def trained(tmp_path_factory, cache) -> Run:
    """`train` on 12 pictures of shapes, uninterrupted."""
    folder = tmp_path_factory.mktemp("trained")
    data_dir, workdir = folder / "shapes", folder / "run"
    jsons = write_shapes(data_dir, train=12, val=4, size=(64, 64))
    pairs = [(jsons[split], data_dir / split) for split in ("train", "val")]
    overrides = SMALL | data_entries(*pairs)
    done = run("train", *config_flags(overrides), "--workdir", workdir, cache=cache)
    check_done(done)
    return Run(workdir, data_dir, overrides, done.stderr + done.stdout)
