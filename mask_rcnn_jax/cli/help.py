"""The texts of `--help` and `--list_config`."""

import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from mask_rcnn_jax.parts import Entry

NAME_WIDTH = 25
MAX_WIDTH = 100
REQUIRED = "Flag --{} must have a value other than None."  # says absl of a required flag


def format_help(about: str, groups: Mapping[str, Sequence[str]]) -> str:
    """Format the help of a command: its docstring, and the flags below each heading."""
    parts = [textwrap.dedent(about).strip()]
    for heading, names in groups.items():
        title = heading if ":" in heading else f"{heading}:"
        parts.append("\n".join([title, *map(_format_flag, names)]))
    return "\n\n".join(parts)


def format_entries(values: Mapping[str, Any], described: Mapping[str, Entry]) -> str:
    """Format the entries of a config, by dotted name: value, meaning, and choices or range."""
    wrapper = textwrap.TextWrapper(min(shutil.get_terminal_size().columns, MAX_WIDTH))
    wrapper.initial_indent = wrapper.subsequent_indent = "    "
    lines = []
    for name, value in values.items():
        lines.append(f"{name} = {value!r}")
        entry = described.get(name)
        if entry is not None:
            choices = ", ".join(map(repr, entry.choices))
            said = f"one of {choices}" if choices else entry.expected
            lines += wrapper.wrap(
                f"{entry.meaning} {said[:1].upper()}{said[1:]}." if said else entry.meaning
            )
    return "\n".join(lines)


def _format_flag(name: str) -> str:
    flag = flags.FLAGS[name]
    shown = f"  --[no]{name}" if flag.boolean else f"  --{name}"
    text = re.sub(r"\s*;\s*repeat this option to .*", "", flag.help or "", flags=re.DOTALL)
    if any(validator.message == REQUIRED.format(name) for validator in flag.validators):
        text += " Required."
    elif flag.default not in (None, False, "", []):
        text += f" Default: {str(flag.default_as_str).strip(chr(39))}."
    indent = " " * NAME_WIDTH
    first = shown.ljust(NAME_WIDTH) if len(shown) < NAME_WIDTH else f"{shown}\n{indent}"
    width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
    wrapper = textwrap.TextWrapper(width - NAME_WIDTH, break_long_words=False)
    return first + f"\n{indent}".join(wrapper.wrap(" ".join(text.split())))
