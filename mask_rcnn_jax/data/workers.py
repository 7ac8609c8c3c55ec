"""Batches made in threads or in worker processes, of which nothing stays behind.

Worker processes hand their batches over in shared memory, whose files outlive a process that is
killed. So a worker ends when its owner does, the process that reads, and then multiprocessing's
resource tracker removes the files. Should the tracker be killed too, the next process that starts
workers or trains removes them: they bear the owner's name, and the owner's lock is free.
"""

import fcntl
import functools
import itertools
import multiprocessing
import os
import re
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing import resource_tracker, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from absl import flags, logging

from mask_rcnn_jax import opencv as cv2
from mask_rcnn_jax.data import blocks

Zeros = Callable[..., np.ndarray]  # of (shape, dtype)
THREADS_WITHOUT_WORKERS = 4
# Where Linux keeps shared memory and semaphores; absent elsewhere.
SHARED = Path("/dev/shm")
_PREFIX = "mrcnn-"  # short, since macOS allows names of 30 characters
_LOCK = ".lock"
# Batches n in the queue of a worker. grain takes n more out of it early: up to 2 n + 4 are in
# shared memory, with the one being made and the one read last. They are made one at a time: one
# made ahead of the queue would be lost, with its shared memory, when the worker stops.
_BATCHES_AHEAD = 4
_ENDED = re.compile("exit code (-?[0-9]+)")  # in what grain says of a worker
_STARTED_AGAIN = 78  # exit code of a worker that began to run the main script
_numbers = itertools.count()


def check_main() -> None:
    """End a worker that runs the main script again, as it does without a main guard: `Reader` says
    so once, where it started the worker."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as Python asks itself
        os._exit(_STARTED_AGAIN)


def shared_prefix(num_workers: int) -> str:
    """Begin the names that one loader's workers give to shared memory; "" for threads."""
    if num_workers:
        check_main()
    return f"{_owner(os.getpid())}-{next(_numbers):x}-" if num_workers else ""


def zeros(prefix: str) -> Zeros:
    """The function that makes a batch's large arrays: those from worker processes lie in shared
    memory, which is handed over as it is. prefix: a `shared_prefix`."""
    return partial(blocks.lent_zeros, prefix) if prefix else np.zeros


class Reader:
    """The elements of a dataset in their order."""

    def __init__(self, batches: grain.MapDataset, num_workers: int, prefix: str, size: int = 0):
        """
        num_workers: worker processes, which begin with the first element and make every n-th; 0
            reads in threads of this process.
        prefix: a `shared_prefix`.
        size: bytes of the arrays of an element, at most, that lie in shared memory.
        """
        self._prefix, self._count = prefix, 0
        cv2.setNumThreads(1)  # batches are made in parallel already
        if num_workers == 0:
            threads = min(THREADS_WITHOUT_WORKERS, os.cpu_count() or 1)
            self._parts = [iter(batches.to_iter_dataset(grain.ReadOptions(threads, 2 * threads)))]
            return
        if not flags.FLAGS.is_parsed():  # grain reads a flag when it starts workers
            flags.FLAGS.mark_as_parsed()
        ahead = _batches_ahead(num_workers, size)
        # Not grain's own turns of several workers, which it ends one after the other.
        parts = (batches[index::num_workers] for index in range(num_workers))
        self._parts = [_one_worker(part, ahead) for part in parts]

    def __next__(self) -> Any:
        """The next element; ValueError if its dataset cannot be sent to worker processes or
        the main script has no main guard, OSError if shared memory is full, RuntimeError if a
        worker was killed."""
        if self._count == 0 and self._prefix:
            self._start()
        part = self._parts[self._count % len(self._parts)]
        self._count += 1
        try:
            element = next(part)
        except Exception as error:  # pickling runs the code of whatever the dataset holds
            if isinstance(error, RuntimeError) and (ended := _ENDED.search(str(error))):
                _raise_ended(int(ended[1]), error)
            if not any("cannot be pickled" in note for note in getattr(error, "__notes__", ())):
                raise
            where = f"for the worker processes of data.num_workers ({error})"
            advice = "data.num_workers=0 needs no pickling"
            raise ValueError(
                f"the dataset or augment cannot be pickled {where}; {advice}"
            ) from error
        return jax.tree.map(
            lambda leaf: blocks.receive(leaf) if isinstance(leaf, blocks.Sent) else leaf, element
        )

    def _start(self) -> None:
        """Begin to start the workers, in threads, which keep these signals blocked as the workers
        do: one to the whole group, from a terminal or a batch system, must not end them while
        their owner needs them, for instance to save."""
        numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        try:
            for part in self._parts:
                part.start_prefetch()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        """End the threads or workers; remove what they made and no one took."""
        if self._prefix:
            for worker, process in _workers_of(self._parts):
                _kill(worker, process)
        closing = threading.Thread(target=lambda: [part.close() for part in self._parts])
        closing.start()
        while closing.is_alive():
            closing.join(0.1)
            for _, process in _workers_of(self._parts):  # started meanwhile
                process.kill()
        if self._prefix:
            blocks.forget(self._prefix)
            _remove_files(f"{self._prefix}*")

    def abandon(self) -> None:
        """Close, in a process that then ends at once, of which its tracker would complain."""
        self.close()
        if self._prefix:
            owner = _owner(os.getpid())
            for path in SHARED.glob(f"sem.{owner}*"):
                name = path.name.removeprefix("sem.")
                resource_tracker.unregister(f"/{name}", "semaphore")
            _remove_own(owner)


def _batches_ahead(num_workers: int, size: int) -> int:
    """How many batches of `size` bytes there is room for in the queue of each worker."""
    free = shutil.disk_usage(SHARED).free if SHARED.is_dir() else sys.maxsize
    fit = free // max(1, num_workers * size) // 2 - 2  # up to 2 n + 4 are there, see above
    if fit >= _BATCHES_AHEAD:
        return _BATCHES_AHEAD
    needed = num_workers * size * (2 * _BATCHES_AHEAD + 4)
    logging.log_first_n(
        logging.WARNING,
        "%d worker processes may take %s of %s, which has %s free; they go fewer batches ahead, %d "
        "instead of %d (%s)",
        1,
        *(num_workers, _megabytes(needed), SHARED, _megabytes(free)),
        *(max(1, fit), _BATCHES_AHEAD, _MORE_ROOM),
    )
    return max(1, fit)


_MORE_ROOM = "docker run --shm-size=.. gives more, fewer data.num_workers take less"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def _raise_ended(code: int, error: Exception) -> None:
    """Raise what is behind the known ways in which a worker ends, in words."""
    if code == _STARTED_AGAIN:
        script = getattr(sys.modules["__main__"], "__file__", "the script")
        what = f'{script} lacks `if __name__ == "__main__":` before what it does'
        raise ValueError(f"{what}, so that worker processes would do it again") from error
    if code == -signal.SIGBUS:
        free = _megabytes(shutil.disk_usage(SHARED).free)
        what = f"{SHARED}, the shared memory, is full ({free} free)"
        raise OSError(f"a worker process was ended since {what}; {_MORE_ROOM}") from error
    if code == -signal.SIGKILL:
        what = "as the system does when memory runs out; fewer data.num_workers take less"
        raise RuntimeError(f"a worker process was killed, {what}") from error


def _one_worker(batches: grain.MapDataset, ahead: int) -> grain.DatasetIterator:
    """Read in one worker process, and in a thread that starts it and takes one element early."""
    dataset = grain.experimental.WithOptionsIterDataset(
        batches.to_iter_dataset(grain.ReadOptions(0, 0)),
        # Small arrays are sent as they are; shared memory would take a file for each.
        grain.experimental.DatasetOptions(min_shm_size=sys.maxsize),
    )
    options = grain.MultiprocessingOptions(1, per_worker_buffer_size=ahead)
    worker = dataset.mp_prefetch(options, worker_init_fn=_begin_worker)
    return iter(grain.experimental.ThreadPrefetchIterDataset(worker, prefetch_buffer_size=1))


def _workers_of(part: Any) -> Iterator[tuple[Any, BaseProcess]]:
    """Find grain's iterators with a process at work, and these; it has no public names for them."""
    process = getattr(part, "_prefetch_process", None)
    if process is not None and process.pid is not None:
        yield part, process
    elif isinstance(part, list | grain.DatasetIterator):
        for inner in part if isinstance(part, list) else list(vars(part).values()):
            yield from _workers_of(inner)


def _kill(worker: Any, process: BaseProcess) -> None:
    """Kill a process of `_workers_of`. grain alone would have it make a batch or two, and wait 25
    seconds for one whose batches do not fit into its pipe."""
    # So grain neither starts another one nor waits for locks that this one may hold.
    worker._closed, worker._prefetch_process = True, None
    process.kill()
    with suppress(AttributeError):  # or the rest of half a batch would be waited for
        worker._buffer._writer.close()
    process.join()


@functools.cache
def _owner(pid: int) -> str:
    """The name of the shared files of this process, made and locked once; those of owners that are
    gone are removed. `pid` tells a forked process from the one that it comes from."""
    owner = _PREFIX + secrets.token_hex(4)
    # multiprocessing names its semaphores, some 25 for each worker, after this.
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config["semprefix"] = f"/{owner}"
    # The tracker survives SIGINT and SIGTERM; let it survive the end of a terminal as well.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if SHARED.is_dir():
        with suppress(OSError):  # without room for the lock there is none for a batch either
            _lock(owner)
    remove_leftovers()
    return owner


def remove_leftovers() -> None:
    """Remove the shared files of owners that are gone, also where no worker is going to start."""
    for lock in SHARED.glob(_PREFIX + 8 * "[0-9a-f]" + _LOCK):
        with suppress(OSError), open(lock, "rb", opener=_open_at_once) as file:
            # It fails if the owner lives or is another user's.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(lock.name.removesuffix(_LOCK))


def _open_at_once(path: str, flags: int) -> int:
    """Open what any user may have put there; a pipe without a writer is not waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


def _lock(owner: str) -> None:
    """Hold a lock until this process ends. A lock, unlike a process id, also tells processes of
    other containers that the owner lives."""
    descriptor = os.open(SHARED / owner, os.O_CREAT | os.O_EXCL | os.O_RDONLY, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # before the others see the name they look for
    os.rename(SHARED / owner, SHARED / f"{owner}{_LOCK}")
    util.Finalize(None, _remove_own, (owner,), exitpriority=-100)  # the workers have ended


def _remove_own(owner: str) -> None:
    """Remove this process's files at its end, among them batches never taken."""
    _remove_files(f"{owner}-*")
    _remove(owner)


def _remove_files(pattern: str) -> None:
    for path in SHARED.glob(pattern):
        # The resource tracker would complain of them, also of one that it does not know yet.
        resource_tracker.register(f"/{path.name}", "shared_memory")
        resource_tracker.unregister(f"/{path.name}", "shared_memory")
        with suppress(OSError):
            path.unlink()


def _remove(owner: str) -> None:
    """Remove every shared file of an owner that is gone, its lock last."""
    for pattern in (f"sem.{owner}*", f"{owner}-*", f"{owner}{_LOCK}"):
        for path in SHARED.glob(pattern):
            with suppress(OSError):
                path.unlink()


def _begin_worker(index: int, count: int) -> None:
    """Have this worker process end with its owner; called in it before it reads."""
    cv2.setNumThreads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent, pid = multiprocessing.parent_process(), os.getppid()
    # A process forked from the parent may hold its pipe open; the parent's id changes all the same.
    while parent is not None and parent.is_alive() and os.getppid() == pid:
        parent.join(1)
    with blocks.making_file:
        os._exit(1)
