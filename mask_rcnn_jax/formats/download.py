"""Public files by name: downloaded once, resumed after a break, never half there."""

import hashlib
import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from absl import logging

from mask_rcnn_jax.formats.disk import check_room

_TORCH = "https://download.pytorch.org/models/"
# Name: address, and the sha256 that its file name starts with. Weights whose publishers name no
# checksum (detectron2's, Detectron's and Google's) are not here: what came could not be verified.
PUBLIC_WEIGHTS = {
    "resnet18": (_TORCH + "resnet18-f37072fd.pth", "f37072fd"),
    "resnet34": (_TORCH + "resnet34-b627a593.pth", "b627a593"),
    "resnet50": (_TORCH + "resnet50-0676ba61.pth", "0676ba61"),
    "resnet101": (_TORCH + "resnet101-63fe2227.pth", "63fe2227"),
    "resnet152": (_TORCH + "resnet152-394f9c45.pth", "394f9c45"),
    "maskrcnn_resnet50_fpn_coco": (
        _TORCH + "maskrcnn_resnet50_fpn_coco-bf2d0c1e.pth",
        "bf2d0c1e",
    ),
}
# Given all bytes of a file (0 if the server does not say), what is told how many more are there.
ProgressOf = Callable[[int], Callable[[int], None]]
_CHUNK = 1 << 20
_TIMEOUT = 60.0  # seconds without a byte


def download_weights(
    name: str, folder: str | os.PathLike, progress_of: ProgressOf | None = None
) -> Path:
    """The file of `PUBLIC_WEIGHTS` with that name, in `folder`; see `download`.

    Raises ValueError, listing the names, for another name.
    """
    if name not in PUBLIC_WEIGHTS:
        raise ValueError(f"no weights are called {name!r}, expected one of {list(PUBLIC_WEIGHTS)}")
    url, sha256 = PUBLIC_WEIGHTS[name]
    return download(
        url, Path(folder) / url.rpartition("/")[2], sha256=sha256, progress_of=progress_of
    )


def download(
    url: str,
    path: str | os.PathLike,
    *,
    sha256: str = "",
    md5: str = "",
    size: int = 0,
    persistent: bool = False,
    progress_of: ProgressOf | None = None,
) -> Path:
    """Fetch `url` into the file `path`, unless it is there already and right.

    Args:
        url: http or https.
        path: appears, in a folder made for it, only with all bytes and the right checksum. Until
            then they are in `path` + ".part", from where the next call goes on.
        sha256: of the file, in hex; or its first digits, at least 8.
        md5: of the file, all 32 digits, in place of sha256 where only that is published.
        size: bytes of the file; 0 if nobody knows. A server that offers others is not listened to.
        persistent: go on at once after a break, as long as each connection brings 1 MiB or more.
        progress_of: see `ProgressOf`.

    Raises OSError, naming the address, if the server cannot be reached, does not have the file or
    ends too early, or the disk is too small, and ValueError for a wrong checksum; what was wrong is
    deleted.
    """
    algorithm, expected = _checksum(sha256, md5)
    path = Path(path)
    if path.is_file() and _digest(path, algorithm).startswith(expected):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    while True:
        before = _size(part)
        try:
            _fetch(url, part, size, progress_of)
            break
        except (OSError, http.client.HTTPException) as error:
            if not persistent or _size(part) - before < _CHUNK:
                raise OSError(f"{url}: {error}") from error
            logging.info("%s: %s; going on", url, error)
    digest = _digest(part, algorithm)
    if not digest.startswith(expected):
        part.unlink()
        raise ValueError(f"{url} has {algorithm} {digest}, expected {expected}; deleted, try again")
    os.replace(part, path)
    return path


def _checksum(sha256: str, md5: str) -> tuple[str, str]:
    """The algorithm's name and the digits that are expected."""
    if md5 and not sha256:
        if not re.fullmatch(r"[0-9a-f]{32}", md5):
            raise ValueError(f"md5 is {md5!r}, expected 32 hexadecimal digits")
        return "md5", md5
    if md5 or not re.fullmatch(r"[0-9a-f]{8,64}", sha256):
        raise ValueError(
            f"sha256 is {sha256!r}, expected 8 to 64 hexadecimal digits, or md5 in its place"
        )
    return "sha256", sha256


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _fetch(url: str, part: Path, size: int, progress_of: ProgressOf | None) -> None:
    """Bring `part` to its full length, from where it ends; from its start if the server cannot."""
    there = _size(part)
    if size and there == size:
        return
    if size and there > size:
        part.unlink()
        there = 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={there}-"} if there else {})
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if there and error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # nothing is left to fetch; the checksum tells whether that is so
        raise
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            there = 0
        total = _total(response, there, size)
        check_room(part.parent, total - there)
        advance = progress_of(total) if progress_of else lambda count: None
        advance(there)
        with open(part, "ab" if there else "wb") as file:
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                there += len(chunk)
                advance(len(chunk))
                if size and there > size:  # without a length, it might go on until the disk is full
                    break
    if size and there > size:
        part.unlink()
        raise OSError(f"the server sent more than {size} bytes")
    if there < total:
        raise OSError(f"the connection ended after {there} of {total} bytes; try again to go on")


def _total(response: http.client.HTTPResponse, start: int, size: int) -> int:
    """All bytes of the file, 0 if nobody knows; what follows `start` is about to be sent.

    Raises OSError if that is not what was asked for.
    """
    first = re.match(r"bytes (\d+)-", response.headers.get("Content-Range") or "")
    if start and first and int(first[1]) != start:
        raise OSError(f"the server sent the bytes from {first[1]} on, asked for those from {start}")
    total = start + response.length if response.length else size
    if size and total != size:
        raise OSError(f"the server offers {total} bytes, expected {size}")
    return total


def _digest(path: Path, algorithm: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()
