"""Two small runs: one trained, made once for all processes, and one with random weights."""

import fcntl
import os
from pathlib import Path

import pytest

from tests.commands.command import check_done, run
from tests.commands.small_run import Run, untrained_run, write_data

DAMAGED = ("000003.jpg", "000008.jpg")  # pictures to train on


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
def cache() -> Path:
    """What was compiled, for all processes of these tests."""
    return Path(os.environ["JAX_COMPILATION_CACHE_DIR"])


@pytest.fixture(scope="session")
def trained(together, cache) -> Run:
    """`train` on pictures of shapes, uninterrupted; the first worker to come makes it.

    In 20 batches of 2 each of the 14 pictures comes up at least twice, also the 2 that are cut off.
    """
    folder = together / "trained"
    made, log = Run(folder / "run", folder / "shapes"), folder / "log"
    with open(together / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not log.exists():
            write_data(made.data_dir)
            for name in DAMAGED:
                cut_off(made.data_dir / "train" / name)
            done = run("train", *made.flags, "--workdir", made.workdir, cache=cache)
            check_done(done)
            log.write_text(done.stderr + done.stdout)
    return made._replace(log=log.read_text())


@pytest.fixture(scope="session")
def untrained(tmp_path_factory) -> Run:
    """For tests that only need a run. It is made in a second, so none waits for the other one."""
    return untrained_run(tmp_path_factory.mktemp("untrained"))
