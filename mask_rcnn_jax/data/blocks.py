"""Arrays that a worker process lends to the process that reads, in shared memory used again.

The system takes longer to provide new shared memory than a worker to write a batch. So a worker
keeps its blocks, and writes into one again once the reader has no view left. A block's first byte
says whether it is lent. Its file has a name only until the reader maps it.
"""

import math
import mmap
import secrets
import threading
import weakref
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

_FREE, _LENT = 0, 1
_START = 64  # of the array in its block; bytes
# No worker ends after a file is made and before the resource tracker knows of it.
making_file = threading.Lock()


@dataclass
class _Block:
    """A block that this process, a worker, has made."""

    name: str
    capacity: int  # bytes, a power of two
    memory: mmap.mmap
    loans: int = 0  # so far; arrays of earlier ones may outlive the reader's
    sent: bool = False  # the array in it went to the reader, which gives the block back


@dataclass(frozen=True)
class Sent:
    """What a `LentArray` becomes on its way; opened by `receive`, since not all arrive."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype


class LentArray(np.ndarray):
    """An array in a block. It is pickled as `Sent`; views are pickled as copies."""

    block: _Block | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.block is None:
            return np.asarray(self).__reduce_ex__(protocol)
        self.block.sent = True
        return Sent, (self.block.name, self.shape, self.dtype)


_own: list[_Block] = []  # of this process, a worker
_received: dict[str, mmap.mmap] = {}  # by the reader, by name
_lock = threading.Lock()


def lent_zeros(prefix: str, shape: tuple[int, ...], dtype: Any) -> LentArray:
    """Return an array with zeros; its block is free again once it is dropped here or, if it is
    sent, by the reader.

    prefix: begins the blocks' names, see `forget`.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    block = _take(prefix, size)
    array = np.frombuffer(block.memory, np.uint8, size, _START).view(dtype).reshape(shape)
    lent = array.view(LentArray)
    lent.block = block
    weakref.finalize(lent, _dropped, block, block.loans).atexit = False
    return lent


def forget(prefix: str) -> None:
    """Let go of blocks after the workers' end; arrays in them stay as they are."""
    with _lock:
        for name in [name for name in _received if name.startswith(prefix)]:
            del _received[name]
        _own[:] = [block for block in _own if not block.name.startswith(prefix)]


def _take(prefix: str, size: int) -> _Block:
    """Lend a block whose first bytes, so many, are zero."""
    capacity = 1 << max(0, size - 1).bit_length()  # what is not written takes no memory
    with _lock:
        for block in _own:
            fits = block.capacity == capacity and block.name.startswith(prefix)
            if fits and block.memory[0] == _FREE:
                np.frombuffer(block.memory, np.uint8, size, _START)[:] = 0
                break
        else:
            with making_file:
                file = SharedMemory(prefix + secrets.token_hex(5), True, _START + capacity)
            block = _Block(file.name, capacity, _map(file))
            _own.append(block)
        block.loans, block.sent, block.memory[0] = block.loans + 1, False, _LENT
        return block


def _dropped(block: _Block, loan: int) -> None:
    if block.loans == loan and not block.sent:
        block.memory[0] = _FREE


def receive(sent: Sent) -> np.ndarray:
    """Return the array that a worker has sent; its block is free once no view is left."""
    with _lock:
        if sent.name not in _received:
            file = SharedMemory(sent.name)
            file.unlink()
            _received[sent.name] = _map(file)
        memory = _received[sent.name]
    whole = np.frombuffer(memory, np.uint8)  # all views keep this array
    weakref.finalize(whole, memory.__setitem__, 0, _FREE).atexit = False
    size = math.prod(sent.shape) * sent.dtype.itemsize
    return whole[_START : _START + size].view(sent.dtype).reshape(sent.shape)


def _map(file: SharedMemory) -> mmap.mmap:
    """Map a file, which is closed, for as long as anything has the memory."""
    memory = mmap.mmap(file._fd, file.size)  # type: ignore[attr-defined]
    file.close()
    return memory
