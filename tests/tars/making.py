"""Write tars of all kinds."""

import io
import tarfile
from pathlib import Path


def member(name, content=b"", **fields):
    """A member for `write_tar`."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, content


def write_tar(path, *members, format=tarfile.PAX_FORMAT, mode="w"):
    with tarfile.open(path, mode, format=format) as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return path


def tar_folder(folder, *paths, above=""):
    """Put the files of a folder into tars, in turns, in the order of their names."""
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    for n, path in enumerate(paths):
        names = [(file, f"{above}{file.relative_to(folder)}") for file in files[n :: len(paths)]]
        write_tar(path, *(member(name, file.read_bytes()) for file, name in names))
