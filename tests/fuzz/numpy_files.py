"""Mutated `.npy` and `.npz`, as `data.bands` reads them."""

import io
import struct
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from mask_rcnn_jax.images.bands import Bands
from tests.fuzz import hostile

BANDS = Bands(names=("a", "b", "c", "d"), pages="max", scale="image", nan="zero")
HEAD = b"(64, 48, 4)"
TYPES = [b"'<u2'", b"'<f4'", b"'|b1'", b"'<c8'", b"'|O8'", b"'<U9'", b"'>f8'", b"'<i8'"]


@cache
def arrays() -> list[bytes]:
    pixels = np.random.default_rng(0).integers(0, 4096, (64, 48, 4)).astype(np.uint16)
    found = []
    for save in (np.save, np.savez, np.savez_compressed):
        for array in (pixels, pixels.astype(np.float32)):
            file = io.BytesIO()
            save(file, array)
            found.append(file.getvalue())
    return found


cases = st.one_of(
    st.tuples(hostile.places, st.just("bytes"), hostile.byte_edits),
    st.tuples(
        st.integers(0, 1),
        st.just("head"),
        st.tuples(st.lists(hostile.numbers, max_size=5), st.sampled_from([b"", *TYPES])),
    ),
    st.tuples(
        st.integers(0, 1),
        st.just("zip"),
        st.tuples(
            st.sampled_from([[64, 48, 4], [64, 48, 3], [1, 1, 4], [2**16, 2**16, 4], [2**40, 4]]),
            st.sampled_from([b"", *TYPES]),
            st.sampled_from([0, 0, 0, 1, 1 << 20, 400 << 20]),
        ),
    ),
)


def with_head(data: bytes, edit: tuple[list[int], bytes]) -> bytes:
    """With another shape and, unless empty, another type in the head of a `.npy`."""
    (length,) = struct.unpack_from("<H", data, 8)
    head, (shape, kind) = data[10 : 10 + length], edit
    head = head.replace(HEAD, f"({', '.join(map(str, shape))},)".encode())
    head = head.replace(b"'<u2'", kind or b"'<u2'").replace(b"'<f4'", kind or b"'<f4'")
    return data[:8] + struct.pack("<H", len(head)) + head + data[10 + length :]


def zipped(data: bytes, edit: tuple[list[int], bytes, int]) -> bytes:
    """A member with another head and, after the array, so many bytes that no shape needs."""
    *head, more = edit
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("arr_0.npy", "w") as member:
            member.write(with_head(data, tuple(head)))
            for start in range(0, more, 1 << 20):
                member.write(bytes(min(1 << 20, more - start)))
    return file.getvalue()


EDITS = {"bytes": hostile.edit_bytes, "head": with_head, "zip": zipped}


def write(folder: Path, case: Any) -> Path:
    number, kind, edits = case
    path = folder / "case.npy"
    path.write_bytes(EDITS[kind](arrays()[number % len(arrays())], edits))
    return path


def read(path: Path) -> None:
    for source in (path, path.read_bytes()):
        pixels = BANDS.read(source, name=str(path))
        scaled = BANDS.scaled(pixels)
        assert scaled.dtype == np.float32 and scaled.shape[2] == 4
        assert not scaled.size or (scaled.min() >= 0 and scaled.max() <= 255)


NUMPY = cases, write, read
