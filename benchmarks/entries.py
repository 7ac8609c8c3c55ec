"""Take entries of a recipe's config on the command lines of these programs, as the commands do."""

import argparse
import ast
import re
from collections.abc import Sequence

CONFIG_HELP = "a recipe; --config.section.name=value changes an entry"


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; `entries` are those of `--config.section.name=value`, for `load_config`.

    Values are Python literals, or else text.
    """
    parsed, rest = parser.parse_known_args(arguments)
    parsed.entries = {}
    for argument in rest:
        found = re.fullmatch(r"--config\.([\w.]+)=(.*)", argument)
        if not found:
            parser.error(f"unexpected {argument!r}, expected --config.section.name=value")
        try:
            value = ast.literal_eval(found[2])
        except (ValueError, SyntaxError):
            value = found[2]
        parsed.entries[found[1]] = value
    return parsed
