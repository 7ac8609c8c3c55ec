"""Unpack zip archives resumably, without leaving incomplete files."""

import os
import shutil
import stat
import zipfile
import zlib
from pathlib import Path, PureWindowsPath

from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.disk import check_room
from mask_rcnn_jax.download import ProgressFactory

_CHUNK = 1 << 20
MAX_FOLDERS, MAX_PATH = 100, 1000  # in one another, characters
_ENCRYPTED = 0x1  # of a member's flag bits


def unpack(
    archive: str | os.PathLike,
    folder: str | os.PathLike,
    *,
    prefix: str,
    make_progress: ProgressFactory,
) -> None:
    """Unpack the files of a zip archive whose names start with `prefix`.

    Existing files with the right size and CRC are kept. Others are written to name + ".part",
    verified and then renamed, so files never appear incomplete.

    Raises:
        OSError: if the disk is too small.
        ValueError: if the archive is damaged, uses an unknown compression, or holds a name outside
            `folder`; in the last case nothing is unpacked.
    """
    archive, folder = Path(archive), Path(folder)
    try:
        with zipfile.ZipFile(archive) as content:
            for member in content.infolist():
                _check_name(archive, member)
            members = [
                member
                for member in content.infolist()
                if member.filename.startswith(prefix) and not member.is_dir()
            ]
            if not members:
                raise ValueError(f"{archive}: no file name in it starts with {prefix!r}")
            missing = [member for member in members if not _is_unpacked(folder, member)]
            folder.mkdir(parents=True, exist_ok=True)
            needed = sum(member.file_size for member in missing)
            check_room(folder, needed)
            advance = make_progress(needed)
            for member in missing:
                _write(content, member, folder / member.filename)
                advance(member.file_size)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{archive} is damaged: {error}") from error
    except NotImplementedError as error:  # from zipfile, for an unknown compression
        raise ValueError(f"{archive} cannot be unpacked: {error}") from error


def _check_name(archive: Path, member: zipfile.ZipInfo) -> None:
    """Reject links, and paths that lead out of the folder on any system or are too long."""
    name, shown = PureWindowsPath(member.filename), show(member.filename)
    is_outside = name.drive or name.root or ".." in name.parts or "\\" in member.filename
    if is_outside or stat.S_ISLNK(member.external_attr >> 16):
        raise ValueError(f"{archive}: unsafe name {shown} in it, nothing is unpacked")
    if len(name.parts) > MAX_FOLDERS or len(member.filename) > MAX_PATH:
        limits = f"more than {MAX_FOLDERS} folders or {MAX_PATH:,} characters"
        raise ValueError(f"{archive}: {shown} in it has {limits}, nothing is unpacked")
    if member.flag_bits & _ENCRYPTED:
        raise ValueError(f"{archive}: {shown} is encrypted, nothing is unpacked")


def _is_unpacked(folder: Path, member: zipfile.ZipInfo) -> bool:
    path = folder / member.filename
    if not path.is_file() or path.stat().st_size != member.file_size:
        return False
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc == member.CRC


def _write(content: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        with content.open(member) as source, open(part, "wb") as file:
            shutil.copyfileobj(source, file, _CHUNK)
        os.replace(part, path)
    except OSError as error:
        raise OSError(f"{path}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
