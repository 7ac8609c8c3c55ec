"""The entries of a recipe's tree by their dotted names, and what a name that is none may mean."""

import difflib
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

FROZEN = ("model.backbone.frozen_stages", "model.backbone.frozen_blocks", "optim.freeze")
# What other systems, or other backbones, call entries of ours: the first that a recipe has.
OTHERS_ENTRIES = {
    "base_lr": ("optim.learning_rate",),
    "batch": ("train.batch_size",),
    "freeze": FROZEN,
    "frozen_blocks": FROZEN,
    "frozen_stages": FROZEN,
    "imgsz": ("data.image_size",),
    "lr": ("optim.learning_rate",),
    "lr0": ("optim.learning_rate",),
    "max_iter": ("train.steps",),
    "workers": ("data.num_workers",),
}


def override(config: ConfigDict, name: str, value: Any) -> None:
    """Set an entry by its dotted name. Raises ValueError if there is none, or of another type."""
    *sections, key = name.split(".")
    is_section = isinstance(value, ConfigDict | Mapping | None)
    if problem := override_problem(config, name, is_section=is_section):
        raise ValueError(problem)
    section = config
    for part in sections:
        section = section[part]
    try:
        section[key] = value
    except TypeError as error:
        kind = type(section[key]).__name__
        raise ValueError(f"{name} is {value!r}, expected {kind}") from error


def override_problem(config: ConfigDict, name: str, *, is_section: bool = False) -> str:
    """Say why a recipe's tree has no entry of that dotted name to override; "" if it has.

    is_section: whether a whole section is given.
    """
    *sections, key = name.split(".")
    node: Any = config
    for part in sections:
        if not isinstance(node, ConfigDict) or part not in node:
            break
        node = node[part]
    else:
        if isinstance(node, ConfigDict) and key in node:
            if not isinstance(node[key], ConfigDict) or is_section:
                return ""
            parts = ", ".join(f"{name}.{entry}" for entry in node[key])
            return f"{name} is a section, expected one of its entries: {parts}"
        if isinstance(node, ConfigDict) and sections[:1] == ["model"] and "name" in node:
            section = ".".join(sections)
            return (
                f"there is no config entry {name!r} {_of_section(config, section, node.name, key)}"
            )
    close = close_entries(config, key) or difflib.get_close_matches(name, flatten(config), 1)
    hint = f", did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"there is no config entry {name!r}{hint}"


def _of_section(config: ConfigDict, section: str, name: str, key: str) -> str:
    """Say that a section with a `name` has no such entry, and which may be meant."""
    text = f"with {section}.name={name}"
    close = close_entries(config, key)
    if close and (key in OTHERS_ENTRIES or close[0].startswith(f"{section}.")):
        return f"{text}, did you mean {close[0]!r}?"
    prefix = f"{section}."
    entries = [e.removeprefix(prefix) for e in flatten(config) if e.startswith(prefix)]
    if entries == ["name"]:
        return f"{text}; a recipe of yours replaces the whole section (models.build.named_section)"
    return f"{text}, expected one of {sorted(entries)}"


def close_entries(config: ConfigDict, key: str) -> list[str]:
    """Return the entries of a recipe's tree that a name without its section may mean."""
    entries = flatten(config)
    if known := [name for name in OTHERS_ENTRIES.get(key, ()) if name in entries]:
        return known[:1]
    if meant := [name for name in entries if f".{name}".endswith(f".{key}")]:
        return sorted(meant, key=lambda name: not name.startswith("train."))
    keys = {name.rpartition(".")[2]: name for name in entries}
    return [keys[close] for close in difflib.get_close_matches(key, keys, 1)]


def flatten(tree: Mapping, prefix: str = "") -> dict[str, Any]:
    """The entries of a recipe's tree by their dotted names."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, Mapping | ConfigDict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
