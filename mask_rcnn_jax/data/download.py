"""Public files by name: downloaded once, resumed after a break, never half there."""

import hashlib
import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

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
    sha256: str,
    progress_of: ProgressOf | None = None,
) -> Path:
    """Fetch `url` into the file `path`, unless it is there already and right.

    Args:
        url: http or https.
        path: appears, in a folder made for it, only with all bytes and the right checksum. Until
            then they are in `path` + ".part", from where the next call goes on.
        sha256: of the file, in hex; or its first digits, at least 8.
        progress_of: see `ProgressOf`.

    Raises OSError, naming the address, if the server cannot be reached, does not have the file or
    ends too early, and ValueError for a wrong checksum; what was wrong is deleted.
    """
    if not re.fullmatch(r"[0-9a-f]{8,64}", sha256):
        raise ValueError(f"sha256 is {sha256!r}, expected 8 to 64 hexadecimal digits")
    path = Path(path)
    if path.is_file() and _digest(path).startswith(sha256):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        _fetch(url, part, progress_of)
    except (OSError, http.client.HTTPException) as error:
        raise OSError(f"{url}: {error}") from error
    digest = _digest(part)
    if not digest.startswith(sha256):
        part.unlink()
        raise ValueError(f"{url} has sha256 {digest}, expected {sha256}; deleted, try again")
    os.replace(part, path)
    return path


def _fetch(url: str, part: Path, progress_of: ProgressOf | None) -> None:
    """Bring `part` to its full length, from where it ends; from its start if the server cannot."""
    there = part.stat().st_size if part.exists() else 0
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
        length = int(response.headers.get("Content-Length") or 0)
        total = there + length if length else 0
        advance = progress_of(total) if progress_of else lambda count: None
        advance(there)
        with open(part, "ab" if there else "wb") as file:
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                there += len(chunk)
                advance(len(chunk))
    if there < total:
        raise OSError(f"the connection ended after {there} of {total} bytes; try again to go on")


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
