"""The checksums of a checkpoint's files, in a list that `sha256sum -c SHA256SUMS` reads, too."""

import errno
import hashlib
import os
from pathlib import Path

FILE_NAME = "SHA256SUMS"


def write_checksums(folder: Path) -> None:
    """List the SHA-256 of every file below `folder`, and have all of them on the disk.

    A file that the system has not written yet would be empty or cut off after a loss of power.
    """
    lines = [_line(name, path) for name, path in sorted(_files(folder).items())]
    with open(folder / FILE_NAME, "wb") as file:
        file.write(b"".join(lines))
    for path in (*_files(folder).values(), folder / FILE_NAME):
        _flush_to_disk(path)


def find_damage(folder: Path) -> str | None:
    """Say how the files below `folder` differ from its list; None if they are as saved."""
    files = _files(folder)
    lines = (folder / FILE_NAME).read_bytes().split(b"\n")
    for line in lines[:-1]:
        name = line[66:].decode(errors="replace")
        if name not in files:
            return f"{name} is missing"
        try:
            if _line(name, files.pop(name)) != line + b"\n":
                return f"{name} differs from its checksum"
        except FileNotFoundError:  # deleted just now
            return f"{name} is missing"
        except OSError as error:
            if error.errno != errno.EIO:  # all but a bad disk may go away, such as missing rights
                raise
            return f"{name} cannot be read from the disk"
    # Files of the user beside the state change nothing.
    if unlisted := [name for name in files if name.startswith("state/")]:
        return f"{unlisted[0]} is not in {FILE_NAME}"
    return f"{FILE_NAME} is cut off" if lines[-1] or len(lines) == 1 else None


def line_of(name: str, digest: str) -> str:
    """A line of such a list."""
    return f"{digest}  {name}\n"


def flush_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    _flush_to_disk(folder)


def _files(folder: Path) -> dict[str, Path]:
    """Name below `folder` -> path; hidden files, which file systems leave, are no part of it."""
    found = os.walk(folder, onerror=_raise)  # by default it passes over what it cannot list
    paths = (Path(top, name) for top, _, names in found for name in names)
    paths = (p for p in paths if not p.name.startswith(".") and p.name != FILE_NAME)
    return {p.relative_to(folder).as_posix(): p for p in paths if p.is_file()}


def _raise(error: OSError) -> None:
    raise error


def _line(name: str, path: Path) -> bytes:
    with open(path, "rb") as file:
        return line_of(name, hashlib.file_digest(file, "sha256").hexdigest()).encode()


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
