"""Threaded pipeline steps: prefetch, ordered map, round robin and background writer.

An exception in a thread is re-raised in the thread that waits for the result. Closing the generator
or leaving its `with` block closes a step and ends its threads.
"""

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_END = object()


def prefetch(items: Iterable, ahead: int) -> Generator:
    """Yield `items`, produced by a background thread up to `ahead` items in advance.

    The thread ends with the items or when the generator is closed; it then closes `items`, too, if
    that is a generator.
    """
    ready: queue.Queue = queue.Queue(ahead)
    stop = threading.Event()

    def work() -> None:
        iterator = iter(items)
        last: tuple[Any, BaseException | None] = (_END, None)
        try:
            while not stop.is_set() and (item := next(iterator, _END)) is not _END:
                ready.put((item, None))
        except BaseException as error:
            last = (_END, error)
        finally:
            if hasattr(iterator, "close"):
                iterator.close()
            ready.put(last)

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        stop.set()
        while thread.is_alive():  # it may be blocked on a full queue
            _drop(ready)
            thread.join(0.05)


def _drop(items: queue.Queue) -> None:
    try:
        while True:
            items.get_nowait()
    except queue.Empty:
        pass


def map_in_order(
    pool: ThreadPoolExecutor, function: Callable[[Any], Any], items: Iterable, ahead: int
) -> Generator:
    """Apply `function` in a pool to up to `ahead` items at a time; yield results in order."""
    in_flight: deque = deque()
    try:
        for item in items:
            if len(in_flight) >= ahead:
                yield in_flight.popleft().result()
            in_flight.append(pool.submit(function, item))
        while in_flight:
            yield in_flight.popleft().result()
    finally:
        for future in in_flight:
            future.cancel()
        if hasattr(items, "close"):
            items.close()


def round_robin(sources: Iterable[Generator], max_open: int) -> Generator:
    """Yield one item at a time from up to `max_open` sources in turn, replacing exhausted ones."""
    sources = iter(sources)
    running = deque(itertools.islice(sources, max_open))
    try:
        while running:
            item = next(running[0], _END)
            if item is not _END:
                running.rotate(-1)
                yield item
                continue
            running.popleft()
            running.extendleft(itertools.islice(sources, 1))
    finally:
        for source in running:
            source.close()


class BackgroundWriter:
    """Thread that calls `work` on items in order, queueing at most `size` of them.

    `put` blocks while the queue is full; `end` marks the end of the input; `close` waits for
    completion. `put` and `close` raise the thread's first exception, after which further items are
    dropped. The thread calls `finish` last, even after an error.
    """

    def __init__(self, work: Callable[[Any], None], finish: Callable[[], None], size: int):
        self._queue: queue.Queue = queue.Queue(size)
        self._error: BaseException | None = None
        self._work, self._finish = work, finish
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="background-writer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not _END:
                if self._error is None:
                    self._try(self._work, item)
        finally:
            self._try(self._finish)

    def _try(self, function: Callable, *arguments) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            self._error = self._error or error

    def put(self, item: Any) -> None:
        self._raise()
        self._queue.put(item)

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._queue.put(_END)

    def close(self) -> None:
        self.end()
        self._thread.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
