"""Files on the disk: room for them, and files that are written whole or not at all."""

import errno
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mask_rcnn_jax import stores

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_room(folder: str | os.PathLike, needed: int) -> None:
    """Raise OSError unless the existing `folder` has room for `needed` bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"{os.fspath(folder)}: {needed:,} bytes are needed, {free:,} are free")


@contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[Path]:
    """A draft to write to, which takes the place of the file at a path, or is put at an address,
    once the block is done.

    What was there stays until then, and for good if the block raises or the disk is full. What is
    there and no file, such as a pipe, is written to as it is.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        yield Path(path)
        return
    is_address = stores.is_address(path)
    target = stores.with_slashes(path) if is_address else os.path.realpath(path)  # links stay
    parent, _, name = target.rpartition("/")
    folder = stores.home() / "outputs" if is_address else Path(parent)
    folder.mkdir(parents=True, exist_ok=True)
    start, draft = f".{name[:60]}-", ""
    stores.forget_old(folder.glob(f"{glob.escape(start)}*.tmp"))  # of processes that were killed
    try:
        descriptor, draft = tempfile.mkstemp(".tmp", start, folder)
        os.close(descriptor)
        yield Path(draft)
        if is_address:
            stores.retried(lambda: stores.put_file(draft, target))
            os.unlink(draft)
            return
        # Others may read it, too.
        mode = os.stat(target).st_mode if os.path.exists(target) else 0o666 & ~_umask()
        os.chmod(draft, mode & 0o777)
        with open(draft, "rb") as file:
            os.fsync(file.fileno())
        os.replace(draft, target)
        _sync_folder(folder)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(draft)
        if isinstance(error, OSError):
            of_draft = str(error.filename).startswith(f"{folder}/{start}")
            if of_draft or (error.filename is None and error.errno in _FULL):
                error.filename = target
        raise


def write_whole(path: str | os.PathLike, content: str | bytes) -> None:
    """Write a file, or put one at an address, whole or not at all; text in UTF-8."""
    with whole_file(path) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # not every file system takes it
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
