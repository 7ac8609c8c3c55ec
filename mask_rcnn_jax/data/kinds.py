"""The list of augmentations: from a config, or given in its place."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mask_rcnn_jax import parts
from mask_rcnn_jax.data.augment import Kind, as_kinds
from mask_rcnn_jax.data.color import Brightness, Contrast, Hue, Saturation
from mask_rcnn_jax.data.copy_paste import CopyPaste
from mask_rcnn_jax.data.geometry import (
    FixedSizeCrop,
    Geometry,
    HorizontalFlip,
    QuarterTurns,
    Rotation,
    ScaleJitter,
    Translation,
    VerticalFlip,
)

# Names in `data.augment`; the section of that name in `data` has the kind's entries.
KINDS: dict[str, Callable[..., Any]] = {
    "scale_jitter": ScaleJitter,
    "fixed_size_crop": FixedSizeCrop,
    "horizontal_flip": HorizontalFlip,
    "vertical_flip": VerticalFlip,
    "quarter_turns": QuarterTurns,
    "rotation": Rotation,
    "translation": Translation,
    "brightness": Brightness,
    "contrast": Contrast,
    "saturation": Saturation,
    "hue": Hue,
    "copy_paste": CopyPaste,
}


def default_sections() -> dict[str, dict[str, Any]]:
    """Return the sections of all kinds with their defaults."""
    return {name: parts.defaults(part) for name, part in KINDS.items()}


def describe() -> dict[str, parts.Entry]:
    """Return type, choices and meaning for the entries of all kinds, by dotted name."""
    return {
        f"{section}.{name}": entry
        for section, part in KINDS.items()
        for name, entry in parts.entries(part).items()
    }


def resolve_augment(config: Any, augment: Kind | Sequence[Kind] | None) -> tuple[Kind, ...]:
    """Return the list of a config, or a given one, which the config's `data` section then names.

    Raises:
        ValueError: a name is unknown or a value is wrong; the message names the entry.
    """
    if augment is None:
        return build_augment(config["data"])
    kinds = as_kinds(augment)
    config["data"].update(_described(kinds))
    _check_flips(config["data"])
    return kinds


def build_augment(data: Mapping[str, Any]) -> tuple[Kind, ...]:
    """Build the list of a config's `data` section; errors as from `resolve_augment`."""
    _check_flips(data)
    names = data.get("augment", ())  # runs of earlier versions have no such entry
    return tuple(_build(name, data) for name in names)


def _build(name: str, data: Mapping[str, Any]) -> Kind:
    found = parts.find(name, KINDS, "data.augment")
    if name in KINDS:
        return parts.build(found, data.get(name, {}), f"data.{name}")
    return found() if isinstance(found, type) else found


def _check_flips(data: Mapping[str, Any]) -> None:
    if "horizontal_flip" in data.get("augment", ()) and data["flip_probability"]:
        raise ValueError(
            f"data.flip_probability is {data['flip_probability']}, expected 0 if data.augment has "
            "'horizontal_flip': images would be mirrored twice"
        )


def _described(kinds: Sequence[Kind]) -> dict[str, Any]:
    """Return the entries of the `data` section for a list."""
    names, sections = [], {}
    name_of = {part: name for name, part in KINDS.items()}
    for number, kind in enumerate(kinds):
        if type(kind) in name_of:
            names.append(name_of[type(kind)])
            sections[names[-1]] = dataclasses.asdict(kind)  # type: ignore[arg-type]
        elif callable(kind) or isinstance(kind, Geometry):
            named = kind if hasattr(kind, "__qualname__") else type(kind)
            names.append(f"{named.__module__}:{named.__qualname__}")
        else:
            expected = "expected a kind of augmentation or a function of (example, rng)"
            raise ValueError(f"augment has {kind!r} at place {number}, {expected}")
    return {"augment": tuple(names), **sections}
