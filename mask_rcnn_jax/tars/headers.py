"""Read the headers of a tar's members, which may be damaged, or made to harm."""

import os
import posixpath
import re
import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from mask_rcnn_jax.tars.patterns import of_compressed

MAX_HEADER = 1 << 16  # bytes of a member's name and further entries, which tarfile reads at once
_DIGITS = re.compile(rb"\d{200}")
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Member(NamedTuple):
    """A member of a tar that is no folder."""

    name: str  # as `normal` has it
    start: int  # byte of the tar
    size: int
    is_file: bool  # no link, device, or file with holes that are left out


def read_headers(tar: str, file: BinaryIO) -> Iterator[Member]:
    """All members of an open tar but folders, in their order.

    Raises ValueError if it is compressed, damaged or cut off, or has a name that leads out of a
    folder, OSError if it cannot be read.
    """
    start, end = file.read(8), file.seek(0, os.SEEK_END)
    for magic, kind in _COMPRESSED.items():
        if start.startswith(magic):
            raise ValueError(f"{tar}: {of_compressed(f' by {kind}')}")
    try:
        for member in _members(file):
            name = normal(member.name)
            if member.name.startswith("/") or ".." in member.name.split("/") or not name:
                raise ValueError(f"the name {shown(member.name)}, expected one below a folder")
            is_file = member.isreg() and not member.issparse()
            if is_file and member.offset_data + member.size > end:
                raise ValueError(f"it is cut off in {shown(name)}")
            yield Member(name, member.offset_data, member.size, is_file)
    except OSError as error:
        raise OSError(f"{tar}: {error}") from error
    except Exception as error:  # whatever its parser raises on damaged files
        raise ValueError(f"{tar}: cannot be read as a tar ({error})") from error


def normal(name: str) -> str:
    """A name without ./ and the like, "" for the top."""
    found = posixpath.normpath(name).lstrip("/") if name else ""
    return "" if found == "." else found


def shown(name: str) -> str:
    """A name for a message."""
    return repr(name if len(name) <= 100 else f"{name[:100]}..")


def _members(file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """All members but folders. tarfile takes a damaged header for the end, and may turn back."""
    options: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape"}
    before = -1
    file.seek(0)
    with tarfile.open(fileobj=_Headers(file), mode="r:", **options) as archive:  # type: ignore
        while (member := archive.next()) is not None:
            archive.members.clear()  # which would hold all of them
            if member.offset <= before or member.size < 0:
                raise ValueError(f"damaged at byte {member.offset}")
            before = member.offset
            if not member.isdir():
                yield member
        file.seek(archive.offset)
        block = file.read(tarfile.BLOCKSIZE)
        if any(block):
            raise ValueError(f"damaged at byte {archive.offset}")
        while block:
            block = file.read(1 << 20)
            if any(block):
                raise ValueError(f"it goes on after its end, byte {archive.offset}: several tars?")


class _Headers:
    """A file of which tarfile reads headers, none of them large."""

    def __init__(self, file: BinaryIO):
        self._file, self.seek, self.tell = file, file.seek, file.tell

    def read(self, count: int) -> bytes:
        if not 0 <= count <= MAX_HEADER:
            raise ValueError(f"a header of {count:,} bytes at byte {self.tell()}")
        content = self._file.read(count)
        if _DIGITS.search(content):  # on which Python before 3.12.6 takes quadratic time
            raise ValueError(f"a header of digits at byte {self.tell() - count}")
        return content
