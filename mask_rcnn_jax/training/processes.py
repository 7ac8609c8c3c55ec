"""What the processes of one run tell each other; with one process, nothing.

All functions that gather must be called by every process, in the same order.
"""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from mask_rcnn_jax.terminal import interrupts

STOPPED_EARLY = os.EX_TEMPFAIL  # 75, exit code of a run that is to be started again
LOOK_S = 0.5  # between two looks for a SIGTERM to another process, before the first step is done
_NOTICE = "RECEIVED_PREEMPTION_NOTICE"  # JAX's name
_NOTHING_TO_SAVE = (
    f"stopped by SIGTERM, nothing to save (exit code {STOPPED_EARLY}: start it again to go on)"
)


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

    Where the main thread compiles or computes and cannot be told, it and Ctrl-C still end the
    process within seconds. With several processes `StopRequests` answers a SIGTERM.
    """
    try:
        with interrupts.ending_soon():
            if jax.process_count() > 1:
                yield
                return
            with interrupts.raising(signal.SIGTERM, lambda: _Ended(STOPPED_EARLY), _end_at_once):
                yield
    except _Ended:
        logging.info("%s", _NOTHING_TO_SAVE)
        interrupts.leave_with(STOPPED_EARLY)
        raise


def _end_at_once() -> None:
    interrupts.end_with(STOPPED_EARLY, _NOTHING_TO_SAVE, is_error=False)


class StopRequests:
    """Whether to save and leave, since a process got a SIGTERM. Every process asks equally often.

    Until `begin` there is nothing to save, and a SIGTERM ends a process as without this.
    """

    def __init__(self) -> None:
        self._signals: list[int] = []
        self._before: Any = None
        self._questions = count(1)  # that all processes agree on, and none of them has asked yet
        self._has_begun = threading.Event()
        if jax.process_count() > 1:
            name, watch = "preemption", partial(_end_on_notice, self._has_begun)
            threading.Thread(target=watch, name=name, daemon=True).start()

    def __call__(self) -> bool:
        if jax.process_count() == 1:
            return bool(self._signals)
        return multihost_utils.reached_preemption_sync_point(next(self._questions))

    def begin(self) -> None:
        """From now on there is something to save: the first step is done."""
        self._has_begun.set()
        interrupts.end_later()
        # JAX catches the signal in several processes, and Python lets the main thread alone do so.
        is_main = threading.current_thread() is threading.main_thread()
        if jax.process_count() == 1 and is_main and self._before is None:
            self._before = signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: object) -> None:
        self._signals.append(number)

    def close(self) -> None:
        self._has_begun.set()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)


def _end_on_notice(has_begun: threading.Event) -> None:
    """End this process once any of several got a SIGTERM, unless there is something to save.

    JAX, which catches the signal from `jax.distributed.initialize` on, tells all of them, but has
    no public name for what it tells.
    """
    from jax._src.distributed import global_state

    client: Any = global_state.client
    while not has_begun.wait(LOOK_S):
        try:
            client.key_value_try_get(_NOTICE)
        except jax.errors.JaxRuntimeError:  # there is none
            continue
        if jax.process_index() == 0:
            time.sleep(2 * LOOK_S)  # the others ask this one
        if not has_begun.is_set():
            interrupts.end_cleaned(_end_at_once)
