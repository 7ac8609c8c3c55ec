"""What the processes of one run tell each other; with one process, nothing.

All functions that gather must be called by every process, in the same order.
"""

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from mask_rcnn_jax.terminal import interrupts

STOPPED_EARLY = os.EX_TEMPFAIL  # 75, exit code of a run that is to be started again


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


@cache
def count_sharing_cores() -> int:
    """The number of processes of this run, with this one, on the cores that this one may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = sorted(os.sched_getaffinity(0)) if has_affinity else []
    own = [socket.gethostname(), cores]
    return gather(own).count(own)


def from_first(value) -> Any:
    """What the first process has, of what json can write; the others' values do not matter."""
    return value if jax.process_count() == 1 else gather(value)[0]


def on_first(work: Callable[[], Any]) -> Any:
    """Return the JSON-serializable result of `work()` on the first process to all of them.

    One process decides about files that all of them see. Its ValueError or OSError is raised on
    every process.
    """
    value = error = None
    if jax.process_index() == 0:
        try:
            value = work()
        except (ValueError, OSError) as caught:
            error = caught
    value, text = from_first([value, error and str(error)])
    if error is not None:
        raise error
    if text is not None:
        raise ValueError(text)
    return value


def check_equal(values: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the first of `values` in which a process differs from the first."""
    first, *others = gather(dict(values))
    for index, other in enumerate(others, 1):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"the processes of a run must be started alike, but {name} is "
                    f"{first.get(name)!r} on process 0 and {other.get(name)!r} on process {index}"
                )


class Stopped(Exception):
    """Work was left because a process got a SIGTERM."""


class _Ended(SystemExit):
    """A SIGTERM came while there was nothing to save."""


@contextmanager
def end_on_sigterm() -> Iterator[None]:
    """End this process with exit code 75 at a SIGTERM, while there is nothing to save.

    With several processes JAX catches the signal, and `stop_on_sigterm` answers it.
    """
    if jax.process_count() > 1:
        yield
        return
    try:
        with interrupts.raising(signal.SIGTERM, lambda: _Ended(STOPPED_EARLY)):
            yield
    except _Ended:
        text = "stopped by SIGTERM, nothing to save (exit code %d: start it again to go on)"
        logging.info(text, STOPPED_EARLY)
        interrupts.leave_with(STOPPED_EARLY)
        raise


@contextmanager
def stop_on_sigterm() -> Iterator[Callable[[], bool]]:
    """A function that says whether to save and leave, since a process got a SIGTERM.

    Every process asks equally often. With several processes JAX catches the signal, from
    `jax.distributed.initialize` on, and they agree on a question that none of them has asked yet.
    """
    if jax.process_count() > 1:
        questions = count(1)
        yield lambda: multihost_utils.reached_preemption_sync_point(next(questions))
        return
    signals: list[int] = []
    # Python lets the main thread alone handle signals.
    handles = threading.current_thread() is threading.main_thread()
    if handles:
        before = signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    try:
        yield lambda: bool(signals)
    finally:
        if handles:
            signal.signal(signal.SIGTERM, before)
