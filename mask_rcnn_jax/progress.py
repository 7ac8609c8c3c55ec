"""Log the progress of long work: items done, rate and time left."""

import time

from absl import logging


class Progress:
    """Logs how far a long piece of work is: items, rate and remaining time, every few seconds.

    total: may be an estimate, or None where nobody knows.
    """

    def __init__(self, what: str, total: int | None, *, every_seconds: float = 10.0):
        self._what, self._total, self._every = what, total, every_seconds
        self._done = 0
        self._start = self._logged = time.monotonic()

    def advance(self, items: int) -> None:
        """Counts items as done."""
        before, self._done = self._done, self._done + items
        now = time.monotonic()
        finished = self._total is not None and before < self._total <= self._done
        if not finished and now - self._logged < self._every:
            return
        self._logged = now
        seconds = max(now - self._start, 1e-9)
        rate = self._done / seconds
        left, of = "", ""
        if self._total is not None and self._done <= self._total:
            of = f" of {self._total}"
            if rate and not finished:
                left = f", {clock((self._total - self._done) / rate)} left"
        logging.info(
            "%s: %d%s, %.3g per second, %s%s",
            self._what, self._done, of, rate, clock(seconds), left,
        )  # fmt: skip


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
