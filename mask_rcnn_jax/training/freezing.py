"""Parameters that do not learn: those that patterns name, `optim.freeze`, and adapted kernels."""

from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
from optax import MaskedNode

from mask_rcnn_jax.ops.low_rank import LORA


def frozen_leaves(
    params: Mapping[str, Any], freeze: tuple[str, ...], stages: tuple[str, ...] = ()
) -> Any:
    """Of the parameters a tree of bools: those that `freeze` names, those of the backbone's layers
    whose names start with one of `stages`, and kernels that have an adapter, which itself learns.
    """
    leaves = [names_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    with_adapter = {(*names[:-2], "kernel") for names in leaves if names[-2:-1] == (LORA,)}

    def is_frozen(path, _) -> bool:
        names = names_of(path)
        if LORA in names:
            return names[-1] == "scale"
        return names in with_adapter or is_in_stages(names, stages) or matches(names, freeze)

    return jax.tree_util.tree_map_with_path(is_frozen, params)


def trained_leaves(
    params: Mapping[str, Any], freeze: tuple[str, ...], stages: tuple[str, ...] = ()
) -> Any:
    """The same tree, with `optax.MaskedNode`, which is no array, in the place of frozen ones.

    freeze, stages: see `frozen_leaves`.
    """
    frozen = frozen_leaves(params, freeze, stages)
    return jax.tree.map(lambda is_frozen, x: MaskedNode() if is_frozen else x, frozen, params)


def with_frozen(trained: Any, params: Mapping[str, Any]) -> Any:
    """Invert `trained_leaves`: the frozen parameters are those of `params`."""
    return jax.tree.map(lambda old, x: old if _is_masked(x) else x, params, trained)


def apply_updates(params: Mapping[str, Any], updates: Any) -> Any:
    """The parameters after a step; those without an update are the same to the last bit."""

    def updated(x: jax.Array, update: Any) -> jax.Array:
        return x if _is_masked(update) else jnp.asarray(x + update, x.dtype)

    return jax.tree.map(updated, params, updates)


def _is_masked(x: Any) -> bool:
    return isinstance(x, MaskedNode)


def matches(names: tuple[str, ...], freeze: tuple[str, ...]) -> bool:
    """Whether a pattern matches a parameter or a module that it is in."""
    paths = ["/".join(names[:count]) for count in range(1, len(names) + 1)]
    return any(fnmatchcase(path, pattern) for path in paths for pattern in freeze)


def is_in_stages(names: tuple[str, ...], stages: tuple[str, ...]) -> bool:
    """Whether a parameter belongs to a layer of the backbone with one of these prefixes."""
    if names[0] != "backbone":
        return False
    return any(names[1] == prefix or names[1].startswith(f"{prefix}_") for prefix in stages)


def check_freeze(freeze: tuple[str, ...], params: Mapping[str, Any]) -> None:
    """Raise ValueError for a pattern that no parameter matches, and if all are frozen."""
    leaves = [names_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for pattern in freeze:
        if not any(matches(names, (pattern,)) for names in leaves):
            found = f"optim.freeze has {pattern!r}, which matches no parameter"
            raise ValueError(f"{found}; {closest(pattern, leaves)}")
    if leaves and all(jax.tree.leaves(frozen_leaves(params, freeze))):
        raise ValueError(f"optim.freeze is {freeze}, which leaves nothing to train")


def closest(pattern: str, leaves: list[tuple[str, ...]]) -> str:
    """Name what a pattern may have meant, of the parameters and the modules that they are in."""
    paths = sorted({"/".join(n[:count]) for n in leaves for count in range(1, len(n) + 1)})
    close = get_close_matches(pattern.rstrip("*/"), paths, n=3)
    if close:
        return f"did you mean {', '.join(close)}?"
    return f"expected names such as {', '.join(sorted({names[0] for names in leaves}))}"


def names_of(path) -> tuple[str, ...]:
    """Return the names on the way to a leaf."""
    return tuple(str(key.key) for key in path)  # those of an NNX list are numbers
