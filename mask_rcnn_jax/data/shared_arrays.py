"""Named arrays in one block of memory, which worker processes on Linux map instead of copying.

There the block is a file without a name. Workers open it through /proc while its maker lives;
nothing of it stays behind, however they end. Elsewhere they get a copy.
"""

import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

_ALIGNMENT = 64  # bytes


class _Place(NamedTuple):
    """Where an array lies in the block."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    def view(self, memory: mmap.mmap) -> np.ndarray:
        count = int(np.prod(self.shape, dtype=np.int64))
        flat = np.frombuffer(memory, self.dtype, count, self.start)
        return flat.reshape(self.shape)


class SharedArrays:
    """Read-only arrays by name. A pickle holds a copy, on Linux not one of `by_reference()`."""

    def __init__(self, blocks: Mapping[str, Sequence[np.ndarray]]):
        """Store each array, given as blocks to concatenate, at least one."""
        places, size = {}, 1
        for name, parts in blocks.items():
            size = -(-size // _ALIGNMENT) * _ALIGNMENT
            shape = sum(map(len, parts)), *parts[0].shape[1:]
            places[name] = _Place(parts[0].dtype.str, shape, size)
            size += sum(part.nbytes for part in parts)
        self._descriptor = -1
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("mrcnn-annotations")
            os.ftruncate(self._descriptor, size)
        memory = mmap.mmap(self._descriptor, size)
        if self._descriptor >= 0:
            weakref.finalize(memory, os.close, self._descriptor)  # the views keep the memory
        for name, place in places.items():
            np.concatenate(blocks[name], out=place.view(memory))
        self._map(memory, places)

    def _map(self, memory: mmap.mmap, places: dict[str, _Place]) -> None:
        self._places, self._by_reference = places, False
        self._arrays = {name: place.view(memory) for name, place in places.items()}
        for array in self._arrays.values():
            array.flags.writeable = False

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def __reduce__(self) -> tuple[Any, ...]:
        if self._by_reference and self._descriptor >= 0:
            path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
            return _open, (path, self._places)
        return SharedArrays, ({name: [array] for name, array in self._arrays.items()},)

    def by_reference(self) -> "SharedArrays":
        """The same arrays, to be pickled for processes that end before this one."""
        arrays = SharedArrays.__new__(SharedArrays)
        arrays.__dict__.update(self.__dict__, _by_reference=True)
        return arrays


def _open(path: str, places: dict[str, _Place]) -> SharedArrays:
    arrays = SharedArrays.__new__(SharedArrays)
    arrays._descriptor = -1
    with open(path, "rb") as file:
        arrays._map(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), places)
    return arrays
