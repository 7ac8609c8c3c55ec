"""Zip archives, unpacked so that a break leaves no half file and no work is done twice."""

import os
import shutil
import stat
import zipfile
import zlib
from pathlib import Path, PureWindowsPath

from mask_rcnn_jax.formats.disk import check_room
from mask_rcnn_jax.formats.download import ProgressOf

_CHUNK = 1 << 20
_ENCRYPTED = 0x1  # of a member's flag bits


def unpack(
    archive: str | os.PathLike,
    folder: str | os.PathLike,
    *,
    prefix: str,
    progress_of: ProgressOf,
) -> None:
    """Bring the files of a zip archive whose names start with `prefix` into `folder`.

    A file that is there with the right length and CRC stays. Any other is written as its name +
    ".part", compared with its CRC and then moved into place, so that one which is there is whole.

    Args:
        progress_of: see `ProgressOf`; counts bytes of files.

    Raises ValueError for an archive that is damaged, compressed in an unknown way or holds a name
    that leads out of `folder`, of which nothing is unpacked, and OSError if the disk is too small.
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
                raise ValueError(f"{archive}: no file in it is called {prefix}...")
            absent = [member for member in members if not _is_there(folder, member)]
            folder.mkdir(parents=True, exist_ok=True)
            needed = sum(member.file_size for member in absent)
            check_room(folder, needed)
            advance = progress_of(needed)
            for member in absent:
                _write(content, member, folder / member.filename)
                advance(member.file_size)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{archive} is damaged: {error}") from error
    except NotImplementedError as error:  # zipfile's, of a way to compress that it does not know
        raise ValueError(f"{archive} cannot be unpacked: {error}") from error


def _check_name(archive: Path, member: zipfile.ZipInfo) -> None:
    """Raise for what could be written somewhere else, on any system, and for links."""
    name = PureWindowsPath(member.filename)
    leads_out = name.drive or name.root or ".." in name.parts or "\\" in member.filename
    if leads_out or stat.S_ISLNK(member.external_attr >> 16):
        raise ValueError(f"{archive}: unsafe name {member.filename!r} in it, nothing is unpacked")
    if member.flag_bits & _ENCRYPTED:
        raise ValueError(f"{archive}: {member.filename} is encrypted, nothing is unpacked")


def _is_there(folder: Path, member: zipfile.ZipInfo) -> bool:
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
