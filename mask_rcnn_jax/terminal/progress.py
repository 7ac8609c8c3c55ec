"""Log progress: items done, rate and time left."""

import time
from collections.abc import Callable

from mask_rcnn_jax.terminal import console


class Progress:
    """Logs items, rate and remaining time for a long task every few seconds.

    The remaining time is that of the items after the first ones, which wait for a compilation.

    total: may be an estimate, or None if unknown.
    every_seconds: between lines of a log; in a terminal one line changes more often.
    """

    def __init__(self, task: str, total: int | None, *, every_seconds: float = console.LOG_SECONDS):
        self._task, self._total, self._every = task, total, console.interval(every_seconds)
        self._done = 0
        self._start = self._logged = time.monotonic()
        self._first: tuple[int, float] | None = None  # items that came first, and when
        self._is_first = True  # line

    def advance(self, items: int) -> None:
        """Count items as done."""
        before, self._done = self._done, self._done + items
        now = time.monotonic()
        first, since = self._first = self._first or (items, now)
        finished = self._total is not None and before < self._total <= self._done
        if not finished and now - self._logged < self._every:
            return
        self._logged = now
        seconds = max(now - self._start, 1e-9)
        rate = self._done / seconds
        done, left = f"{self._task}: {self._done}", ""
        if self._total is not None and self._done <= self._total:
            done += f" of {self._total}"
            if self._done > first and now > since and not finished:
                each = (now - since) / (self._done - first)
                left = f", {clock((self._total - self._done) * each)} left"
        line = f"{done}, {rate:.3g} per second, {clock(seconds)}{left}"
        console.update(line, is_first=self._is_first)
        self._is_first = False


def bytes_progress(total: int) -> Callable[[int], None]:
    """Return what counts bytes as done; total: 0 if unknown."""
    return Progress("bytes", total or None).advance


def clock(seconds: float) -> str:
    """Format seconds as h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
