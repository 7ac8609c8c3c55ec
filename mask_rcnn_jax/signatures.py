"""What functions and classes take, from their signatures, annotations and docstrings."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

# Parameters, their annotations and their meanings, by name.
Signature = tuple[Mapping[str, inspect.Parameter], dict[str, Any], dict[str, str]]


def signature_of(part: Callable) -> Signature:
    """Return what a function or a class takes; a class's docstrings are those of its bases, too."""
    hints = get_type_hints(part if inspect.isfunction(part) else part.__init__)
    bases = reversed(inspect.getmro(part)) if inspect.isclass(part) else [part]
    texts = {name: text for base in bases for name, text in meanings(base).items()}
    return inspect.signature(part).parameters, hints, texts


def meanings(part: Callable) -> dict[str, str]:
    """Return each parameter's text in a docstring's `Attributes` or `Args` section."""
    doc = inspect.getdoc(part) or ""
    section = re.search(r"^(?:Attributes|Args):\n((?:[ ]+.*\n?|\n)+)", doc, re.MULTILINE)
    if not section:
        return {}
    items = re.findall(r"^    (\w+): ((?:.*\n?)(?:[ ]{5,}.*\n?)*)", section[1], re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in items}
