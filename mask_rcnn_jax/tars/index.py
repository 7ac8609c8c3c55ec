"""The index of tars: a database that says where each member is, kept on the local disk.

It is made by one pass over the headers and belongs to tars of these sizes and times.
"""

import hashlib
import os
import sqlite3
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from absl import logging

from mask_rcnn_jax import stores
from mask_rcnn_jax.tars.headers import normal, read_headers, shown
from mask_rcnn_jax.tars.patterns import expand

FETCHES = 8  # of tars, at a time
OTHER = -1  # size of what is no regular file
_TABLE = (
    "CREATE TABLE members (name BLOB PRIMARY KEY, tar INTEGER, start INTEGER, size INTEGER) "
    "WITHOUT ROWID"
)
_Row = tuple[bytes, int, int]  # name, start, size


class Index(NamedTuple):
    """Where the members of some tars are."""

    path: Path  # a database of `_TABLE`, in which `tar` counts from 0
    tars: tuple[str, ...]
    states: tuple[tuple[int, int], ...]  # of each, see `state_of`


@lru_cache(4096)
def index_of(tars: str) -> Index:
    """The index of the tars that a pattern means; it is made if none is kept.

    Raises OSError if a tar cannot be read, ValueError for one that is compressed or damaged, and
    for a name that occurs twice.
    """
    paths, states = tuple(expand(tars)), []
    fetch(paths)
    for tar in paths:
        with open_tar(tar) as file:
            states.append(state_of(tar, file))
    names = [tar if stores.is_store(tar) else os.path.abspath(tar) for tar in paths]
    key = hashlib.sha256(repr(list(zip(names, states, strict=True))).encode()).hexdigest()
    target = stores.home() / "tars" / key[:2] / f"{key}.sqlite"
    if not target.exists():
        _write(target, paths)
    return Index(target, paths, tuple(states))


def forget() -> None:
    """Find the tars again, and whether they have changed, when they are next read."""
    index_of.cache_clear()


def ask(tars: str, query: str, *values: Any) -> tuple[Index, list[tuple]]:
    """The index of tars, and the rows that a query in SQL gives; errors as `index_of`."""
    index = index_of(tars)
    try:
        return index, _rows(index.path, query, values)
    except sqlite3.Error:  # deleted or damaged
        with suppress(OSError):
            index.path.unlink()
        forget()
    index = index_of(tars)
    try:
        return index, _rows(index.path, query, values)
    except sqlite3.Error as error:
        raise OSError(f"{index.path}, an index of tars, cannot be read: {error}") from error


def fetch(tars: Sequence[str]) -> None:
    """Copy tars that are at addresses, several at a time."""
    if len(tars) > 1 and stores.is_store(tars[0]):
        with ThreadPoolExecutor(FETCHES) as pool:
            list(pool.map(lambda tar: open_tar(tar).close(), tars))


def open_tar(tar: str) -> BinaryIO:
    """Open a tar, or the copy of one at an address, which is kept."""
    if stores.is_store(tar):
        return stores.open_file(tar, keep=True)
    if not os.path.isfile(tar):
        if os.path.exists(tar):
            raise OSError(f"{tar} is not a regular file")
        raise FileNotFoundError(f"no tar {tar!r}")
    return open(tar, "rb", buffering=0)


def state_of(tar: str, file: BinaryIO) -> tuple[int, int]:
    """The size of an open tar, and when it was written; at an address it does not change."""
    found = os.fstat(file.fileno())
    return found.st_size, 0 if stores.is_store(tar) else found.st_mtime_ns


def encoded(name: str) -> bytes:
    """A name as tars and the index have it."""
    return normal(name).encode("utf-8", "surrogateescape")


def _rows(path: Path, query: str, values: Sequence[Any] = ()) -> list[tuple]:
    address = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
    with closing(sqlite3.connect(address, uri=True)) as database:
        return database.execute(query, values).fetchall()


def _write(target: Path, tars: tuple[str, ...]) -> None:
    """Write the index of tars, whole or not at all; that of several is made of theirs."""
    try:
        part = stores.new_part(target.parent)
    except OSError as error:
        raise _unwritten(tars, error) from error
    try:
        # Locks are for files that others write, and network disks may have none.
        with closing(sqlite3.connect(f"{Path(part).as_uri()}?nolock=1", uri=True)) as database:
            database.execute("PRAGMA journal_mode=OFF")
            database.execute("PRAGMA synchronous=OFF")
            database.execute(_TABLE)
            for number, tar in enumerate(tars):
                for row in _members(tar) if len(tars) == 1 else _kept(tar):
                    _add(database, tars, number, row)
            database.commit()
        with open(part, "rb") as file:
            os.fsync(file.fileno())
        os.replace(part, target)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(part)
        if isinstance(error, sqlite3.Error):
            raise _unwritten(tars, error) from error
        raise


def _unwritten(tars: Sequence[str], error: Exception) -> OSError:
    advice = "MASK_RCNN_HOME names a folder for it"
    return OSError(f"no index of {tars[0]} can be written ({error}); {advice}")


def _members(tar: str) -> Iterable[_Row]:
    logging.info("reading the headers in %s", tar)
    with open_tar(tar) as file:
        for member in read_headers(tar, file):
            yield encoded(member.name), member.start, member.size if member.is_file else OTHER


def _kept(tar: str) -> Iterable[_Row]:
    return ask(tar, "SELECT name, start, size FROM members ORDER BY name")[1]


def _add(database: sqlite3.Connection, tars: Sequence[str], number: int, row: _Row) -> None:
    name, start, size = row
    try:
        database.execute("INSERT INTO members VALUES (?, ?, ?, ?)", (name, number, start, size))
    except sqlite3.IntegrityError:
        query = "SELECT tar FROM members WHERE name = ?"
        other = database.execute(query, (name,)).fetchone()[0]
        text = shown(name.decode("utf-8", "surrogateescape"))
        if other == number:
            raise ValueError(f"{tars[number]}: {text} is there twice, expected once") from None
        where = f"{text} is in {tars[other]} and in {tars[number]}, expected once"
        advice = "a file_name may begin with its tar, such as 'train-000000.tar/a.jpg'"
        raise ValueError(f"{where}; {advice}") from None
