"""Mutated TIFFs and arrays of NumPy, as `data.bands` reads them: bands, pages and windows."""

import io
import struct
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from mask_rcnn_jax.data.bands import Bands
from mask_rcnn_jax.data.raster import open_raster
from tests.fuzz import hostile

FOUR = Bands(names=tuple("abcd"), pages="max", scale="image", nan="zero")


@cache
def files() -> list[bytes]:
    import tifffile

    pixels = np.random.default_rng(0).integers(0, 4096, (64, 48, 4)).astype(np.uint16)
    kept = dict(photometric="minisblack", planarconfig="contig", metadata=None)
    written = [
        (pixels, dict(kept)),
        (pixels, dict(kept, tile=(32, 16), compression="zlib", predictor=True)),
        (pixels, dict(kept, rowsperstrip=7, compression="lzw")),
        (pixels.astype("f4"), dict(kept, tile=(16, 16), compression="zstd", bigtiff=True)),
        (np.moveaxis(pixels, 2, 0), dict(photometric="minisblack", planarconfig="separate")),
        (np.stack([pixels] * 3), dict(kept, byteorder=">")),
        (np.stack([pixels] * 3), dict(photometric="minisblack", planarconfig="contig")),
    ]
    found = []
    for array, options in written:
        file = io.BytesIO()
        tifffile.imwrite(file, array, **options)
        found.append(file.getvalue())
    for save in (np.save, np.savez, np.savez_compressed):
        file = io.BytesIO()
        save(file, pixels)
        found.append(file.getvalue())
    return found


raster_cases = st.one_of(
    st.tuples(hostile.places, st.just("bytes"), hostile.byte_edits),
    st.tuples(
        hostile.places,
        st.just("tags"),
        st.lists(st.tuples(hostile.places, hostile.numbers, st.booleans()), min_size=1, max_size=3),
    ),
)


def with_tags(data: bytes, edits: list) -> bytes:
    """Other values, or counts of values, in the first directory of a classic TIFF; or another shape
    in the head of an array."""
    found = bytearray(data)
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(data[:4], "")
    if not order:
        at = data.find(b"(64, 48, 4)")
        shape = ", ".join(str(value) for _, value, _ in edits)
        text = f"({shape},), }}".encode()
        if at >= 0 and len(text) < 60:
            found[at : at + len(text)] = text
        return bytes(found)
    (start,) = struct.unpack_from(order + "I", data, 4)
    (count,) = struct.unpack_from(order + "H", data, start)
    for place, value, is_count in edits:
        at = start + 2 + 12 * (place % count) + (4 if is_count else 8)
        struct.pack_into(order + "I", found, at, value % 2**32)
    return bytes(found)


def write_raster(folder: Path, case: Any) -> Path:
    number, kind, edits = case
    data = files()[number % len(files())]
    path = folder / "case.tif"
    path.write_bytes((with_tags if kind == "tags" else hostile.edit_bytes)(data, edits))
    return path


def read_raster(path: Path) -> None:
    with open_raster(path) as raster:
        (height, width), pages = raster.size, raster.pages
        part = raster.read(pages - 1, (0, 0, min(width, 9), min(height, 11)))
        assert part.shape == (min(height, 11), min(width, 9), raster.bands)
    for source in (path, path.read_bytes()):
        pixels = FOUR.read(source, name=str(path))
        assert pixels.shape == (height, width, 4)
        scaled = FOUR.scaled(pixels)
        assert scaled.dtype == np.float32 and scaled.min() >= 0 and scaled.max() <= 255
