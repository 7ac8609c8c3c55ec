"""What is lost where an image becomes [H, W, 3] uint8: pages, bands, alpha, and bits.

Headers and decoded pixels are looked at; a JPEG loses nothing. With `data.bands.names`, nothing is
lost without a word.
"""

import io
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mask_rcnn_jax.annotations.reader import open_regular
from mask_rcnn_jax.data.dataset import Dataset
from mask_rcnn_jax.images.bands import Bands
from mask_rcnn_jax.images.decode import (
    TIFF,
    WITH_BANDS,
    decode_bytes,
    decode_image,
    tiff_directories,
)
from mask_rcnn_jax.images.headers import bits_of, open_header

PAGES, BANDS, GRAY, BITS, ALPHA, DARK = "pages", "bands", "gray", "bits", "alpha", "dark"
_TEXTS = {
    PAGES: "pages or frames after the first",
    BANDS: "bands after the third",
    GRAY: "bands after the first, which is seen as gray",
    BITS: "all but 8 of {bits} bits",
    ALPHA: "alpha, so that what is transparent is seen",
}
# Gray images of a set are stretched as its recipe says; for `infer`, with any model of photographs:
STRETCHED = (
    "--config.data.bands.names=red,green,blue --config.data.bands.numbers=1,1,1 "
    "--config.data.bands.scale=image --accept_mismatch"
)
DIM = 63  # of 255: a 16-bit image that stays below uses less than a quarter of its range
MOST_PAGES = 1000  # that are counted
SAMPLE, SAMPLE_DEEP = 200, 20  # images of a set that are looked at, and of 16 bits
_TIFF_KIND, _TIFF_BITS, _TIFF_COLORS, _TIFF_BANDS, _TIFF_EXTRA = 254, 258, 262, 277, 338
_OVERVIEW = 1  # a bit of _TIFF_KIND
_GRAYS, _RGB, _CMYK = (0, 1), 2, 5  # of _TIFF_COLORS
_PNG, _JPEG, _JP2_HEADER = b"\x89PNG", b"\xff\xd8", b"ihdr"


class Header(NamedTuple):
    """What an image's header says about its pixels."""

    bits: int = 8  # per band
    bands: int = 3
    has_alpha: bool = False
    pages: int = 1
    is_rgb: bool = False  # of a TIFF: its first bands are red, green and blue
    is_gray: bool = False  # of a TIFF of several bands: the first is seen as gray, the others not

    @property
    def lost(self) -> list[str]:
        found = {PAGES: self.pages > 1, BITS: self.bits > 8}
        found |= {BANDS: self.bands > 3, GRAY: self.is_gray and self.bands <= 3}
        found |= {ALPHA: self.has_alpha}
        return [kind for kind, is_lost in found.items() if is_lost]


def read_header(file: BinaryIO) -> Header:
    """Read an image's header; what is damaged or unknown counts as three bands of 8 bits."""
    start = file.read(64)
    if start.startswith(_JPEG):
        return Header()
    try:
        if start.startswith(TIFF):
            return _tiff_header(file)
        file.seek(0)
        with open_header(file) as image:
            has_alpha = image.mode.endswith(("A", "a")) or "transparency" in image.info
            pages = 1 if image.format == "JPEG" else getattr(image, "n_frames", 1)
            bits = 16 if image.mode.startswith("I") else bits_of(image, file)
        if start.startswith(_PNG):
            bits = start[24]
        elif _JP2_HEADER in start:
            bits = (start[start.index(_JP2_HEADER) + 14] & 127) + 1
    except Exception:  # whatever its parsers raise on damaged files
        return Header()
    return Header(bits, 3, has_alpha, pages)


def _tiff_header(file: BinaryIO) -> Header:
    pages, first = 0, Header()
    for tags in itertools.islice(tiff_directories(file), MOST_PAGES):
        if pages and tags.get(_TIFF_KIND, 0) & _OVERVIEW:
            continue
        pages += 1
        if pages == 1:
            bits, extra = tags.get(_TIFF_BITS, (8,)), tags.get(_TIFF_EXTRA, ())
            has_alpha, is_cmyk = bool({1, 2} & set(extra)), tags.get(_TIFF_COLORS) == _CMYK
            bands = tags.get(_TIFF_BANDS, 1) - has_alpha - is_cmyk
            is_rgb = tags.get(_TIFF_COLORS) == _RGB
            is_gray = bands > 1 and tags.get(_TIFF_COLORS) in _GRAYS
            first = Header(max(bits), max(bands, 3), has_alpha, is_rgb=is_rgb, is_gray=is_gray)
    return first._replace(pages=pages)


@dataclass
class _Named:
    """Images that have something in common."""

    first: str
    count: int = 0


class Unused:
    """Counts images that lose something. May be shared by threads."""

    def __init__(self) -> None:
        self._lock, self._total = threading.Lock(), 0
        self._found: dict[str, _Named] = {}  # by what is lost
        self._kinds: dict[tuple[int, int], _Named] = {}  # by bits and bands

    def add(self, name: str, file: BinaryIO | str, image: np.ndarray | None) -> None:
        """Look at an image: its file, or the path of it, and its pixels [H, W, 3] if decoded."""
        if isinstance(file, str):
            try:
                with open_regular(file) as opened:
                    header = read_header(opened)
            except (OSError, ValueError):
                return
        else:
            header = read_header(file)
        is_dark = header.bits > 8 and image is not None and image.size and image.max() <= DIM
        with self._lock:
            self._total += 1
            for kind in [*header.lost, *([DARK] if is_dark else [])]:
                self._found.setdefault(kind, _Named(name)).count += 1
            self._kinds.setdefault((header.bits, header.bands), _Named(name)).count += 1

    def lines(self, *, infers: bool = False) -> list[str]:
        """Lines on parts that are not used, bits and bands that differ, and images nearly black.

        infers: give the flags of `infer` for the latter.
        """
        found, total, lines = self._found, self._total, []
        deepest = max((bits for bits, _ in self._kinds), default=8)
        listed = [
            f"{text.format(bits=deepest)} in {found[kind].count} (first: {found[kind].first})"
            for kind, text in _TEXTS.items()
            if kind in found
        ]
        if listed:
            how = "" if found.keys().isdisjoint((PAGES, BANDS, GRAY, BITS)) else f"; {WITH_BANDS}"
            lines.append(f"of {total} images, what is not used: {'; '.join(listed)}{how}")
        if len(self._kinds) > 1 and (BITS in found or BANDS in found):
            kinds = [
                f"{bits} bits in up to {bands} bands in {some.count} (first: {some.first})"
                for (bits, bands), some in sorted(self._kinds.items())
            ]
            lines.append(f"of {total} images, bits and bands differ: {'; '.join(kinds)}")
        if dark := found.get(DARK):
            how = f"; {STRETCHED} stretches gray ones" if infers else ""
            lines.append(
                f"{dark.count} of {total} images have 16 bits and use less than a quarter of their "
                f"range, so that they are nearly black in the 8 bits that are read (first: "
                f"{dark.first}); data.bands.scale, with data.bands.names, stretches them "
                f"(docs/bands.md#gray-images-of-16-bits){how}"
            )
        return lines


def unused_of(dataset: Dataset) -> list[str]:
    """Return such lines about some images of a dataset whose images are files or in records."""
    path_of, bands = getattr(dataset, "image_path", None), getattr(dataset, "bands", Bands())
    if path_of is None or bands.names:
        return []
    total, records = len(dataset.images), getattr(dataset, "records", None)
    if records is not None:
        return _unused_of_records(dataset, records)
    return unused_of_files([path_of(n) for n in range(0, total, -(-total // SAMPLE) or 1)])


def _unused_of_records(dataset: Dataset, records: Any) -> list[str]:
    """`unused_of` where each image is read whole, of fewer of them."""
    unused, total = Unused(), len(dataset.images)
    for n in range(0, total, -(-total // SAMPLE_DEEP) or 1):
        entry = dataset.images[n]
        try:
            content = records.read(n, entry.id)
            is_deep = read_header(io.BytesIO(content)).bits > 8
            image = decode_bytes(content, entry.file_name) if is_deep else None
        except (OSError, ValueError):
            continue
        unused.add(entry.file_name, io.BytesIO(content), image)
    return unused.lines()


def unused_of_files(paths: Sequence[str]) -> list[str]:
    """Return such lines about files; those that cannot be read do not count."""
    unused, decoded = Unused(), 0
    for path in paths:
        image = None
        try:
            with open_regular(path) as file:
                is_deep = read_header(file).bits > 8
            if is_deep and decoded < SAMPLE_DEEP:
                decoded += 1
                image = decode_image(path)
        except (OSError, ValueError):
            continue
        unused.add(path, path, image)
    return unused.lines()
