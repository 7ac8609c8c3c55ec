"""What an installation of some packages alone can import, with those of this environment."""

import re
from collections.abc import Iterable
from importlib import metadata

from packaging.requirements import Requirement


def required(lines: Iterable[str]) -> set[str]:
    """Names of all packages that requirements bring, with those that they require in turn."""
    found: set[tuple[str, str]] = set()
    todo = [(Requirement(line), "") for line in lines]
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = _canonical(requirement.name)
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in found:
                found.add((name, wanted))
                todo += [(Requirement(line), wanted) for line in metadata.requires(name) or ()]
    return {name for name, _ in found}


def modules_of_others(packages: set[str]) -> set[str]:
    """Top-level modules that are installed here and belong to none of the packages."""
    owners = metadata.packages_distributions().items()
    return {module for module, names in owners if not packages & set(map(_canonical, names))}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
