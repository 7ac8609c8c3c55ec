"""Write recipes that are translated from another system's config."""

import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.disk import whole_file
from mask_rcnn_jax.formats.fields import entries_of
from mask_rcnn_jax.models.build import BUILDERS


class Translated(NamedTuple):
    """What becomes of a config."""

    title: str  # of the config, such as "a TAO spec"
    action: str  # of `prepare`
    base: str  # the recipe that it is a change of
    entries: Mapping[str, Any]  # that differ from it, as "section.name"
    notes: list[str]  # a line for each field without a counterpart


def write_translated(
    translated: Translated, source: str | os.PathLike, output: str | os.PathLike
) -> None:
    """Write a recipe; nothing is left behind where it would not load.

    Raises ValueError, naming the source, for entries that make no recipe.
    """
    for name, value in translated.entries.items():
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(math.isfinite(n) for n in numbers if isinstance(n, float)):
            raise ValueError(f"{source}: {name} comes to {value}, expected finite numbers")
    with whole_file(output) as draft:
        draft.write_text(_text(translated))
        try:
            load_config(draft)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{source}: {' '.join(str(error).split())}") from error


def warmup_entries(until: float, factor: float, rate: float) -> dict[str, float]:
    """The entries of a linear warm-up, which may end behind the run.

    until: its end as a fraction of the steps. factor: its first share of the rate.
    """
    share = 1.0
    if until > 1:
        share = factor + (1 - factor) / until  # that the last step comes to
    return {
        "optim.warmup_until": min(until, 1.0),
        "optim.warmup_factor": factor / share,
        "optim.learning_rate": rate * share,
    }


def _text(translated: Translated) -> str:
    """The Python source of a recipe."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in sorted(translated.entries.items()):
        section, _, key = name.rpartition(".")
        sections.setdefault(section, {})[key] = value
    base, _, variant = translated.base.partition(":")
    argument = repr(variant) if variant else ""
    other = [section for section in sections if _is_other(section, sections[section], translated)]
    lines = [f'"""Recipe of {translated.title}, written by `prepare {translated.action}`."""', ""]
    lines += ["from ml_collections import ConfigDict", ""]
    lines += [f"from mask_rcnn_jax.configs import {base}"]
    lines += ["from mask_rcnn_jax.models.build import named_section"] if other else []
    lines += ["", *(f"# Without counterpart: {ascii(note)[1:-1]}" for note in translated.notes)]
    lines += ["", "def get_config() -> ConfigDict:", f"    config = {base}.get_config({argument})"]
    for section, values in sections.items():
        arguments = "".join(f"        {key}={value!a},\n" for key, value in values.items())
        call = f"config.{section}.update(\n"
        if section in other:
            name = section.removeprefix("model.")
            call = f"config.{section} = named_section(\n        {name!r},\n"
        lines.append(f"    {call}{arguments}    )")
    return "\n".join([*lines, "    return config", ""])


def _is_other(section: str, values: Mapping[str, Any], translated: Translated) -> bool:
    """Whether a section is of another part than in the base, whose entries it does not have."""
    name = section.removeprefix("model.")
    if name not in BUILDERS or values.get("name", "none") == "none":
        return False
    builders, old = BUILDERS[name], entries_of(translated.base)[f"{section}.name"]
    return builders[values["name"]] is not builders[old]
