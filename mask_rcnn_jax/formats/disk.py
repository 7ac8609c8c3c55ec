"""Room on a disk, asked for before long work begins."""

import os
import shutil


def check_room(folder: str | os.PathLike, needed: int) -> None:
    """Raise OSError unless `folder`, which exists, has room for that many bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"{os.fspath(folder)}: {needed:,} bytes are needed, {free:,} are free")
