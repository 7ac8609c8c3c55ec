"""A set of generated pictures and one trained run, made once."""

import fcntl
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from mask_rcnn_jax.formats.shapes import write_shapes
from tests.commands.command import SMALL, check_done, config_flags, data_entries, run

DAMAGED = ("000003.jpg", "000008.jpg")  # pictures to train on


class Run(NamedTuple):
    """A finished run and what it was started with."""

    workdir: Path
    data_dir: Path
    overrides: dict
    log: str

    @property
    def untouched(self) -> Path:
        """A copy of the workdir, which tests of several processes may read at any time."""
        return self.workdir.with_name("untouched")

    @property
    def flags(self) -> list[str]:
        return config_flags(self.overrides)


def cut_off(path: Path) -> None:
    """Leave the first half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.fixture(scope="session")
def together(tmp_path_factory) -> Path:
    """A folder that pytest's worker processes share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "together"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def cache(together) -> Path:
    """What was compiled, for all processes of these tests."""
    folder = together / "compiled"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def trained(together, cache) -> Run:
    """`train` on pictures of shapes, uninterrupted; the first worker to come makes it.

    In 20 batches of 2 each of the 14 pictures comes up at least twice, also the 2 that are cut off.
    """
    folder = together / "trained"
    data_dir, workdir, log = folder / "shapes", folder / "run", folder / "log"
    with open(together / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        pairs = [
            (data_dir / "annotations" / f"instances_{split}.json", data_dir / split)
            for split in ("train", "val")
        ]
        overrides = SMALL | data_entries(*pairs)
        if not log.exists():
            write_shapes(data_dir, train=14, val=4, size=(64, 64))
            for name in DAMAGED:
                cut_off(data_dir / "train" / name)
            done = run("train", *config_flags(overrides), "--workdir", workdir, cache=cache)
            check_done(done)
            shutil.copytree(workdir, workdir.with_name("untouched"))
            log.write_text(done.stderr + done.stdout)
    return Run(workdir, data_dir, overrides, log.read_text())
