"""Tars, of which every member is listed and read."""

import io
import os
import shutil
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from mask_rcnn_jax.annotations.reader import read_regular
from mask_rcnn_jax.tars.members import find_members
from tests.fuzz import hostile

CHECKSUM = slice(148, 156)


@cache
def files() -> list[tuple[bytes, list[int]]]:
    """Tars, and where the headers are in each."""
    found = []
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        file, names = io.BytesIO(), ["a.jpg", "./sub/b.json", "sub/grün.jpg"]
        with tarfile.open(fileobj=file, mode="w", format=form, encoding="utf-8") as archive:
            for name in names if form == tarfile.USTAR_FORMAT else [*names, f"{'n' * 200}/c"]:
                info = tarfile.TarInfo(name)
                info.size = 600
                archive.addfile(info, io.BytesIO(name.encode() * 600))
        content = file.getvalue()
        places = range(0, len(content), tarfile.BLOCKSIZE)
        found.append((content, [at for at in places if content[at + 257 : at + 262] == b"ustar"]))
    return found


def write(folder: Path, case: Any) -> Path:
    """With `mended`, headers have the checksums of what is in them."""
    number, edits, mended = case
    content, headers = files()[number % len(files())]
    data = bytearray(hostile.edit_bytes(content, edits))
    for at in headers if mended else ():
        header = data[at : at + tarfile.BLOCKSIZE]
        if len(header) == tarfile.BLOCKSIZE:
            header[CHECKSUM] = b" " * 8
            header[CHECKSUM] = b"%06o\0 " % sum(header)
            data[at : at + tarfile.BLOCKSIZE] = header
    path = folder / "case.tar"
    path.write_bytes(data)
    return path


def read(path: Path) -> None:
    os.environ["MASK_RCNN_HOME"] = str(path.parent / "home")
    try:
        members = find_members(str(path))
        with tarfile.open(path, "r:", encoding="utf-8", errors="surrogateescape") as archive:
            theirs = {os.path.normpath(one.name): one for one in archive if one.isreg()}
            for _, name in members:
                assert not name.startswith("/") and ".." not in name.split("/")
                file = archive.extractfile(theirs[name])
                assert file is not None and read_regular(f"{path}/{name}") == file.read()
    finally:
        shutil.rmtree(path.parent / "home", ignore_errors=True)


TARS = st.tuples(hostile.places, hostile.byte_edits, st.booleans()), write, read
