"""Which values an entry may have, declared with its type: `eps: Positive = 1e-8`.

It is compared when a dataclass or a recipe is made, and `--list_config` shows it.
"""

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, NamedTuple


class Range(NamedTuple):
    """Metadata of an annotation: what is expected of a value in words, and whether it is so.

    NaN must not be.
    """

    text: str
    allows: Callable[[Any], bool]

    def check(self, value: Any, name: str) -> None:
        """Raise ValueError, naming the entry, for a value that is not in the range."""
        kind = ""
        try:
            if self.allows(value):
                return
        except TypeError:
            kind = "a number, "
        raise ValueError(f"{name} is {value!r}, expected {kind}{self.text}")


def numbers(text: str, allows: Callable[[Any], bool]) -> Range:
    """A range of tuples whose values all are in it."""
    return Range(text, lambda values: all(map(allows, values)))


AT_LEAST_1 = Range("at least 1", lambda value: value >= 1)
AT_LEAST_0 = Range("at least 0", lambda value: value >= 0)
FROM_0_TO_1 = Range("from 0 to 1", lambda value: 0 <= value <= 1)
ABOVE_0 = Range("above 0", lambda value: value > 0)
Count = Annotated[int, AT_LEAST_1]
Whole = Annotated[int, AT_LEAST_0]
NotNegative = Annotated[float, AT_LEAST_0]
Positive = Annotated[float, ABOVE_0]
Fraction = Annotated[float, FROM_0_TO_1]
PositiveFraction = Annotated[float, Range("above 0 and up to 1", lambda value: 0 < value <= 1)]
ProperFraction = Annotated[float, Range("from 0 to below 1", lambda value: 0 <= value < 1)]
Positives = Annotated[tuple[float, ...], numbers("numbers above 0", ABOVE_0.allows)]
NotNegatives = Annotated[tuple[float, ...], numbers("numbers of at least 0", AT_LEAST_0.allows)]
Counts = Annotated[tuple[int, ...], numbers("numbers of at least 1", AT_LEAST_1.allows)]
Probability = Annotated[float, Range("0 to 1", FROM_0_TO_1.allows)]


class Ranged:
    """Base of a dataclass that is not made with a field out of its range."""

    def __post_init__(self) -> None:
        check(self)


def check(part: Any) -> None:
    """Raise ValueError, naming the field, for a field of a dataclass that is out of its range."""
    kind: Any = type(part)
    for name, limits in _declared(kind).items():
        limits.check(getattr(part, name), name)


@cache
def _declared(kind: Any) -> dict[str, Range]:
    found = {field.name: range_of(field.type) for field in fields(kind)}
    return {name: limits for name, limits in found.items() if limits is not None}


def range_of(annotation: Any) -> Range | None:
    """The range that an annotation declares."""
    metadata = getattr(annotation, "__metadata__", ())
    return next((one for one in metadata if isinstance(one, Range)), None)
