"""TIFFs with any bands, pages and bits, whole or by window, by tifffile (the extra `tiff`).

What texts in a file say of it, ImageJ's, OME's and tifffile's own, is bounded by what is there, and
no other file is opened.
"""

import logging
import math
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, BinaryIO

import numpy as np

from mask_rcnn_jax.images.decode import MAX_BYTES, UndecodableImage, header_size, turned
from mask_rcnn_jax.images.headers import MissingPackage
from mask_rcnn_jax.images.ome import read_planes
from mask_rcnn_jax.images.pixel_size import tiff_pixel_size
from mask_rcnn_jax.images.raster import (
    INSTALL,
    KINDS,
    ImageTooLarge,
    Raster,
    as_undecodable,
    check_bytes,
)
from mask_rcnn_jax.rle import Window

_JPEG_IN_TIFF = (6, 7, 34892, 33007)
# Also JPEG 2000, WebP and PNG in a TIFF: they say for themselves how large they are.
_WITH_HEADERS = (*_JPEG_IN_TIFF, 33003, 33004, 33005, 34712, 34927, 50001, 34933)
_ORIENTATION, _UNASSOCIATED = 274, 2  # a tag, and a kind of alpha
_GDAL_NODATA = 42113  # a tag
_MAX_TILE = 1 << 28  # bytes of a tile, which is decoded as a whole
_SMALL = 1 << 16  # pixels of a tile that are decoded whatever it says
_SUB_IFDS, _MAX_TAGS = 330, 4096  # a tag with the places of overviews, and tags of a page
_MAX_PAGES, _MAX_LEVELS = 1 << 16, 64  # all with as many overviews as one has
# How files are understood. Others may list files, and texts in them are as long as they say.
_KINDS = {"shaped", "imagej", "lsm", "stk", "uniform"}


@contextmanager
def open_tiff(file: BinaryIO, path: str, upright: bool) -> Iterator[Raster]:
    """Open a TIFF; arguments and errors as for `opening.open_raster`."""
    try:
        import tifffile
    except ImportError as error:
        raise MissingPackage(f"{path}: a TIFF's bands are read by tifffile; {INSTALL}") from error
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # what is wrong is raised
    others: dict[str, Any] = {f"is_{kind}": False for kind in tifffile.TIFF.FILE_FLAGS - _KINDS}
    with as_undecodable(path):
        _check_pages(file, path)
        opened = tifffile.TiffFile(file, name=os.path.basename(path), **others)
    with opened:
        with as_undecodable(path):
            raster = _of_series(opened, path)
            entry = opened.pages.first.tags.get(_ORIENTATION)
            raster = (
                _turned(raster, entry.value) if upright and entry and entry.value != 1 else raster
            )
        yield raster


def _check_pages(file: BinaryIO, path: str) -> None:
    """Refuse more pages than are read before they are parsed, and pages in a circle."""
    file.seek(0)
    begin = file.read(16)
    is_big, order = 43 in begin[2:4], "<" if begin.startswith(b"I") else ">"
    head, entry, offset = ("Q", 20, "Q") if is_big else ("H", 12, "I")
    (at,) = struct.unpack_from(order + offset, begin, 8 if is_big else 4)
    pages, levels = 0, 0
    while at:
        file.seek(at)
        try:
            (tags,) = struct.unpack(order + head, file.read(struct.calcsize(order + head)))
            entries = file.read(min(tags, _MAX_TAGS) * entry)
            (at,) = struct.unpack(order + offset, file.read(struct.calcsize(order + offset)))
        except struct.error:  # cut off
            break
        for place in range(0, len(entries), entry):
            code, _, count = struct.unpack_from(f"{order}HH{offset}", entries, place)
            levels = max(levels, count) if code == _SUB_IFDS else levels
        pages += 1
        if pages * (1 + levels) > _MAX_PAGES or levels > _MAX_LEVELS:
            most = f"{_MAX_PAGES:,} pages, or the {_MAX_LEVELS} overviews of one, that are read"
            raise UndecodableImage(f"{path}: more than the {most}")
    file.seek(0)


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
    first, there = tiff.pages.first, len(tiff.pages)
    series: Any = None  # of tifffile's, for pages that no OME-XML tells of
    height, width = first.imagelength, first.imagewidth
    if first.dtype is None or first.dtype.kind not in KINDS:
        raise UndecodableImage(f"{path}: a TIFF of {first.dtype or 'unknown'} numbers is not read")
    if min(height, width, first.samplesperpixel) < 1:
        raise UndecodableImage(f"{path}: {height} x {width} pixels are not read")
    if first.is_tiled:
        samples = math.prod((first.tilelength, first.tilewidth, first.samplesperpixel))
        check_bytes(samples * first.dtype.itemsize, _MAX_TILE, f"{path}: a tile")
    shape, planes = (height, width, first.samplesperpixel), None
    if first.is_ome:
        planes = read_planes(first.description, path, tiff.filename, there, shape)
    if planes:
        outer, lengths, others = planes.axes, planes.lengths, planes.others
    else:
        series, others = tiff.series[0], len(tiff.series) - 1
        axes = series.axes
        # A page's samples may have any name, which tifffile takes from the file: YXC, CYX, YXQ.
        own = len(first.axes) if series.shape[-len(first.shape) :] == first.shape else 0
        outer = "".join(axis for axis in axes[: len(axes) - own] if axis not in "YXS")
        lengths = [series.shape[axes.index(axis)] for axis in outer]
    total, size = math.prod(lengths), math.prod(shape) * first.dtype.itemsize
    in_pages = series is None or len(series.pages) == total
    if not in_pages:  # ImageJ's large stacks: one page that describes all, which follow it
        there = (tiff.filehandle.size - series.dataoffset) // size
    if not 1 <= total <= there:
        found = f"a text in it tells of {total:,} pages"
        raise UndecodableImage(f"{path}: {found}, {there:,} are there")
    # A page's channels, and the pages that have one of them before those with the next.
    at = outer.find("C")
    channels, step = (lengths[at], math.prod(lengths[at + 1 :])) if at >= 0 else (1, 1)
    bands = channels * first.samplesperpixel
    if bands > 1024:
        raise UndecodableImage(f"{path}: {height} x {width} pixels of {bands} bands are not read")
    inverted = first.photometric == 0 and first.dtype.kind == "u"

    def read_page(page: int, window: Window) -> np.ndarray:
        before, after = divmod(page, step)
        found = [(before * channels + channel) * step + after for channel in range(channels)]
        if planes:
            layers = [_read_segments(_alike(tiff, planes.pages[n]), window) for n in found]
        elif in_pages:
            layers = [_read_segments(series.pages[number], window) for number in found]
        else:
            offsets = [series.dataoffset + number * size for number in found]
            layers = [_read_stored(first, window, offset) for offset in offsets]
        pixels = layers[0] if len(layers) == 1 else np.concatenate(layers, axis=-1)
        return np.iinfo(pixels.dtype).max - pixels if inverted else pixels

    given = path, (height, width), bands, total // channels, first.dtype, "tiff", read_page
    colors = _colors(first) if bands == first.samplesperpixel else ""
    raster = Raster(*given, _has_parts(first), colors=colors, others=others)
    return replace(raster, pixel_size=tiff_pixel_size(tiff), nodata=_nodata(first))


def _alike(tiff: Any, number: int) -> Any:
    """A page of a file whose pages are like the first."""
    page = tiff.pages[number]
    if page.hash != tiff.pages.first.hash:
        raise ValueError(f"page {number} is not like the first")
    return page


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


def _read_stored(page: Any, window: Window, offset: int) -> np.ndarray:
    """`_read_segments` of uncompressed pixels in one piece from an offset on, however large its
    strips; of a file, only the window takes memory."""
    x1, y1, x2, y2 = window
    file, key = page.parent.filehandle, page.keyframe
    planes, _, length, width, samples = key.shaped
    dtype, shape = key.dtype.newbyteorder(page.parent.byteorder), (planes, length, width, samples)
    if file.is_file:
        stored = file.memmap_array(dtype, shape, offset)
    else:
        file.seek(offset)
        stored = np.frombuffer(file.read(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)
    out = np.array(stored[:, y1:y2, x1:x2])
    return np.moveaxis(out, 0, 2).reshape(y2 - y1, x2 - x1, planes * samples)


def _check_segment(content: bytes, pixels: int, path: str) -> None:
    """Refuse a tile, or strip, whose own header has far more pixels than the file says it has."""
    size = header_size(content, path)
    if size and size[0] * size[1] > 4 * pixels + _SMALL:
        found = f"{path}: a tile or strip of {size[0]} x {size[1]} pixels"
        raise ImageTooLarge(f"{found}, expected {pixels:,}")


def _read_segments(page: Any, window: Window) -> np.ndarray:
    """[h, w, samples] of the tiles or strips of a page that a window (x1, y1, x2, y2) touches."""
    x1, y1, x2, y2 = window
    key = page.keyframe
    if page.is_memmappable:
        return _read_stored(page, window, page.dataoffsets[0])
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
        segment, (plane, _, y, x, _), _ = key.decode(
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
