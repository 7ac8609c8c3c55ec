"""Fields of another system's config, by dotted names, and which of them have been read."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.config import load_own
from mask_rcnn_jax.recipe.entries import flatten

KINDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}


class Place(NamedTuple):
    """Where a value is written."""

    path: str
    line: int

    def fault(self, text: str) -> ValueError:
        """The error for what is there."""
        return ValueError(f"{self.path}, line {self.line}: {text}")


class Fields:
    """The values of a config.

    Attributes:
        path: of the config.
        values: by dotted names.
        places: of those in `values` that the config itself gives.
        unread: names in the order of the config.
    """

    def __init__(self, path: str, values: Mapping[str, Any], places: Mapping[str, Place]):
        self.path, self.values, self.places = path, dict(values), dict(places)
        self.unread = dict.fromkeys(values)

    def fault(self, name: str, expected: str) -> ValueError:
        """The error for a field, with its line."""
        value = self.values.get(name)
        if name in self.places:
            return self.places[name].fault(f"{name} is {show(value)}, expected {expected}")
        means = "" if value is None else f", which means {show(value)}"
        return ValueError(f"{self.path}: {name} is left out{means}, expected {expected}")

    def get(self, name: str, default: Any = None) -> Any:
        """A field's value, which counts as read."""
        self.unread.pop(name, None)
        return self.values.get(name, default)

    def number(self, name: str, default: float | None = None) -> Any:
        """A field's value, a number from 0 to 1e9."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not 0 <= value <= 1e9:
            raise self.fault(name, "a number")
        return value

    def positive(self, name: str, default: float | None = None) -> Any:
        """A field's value, a number above 0."""
        value = self.number(name, default)
        if not value > 0:
            raise self.fault(name, "a number above 0")
        return value

    def numbers(self, name: str, expected: str, count: int = 0) -> tuple:
        """A field's list of numbers, of `count` of them if not 0."""
        values = self.get(name)
        is_list = isinstance(values, list | tuple) and len(values) == (count or len(values))
        if not is_list or not all(type(v) in (int, float) and abs(v) <= 1e9 for v in values):
            raise self.fault(name, expected)
        return tuple(values)

    def named(self, prefix: str) -> list[str]:
        """Names of the fields below one."""
        return [name for name in self.values if name.startswith(f"{prefix}.")]

    def ignore(self, prefixes: Iterable[str]) -> None:
        """Count fields, and those below them, as read."""
        for prefix in prefixes:
            for name in [n for n in self.unread if n == prefix or n.startswith(f"{prefix}.")]:
                del self.unread[name]

    def check(self, fixed: Mapping[str, tuple]) -> None:
        """Raise ValueError for a field, where it is given, whose value is not among the possible
        ones."""
        for name, possible in fixed.items():
            if name in self.values and not any(_equal(self.get(name), one) for one in possible):
                raise self.fault(name, " or ".join(map(repr, possible)))

    def same(self, names: Mapping[str, str], recipe: str) -> dict[str, Any]:
        """The values of fields, where they are given, as those of entries, by entry.

        Raises ValueError for one of another kind than the entry's in `recipe`.
        """
        entries, found = entries_of(recipe), {}
        for name, entry in names.items():
            if name not in self.values:
                continue
            value, kind = self.get(name), type(entries[entry])
            if kind is float and type(value) is int and abs(value) <= 1e9:
                value = float(value)
            if type(value) is not kind:
                raise self.fault(name, KINDS[kind])
            found[entry] = value
        return found


@cache
def entries_of(recipe: str) -> dict[str, Any]:
    """The entries of a recipe of this package by their dotted names."""
    return flatten(load_own(recipe).to_dict())


def _equal(value: Any, other: Any) -> bool:
    """Whether two values are equal, lists and tuples being alike, and True no 1."""
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(map(_equal, value, other))
    return value == other and isinstance(value, bool) == isinstance(other, bool)
