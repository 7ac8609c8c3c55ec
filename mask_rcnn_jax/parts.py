"""Build parts from config sections and describe section entries.

A part is a frozen dataclass, a Flax module or a function. Its parameters are its section's entries:
annotations give types and choices, defaults give values, and the docstring's `Attributes` or `Args`
give meanings.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NamedTuple,
    Protocol,
    TypeGuard,
    Union,
    get_args,
    get_origin,
    runtime_checkable,
)

from mask_rcnn_jax.ranges import range_of
from mask_rcnn_jax.signatures import Signature, signature_of

MODULE_FIELDS = ("parent", "name")  # fields on every Flax module
NO_ENTRY = {"no entry": True}  # metadata of a field that follows from other values


@runtime_checkable
class Section(Protocol):
    """A section of a config: a dict, or an `ml_collections.ConfigDict`, which is no `Mapping`."""

    def __getitem__(self, name: str, /) -> Any: ...

    def __iter__(self) -> Iterator[str]: ...

    def get(self, name: str, default: Any, /) -> Any: ...

    def keys(self) -> Iterable[str]: ...

    def items(self) -> Iterable[tuple[str, Any]]: ...


def is_section(value: object) -> TypeGuard[Section]:
    """Return whether a value is a section of a config."""
    return _are_sections(type(value))  # type: ignore[arg-type]


@cache  # Python looks at every method of a class, which took half of the time to read a recipe
def _are_sections(kind: type) -> bool:
    return issubclass(kind, Section)


class UnknownEntry(ValueError):
    """A section has an entry that its part does not take."""


class Entry(NamedTuple):
    """A config section's entry."""

    default: Any
    type: Any
    meaning: str
    expected: str = ""  # of its range

    @property
    def choices(self) -> tuple:
        """Allowed values for a `Literal`, or ()."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()


@dataclass(frozen=True)
class Named:
    """A part that its section names, to be built once the other arguments are known.

    Attributes:
        name: of the builder, or `package.module:function`.
        builder: a class or a function.
        entries: for the builder; each is an attribute, too. With the defaults of a builder that
            comes with the package; those of a user's may be anything.
        where: the section's name, for error messages.
        known: the builder's entries.
        choices: names of the builders that come with the package, the default first.
    """

    name: str
    builder: Callable
    entries: Mapping[str, Any]
    where: str
    known: Mapping[str, Entry] = field(repr=False, compare=False)
    choices: tuple[str, ...] = field(repr=False, compare=False)

    def __getattr__(self, name: str) -> Any:
        if name in ("entries", "known") or name not in {**self.known, **self.entries}:
            raise AttributeError(f"{self.__dict__.get('name')!r} has no entry {name!r}")
        return self.get(name, None)

    def get(self, name: str, default: Any) -> Any:
        """Return an entry or its default, or `default` where the builder has no such entry."""
        known = self.known.get(name)
        return self.entries.get(name, default if known is None else known.default)

    def make(self, **given: Any) -> Any:
        """Build the part; `given` arguments that it does not take are dropped."""
        return build(self.builder, self.entries, self.where, **given)

    def check(self) -> None:
        """Raise ValueError, naming the entry, for one that is out of its range."""
        parameters, _, _ = _signature(self.builder)
        for name, value in self.entries.items():
            if name in parameters and (limits := range_of(parameters[name].annotation)):
                limits.check(value, f"{self.where}.{name}")


def entries(part: Callable, given: tuple[str, ...] = ()) -> dict[str, Entry]:
    """Return a part's config entries by name.

    given: parameters from elsewhere, such as `dtype`, beside the fields with `NO_ENTRY`.
    """
    parameters, hints, texts = _signature(part)
    hidden = {*given, *(MODULE_FIELDS if "parent" in parameters else ())}
    made = {f.name: f for f in fields(part)} if is_dataclass(part) else {}
    found = {}
    for name, parameter in parameters.items():
        if name in hidden or parameter.kind is parameter.VAR_KEYWORD:
            continue
        default = parameter.default
        if name in made and made[name].metadata == NO_ENTRY:
            continue
        if name in made and (factory := made[name].default_factory) is not MISSING:
            default = factory()
        limits = range_of(parameter.annotation)
        expected = limits.text if limits else ""
        found[name] = Entry(default, hints.get(name), texts.get(name, ""), expected)
    return found


def _signature(part: Callable) -> Signature:
    is_plain = inspect.isclass(part) or inspect.isfunction(part)
    return (_remembered if is_plain else signature_of)(part)


_remembered = cache(signature_of)  # it takes most of the time in which a recipe is read


def defaults(part: Callable | Named, given: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a config section with the defaults of a part, or of a named one's builder; those it
    needs have none."""
    known = part.known if isinstance(part, Named) else entries(part, given)
    found = {name: entry.default for name, entry in known.items()}
    return {n: to_section(v) for n, v in found.items() if v is not inspect.Parameter.empty}


def to_section(value: Any) -> Any:
    """Return the section that a part was built from, with all entries; other values as they are."""
    if isinstance(value, Named):
        return {"name": value.name} | {n: to_section(v) for n, v in value.entries.items()}
    if not _is_part(type(value)):
        return value
    return {name: to_section(getattr(value, name)) for name in entries(type(value))}


def change(part: Any, **entries: Any) -> Any:
    """Return a part with other values of some entries."""
    if isinstance(part, Named):
        return replace(part, entries={**part.entries, **entries})
    return part.clone(**entries) if hasattr(part, "clone") else replace(part, **entries)


def changes(value: Any) -> dict[str, Any]:
    """Return the section of a part with those entries alone that differ from their defaults.

    A part that a section names has its name, unless all is as by default; a user's own has the
    entries that it was given.
    """
    if isinstance(value, Named):
        is_own, known = value.name not in value.choices, value.known
        differ = {
            name: to_section(given)
            for name, given in value.entries.items()
            if is_own or name not in known or known[name].default != given
        }
        return {"name": value.name, **differ} if differ or value.name != value.choices[0] else {}
    found = {}
    for name, entry in entries(type(value)).items():
        inner = getattr(value, name)
        if isinstance(inner, Named) or _is_part(type(inner)):
            if differ := changes(inner):
                found[name] = differ
        elif entry.default != inner:
            found[name] = inner
    return found


def describe(value: Any) -> dict[str, Entry]:
    """Return the entries of a part, and of the parts inside it, by dotted name."""
    if isinstance(value, Named):
        meaning = f"{' or '.join(value.choices)}, or package.module:function for your own."
        return {"name": Entry(value.choices[0], str, meaning), **value.known}
    found = {}
    for name, entry in entries(type(value)).items():
        inner = getattr(value, name)
        if isinstance(inner, Named) or _is_part(type(inner)):
            found |= {f"{name}.{inside}": e for inside, e in describe(inner).items()}
        else:
            found[name] = entry
    return found


def _is_part(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)


def build(part: Callable, section: Section, where: str, **given: Any) -> Any:
    """Call the part with its section's entries; missing ones use the part's defaults.

    An entry that is a part itself is built from the section inside.

    where: section name for error messages, such as "model.rpn".
    given: further arguments; those unknown to the part are dropped.

    Raises ValueError, naming the entry, if one is unknown, is missing without a default, has a
    wrong type, is not among the choices or out of its range.
    """
    known = entries(part, tuple(given))
    arguments = checked(part, section, where, tuple(given))
    for name, entry in known.items():
        if entry.default is inspect.Parameter.empty and name not in arguments:
            raise ValueError(f"{where}.{name} is missing")
    signature, _, _ = _signature(part)
    arguments |= {name: value for name, value in given.items() if name in signature}
    try:
        return part(**arguments)
    except ValueError as error:
        names_entry = str(error).partition(" ")[0] in known
        raise ValueError(f"{where}{'.' if names_entry else ': '}{error}") from error


def checked(
    part: Callable, section: Section, where: str, given: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return a section's entries as the part takes them; arguments and errors of `build`."""
    known = entries(part, given)
    if not is_section(section):
        raise ValueError(f"{where} is {section!r}, expected a section with {sorted(known)}")
    signature, _, _ = _signature(part)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.values())
    found = {}
    for name, value in section.items():
        if name not in known and not takes_all:
            raise UnknownEntry(f"{where} has no entry {name!r}, expected one of {sorted(known)}")
        kind: Any = known[name].type if name in known else None
        entry = f"{where}.{name}"
        if _is_part(kind) and not isinstance(value, kind):
            found[name] = build(kind, value, entry)
            continue
        try:
            found[name] = _checked(value, kind, entry)
        except TypeError:
            if part.__module__.startswith(f"{__package__}."):
                raise
            found[name] = _plain(value)  # a user's part may have any annotation
    return found


def not_imported(**entries: Any) -> None:
    """Stand for a function of a user's in a part that is described and never built."""
    raise ValueError("its function is not imported, since nothing is built from this recipe")


def named(
    section: Any,
    builders: Mapping[str, Callable],
    where: str,
    given: tuple[str, ...] = (),
    *,
    imports: bool = True,
) -> Named:
    """Find the builder that a section names, the first without a name, and check its entries.

    section: None is short for the name "none". given: parameters that come later. imports: whether
    a function of a user's is imported; otherwise `not_imported` takes its place.
    """
    if section is not None and not is_section(section):
        raise ValueError(f"{where} is {section!r}, expected a section with a name")
    values = {"name": "none"} if section is None else dict(section.items())
    name = values.pop("name", next(iter(builders)))
    is_described = not imports and isinstance(name, str) and ":" in name
    builder = not_imported if is_described else find(name, builders, f"{where}.name")
    if not callable(builder):
        raise ValueError(f"{where}.name is {name!r}, which is {builder!r}, expected a function")
    try:
        values = checked(builder, values, where, given)
    except UnknownEntry as error:
        advice = "a recipe that changes the name replaces the whole section"
        raise ValueError(f"{error}; {advice} (models.build.named_section)") from error
    if name in builders:
        values = defaults(builder, given) | values
    return Named(name, builder, values, where, entries(builder, given), tuple(builders))


def find(name: str, builders: Mapping[str, Callable], where: str) -> Callable:
    """Return a built-in builder by name, or a custom one given as `package.module:function`.

    Raises:
        ValueError: the name is neither; the message names the entry `where`.
    """
    if name in builders:
        return builders[name]
    module, colon, attribute = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not colon:
        raise ValueError(
            f"{where} is {name!r}, expected one of {sorted(builders)} or package.module:function"
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the user's module raises
        raise ValueError(f"{where} is {name!r}: {error}") from error


def _checked(value: Any, kind: Any, where: str) -> Any:
    """Convert lists to tuples; raise ValueError if the value does not match the annotation."""
    value = _plain(value)
    if not _fits(value, kind):
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        expected = f"one of {list(choices)}" if choices else _text(kind)
        if isinstance(value, tuple) and _fits(twice := value * 2, kind):
            expected += f", such as {twice}"
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
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in args)
    if kind in (int, float):
        allowed = (int,) if kind is int else (int, float)
        return isinstance(value, allowed) and not isinstance(value, bool)
    if kind in (bool, str, NoneType) or (_is_part(kind) and isinstance(value, kind)):
        return isinstance(value, kind)
    if kind in (None, Any):
        return True
    raise TypeError(f"an entry has the annotation {kind}, for which there is no check")


def _plain(value: Any) -> Any:
    """Return tuples for lists and dicts for sections."""
    if is_section(value):
        return {key: _plain(item) for key, item in value.items()}
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def _text(kind: Any) -> str:
    """Format an annotation: int, tuple[float, ...]."""
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
