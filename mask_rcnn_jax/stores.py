"""Files at addresses, such as s3://bucket/a.jpg: read through fsspec and kept on the local disk.

fsspec's packages know the stores and their credentials: s3fs, gcsfs, adlfs and others.
"""

import errno
import glob
import hashlib
import os
import re
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.error import HTTPError

from absl import logging

FREE = 5 << 30  # bytes of the disk that are left free
SILENCE = 60.0  # seconds that a web server may send nothing; a file may take as long as it needs
PAUSES = (0.5, 2.0, 8.0)  # seconds before what may pass is tried again
OF_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)
_PASSING = (
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY, errno.EAGAIN),
    *(errno.ENETUNREACH, errno.EHOSTUNREACH, socket.EAI_AGAIN),
)
_BUSY = (408, 425, 429, *range(500, 600))  # what web servers answer for a while
_LEFT = 86_400.0  # seconds after which what is not whole is that of a process that was killed
_ADDRESS = re.compile("[A-Za-z][A-Za-z0-9+.-]+:/")  # a Path has one slash
_SLASHES = {"file:": "///", "local:": "///"}  # after it, a path from the root
_INSTALL = "pip install 'mask-rcnn-jax[stores]'"
# Variables that name another server for the same addresses, which has other files.
_SERVERS = (
    *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "FSSPEC_S3_ENDPOINT_URL"),
    *("FSSPEC_GCS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST"),
)
T = TypeVar("T")
# Where stores say that a file has changed.
_CHANGES = (
    "size ETag etag LastModified last_modified Last-Modified mtime updated generation".split()
)


def is_address(path: str | os.PathLike) -> bool:
    """Whether it is an address, such as gs://bucket/run, and no path."""
    return bool(_ADDRESS.match(str(path)))


def is_store(path: str | os.PathLike) -> bool:
    """Whether it is the address of something that fsspec reads, and no web page or stream."""
    found = _ADDRESS.match(str(path))
    if not found or found[0][:-2].lower() in ("http", "https"):
        return False
    from fsspec import available_protocols

    return found[0][:-2].lower() in available_protocols()


def home() -> Path:
    """Return where fetched files go: MASK_RCNN_HOME, or mask_rcnn_jax in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("MASK_RCNN_HOME") or Path(cache) / "mask_rcnn_jax")


def local_file(path: str | os.PathLike) -> Path:
    """Return a local copy of what an address has now, or a path as it is.

    For annotations and weights: the store is asked whether the file has changed since it was kept.

    Raises FileNotFoundError or another OSError, naming the address, if it cannot be had, ValueError
    if the package for such addresses is missing.
    """
    if not is_address(path):
        return Path(path)
    address = with_slashes(path)
    with errors_of(address):
        store, inside = store_of(address)
        store.invalidate_cache()
        found = store.info(inside)
        if found.get("type") == "directory":
            raise IsADirectoryError(f"{address} is a folder, expected a file")
        state = str([found.get(name) for name in _CHANGES])
        target = _place(address, f"-{hashlib.sha256(state.encode()).hexdigest()[:16]}")
        known = any(found.get(name) for name in _CHANGES[1:])
        if not (known and target.exists()):
            os.replace(_fetched(store, inside, target.parent), target)
            for other in target.parent.glob(f"{key_of(address)}-*-*"):
                if other != target:
                    with suppress(OSError):
                        other.unlink()
    return target


def open_file(address: str | os.PathLike, keep: bool = False) -> BinaryIO:
    """Open a local copy of an image, which must not change under its address, as a regular file.

    It is fetched once; while less than `FREE` is free on the disk, each time, or, with `keep`,
    OSError is raised. Errors are those of `local_file`.
    """
    address = with_slashes(address)
    target = _place(address)
    with suppress(FileNotFoundError):
        return open(target, "rb")
    with errors_of(address):
        part = _fetched(*store_of(address), target.parent)
        file = open(part, "rb")
        if shutil.disk_usage(target.parent).free > FREE:
            os.replace(part, target)
        else:
            os.unlink(part)
            if keep:
                file.close()
                few = f"less than {FREE >> 30} GiB are free in {home()}, where it is kept"
                raise OSError(few)
            text = "%s: less than %d GiB are free, so further images are fetched each time"
            logging.log_first_n(logging.WARNING, text, 1, home(), FREE >> 30)
        return file


def list_folder(address: str | os.PathLike) -> dict[str, bool]:
    """Whether each entry below an address is a file; {} if there is no such folder.

    Errors are those of `local_file`.
    """
    address = with_slashes(address)
    with errors_of(address):
        store, inside = store_of(address)
        try:
            found = store.ls(inside, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
    return {
        entry["name"].rstrip("/").rpartition("/")[2]: entry["type"] == "file" for entry in found
    }


def find_files(address: str | os.PathLike) -> list[str]:
    """Addresses of the file, the files below a folder, or those that a pattern matches, sorted.

    Errors are those of `local_file`.
    """
    address = with_slashes(address)
    with errors_of(address):
        store, inside = store_of(address)
        if glob.has_magic(inside) and not store.exists(inside):
            found = [path for path in store.glob(inside) if store.isfile(path)]
        else:
            found = store.find(inside)
        return sorted(store.unstrip_protocol(path) for path in found)


def put_file(path: str | os.PathLike, address: str | os.PathLike) -> None:
    """Write a local file to an address, whole or not at all; its folder need not exist.

    Errors are those of `local_file`.
    """
    address = with_slashes(address)
    with errors_of(address, "written"):
        store, inside = store_of(address)
        if "file" in store.protocol:  # only there a reader can meet half of a file
            os.makedirs(os.path.dirname(inside), exist_ok=True)
            part = f"{inside}.{uuid.uuid4().hex}.tmp"  # another process may write the same
            store.put_file(os.fspath(path), part)
            os.replace(part, inside)
        else:
            store.put_file(os.fspath(path), inside)
            store.invalidate_cache()


def may_pass(error: OSError) -> bool:
    """Whether the disk, the store or the network failed, which may pass, and not the file."""
    if isinstance(error, HTTPError):
        return error.code in _BUSY
    return isinstance(error, ConnectionError | TimeoutError) or error.errno in _PASSING


def retried(function: Callable[[], T], *, pauses: bool = True) -> T:
    """Call a function, and, unless without `pauses`, again after each of `PAUSES` while it raises
    an OSError that may pass."""
    for pause in PAUSES if pauses else ():
        try:
            return function()
        except OSError as error:
            if not may_pass(error):
                raise
            time.sleep(pause)
    return function()


def store_of(address: str) -> tuple[Any, str]:
    """The file system of an address, of which each process has its own, and the path in it."""
    from fsspec.core import url_to_fs  # takes 0.1 s, and most runs need none

    if "::" in address:  # in fsspec's addresses, another one follows
        raise ValueError("expected an address without '::'")
    options = {}
    if address.lower().startswith(("http://", "https://")):
        from aiohttp import ClientTimeout

        silence = ClientTimeout(total=None, sock_connect=SILENCE, sock_read=SILENCE)
        options = {"client_kwargs": {"timeout": silence}}
    return url_to_fs(address, **options)


def _fetched(store: Any, inside: str, folder: Path) -> str:
    """Fetch a file, whole on the disk, under a name of its own."""
    part = new_part(folder)
    try:
        store.get_file(inside, part)
        with open(part, "rb") as file:
            os.fsync(file.fileno())
    except BaseException:
        os.unlink(part)
        raise
    return part


def new_part(folder: Path) -> str:
    """An empty file in a folder, to be renamed once it is whole; those that killed processes left
    are deleted."""
    folder.mkdir(parents=True, exist_ok=True)
    forget_old(folder.glob(".part*"))
    descriptor, part = tempfile.mkstemp(dir=folder, prefix=".part")
    os.close(descriptor)
    return part


def forget_old(paths: Iterable[Path]) -> None:
    """Delete files and folders that have not changed for a day."""
    for path in paths:
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - _LEFT:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def with_slashes(path: str | os.PathLike) -> str:
    """An address with all of its slashes, of which a Path keeps one; a file's has three."""
    return re.sub(
        "^([^/]+:)/(?!/)", lambda one: one[1] + _SLASHES.get(one[1].lower(), "//"), str(path)
    )


def key_of(address: str) -> str:
    """64 characters that stand for an address on the server that the environment names."""
    servers = [f"{name}={os.environ[name]}" for name in _SERVERS if os.environ.get(name)]
    return hashlib.sha256(" ".join([address, *servers]).encode()).hexdigest()


def _place(address: str, version: str = "") -> Path:
    """Where the copy is kept, with the name of the file, which messages show, at its end."""
    name, plain = key_of(address), address.partition("?")[0].rpartition("/")[2]
    shown = re.sub("[^A-Za-z0-9._-]", "_", plain)[-100:]
    return home() / "objects" / name[:2] / f"{name}{version}-{shown}"


@contextmanager
def errors_of(address: str, done: str = "read") -> Iterator[None]:
    """Raise all errors, of which each store has its own, as OSError with the address.

    ConnectionError, which may pass, is for those of which nothing else is known.
    """
    try:
        yield
    except FileNotFoundError as error:
        reason = error.__cause__ or "no such file"  # the first is of a server that does not answer
        raise FileNotFoundError(f"{address}: {reason}") from error
    except IsADirectoryError:
        raise
    except ImportError as error:
        raise ValueError(
            f"{address} needs a package for its store ({error}); {_INSTALL}"
        ) from error
    except ValueError as error:  # no such protocol
        raise ValueError(f"{address}: {error}") from error
    except PermissionError as error:
        raise PermissionError(f"{address} cannot be {done}: {error}") from error
    except Exception as error:
        if getattr(error, "errno", None) in OF_MACHINE:
            raise
        text = str(error) or type(error).__name__
        raise ConnectionError(f"{address} cannot be {done}: {text[:300]}") from error
