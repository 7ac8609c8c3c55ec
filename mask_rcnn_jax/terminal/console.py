"""Lines about work that lasts: they replace each other in a terminal, and all stand in a log.

A line that may be replaced ends like any other; the next one moves the cursor up and overwrites it.
So whatever else is printed begins at the start of a line; in a terminal, the last such line is
overwritten if it was not logged.
"""

import logging as std_logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from absl import logging

from mask_rcnn_jax.terminal.safe_text import printable

TERMINAL_SECONDS = 0.2
TICK_SECONDS = 1.0  # in a terminal, while something lasts
LOG_SECONDS = 10.0
FALLBACK_COLUMNS = 79
UP, CLEAR = "\x1b[A\r", "\x1b[K"  # to the start of the line above; to the end of the line

_in_terminal = False  # whether stderr is one and `make_formatter` was called


def make_formatter() -> std_logging.Formatter:
    """Return the formatter for lines on stderr, and from now on replace lines if it is a terminal.

    Without this call, as in a notebook or a script, lines are never replaced.
    """
    global _in_terminal
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    _in_terminal = is_terminal and os.environ.get("TERM") != "dumb"
    return _LineFormatter(_in_terminal)


def interval(in_log: float = LOG_SECONDS) -> float:
    """Return the seconds between two lines about the same work."""
    return TERMINAL_SECONDS if _in_terminal else in_log


def update(text: str, *, is_first: bool = False) -> None:
    """Log a line that takes the place of the one before, if that was logged here, too.

    is_first: keep the one before, which is about other work.
    """
    logging.info("%s", text, extra={"is_update": True, "is_first": is_first})


@contextmanager
def lasting(doing: str, done: str = "") -> Iterator[None]:
    """Say what is being done, every few seconds, and in the end how long it took.

    Args:
        doing: such as "compiling the model".
        done: such as "compiled"; not said if it is empty or the work fails.
    """
    begin, ended = time.monotonic(), threading.Event()
    update(f"{doing} ...", is_first=True)

    def repeat() -> None:
        while not ended.wait(TICK_SECONDS if _in_terminal else LOG_SECONDS):
            update(f"{doing} ... {time.monotonic() - begin:.0f} s")

    repeating = threading.Thread(target=repeat, daemon=True)
    repeating.start()
    try:
        yield
    finally:
        ended.set()
        repeating.join()
    if done:
        logging.info("%s in %.1f s", done, time.monotonic() - begin)


class _LineFormatter(std_logging.Formatter):
    """Escapes control characters; in a terminal, overwrites an update with the next."""

    def __init__(self, in_terminal: bool):
        super().__init__("%(message)s")
        self._in_terminal, self._after_update = in_terminal, False

    def format(self, record: std_logging.LogRecord) -> str:
        text = printable(super().format(record))
        is_update = self._in_terminal and getattr(record, "is_update", False)
        replaced = self._after_update and not getattr(record, "is_first", False)
        self._after_update = is_update
        if not is_update:
            return text
        # A line that wraps would be overwritten by half.
        try:
            width = os.get_terminal_size(sys.stderr.fileno()).columns - 1
        except (OSError, ValueError):  # no longer a terminal
            width = FALLBACK_COLUMNS
        return f"{UP if replaced else ''}{text[:width]}{CLEAR}"
