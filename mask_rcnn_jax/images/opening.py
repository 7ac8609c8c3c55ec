"""Open image files as they are: all bands, pages and bits, whole or by window.

TIFF is read by tifffile (the extra `tiff`), `.npy` and `.npz` by NumPy, the rest by OpenCV.
"""

import io
import math
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np

from mask_rcnn_jax.annotations.reader import NotRegular, open_regular
from mask_rcnn_jax.images.decode import MAX_BYTES, TIFF, UndecodableImage, decode_all
from mask_rcnn_jax.images.raster import KINDS, MAX_BANDS, Raster, as_undecodable, check_bytes
from mask_rcnn_jax.images.tiff import open_tiff
from mask_rcnn_jax.rle import Window

NPY, _ZIP = b"\x93NUMPY", b"PK\x03\x04"
_HEAD = 1 << 16  # bytes of a `.npy` in which its shape is found


def has_raster_head(content: bytes) -> bool:
    """Whether a file begins as one whose head tells its bands: a TIFF or an array of NumPy."""
    return content.startswith((*TIFF, NPY, _ZIP))


@contextmanager
def open_raster(
    source: str | os.PathLike | bytes,
    path: str = "",
    upright: bool = False,
    max_bytes: int | None = None,
) -> Iterator[Raster]:
    """Open an image for a `with` block, which gets a `Raster`.

    Args:
        source: the file, or its content.
        path: names it in messages; by default its own.
        upright: apply an EXIF rotation; such a file is decoded whole.
        max_bytes: of all pixels of all pages; None has no limit for what is read by window.

    Raises:
        UndecodableImage: the file is damaged, no regular file, too large, or not understood.
        MissingPackage: the extra for it is missing.
        OSError: it cannot be read.
    """
    path = path or ("image" if isinstance(source, bytes) else os.fspath(source))
    with _opened(source, path) as file:
        begin = file.read(8)
        file.seek(0)
        if begin.startswith(TIFF):
            with open_tiff(file, path, upright) as raster:
                height, width = raster.size
                values = raster.pages * height * width * raster.bands
                check_bytes(values * raster.dtype.itemsize, max_bytes, path)
                yield raster
        elif begin.startswith((NPY, _ZIP)):
            yield _open_numpy(file, path, max_bytes)
        else:
            if file.seek(0, os.SEEK_END) > MAX_BYTES:
                raise UndecodableImage(f"{path}: larger than the {MAX_BYTES:,} bytes that are read")
            file.seek(0)  # `read` with a limit would take memory for all of it
            pixels = decode_all(file.read(), path, upright=upright)
            yield _of_array(pixels[None], path, "image")


@contextmanager
def _opened(source: str | os.PathLike | bytes, path: str) -> Iterator[BinaryIO]:
    if isinstance(source, bytes):
        yield io.BytesIO(source)
        return
    try:
        file = open_regular(source)
    except NotRegular as error:
        raise UndecodableImage(str(error)) from error
    with file:
        yield file


def _of_array(array: np.ndarray, path: str, kind: str, by_window: bool = False) -> Raster:
    """A raster of an array [pages, height, width, bands]."""
    pages, height, width, bands = array.shape

    def read_page(page: int, window: Window) -> np.ndarray:
        x1, y1, x2, y2 = window
        return np.array(array[page, y1:y2, x1:x2])

    return Raster(path, (height, width), bands, pages, array.dtype, kind, read_page, by_window)


def _open_numpy(file: BinaryIO, path: str, max_bytes: int | None) -> Raster:
    """A raster of a `.npy`, or of the only array of a `.npz`."""
    most = MAX_BYTES if max_bytes is None else max_bytes
    with as_undecodable(path):
        if file.read(1) != NPY[:1]:
            with zipfile.ZipFile(file) as archive:
                names = archive.namelist()
                if len(names) != 1 or not names[0].endswith(".npy"):
                    found = f"{len(names)} files in it, expected one array"
                    raise UndecodableImage(f"{path}: a zip archive with {found}")
                with archive.open(names[0]) as inner:
                    length = archive.getinfo(names[0]).file_size
                    array = _read_array(inner, path, most, length)
                    return _of_array(_as_pages(array, path), path, "numpy")
        length = file.seek(0, os.SEEK_END)
        file.seek(0)
        if isinstance(file, io.BytesIO) or not os.path.isfile(path):  # in a store, or a tar
            return _of_array(_as_pages(_read_array(file, path, most, length), path), path, "numpy")
        _check_array(file, path, max_bytes)
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        return _of_array(_as_pages(array, path), path, "numpy", by_window=True)


def _check_array(file: Any, path: str, most: int | None) -> int:
    """The bytes that an array needs by its header; refuses more than `most`, or one that is none of
    numbers."""
    version = np.lib.format.read_magic(file)
    read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
    shape, _, dtype = read[version[0]](file)
    if dtype.kind not in KINDS:
        raise UndecodableImage(f"{path}: an array of {dtype}, expected numbers")
    size = math.prod(shape) * dtype.itemsize
    check_bytes(size, most, path)
    return file.tell() + size


def _read_array(file: Any, path: str, most: int, length: int) -> np.ndarray:
    """The array of a `.npy` of a length, of which nothing behind it is read."""
    needed = _check_array(io.BytesIO(file.read(_HEAD)), path, most)
    if needed > length:
        raise ValueError(f"{length:,} bytes, its shape needs {needed:,}")
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)


def _as_pages(array: np.ndarray, path: str) -> np.ndarray:
    """[pages, height, width, bands] of [H, W], [H, W, bands], [bands, H, W], or as it is.

    Of three axes, the first is that of the bands only where the last cannot be.
    """
    if not array.size:  # of which there could be any number of pages
        raise UndecodableImage(f"{path}: an array without numbers")
    if array.ndim == 2:
        return array[None, ..., None]
    if array.ndim == 3:
        first = array.shape[2] > MAX_BANDS >= array.shape[0]
        return np.moveaxis(array, 0, 2)[None] if first else array[None]
    if array.ndim == 4 and array.shape[0]:
        return array
    found = "x".join(map(str, array.shape)) or "one number"
    raise UndecodableImage(f"{path}: an array of {found}, expected [H, W] or [H, W, bands]")
