"""A config entry with a value that fits a dataset, and why."""

import math
from typing import Any, NamedTuple

from mask_rcnn_jax.data.options import CANVAS_MULTIPLE


class Suggestion(NamedTuple):
    """A config entry, which may stay as it is."""

    entry: str  # dotted name
    current: Any
    value: Any
    reason: str

    @property
    def is_change(self) -> bool:
        return self.value != self.current

    @property
    def flag(self) -> str:
        """The value as an argument for a shell."""
        text = str(self.value)
        return f'--config.{self.entry}="{text}"' if "(" in text else f"--config.{self.entry}={text}"


def raised(entry: str, current: int, least: float, unit: int, reason: str) -> Suggestion:
    """Suggest a multiple of a unit that is at least `least`, unless the recipe has as much."""
    value = current if current >= least else round_up(least, unit)
    return Suggestion(entry, current, value, reason)


def round_up(value: float, unit: int = CANVAS_MULTIPLE) -> int:
    """Round up to a multiple of a unit, but for rounding noise; at least one unit."""
    return max(math.ceil(value / unit - 1e-6), 1) * unit


def show(value: Any) -> str:
    """Return a number or tuples of numbers as text, with at most two decimals."""
    if isinstance(value, tuple):
        return f"({', '.join(map(show, value))})"
    return f"{round(value, 2):g}" if isinstance(value, float) else str(value)
