"""Runs at addresses of object stores: what is read of them is kept on the local disk.

A run in a store has the layout of one on a disk, so that a plain copy of either is the other. A
checkpoint counts once its list of checksums is there, which is put last and deleted first.
"""

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from absl import logging

from mask_rcnn_jax.disk import write_whole
from mask_rcnn_jax.store_folders import full, get_files, list_tree, read_bytes
from mask_rcnn_jax.stores import forget_old, home, key_of, local_file
from mask_rcnn_jax.weights import model_folder
from mask_rcnn_jax.weights.checksums import FILE_NAME as SUMS
from mask_rcnn_jax.weights.checksums import find_damage

_CHECKPOINT = re.compile("(.+)/checkpoints/(0|[1-9][0-9]*)")
_ADDRESS = "address"  # a file in the copy of a run, which says where that is


def local(address: str | os.PathLike) -> Path:
    """Return a local copy of a file, or of a run with its newest whole checkpoint, or of the
    checkpoint that the address names, or of a whole model's folder.

    Raises what `stores.local_file` does, and ValueError where there is neither.
    """
    address = full(address)
    try:
        return local_file(address)
    except IsADirectoryError:
        pass
    if named := _CHECKPOINT.fullmatch(address):
        run, step = named[1], int(named[2])
        folder, fault = fetch_checkpoint(run, step)
        if fault:
            raise ValueError(f"{address} is damaged: {fault}; choose another checkpoint")
        return folder / "checkpoints" / str(step)
    names = list_tree(address)
    if names.keys() >= set(model_folder.MOST_BYTES):
        return _whole_model(address)
    for step in whole_steps(names):
        folder, fault = fetch_checkpoint(address, step)
        if not fault:
            return folder
        logging.warning("%s/checkpoints/%d is damaged: %s", address, step, fault)
    raise ValueError(f"{address} holds no whole checkpoint, expected {address}/checkpoints/<step>")


def address_of(workdir: Path) -> str | None:
    """Return the address of the run that a folder is a copy of; None if it is none."""
    file = workdir / _ADDRESS
    return file.read_text() if file.is_file() else None


def whole_steps(names: Iterable[str]) -> list[int]:
    """The steps of the checkpoints that count, newest first; names: those of a run's files."""
    found = (re.fullmatch(f"checkpoints/(0|[1-9][0-9]*)/{SUMS}", name) for name in names)
    return sorted((int(one[1]) for one in found if one), reverse=True)


def fetch_checkpoint(run: str, step: int) -> tuple[Path, str | None]:
    """Return a folder like that of the run with one checkpoint, and what is wrong with that.

    Of several processes, one fetches it. Raises ValueError if there is no such checkpoint.
    """
    prefix = f"checkpoints/{step}"
    sums = read_bytes(f"{run}/{prefix}/{SUMS}")
    if sums is None:
        raise ValueError(f"{run}/{prefix} is no whole checkpoint: it has no {SUMS}")
    folder = place(run, hashlib.sha256(sums).hexdigest()[:16])
    checkpoint = folder / prefix
    with _alone(run):
        _forget_others(folder.parent)
        if not checkpoint.is_dir() or find_damage(checkpoint):
            shutil.rmtree(checkpoint, ignore_errors=True)
            _fetch(f"{run}/{prefix}", checkpoint)
        for name in ("config.json", "metrics.jsonl"):
            if (content := read_bytes(f"{run}/{name}")) is not None:
                write_whole(folder / name, content)
        write_whole(folder / _ADDRESS, run.encode())
        return folder, find_damage(checkpoint)


def place(run: str, part: str) -> Path:
    """Where a part of what is kept of a run lies: a folder with the run's name."""
    name = re.sub("^[.]+|[^A-Za-z0-9._-]", "_", run.rpartition("/")[2])[-100:]
    return home() / "runs" / key_of(run)[:16] / part / name


def _whole_model(address: str) -> Path:
    sums = read_bytes(f"{address}/{SUMS}") or b""
    folder = place(address, hashlib.sha256(sums).hexdigest()[:16])
    with _alone(address):
        try:
            model_folder.check(folder)
        except (OSError, ValueError):  # not there, or damaged
            shutil.rmtree(folder, ignore_errors=True)
            _fetch(address, folder, model_folder.MOST_BYTES)
    return folder


def _fetch(address: str, target: Path, names: Iterable[str] | None = None) -> None:
    """Fetch what is below an address, all of it or nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    forget_old(target.parent.glob("tmp.*"))
    draft = Path(tempfile.mkdtemp(dir=target.parent, prefix="tmp."))
    try:
        get_files(address, list_tree(address) if names is None else names, draft)
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


@contextmanager
def _alone(run: str) -> Iterator[None]:
    """Have other processes of this machine wait."""
    path = place(run, "").parent / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        with suppress(OSError):  # some file systems know no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _forget_others(folder: Path) -> None:
    """Delete copies of a run's other checkpoints that were not asked for in a day."""
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    forget_old(folder.parent.glob("?" * 16))
