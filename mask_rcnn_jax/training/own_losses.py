"""Losses of a user's own beside the model's: `loss.own` of a recipe, or `losses` of a call."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from mask_rcnn_jax import parts
from mask_rcnn_jax.models.outputs import TrainOutputs
from mask_rcnn_jax.models.tasks import TASKS
from mask_rcnn_jax.ops.losses import AddedLoss, LossOptions
from mask_rcnn_jax.structures import Batch, Targets
from mask_rcnn_jax.terminal.safe_text import cut, one_line

OwnLoss = Callable[[TrainOutputs, Targets, Batch], Any]  # returns one number
_TAKEN = ("total", "rpn_cls", "rpn_box", "box_cls", "box_reg", *TASKS, "mask_point")
_EXPECTED = "expected a function of (outputs, targets, batch)"


def resolve_losses(
    options: LossOptions, given: Sequence[tuple[str, OwnLoss]] | None = None
) -> LossOptions:
    """Return a `loss` section with the functions of `own`, or with given ones, which it then names.

    given: pairs of a name for the log and a function.

    Raises:
        ValueError: a name or a function is none that can be used, or the weights are not as many.
    """
    if given is None:
        pairs = [(name.partition(":")[2], _found(name)) for name in options.own]
    else:
        pairs = _checked_pairs(given)
        options = replace(options, own=tuple(_described(*pair) for pair in pairs))
    weights = options.own_weights or (1.0,) * len(pairs)
    if len(weights) != len(pairs):
        raise ValueError(
            f"loss.own_weights is {options.own_weights}, expected {len(pairs)} numbers, one for "
            "each loss of your own"
        )
    names: list[str] = []
    for name, function in pairs:
        _check(name, function, names)
        names.append(name)
    added = tuple(
        AddedLoss(name, function, weight)
        for (name, function), weight in zip(pairs, weights, strict=True)
    )
    return replace(options, added=added)


def add_losses(
    terms: Mapping[str, jax.Array],
    added: Sequence[AddedLoss],
    outputs: TrainOutputs,
    batch: Batch,
) -> dict[str, jax.Array]:
    """Return the losses with those of the user's own, also in `loss/total`.

    batch: as the model saw it, that is, flipped.

    Raises ValueError, naming the loss, where it fails or is not one number.
    """
    more = {f"loss/{one.name}": one.weight * _value(one, outputs, batch) for one in added}
    return {**terms, "loss/total": sum(more.values(), start=terms["loss/total"]), **more}


def _value(loss: AddedLoss, outputs: TrainOutputs, batch: Batch) -> jax.Array:
    try:
        value = jnp.asarray(loss.function(outputs, batch.targets, batch))
    except Exception as error:  # of the user's code
        why = cut(one_line(error))
        raise ValueError(f"loss {loss.name!r} failed: {type(error).__name__}: {why}") from error
    if value.shape or not jnp.issubdtype(value.dtype, jnp.floating):
        found = f"{value.dtype} {list(value.shape)}"
        raise ValueError(f"loss {loss.name!r} returned {found}, expected one number, a float []")
    return value.astype(jnp.float32)


def _found(name: str) -> OwnLoss:
    if ":" not in name:
        raise ValueError(f"loss.own has {name!r}, expected package.module:function")
    return parts.find(name, {}, "loss.own")


def _checked_pairs(given: Any) -> list[tuple[str, OwnLoss]]:
    pairs = [given] if not isinstance(given, list | tuple) else list(given)
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ValueError(f'losses has {pair!r}, expected pairs ("name", function)')
    return [(name, function) for name, function in pairs]


def _described(name: str, function: OwnLoss) -> str:
    """Return what `loss.own` names a given function, with a note if that alone does not name it."""
    named = function if hasattr(function, "__qualname__") else type(function)
    found = f"{named.__module__}:{named.__qualname__}"
    return found if named.__qualname__ == name else f"{found}, given as losses"


def _check(name: str, function: OwnLoss, names: Sequence[str]) -> None:
    if not re.fullmatch(r"[A-Za-z]\w*", name):
        raise ValueError(f"a loss is named {name!r}, expected letters, digits and _")
    if name in _TAKEN or name.startswith("distill_") or name in names:
        raise ValueError(f"two losses are named {name!r}: give yours another name")
    try:
        inspect.signature(function).bind(None, None, None)
    except (TypeError, ValueError) as error:
        raise ValueError(f"loss {name!r} is {function!r}, {_EXPECTED} ({error})") from error


def own_broken(broken: Sequence[str], added: Sequence[AddedLoss]) -> list[str]:
    """Return which of the user's own losses made a step's metrics not finite; [] if others did."""
    own = [f"loss/{one.name}" for one in added if f"loss/{one.name}" in broken]
    follow = {*own, "loss/total", "grad_norm"}
    return own if follow.issuperset(broken) else []
