"""Check free disk space before long work begins."""

import os
import shutil


def check_room(folder: str | os.PathLike, needed: int) -> None:
    """Raise OSError unless the existing `folder` has room for `needed` bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"{os.fspath(folder)}: {needed:,} bytes are needed, {free:,} are free")
