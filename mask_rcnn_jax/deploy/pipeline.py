"""Steps of a pipeline in threads: reading ahead, a pool in order, a line to a slow consumer.

Whatever fails in a thread is raised again in the thread that waits for its result. Every step is
closed with its generator or its `with` block, which leaves no thread behind.
"""

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_END = object()


def prefetch(items: Iterable, ahead: int) -> Iterator:
    """The same items, made in a thread of their own, which stays up to `ahead` items ahead.

    The thread ends with the items or when the generator is closed; then it also closes `items`, if
    that is a generator.
    """
    ready: queue.Queue = queue.Queue(ahead)
    stop = threading.Event()

    def work() -> None:
        iterator, last = iter(items), (_END, None)
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
        while thread.is_alive():  # it may wait for a place in the queue
            _drop(ready)
            thread.join(0.05)


def _drop(line: queue.Queue) -> None:
    try:
        while True:
            line.get_nowait()
    except queue.Empty:
        pass


def map_in_order(
    pool: ThreadPoolExecutor, function: Callable[[Any], Any], items: Iterable, ahead: int
) -> Iterator:
    """`map(function, items)` by a pool, up to `ahead` items under way, results in order."""
    under_way: deque = deque()
    try:
        for item in items:
            if len(under_way) >= ahead:
                yield under_way.popleft().result()
            under_way.append(pool.submit(function, item))
        while under_way:
            yield under_way.popleft().result()
    finally:
        for future in under_way:
            future.cancel()
        if hasattr(items, "close"):
            items.close()


def take_turns(sources: Iterable[Iterator], at_once: int) -> Iterator:
    """One item of each of up to `at_once` sources, then the next of each; where one has ended
    another begins."""
    sources = iter(sources)
    running = deque(itertools.islice(sources, at_once))
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


class Line:
    """A thread that works off items one by one, at most `size` of them waiting.

    `put` blocks while the line is full, and raises what the thread raised. `end` says that there is
    no more, `close` waits until all is done and raises too. `finish` is called in the thread at the
    end, also after an error; items that come after an error are dropped.
    """

    def __init__(self, work: Callable[[Any], None], finish: Callable[[], None], size: int):
        self._queue: queue.Queue = queue.Queue(size)
        self._error: BaseException | None = None
        self._work, self._finish = work, finish
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="line", daemon=True)
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
