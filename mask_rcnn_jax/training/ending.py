"""How a logger ends a run before its time."""

from collections.abc import Iterator
from contextlib import contextmanager


class StopTraining(Exception):
    """Raised by a logger, ends the run in good order: its state is saved and returned, once scores
    that are pending are logged. The state is not evaluated for it.

    Its text becomes the reason in the log.
    """


@contextmanager
def by_loggers_alone() -> Iterator[None]:
    """Raise ValueError for a `StopTraining` of a dataset, an augmentation or a loss: one process of
    several would end, and the others wait for it."""
    try:
        yield
    except StopTraining as stop:
        reason = f": {stop}" if str(stop) else ""
        raise ValueError(f"StopTraining was not raised by a logger, as expected{reason}") from stop
