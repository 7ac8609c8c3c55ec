"""The file that could not be written: of a full disk the system does not say which it was."""

import errno
import io
import os
from pathlib import Path

# Of a file that is open; where one cannot be opened, Python names it.
_OF_WRITING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
_PACKAGE = os.path.dirname(os.path.dirname(__file__))


def name_file(error: OSError) -> None:
    """Set an error's `filename`, if it has none, to the file that the innermost function that has
    one was writing."""
    if error.filename is not None or error.errno not in _OF_WRITING:
        return
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    for frame in reversed(frames):
        values = list(frame.f_locals.values())
        names = [str(value.name) for value in values if _is_written(value)]
        if frame.f_code.co_filename.startswith(_PACKAGE):
            # The last one is the most special.
            names += [os.fspath(value) for value in reversed(values) if isinstance(value, Path)]
        if names:
            error.filename = names[0]
            return


def of_another_kind(error: Exception) -> str | None:
    """Say of what is not there, a folder in the place of a file, or a file in that of a folder;
    None if it is none of these."""
    if not isinstance(error, OSError) or error.strerror is None or error.filename is None:
        return None
    if isinstance(error, FileNotFoundError):
        return f"{error.filename}: no such file or folder"
    if isinstance(error, IsADirectoryError):
        return f"{error.filename} is a folder, expected a file"
    is_file = isinstance(error, FileExistsError) and os.path.isfile(error.filename)
    return f"{error.filename} is a file, expected a folder" if is_file else None


def _is_written(value: object) -> bool:
    if not isinstance(value, io.IOBase) or not isinstance(getattr(value, "name", None), str):
        return False
    return any(letter in str(getattr(value, "mode", "")) for letter in "wax+")
