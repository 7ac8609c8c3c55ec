"""Files in tars, such as WebDataset's shards: read where they lie, never unpacked."""

import io
import os
from collections.abc import Iterable
from typing import Any, BinaryIO

from mask_rcnn_jax.tars.headers import shown
from mask_rcnn_jax.tars.index import OTHER, ask, encoded, fetch, forget, open_tar, state_of
from mask_rcnn_jax.tars.patterns import expand


def open_member(tars: str, name: str) -> BinaryIO:
    """Open a regular file in one of the tars that a pattern means, in any thread or process.

    Raises FileNotFoundError if there is none of that name, OSError if it is no regular file or
    cannot be read, ValueError if a tar is compressed or damaged, or a name occurs twice.
    """
    found = _opened(tars, name)
    if found is None:  # a tar has changed
        forget()
        found = _opened(tars, name)
    if found is None:
        raise OSError(f"{tars} changes while it is read")
    return found


def list_folder(tars: str, folder: str) -> dict[str, bool]:
    """Whether each entry below a folder in the tars is a regular file; errors as `open_member`."""
    above = encoded(folder) + b"/" if encoded(folder) else b""
    query = "SELECT substr(name, ?), size FROM members WHERE name >= ? AND name < ?"
    _, rows = ask(tars, query, len(above) + 1, above, above + b"\xff")
    return {_decoded(name): size != OTHER for name, size in rows if b"/" not in name}


def find_members(tars: str) -> list[tuple[str, str]]:
    """The tar and the name of each regular file in the tars, sorted; errors as `open_member`.

    A name may be in several tars.
    """
    forget()
    found = expand(tars)
    fetch(found)
    return [(tar, name) for tar in found for name in find_names(tar)]


def above_all(tars: Iterable[str]) -> str:
    """The folder or address above all tars, with the slash at its end, "" for that of relative
    paths."""
    parts = os.path.commonprefix([tar.split("/")[:-1] for tar in tars])
    return "".join(f"{part}/" for part in parts)


def find_names(tars: str) -> list[str]:
    """Names of all regular files in the tars, sorted; errors as `open_member`."""
    query = "SELECT name FROM members WHERE size >= 0 ORDER BY name"
    return [_decoded(name) for (name,) in ask(tars, query)[1]]


def has_member(tars: str, name: str) -> bool:
    """Whether one of the tars has a regular file of that name; errors as `open_member`."""
    query = "SELECT 1 FROM members WHERE name = ? AND size >= 0"
    return bool(ask(tars, query, encoded(name))[1])


def _opened(tars: str, name: str) -> BinaryIO | None:
    """None if the tar is another than the one in the index."""
    query = "SELECT tar, start, size FROM members WHERE name = ?"
    index, rows = ask(tars, query, encoded(name))
    if not rows:
        raise FileNotFoundError(f"no {shown(name)} in {tars}")
    (number, start, size) = rows[0]
    tar = index.tars[number]
    if size == OTHER:
        raise OSError(f"{shown(name)} in {tar} is a link, or sparse, or no file; it is not read")
    file = open_tar(tar)
    if state_of(tar, file) != index.states[number]:
        file.close()
        return None
    return io.BufferedReader(_Section(file, start, size))


def _decoded(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


class _Section(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, size: int):
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        most = max(0, self._size - self._at)
        count = self._file.readinto(memoryview(buffer)[:most])  # type: ignore[attr-defined]
        self._at += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
