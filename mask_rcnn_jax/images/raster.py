"""Read image files as they are: all bands, pages and bits, whole or by window.

TIFF is read by tifffile (the extra `tiff`), `.npy` and `.npz` by NumPy, the rest by OpenCV.
"""

import io
import logging
import math
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np

from mask_rcnn_jax.annotations.reader import NotRegular, open_regular
from mask_rcnn_jax.images.decode import (
    MAX_BYTES,
    MAX_PIXELS,
    TIFF,
    UndecodableImage,
    decode_all,
    header_size,
    too_many,
    turned,
)
from mask_rcnn_jax.images.pixel_size import PixelSize, tiff_pixel_size
from mask_rcnn_jax.rle import Window
from mask_rcnn_jax.terminal.safe_text import cut

MAX_BANDS = 64
_INSTALL = "`pip install 'mask-rcnn-jax[tiff]'` installs what is missing"
_JPEG_IN_TIFF = (6, 7, 34892, 33007)
# Also JPEG 2000, WebP and PNG in a TIFF: they say for themselves how large they are.
_WITH_HEADERS = (*_JPEG_IN_TIFF, 33003, 33004, 33005, 34712, 34927, 50001, 34933)
_ORIENTATION, _UNASSOCIATED = 274, 2  # a tag, and a kind of alpha
_GDAL_NODATA = 42113  # a tag
NPY, _ZIP = b"\x93NUMPY", b"PK\x03\x04"
_KINDS = "buif"  # of NumPy's types: bool, whole and floating-point numbers
_HEAD = 1 << 16  # bytes of a `.npy` in which its shape is found
_MAX_TILE = 1 << 28  # bytes of a tile of a TIFF, which is decoded as a whole


class ImageTooLarge(UndecodableImage):
    """Raised for an image whose head tells of more bytes than are read."""


class MissingPackage(ImportError, ValueError):
    """Raised for an image whose reader, or codec, is not installed: a user's mistake."""


@dataclass(frozen=True)
class Raster:
    """An open image file.

    Attributes:
        path: names it in messages.
        size: (height, width), pixels.
        bands: of each page.
        pages: pages, slices or time points, in the file's order.
        dtype: of its numbers.
        kind: "tiff", "numpy" or "image".
        read_page: returns [h, w, bands] of a page, from 0, in a window (x1, y1, x2, y2).
        by_window: whether reading a window takes less than reading all.
    """

    path: str
    size: tuple[int, int]
    bands: int
    pages: int
    dtype: np.dtype
    kind: str
    read_page: Callable[[int, Window], np.ndarray]
    by_window: bool
    colors: str = ""  # of a TIFF of 8 bits, stored upright: "gray", "rgb" or "rgba"
    others: int = 0  # images of other sizes or types in the file; overviews do not count
    pixel_size: PixelSize | None = None  # of a TIFF's pixels, if it says
    nodata: float | None = None  # the number that GDAL calls no data, if a TIFF says

    def read(self, page: int = 0, window: Window | None = None) -> np.ndarray:
        """Read [h, w, bands] of a page: bool as uint8, halves and doubles as float32, others as
        they are stored.

        Raises UndecodableImage for damage, or for more than `MAX_PIXELS` pixels at once.
        """
        height, width = self.size
        x1, y1, x2, y2 = window or (0, 0, width, height)
        if (y2 - y1) * (x2 - x1) > MAX_PIXELS:
            found = f"{self.path}: {y2 - y1} x {x2 - x1} pixels"
            raise UndecodableImage(f"{found}, {too_many(MAX_PIXELS)}")
        _check_bytes((y2 - y1) * (x2 - x1) * self.bands * self.dtype.itemsize, MAX_BYTES, self.path)
        with _as_undecodable(self.path):
            pixels = self.read_page(page, (x1, y1, x2, y2))
        return as_plain(pixels)


def as_plain(pixels: np.ndarray) -> np.ndarray:
    """Bool becomes uint8, halves and doubles float32; others stay, in this machine's byte order."""
    if pixels.dtype == bool:
        return pixels.astype(np.uint8)
    if pixels.dtype.kind == "f":
        with np.errstate(over="ignore"):  # what is beyond becomes infinite
            return pixels.astype(np.float32, copy=False)
    return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)


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
            with _open_tiff(file, path, upright) as raster:
                height, width = raster.size
                values = raster.pages * height * width * raster.bands
                _check_bytes(values * raster.dtype.itemsize, max_bytes, path)
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


@contextmanager
def _as_undecodable(path: str) -> Iterator[None]:
    """Say of what file it was that a parser failed, whatever it raises."""
    try:
        yield
    except (UndecodableImage, MissingPackage):
        raise
    except MemoryError as error:
        raise UndecodableImage(f"{path}: too large for the memory") from error
    except Exception as error:
        if isinstance(error, ImportError) or "imagecodecs" in str(error):
            raise MissingPackage(f"{path}: {cut(str(error))}; {_INSTALL}") from error
        reason = cut(f"{type(error).__name__}: {error}")
        raise UndecodableImage(f"{path}: truncated or damaged ({reason})") from error


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
    with _as_undecodable(path):
        if file.read(1) != NPY[:1]:
            with zipfile.ZipFile(file) as archive:
                names = archive.namelist()
                if len(names) != 1 or not names[0].endswith(".npy"):
                    found = f"{len(names)} files in it, expected one array"
                    raise UndecodableImage(f"{path}: a zip archive with {found}")
                with archive.open(names[0]) as inner:
                    array = _read_array(inner, path, most)
                    return _of_array(_as_pages(array, path), path, "numpy")
        file.seek(0)
        if isinstance(file, io.BytesIO):
            return _of_array(_as_pages(_read_array(file, path, most), path), path, "numpy")
        _check_array(file, path, max_bytes)
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        return _of_array(_as_pages(array, path), path, "numpy", by_window=True)


def _check_array(file: Any, path: str, most: int | None) -> None:
    """Refuse by its header an array of more bytes, or one that is none of numbers."""
    version = np.lib.format.read_magic(file)
    read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
    shape, _, dtype = read[version[0]](file)
    if dtype.kind not in _KINDS:
        raise UndecodableImage(f"{path}: an array of {dtype}, expected numbers")
    _check_bytes(math.prod(shape) * dtype.itemsize, most, path)


def _check_bytes(count: int, most: int | None, path: str) -> None:
    if most is not None and count > most:
        found = f"{path}: pixels of {count:,} bytes"
        raise ImageTooLarge(f"{found}, more than the {most:,} that are read")


def _read_array(file: Any, path: str, most: int) -> np.ndarray:
    head = file.read(_HEAD)
    _check_array(io.BytesIO(head), path, most)
    return np.lib.format.read_array(io.BytesIO(head + file.read(most)), allow_pickle=False)


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


@contextmanager
def _open_tiff(file: BinaryIO, path: str, upright: bool) -> Iterator[Raster]:
    try:
        import tifffile
    except ImportError as error:
        raise MissingPackage(f"{path}: a TIFF's bands are read by tifffile; {_INSTALL}") from error
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # what is wrong is raised
    with _as_undecodable(path):
        opened = tifffile.TiffFile(file, name=os.path.basename(path))
    with opened:
        with _as_undecodable(path):
            raster = _of_series(opened, path)
            entry = opened.pages.first.tags.get(_ORIENTATION)
            raster = (
                _turned(raster, entry.value) if upright and entry and entry.value != 1 else raster
            )
        yield raster


def _turned(raster: Raster, entry: int) -> Raster:
    """A raster as an EXIF orientation asks for."""
    height, width = raster.size
    after = turned(np.empty((height, width, 0)), entry)

    def read_page(page: int, window: Window) -> np.ndarray:
        x1, y1, x2, y2 = window
        return turned(raster.read(page), entry)[y1:y2, x1:x2]

    return replace(raster, size=after.shape[:2], read_page=read_page, by_window=False)


def _of_series(tiff: Any, path: str) -> Raster:
    """The raster of a TIFF's first series: its channels and samples are bands, and what else it has
    beside height and width is pages."""
    series, first = tiff.series[0], tiff.pages.first
    axes = series.axes
    # A page's samples may have any name, which tifffile takes from the file: YXC, CYX, YXQ.
    own = len(first.axes) if series.shape[-len(first.shape) :] == first.shape else 0
    outer = [axis for axis in axes[: len(axes) - own] if axis not in "YXS"]
    lengths = [series.shape[axes.index(axis)] for axis in outer]
    # [pages, channels]: which page of the file has a channel of a page.
    numbers = np.arange(math.prod(lengths)).reshape(lengths)
    if "C" in outer:
        numbers = np.moveaxis(numbers, outer.index("C"), -1)
    numbers = numbers.reshape(-1, numbers.shape[-1] if "C" in outer else 1)
    height, width = first.imagelength, first.imagewidth
    bands = numbers.shape[1] * first.samplesperpixel
    others = len(tiff.series) - 1
    if first.dtype is None or first.dtype.kind not in _KINDS:
        raise UndecodableImage(f"{path}: a TIFF of {first.dtype or 'unknown'} numbers is not read")
    if not 1 <= bands <= 1024 or min(height, width) < 1:
        raise UndecodableImage(f"{path}: {height} x {width} pixels of {bands} bands are not read")
    if first.is_tiled:
        samples = math.prod((first.tilelength, first.tilewidth, first.samplesperpixel))
        _check_bytes(samples * first.dtype.itemsize, _MAX_TILE, f"{path}: a tile")
    if tiff.is_ome and any(page is None or page.parent is not tiff for page in series.pages):
        raise UndecodableImage(f"{path}: an OME-TIFF with planes in other files is not read")
    in_pages = len(series.pages) == numbers.size
    inverted = first.photometric == 0 and first.dtype.kind == "u"

    def read_page(page: int, window: Window) -> np.ndarray:
        found = numbers[page].tolist()
        if in_pages:
            layers = [_read_segments(series.pages[number], window) for number in found]
        else:  # ImageJ's large stacks: one page that describes all, which follow it
            x1, y1, x2, y2 = window
            size = height * width * first.samplesperpixel * first.dtype.itemsize
            offsets = [series.dataoffset + number * size for number in found]
            whole = [_read_raw(tiff.filehandle, first, offset) for offset in offsets]
            layers = [layer[y1:y2, x1:x2] for layer in whole]
        pixels = layers[0] if len(layers) == 1 else np.concatenate(layers, axis=-1)
        return np.iinfo(pixels.dtype).max - pixels if inverted else pixels

    given = path, (height, width), bands, len(numbers), first.dtype, "tiff", read_page
    colors = _colors(first) if bands == first.samplesperpixel else ""
    raster = Raster(*given, _has_parts(first), colors=colors, others=others)
    return replace(raster, pixel_size=tiff_pixel_size(tiff), nodata=_nodata(first))


def _nodata(page: Any) -> float | None:
    """`Raster.nodata` of a page, as `as_plain` has it; GDAL writes it in decimals, which may be
    beyond the largest number of a type that is meant."""
    tag = page.tags.get(_GDAL_NODATA)
    try:
        value = float(tag.value.strip("\0 ")) if tag else None
    except (AttributeError, ValueError):
        return None
    if value is None or page.dtype.kind != "f":
        return value
    most = np.finfo(page.dtype).max
    with np.errstate(over="ignore"):
        return float(np.clip(value, -most, most, dtype=np.float64).astype(np.float32))


def _colors(page: Any) -> str:
    """`Raster.colors` of a page."""
    tag, alpha = page.tags.get(_ORIENTATION), list(map(int, page.extrasamples))
    if page.dtype != np.uint8 or page.bitspersample != 8 or (tag and tag.value not in (0, 1)):
        return ""
    if page.photometric in (0, 1):
        return "gray"
    is_rgb = page.photometric == 2 or (page.photometric == 6 and page.compression in _JPEG_IN_TIFF)
    if not is_rgb or page.samplesperpixel < 3:
        return ""
    return "rgba" if alpha == [_UNASSOCIATED] else "rgb"


def _has_parts(page: Any) -> bool:
    """Whether a page is stored in several tiles or strips, or can be mapped."""
    return page.is_tiled or page.rowsperstrip < page.imagelength or page.is_memmappable


def _read_raw(file: Any, page: Any, offset: int) -> np.ndarray:
    """[height, width, samples] of uncompressed pixels."""
    shape = page.imagelength, page.imagewidth, page.samplesperpixel
    file.seek(offset)
    dtype = page.dtype.newbyteorder(page.parent.byteorder)
    return np.frombuffer(file.read(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)


def _read_mapped(page: Any, window: Window) -> np.ndarray:
    """`_read_segments` of uncompressed pixels in one piece of a file, however large its strips."""
    x1, y1, x2, y2 = window
    key = page.keyframe
    planes, _, length, width, samples = key.shaped
    dtype = key.dtype.newbyteorder(page.parent.byteorder)
    shape = planes, length, width, samples
    stored = page.parent.filehandle.memmap_array(dtype, shape, page.dataoffsets[0])
    out = np.array(stored[:, y1:y2, x1:x2])
    return np.moveaxis(out, 0, 2).reshape(y2 - y1, x2 - x1, planes * samples)


def _check_segment(content: bytes, pixels: int, path: str) -> None:
    """Refuse a tile, or strip, whose own header has far more pixels than the file says it has."""
    size = header_size(content, path)
    if size and size[0] * size[1] > 4 * pixels + _HEAD:
        found = f"{path}: a tile or strip of {size[0]} x {size[1]} pixels"
        raise ImageTooLarge(f"{found}, expected {pixels:,}")


def _read_segments(page: Any, window: Window) -> np.ndarray:
    """[h, w, samples] of the tiles or strips of a page that a window (x1, y1, x2, y2) touches."""
    x1, y1, x2, y2 = window
    key = page.keyframe
    if page.is_memmappable:
        return _read_mapped(page, window)
    planes, depth, length, width, samples = key.shaped
    if depth != 1:
        raise ValueError("tiles of several slices")
    rows, columns = (key.tilelength, key.tilewidth) if key.is_tiled else (key.rowsperstrip, width)
    rows = rows if key.is_tiled else min(rows, length)
    down, across = -(-length // rows), -(-width // columns)
    if rows * columns * samples * key.dtype.itemsize > MAX_BYTES:
        found = f"{page.parent.filename}: tiles or strips of {rows} x {columns} pixels"
        raise UndecodableImage(f"{found}, more than the {MAX_BYTES:,} bytes that are read at once")
    numbers = [
        (plane * down + y) * across + x
        for plane in range(planes)
        for y in range(y1 // rows, -(-y2 // rows))
        for x in range(x1 // columns, -(-x2 // columns))
    ]
    options = {}
    if key.compression in _JPEG_IN_TIFF:
        options = {"jpegtables": page.jpegtables, "jpegheader": key.jpegheader}
    out = np.full((planes, y2 - y1, x2 - x1, samples), key.nodata, key.dtype)
    offsets, lengths = (
        [array[n] for n in numbers] for array in (page.dataoffsets, page.databytecounts)
    )
    read = page.parent.filehandle.read_segments
    found = read(offsets, lengths, indices=numbers, flat=True)
    for content, number in found:
        if content is not None and key.compression in _WITH_HEADERS:
            _check_segment(content, rows * columns, page.parent.filename)
        segment, (plane, _, y, x, _), shape = key.decode(
            content, number, _fullsize=key.is_tiled, **options
        )
        if segment is None:  # a tile that is left out
            continue
        _, h, w, _ = segment.shape
        h, w = min(h, length - y), min(w, width - x)
        top, left, bottom, right = max(y, y1), max(x, x1), min(y + h, y2), min(x + w, x2)
        part = segment[0, top - y : bottom - y, left - x : right - x]
        out[plane, top - y1 : bottom - y1, left - x1 : right - x1] = part
    return np.moveaxis(out, 0, 2).reshape(y2 - y1, x2 - x1, planes * samples)
