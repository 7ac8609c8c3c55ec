"""Download public files: resumable, verified, and never left incomplete."""

import fcntl
import hashlib
import http.client
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import HTTPError

from absl import logging

from mask_rcnn_jax.disk import check_room
from mask_rcnn_jax.network import Limits, open_url

# Factory: total bytes (0 if unknown) -> callback(additional bytes).
ProgressFactory = Callable[[int], Callable[[int], None]]
_CHUNK = 1 << 20
_MOST = 1 << 34  # bytes of a file whose size is not known
_LIMITS = Limits(silence=60.0, window=60.0)  # patient: what has come is kept


def download(
    url: str,
    path: str | os.PathLike,
    checksum: str | None,
    *,
    size: int = 0,
    persistent: bool = False,
    make_progress: ProgressFactory | None = None,
    headers: Mapping[str, str] | None = None,
) -> Path:
    """Download `url` to `path`, unless `path` exists with the right checksum.

    Of several processes that want the same file, the first one downloads it and the others wait.

    Args:
        url: http or https.
        path: created, with its folder, only when complete and verified. Until then the data is in
            `path` + ".part", from which the next call resumes.
        checksum: "sha256:" and at least the first 8 hex digits, or "md5:" and at least 6; None
            if none is known, which any content fits.
        size: expected bytes, 0 if unknown. Rejects responses whose size differs.
        persistent: resume after a lost connection, as long as each attempt yields at least 1 MiB.
        make_progress: see `ProgressFactory`.
        headers: of the request, such as Authorization.

    Raises:
        OSError: with the URL, if the server is unreachable, lacks the file, ends too early or sends
            too slowly, or the disk is too small.
        ValueError: for a wrong checksum; the file is deleted.
    """
    checksums = r"sha256:[0-9a-f]{8,64}|md5:[0-9a-f]{6,32}"
    if checksum is not None and not re.fullmatch(checksums, checksum):
        forms = "'sha256:' and 8 to 64 hexadecimal digits, or 'md5:' and 32, at least the first 6"
        raise ValueError(f"checksum is {checksum!r}, expected {forms}")
    algorithm, _, expected = (checksum or "sha256:").partition(":")
    path = Path(path)
    part = path.with_name(path.name + ".part")

    def is_there() -> bool:
        return path.is_file() and _digest(path, algorithm).startswith(expected)

    if is_there():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(part):
        if is_there():
            return path
        _complete(url, part, size, persistent, make_progress, headers or {})
        digest = _digest(part, algorithm)
        if not digest.startswith(expected):
            part.unlink()
            text = f"{url} has {algorithm} {digest}, expected {expected}; deleted, try again"
            raise ValueError(text)
        os.replace(part, path)
    return path


@contextmanager
def _locked(part: Path) -> Iterator[None]:
    """Keep other processes from a file, which is made if need be, and removed if it stays empty."""
    while True:
        file = open(part, "ab")
        with suppress(OSError):  # some file systems know no locks
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logging.info("waiting for another process, which downloads %s", part)
                fcntl.flock(file, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(part), os.fstat(file.fileno())):
                break
        file.close()  # complete, or deleted, by the one before
    with file:
        try:
            yield
        finally:
            if part.is_file() and not _size(part):
                part.unlink(missing_ok=True)


def _complete(
    url: str,
    part: Path,
    size: int,
    persistent: bool,
    make_progress: ProgressFactory | None,
    headers: Mapping[str, str],
) -> None:
    """`_fetch`, again after a lost connection if it is to be `persistent`."""
    while True:
        before = _size(part)
        try:
            _fetch(url, part, size, make_progress, headers)
            return
        except (OSError, http.client.HTTPException) as error:
            if not persistent or _size(part) - before < _CHUNK:
                advice = "; retry to resume" if isinstance(error, TimeoutError) else ""
                raise OSError(f"{url}: {error}{advice}") from error
            logging.info("%s: %s; resuming", url, error)


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _fetch(
    url: str,
    part: Path,
    size: int,
    make_progress: ProgressFactory | None,
    headers: Mapping[str, str],
) -> None:
    """Complete `part` from its end, or from the start if the server does not support ranges."""
    received, most = _size(part), size or _MOST
    if size and received == size:
        return
    if size and received > size:
        part.unlink()
        received = 0
    ranges = {"Range": f"bytes={received}-"} if received else {}
    try:
        response = open_url(url, _LIMITS, headers={**headers, **ranges})
    except HTTPError as error:
        if received and error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # nothing left to fetch; verified by the checksum
        raise
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            received = 0
        total = _total(response, received, size)
        check_room(part.parent, total - received)
        advance = make_progress(total) if make_progress else lambda count: None
        advance(received)
        with open(part, "ab" if received else "wb") as file:
            while chunk := response.read1(_CHUNK):  # returns what has come
                file.write(chunk)
                received += len(chunk)
                advance(len(chunk))
                if received > most:  # without a length, it could fill the disk
                    break
    if received > most:
        part.unlink()
        raise OSError(f"the server sent more than {most} bytes")
    if received < total:
        raise OSError(f"the connection ended after {received} of {total} bytes; retry to resume")


def _total(response: http.client.HTTPResponse, start: int, size: int) -> int:
    """Return the file size, 0 if unknown; OSError unless the response begins at `start`."""
    first = re.match(r"bytes (\d+)-", response.headers.get("Content-Range") or "")
    if start and first and int(first[1]) != start:
        raise OSError(f"the server sent bytes from {first[1]}, expected from {start}")
    total = start + response.length if response.length else size
    if size and total != size:
        raise OSError(f"the server offers {total} bytes, expected {size}")
    return total


def _digest(path: Path, algorithm: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()
