"""Build parts from config sections and describe section entries.

A part is a frozen dataclass, a Flax module or a function. Its parameters are its section's entries:
annotations give types and choices, defaults give values, and the docstring's `Attributes` or `Args`
give meanings.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import (
    Any,
    Literal,
    NamedTuple,
    Protocol,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

MODULE_FIELDS = ("parent", "name")  # fields on every Flax module


@runtime_checkable
class Section(Protocol):
    """A section of a config: a dict, or an `ml_collections.ConfigDict`, which is no `Mapping`."""

    def __getitem__(self, name: str, /) -> Any: ...

    def __iter__(self) -> Iterator[str]: ...

    def get(self, name: str, default: Any, /) -> Any: ...

    def keys(self) -> Iterable[str]: ...

    def items(self) -> Iterable[tuple[str, Any]]: ...


class UnknownEntry(ValueError):
    """A section has an entry that its part does not take."""


class Entry(NamedTuple):
    """A config section's entry."""

    default: Any
    type: Any
    meaning: str

    @property
    def choices(self) -> tuple:
        """Allowed values for a `Literal`, or ()."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()


def entries(part: Callable, given: tuple[str, ...] = ()) -> dict[str, Entry]:
    """Return a part's config entries by name.

    given: parameters from elsewhere, such as `dtype`.
    """
    hints = get_type_hints(part if inspect.isfunction(part) else part.__init__)
    bases = reversed(inspect.getmro(part)) if inspect.isclass(part) else [part]
    meanings = {name: text for base in bases for name, text in _meanings(base).items()}
    parameters = inspect.signature(part).parameters
    hidden = {*given, *(MODULE_FIELDS if "parent" in parameters else ())}
    found = {}
    for name, parameter in parameters.items():
        if name in hidden or parameter.kind is parameter.VAR_KEYWORD:
            continue
        found[name] = Entry(parameter.default, hints.get(name), meanings.get(name, ""))
    return found


def defaults(part: Callable, given: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a config section with the part's defaults."""
    return {name: entry.default for name, entry in entries(part, given).items()}


def build(part: Callable, section: Section, where: str, **given: Any) -> Any:
    """Call the part with its section's entries; missing ones use the part's defaults.

    where: section name for error messages, such as "model.rpn".
    given: further arguments; those unknown to the part are dropped.

    Raises ValueError, naming the entry, if one is unknown, is missing without a default, has a
    wrong type or is not among the choices.
    """
    known = entries(part, tuple(given))
    signature = inspect.signature(part).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.values())
    arguments = {name: value for name, value in given.items() if name in signature}
    for name, value in section.items():
        if name not in known and not takes_all:
            raise UnknownEntry(f"{where} has no entry {name!r}, expected one of {sorted(known)}")
        kind = known[name].type if name in known else None
        arguments[name] = _checked(value, kind, f"{where}.{name}")
    for name, entry in known.items():
        if entry.default is inspect.Parameter.empty and name not in arguments:
            raise ValueError(f"{where}.{name} is missing")
    try:
        return part(**arguments)
    except ValueError as error:
        names_entry = str(error).partition(" ")[0] in known
        raise ValueError(f"{where}{'.' if names_entry else ': '}{error}") from error


def pick(part: Callable, section: Section, where: str, **given: Any) -> Any:
    """`build` from a section that also has entries for other parts."""
    own = entries(part, tuple(given))
    return build(part, {name: section[name] for name in own if name in section}, where, **given)


def check_at_least(part: Any, **lowest: float) -> None:
    """Raise ValueError, naming the field, for a field of a part below its lowest value."""
    for name, low in lowest.items():
        if not (value := getattr(part, name)) >= low:
            raise ValueError(f"{name} is {value}, expected at least {low}")


def find(name: str, builders: Mapping[str, Callable], where: str) -> Callable:
    """Return a built-in builder by name, or a custom one given as `package.module:function`.

    Raises:
        ValueError: the name is neither; the message names the entry `where`.
    """
    if name in builders:
        return builders[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(
            f"{where} is {name!r}, expected one of {sorted(builders)} or package.module:function"
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{where} is {name!r}: {error}") from error


def _checked(value: Any, kind: Any, where: str) -> Any:
    """Convert lists to tuples; raise ValueError if the value does not match the annotation."""
    value = _as_tuple(value)
    if not _fits(value, kind):
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        expected = f"one of {list(choices)}" if choices else _text(kind)
        raise ValueError(f"{where} is {value!r}, expected {expected}")
    return value


def _fits(value: Any, kind: Any) -> bool:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in args
    if origin is tuple and args[-1:] == (Ellipsis,):
        return isinstance(value, tuple) and all(_fits(item, args[0]) for item in value)
    if origin is tuple:
        same_length = isinstance(value, tuple) and len(value) == len(args)
        return same_length and all(map(_fits, value, args))
    if kind in (int, float):
        allowed = (int,) if kind is int else (int, float)
        return isinstance(value, allowed) and not isinstance(value, bool)
    return not isinstance(kind, type) or kind not in (bool, str) or isinstance(value, kind)


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list | tuple) else value


def _text(kind: Any) -> str:
    """Format an annotation: int, tuple[float, ...]."""
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)


def _meanings(part: Callable) -> dict[str, str]:
    """Return each parameter's text in a docstring's `Attributes` or `Args` section."""
    doc = inspect.getdoc(part) or ""
    section = re.search(r"^(?:Attributes|Args):\n((?:[ ]+.*\n?|\n)+)", doc, re.MULTILINE)
    if not section:
        return {}
    items = re.findall(r"^    (\w+): ((?:.*\n?)(?:[ ]{5,}.*\n?)*)", section[1], re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in items}
