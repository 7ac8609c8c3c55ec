"""What the processes of one run tell each other; with one process, nothing.

All functions that gather must be called by every process, in the same order.
"""

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def local_rows(tree) -> Any:
    """The rows of batched arrays that lie on this process' devices, in order, as numpy arrays."""

    def rows(array: jax.Array | np.ndarray) -> np.ndarray:
        if isinstance(array, np.ndarray):  # of a model that is no JAX program
            return array
        shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        return np.concatenate([np.asarray(shard.data) for shard in shards])

    return jax.tree.map(rows, tree)


def all_rows(tree) -> Any:
    """The rows of all processes, as numpy arrays: of arrays over all devices, or of each process'
    own numpy arrays, which must have the same shapes everywhere."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def gather(value) -> list:
    """What every process has, in the order of the processes; anything that json can write."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([len(data)])).reshape(-1)
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(data)] = data
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]


def from_first(value) -> Any:
    """What the first process has, of what json can write; the others' values do not matter."""
    return value if jax.process_count() == 1 else gather(value)[0]


@contextmanager
def stop_on_sigterm() -> Iterator[Callable[[int], bool]]:
    """A function of the step: whether to save and leave after it, since a process got a SIGTERM.

    Every process asks once a step. With several processes JAX catches the signal, from
    `jax.distributed.initialize` on, and they agree on a step that none of them has done yet.
    """
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    signals: list[int] = []
    # Python lets the main thread alone handle signals.
    handles = threading.current_thread() is threading.main_thread()
    if handles:
        before = signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    try:
        yield lambda step: bool(signals)
    finally:
        if handles:
            signal.signal(signal.SIGTERM, before)
