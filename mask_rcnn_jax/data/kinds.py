"""The list of augmentations: from a recipe, or given in its place."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from mask_rcnn_jax import parts
from mask_rcnn_jax.data.affine import fill_of
from mask_rcnn_jax.data.augment import Kind, as_kinds
from mask_rcnn_jax.data.color import Hue, OfColors, Saturation
from mask_rcnn_jax.data.copy_paste import CopyPaste
from mask_rcnn_jax.data.geometry import FixedSizeCrop, Geometry, HorizontalFlip
from mask_rcnn_jax.data.options import Augmentations, DataOptions
from mask_rcnn_jax.images.bands import RGB

# Names in `data.augment`; the section of that name in `data` has the kind's entries.
KINDS: dict[str, Callable[..., Any]] = {f.name: f.type for f in fields(Augmentations)}  # type: ignore[misc]


def resolve_augment(
    data: DataOptions, augment: Kind | Sequence[Kind] | None
) -> tuple[tuple[Kind, ...], DataOptions]:
    """Return the list of a `data` section, or a given one, which the section returned then names.

    Raises:
        ValueError: a name is unknown or a value is wrong; the message names the entry.
    """
    if augment is None:
        return build_augment(data), data
    kinds = as_kinds(augment)
    data = _described(data, kinds)
    _check(kinds, data)
    return _on_bands(kinds, data.bands.names), data


def build_augment(data: DataOptions) -> tuple[Kind, ...]:
    """Build the list of a `data` section; errors as from `resolve_augment`."""
    kinds = tuple(_build(name, data) for name in data.augment)
    _check(kinds, data)
    return _on_bands(kinds, data.bands.names)


def _on_bands(kinds: Sequence[Kind], names: Sequence[str]) -> tuple[Kind, ...]:
    """Return the list for bands of these names, of which some may be red, green and blue."""
    if not names or tuple(names) == RGB:
        return tuple(kinds)
    colors = [kind for kind in kinds if isinstance(kind, Saturation | Hue)]
    if colors and not set(RGB) <= set(names):
        kind = type(colors[0]).__name__.lower()
        expected = "expected red, green and blue among data.bands.names"
        raise ValueError(f"data.augment has '{kind}', {expected}, which are {', '.join(names)}")
    places = [names.index(name) for name in RGB if name in names]
    return tuple(OfColors(kind, places) if kind in colors else kind for kind in kinds)


def _build(name: str, data: DataOptions) -> Kind:
    found = parts.find(name, KINDS, "data.augment")
    if name in KINDS:
        return getattr(data, name)
    try:
        kind = found() if isinstance(found, type) else found
    except TypeError as error:
        raise ValueError(f"data.augment is {name!r}: {error}") from error
    if not _is_kind(kind):
        raise ValueError(f"data.augment is {name!r}, which is {kind!r}, {_EXPECTED}")
    return kind


_EXPECTED = "expected a kind of augmentation or a function of (example, rng)"


def _is_kind(value: Any) -> bool:
    is_class = isinstance(value, type)
    return not is_class and (callable(value) or isinstance(value, Geometry | CopyPaste))


def _check(kinds: Sequence[Kind], data: DataOptions) -> None:
    """Raise ValueError for kinds that do not fit the other entries."""
    for kind in kinds:
        if fill := getattr(kind, "fill", None):
            try:
                fill_of(fill, data.bands.count)
            except ValueError as error:
                raise ValueError(f"data.augment: {type(kind).__name__}: {error}") from error
    if any(isinstance(kind, HorizontalFlip) for kind in kinds) and data.flip_probability:
        raise ValueError(
            f"data.flip_probability is {data.flip_probability}, expected 0 if data.augment has "
            "'horizontal_flip': images would be mirrored twice"
        )
    crops = [type(kind) for kind in kinds if isinstance(kind, FixedSizeCrop)]
    if crops and "fixed_size_crop" not in data.augment:
        found = f"{crops[0].__module__}:{crops[0].__qualname__}"
        expected = "expected 'fixed_size_crop', whose size is the canvas in training"
        raise ValueError(f"data.augment has '{found}', {expected}")


def _described(data: DataOptions, kinds: Sequence[Kind]) -> DataOptions:
    """Return the `data` section for a list."""
    names: list[str] = []
    sections: dict[str, Any] = {}
    name_of = {part: name for name, part in KINDS.items()}
    for number, kind in enumerate(kinds):
        if not _is_kind(kind):
            raise ValueError(f"augment has {kind!r} at place {number}, {_EXPECTED}")
        if type(kind) not in name_of:
            names.append(_name(kind))
            continue
        names.append(name_of[type(kind)])
        if sections.setdefault(names[-1], kind) != kind:
            expected = "expected the same entries as before: a recipe has them once"
            raise ValueError(f"augment has {kind!r} at place {number}, {expected}")
    return replace(data, augment=tuple(names), **sections)


def _name(kind: Any) -> str:
    """Return the name of a function or class, with a note if it alone does not make the kind."""
    if hasattr(kind, "__qualname__"):
        return f"{kind.__module__}:{kind.__qualname__}"
    part = type(kind)
    name = f"{part.__module__}:{part.__qualname__}"
    takes_values = part.__init__ is not object.__init__ or part.__new__ is not object.__new__
    return f"{name}, given as augment" if takes_values else name
