"""Folders at addresses of object stores: listed, fetched and written. Each object is put whole."""

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from absl import logging

from mask_rcnn_jax.stores import (
    errors_of,
    home,
    is_address,
    is_store,
    store_of,
    with_slashes,
)

PROBE = ".write_test_"  # names of what is put to see whether that can be


def is_bucket(path: str | os.PathLike) -> bool:
    """Whether it is an address where folders are read and written."""
    return is_store(path) and not str(path).startswith("hf:")  # `hub` knows how


def full(address: str | os.PathLike) -> str:
    """Return an address with both slashes, of which a Path keeps one, and with none at its end."""
    return with_slashes(address).rstrip("/")


def list_tree(address: str) -> dict[str, int]:
    """Bytes of each file below an address, by its name there; {} if there is nothing.

    Names that would leave a folder are left out. Errors are those of `stores.local_file`.
    """
    with errors_of(address):
        store, inside = store_of(address)
        store.invalidate_cache()
        found = store.find(inside, detail=True)
    start = len(inside.rstrip("/")) + 1
    sizes = {path[start:]: one["size"] for path, one in found.items() if one["type"] == "file"}
    return {name: n for name, n in sizes.items() if {"", ".", ".."}.isdisjoint(name.split("/"))}


def get_files(address: str, names: Iterable[str], folder: Path) -> None:
    """Fetch files below an address into a folder. Errors are those of `stores.local_file`."""
    targets = {name: folder / name for name in names}
    for target in targets.values():
        target.parent.mkdir(parents=True, exist_ok=True)
    with errors_of(address):
        store, inside = store_of(address)
        if targets:
            store.get([f"{inside}/{name}" for name in targets], list(map(str, targets.values())))


def put_files(address: str, names: Iterable[str], folder: Path) -> None:
    """Put files of a folder below an address, in no order. OSError if that fails."""
    names = list(names)
    with errors_of(address, "written"):
        store, inside = store_of(address)
        targets = [f"{inside}/{name}" for name in names]
        for target in targets if "file" in store.protocol else ():  # others have no folders
            os.makedirs(os.path.dirname(target), exist_ok=True)
        if targets:
            store.put([str(folder / name) for name in names], targets)


def read_bytes(address: str) -> bytes | None:
    """Return what is at an address; None if nothing is. Errors are those of `stores.local_file`."""
    with errors_of(address):
        store, inside = store_of(address)
        store.invalidate_cache()
        try:
            store.info(inside)
        except FileNotFoundError:
            return None
        return store.cat_file(inside)


def write_bytes(address: str, content: bytes) -> None:
    """Put a small file. OSError if that fails."""
    with errors_of(address, "written"):
        store, inside = store_of(address)
        if "file" in store.protocol:
            os.makedirs(os.path.dirname(inside), exist_ok=True)
        store.pipe_file(inside, content)


def delete(address: str, names: Iterable[str]) -> None:
    """Delete files below an address, in that order. OSError if that fails."""
    with errors_of(address, "written"):
        store, inside = store_of(address)
        for name in names:
            with suppress(FileNotFoundError):
                store.rm_file(f"{inside}/{name}")


def check_writable(address: str) -> None:
    """Raise OSError, before the work, if nothing can be put below an address."""
    with errors_of(address, "written"):
        store, inside = store_of(address)
        if "file" in store.protocol:
            os.makedirs(inside, exist_ok=True)
        probe = f"{inside}/{PROBE}{uuid.uuid4().hex}"
        store.pipe_file(probe, b"")
        store.rm_file(probe)


def files_below(folder: Path) -> list[str]:
    """Names of the files below a folder on the disk, sorted; one may be gone when it is read."""
    found = (os.path.join(top, name) for top, _, names in os.walk(folder) for name in names)
    return sorted(os.path.relpath(path, folder) for path in found)


@contextmanager
def written_at(output: str | os.PathLike) -> Iterator[Path]:
    """Give a path to write a file or a folder to: `output`, or for an address one on the disk.

    That, and what is beside it, is copied to the address once the block is done. What is not
    copied, since the block raises or the store does not answer, is named and stays on the disk.
    """
    if not is_address(output):
        yield Path(output)
        return
    parent, _, name = full(output).rpartition("/")
    if "://" not in parent:
        raise ValueError(
            f"{output} is a whole store, expected a name below it, such as s3://bucket/out"
        )
    check_writable(parent)
    drafts = home() / "outputs"
    drafts.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=drafts))
    try:
        yield folder / name
        names = files_below(folder)
        put_files(parent, names, folder)
    except BaseException:
        if files_below(folder):
            logging.warning("%s is not complete; what was written is in %s", output, folder)
        else:
            shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)
    if names:  # of several processes, one writes
        logging.info("%d files copied: %s", len(names), full(output))
