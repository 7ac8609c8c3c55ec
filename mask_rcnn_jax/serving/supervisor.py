"""Start workers, replace those that end, and end them all.

The supervisor holds the address and no model. Workers accept from the socket that they inherit, so
a connection that none has accepted yet outlives each of them.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from absl import logging

from mask_rcnn_jax.memory import available_host_bytes
from mask_rcnn_jax.serving.server import STOP_SECONDS, Server
from mask_rcnn_jax.serving.workers import COUNTS, GIVEN, Share, Worker, open_counts

RESTART_SECONDS = 10.0  # from one start of a worker to the next, at least
_LOOK_SECONDS = 0.05


def supervise(server: Server, shares: Sequence[Share]) -> None:
    """Serve by a worker for each share until SIGTERM or Ctrl-C; a second one ends all at once.

    Each runs the command of this process. The first is ready before the others start, which find
    in the cache what it compiled. The server listens once all are ready.

    Raises SystemExit, with its code, if a worker fails before that; it has said why.
    """
    with _signals() as told, tempfile.TemporaryFile() as file, _Workers(server, shares, file) as w:
        for count in (1, len(shares)):
            w.start(count)
            while not told and not w.are_ready():
                w.check()
                time.sleep(_LOOK_SECONDS)
            if count == 1 and not told:
                w.check_memory()
        if not told:
            memory = ", ".join(map(str, w.megabytes()))
            logging.info("%d workers are ready, with %s MB of memory", len(shares), memory)
            server.server_activate()
            print(f"ready: {server.url}", flush=True)
        while not told:
            w.replace()
            time.sleep(_LOOK_SECONDS)
        logging.info("stopping")
        server.server_close()  # or clients would wait for what no one accepts any more
        w.stop(told)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the signals that end the server instead of raising anything."""
    told: list[int] = []
    numbers = signal.SIGINT, signal.SIGTERM
    before = {n: signal.signal(n, lambda number, _: told.append(number)) for n in numbers}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Process(NamedTuple):
    process: subprocess.Popen
    since: float  # time.monotonic()


class _Workers:
    """The processes; none is left after a `with`."""

    def __init__(self, server: Server, shares: Sequence[Share], file: Any):
        file.truncate(len(shares) * COUNTS.itemsize)
        self._server, self._shares, self._file = server, shares, file
        self._counts = open_counts(file.fileno(), len(shares))
        self._running: list[_Process] = []

    def __enter__(self) -> "_Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for process, _since in self._running:
            process.kill()
            process.wait()

    def start(self, count: int) -> None:
        """Start workers until there are so many."""
        for index in range(len(self._running), count):
            self._running.append(self._started(index))

    def are_ready(self) -> bool:
        return bool(self._counts["ready"][: len(self._running)].all())

    def check(self) -> None:
        """Raise SystemExit if one has ended, which none should before all are ready."""
        for index, (process, _) in enumerate(self._running):
            if (code := process.poll()) is not None:
                if code <= 0:
                    logging.error("worker %d %s before all were ready", index, _end(code))
                raise SystemExit(max(code, 1))

    def check_memory(self) -> None:
        """Warn if there may not be the memory for the others that the first one takes."""
        others, size, free = len(self._shares) - 1, self.megabytes()[0], available_host_bytes()
        if free is not None and others * size > (free := free // 10**6):
            text = "each worker takes about %d MB, and %d MB are free for %d more: too little"
            logging.warning(text, size, free, others)

    def megabytes(self) -> list[int]:
        """Return the memory of each at its peak."""
        return self._counts["megabytes"].tolist()

    def replace(self) -> None:
        """Start another worker for one that has ended, unless that was started just now."""
        for index, (process, since) in enumerate(self._running):
            if (code := process.poll()) is None:
                continue
            row = self._counts[index]
            if row["alive"]:
                logging.warning("worker %d %s, and is replaced", index, _end(code))
                row["alive"] = row["ready"] = row["waiting"] = row["connections"] = 0
            if time.monotonic() - since < RESTART_SECONDS:
                continue
            try:
                self._running[index] = self._started(index)
            except OSError as error:  # there may be memory, or a place for a process, later
                logging.error("worker %d cannot be started: %s", index, error)
                self._counts[index]["alive"] = 0
                self._running[index] = _Process(process, time.monotonic())

    def stop(self, told: list[int]) -> None:
        """Let them finish what is in flight, unless they are told again."""
        latest = time.monotonic() + STOP_SECONDS + 2
        for process, _ in self._running:
            process.terminate()
        while any(process.poll() is None for process, _ in self._running):
            if len(told) > 1 or time.monotonic() > latest:
                return
            time.sleep(_LOOK_SECONDS)

    def _started(self, index: int) -> _Process:
        """Run the command of this process as a worker."""
        share, self._counts[index]["alive"] = self._shares[index], 1
        files = self._server.fileno(), self._file.fileno()
        given = Worker(index, len(self._shares), os.getpid(), *files)
        environment = os.environ | share.environment | {GIVEN: " ".join(map(str, given))}
        before = os.sched_getaffinity(0) if share.cpus else ()
        if share.cpus:  # a process has those of the thread that starts it
            os.sched_setaffinity(0, share.cpus)
        try:
            process = subprocess.Popen(
                [sys.executable, *sys.orig_argv[1:]],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=files,
                process_group=0,  # a Ctrl-C at a terminal is for this process, which tells them
            )
        finally:
            if share.cpus:
                os.sched_setaffinity(0, before)
        return _Process(process, time.monotonic())


def _end(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"
