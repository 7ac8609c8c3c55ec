"""Parameters that patterns keep from training: `optim.freeze`."""

from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import jax


def without_gradients(params: Mapping[str, Any], freeze: tuple[str, ...]) -> Any:
    """The same parameters, of which those that `freeze` names get no gradient, and none is
    computed."""
    if not freeze:
        return params
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jax.lax.stop_gradient(x) if matches(names_of(path), freeze) else x, params
    )


def matches(names: tuple[str, ...], freeze: tuple[str, ...]) -> bool:
    """Whether a pattern matches a parameter or a module that it is in."""
    paths = ["/".join(names[:count]) for count in range(1, len(names) + 1)]
    return any(fnmatchcase(path, pattern) for path in paths for pattern in freeze)


def check_freeze(freeze: tuple[str, ...], params: Mapping[str, Any]) -> None:
    """Raise ValueError for a pattern that no parameter matches, and if all are frozen."""
    leaves = [names_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for pattern in freeze:
        if not any(matches(names, (pattern,)) for names in leaves):
            found = f"optim.freeze has {pattern!r}, which matches no parameter"
            raise ValueError(f"{found}; {_closest(pattern, leaves)}")
    if leaves and all(matches(names, freeze) for names in leaves):
        raise ValueError(f"optim.freeze is {freeze}, which leaves nothing to train")


def _closest(pattern: str, leaves: list[tuple[str, ...]]) -> str:
    paths = sorted({"/".join(n[:count]) for n in leaves for count in range(1, len(n) + 1)})
    close = get_close_matches(pattern.rstrip("*/"), paths, n=3)
    if close:
        return f"did you mean {', '.join(close)}?"
    return f"expected names such as {', '.join(sorted({names[0] for names in leaves}))}"


def names_of(path) -> tuple[str, ...]:
    """Return the names on the way to a leaf."""
    return tuple(key.key for key in path)
