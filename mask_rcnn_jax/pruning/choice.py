"""Structured pruning: leave out channels with small weights.

Two rules choose them. `keep_above`, from NVIDIA's TAO Toolkit, keeps those whose filter's norm,
relative to their layer, is above a threshold. `keep_operations` narrows all groups together until a
prediction needs a given share of its operations.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from mask_rcnn_jax.models.build import ModelOptions
from mask_rcnn_jax.pruning.channel_groups import (
    Axis,
    Group,
    Term,
    with_widths,
)
from mask_rcnn_jax.ranges import Count, Range, Ranged

NORM_EPS = 1e-5  # added to a variance
# Lowest widths. A mask head of 32 channels, cut to 16 to 24, lost .05 AP (docs/small_models.md).
LEAST_ABOVE, LEAST_OPERATIONS = 16, 32

Kept = dict[str, np.ndarray]  # indices of the channels that stay, by group, ascending


@dataclass(frozen=True)
class Limits(Ranged):
    """How filters are compared, and how many stay.

    Attributes:
        normalizer: norms are divided by their layer's largest, or by the L2 norm over all.
        equalization: where layers share channels, a channel counts by its largest norm (it stays if
            any layer would keep it), by its smallest (if all would), or by a mean.
        granularity: widths are rounded up to its multiples.
        min_channels: lowest width; None: 16 in `keep_above`, as in TAO, 32 in `keep_operations`.
        exclude: groups to leave alone, such as "backbone/res2", or whole parts, such as "backbone".
    """

    normalizer: Literal["max", "l2"] = "max"
    equalization: Literal["union", "intersection", "arithmetic_mean", "geometric_mean"] = "union"
    granularity: Count = 8
    min_channels: Annotated[int | None, Range("at least 1", lambda n: n is None or n >= 1)] = None
    exclude: tuple[str, ...] = ()


DEFAULT_LIMITS = Limits()


def prune(
    variables: Mapping[str, Any], model: ModelOptions, groups: Mapping[str, Group], kept: Kept
) -> tuple[dict[str, Any], ModelOptions]:
    """Leave out channels.

    Args:
        variables: {"params", "batch_stats"}.
        model: the `model` section that they fit.
        groups: from `find_groups`.
        kept: the channels that stay; groups not named stay whole.

    Returns:
        The pruned model's variables and `model` section. Outputs equal those before with 0 for the
        filters left out, their biases, and their norms' scales and biases.
    """
    arrays = _flat(variables)
    for name, indices in kept.items():
        count = groups[name].channels.count
        for path, axis, repeats, _ in groups[name].axes:
            places = (np.arange(repeats)[:, None] * count + indices).reshape(-1)
            arrays[path] = np.take(np.asarray(arrays[path]), places, axis)
    widths = {name: len(indices) for name, indices in kept.items()}
    return {"batch_stats": {}, **unflatten_dict(arrays, sep="/")}, with_widths(model, widths)


def keep_above(
    variables: Mapping[str, Any], groups: Mapping[str, Group], threshold: float, limits: Limits
) -> Kept:
    """Choose the channels whose relative norm is above a threshold, as TAO does."""
    check_excluded(groups, limits)
    limits = replace(limits, min_channels=limits.min_channels or LEAST_ABOVE)
    arrays, kept = _flat(variables), {}
    for name in _chosen(groups, limits):
        norms = _merge([_normalize(n, limits) for n in _filter_norms(arrays, groups[name])], limits)
        wanted = int(np.sum(norms > threshold))
        kept[name] = _largest(norms, _allowed(wanted, groups[name], limits), groups[name])
    return kept


def keep_operations(
    variables: Mapping[str, Any],
    groups: Mapping[str, Group],
    terms: list[Term],
    share: float,
    limits: Limits,
) -> Kept:
    """Choose channels such that a prediction needs at most this share of its operations.

    A channel counts by its share of the squared norm of each layer that writes or reads it, on
    average over these layers; a norm layer behind a filter scales it. From the whole model on, the
    next `limits.granularity` channels that count least go from that group where they cost the
    fewest squares for the operations they save: the sum over the group's layers of the square of
    the share that they have lost. `limits.normalizer` and `limits.equalization` are for
    `keep_above`.

    Args:
        terms: from `find_operations`.

    Raises:
        ValueError: the smallest model within the limits needs more, or a group has no kernels.
    """
    check_excluded(groups, limits)
    limits = replace(limits, min_channels=limits.min_channels or LEAST_OPERATIONS)
    arrays, importance, squares = _flat(variables), {}, {}
    for name in _chosen(groups, limits):
        importance[name], squares[name] = _losses(arrays, name, groups[name])
    counts = {name: group.channels.count for name, group in groups.items()}
    widths = {name: counts[name] for name in importance}
    values: list[float] = [_value(term, groups) for term in terms]
    uses = {
        name: [(i, term.groups.count(name)) for i, term in enumerate(terms) if name in term.groups]
        for name in widths
    }
    total = sum(values)
    while sum(values) > share * total:
        best, cheapest = None, math.inf
        for name, width in widths.items():
            narrower = _narrower(width, groups[name], limits)
            if narrower == width:
                continue
            scale = narrower / width
            saved = sum(values[i] * (1 - scale**power) for i, power in uses[name])
            gone = counts[name] - narrower, counts[name] - width
            cost = (squares[name][gone[0]] - squares[name][gone[1]]) / max(saved, 1e-9)
            if cost < cheapest:
                best, cheapest = (name, narrower), cost
        if best is None:
            raise ValueError(
                f"--target_operations is {share}, but with at least {limits.min_channels} channels "
                f"everywhere and without --exclude a prediction takes {sum(values) / total:.3f}"
            )
        name, narrower = best
        for i, power in uses[name]:
            values[i] *= (narrower / widths[name]) ** power
        widths[name] = narrower
    return {name: _largest(importance[name], widths[name], groups[name]) for name in widths}


def _losses(
    arrays: Mapping[str, np.ndarray], name: str, group: Group
) -> tuple[np.ndarray, np.ndarray]:
    """Return each unit's importance [units], and the squares lost with so many channels [0..C]."""
    layers, unit = _energies(arrays, group), group.channels.unit
    if not layers:
        raise ValueError(
            f"{name} is declared as `prunable`, but no layer's kernel has its channels"
        )
    importance = np.mean(layers, axis=0)
    lost = np.cumsum(np.repeat(np.sort(importance) / unit, unit))
    return importance, len(layers) * np.square(np.concatenate([[0.0], lost]))


def check_excluded(groups: Mapping[str, Group], limits: Limits) -> None:
    """Raise ValueError if `limits.exclude` names an unknown group, or leaves none."""
    for name in limits.exclude:
        if not any(_is_in(group, name) for group in groups):
            known = sorted({*groups, *(group.partition("/")[0] for group in groups)})
            raise ValueError(f"--exclude is {name!r}, expected one of {known}")
    if not _chosen(groups, limits):
        raise ValueError("no channels to prune: --exclude names all that the parts declare")


def _chosen(groups: Mapping[str, Group], limits: Limits) -> list[str]:
    """Return the groups that are not excluded."""
    return [group for group in groups if not any(_is_in(group, n) for n in limits.exclude)]


def _is_in(group: str, name: str) -> bool:
    return f"{group}/".startswith(f"{name}/")


def _flat(variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return flatten_dict({name: variables[name] for name in ("params", "batch_stats")}, sep="/")


def _value(term: Term, groups: Mapping[str, Group]) -> int:
    channels = (groups[name].channels for name in term.groups)
    return term.factor * math.prod(c.count // c.unit for c in channels)


def _filter_norms(arrays: Mapping[str, np.ndarray], group: Group) -> list[np.ndarray]:
    """Return the filters' L2 norms [units] for each layer that writes a group's channels."""
    kernels = [axis for axis in group.axes if axis.path.endswith("/kernel")]
    return [np.sqrt(_squares(arrays, group, axis)) for axis in kernels if axis.is_output]


def _energies(arrays: Mapping[str, np.ndarray], group: Group) -> list[np.ndarray]:
    """Return each unit's share of the squared norm, [units], for each layer of a group's channels.

    Those that write them, with the scale of the norm behind, and those that read them.
    """
    found = []
    for axis in group.axes:
        layer, _, leaf = axis.path.rpartition("/")
        if leaf == "kernel":
            scale = _squared_scale(arrays, layer.partition("/")[2]) if axis.is_output else 1.0
            squares = _squares(arrays, group, axis, scale)
            found.append(squares / max(np.sum(squares), np.finfo(float).tiny))
    return found


def _squares(
    arrays: Mapping[str, np.ndarray], group: Group, axis: Axis, scale: np.ndarray | float = 1.0
) -> np.ndarray:
    """Return the sum of squares of a kernel in each unit, [units]. scale: of each channel's."""
    kernel = np.moveaxis(np.asarray(arrays[axis.path], np.float64), axis.axis, 0)
    squares = np.sum(np.square(kernel.reshape(len(kernel), -1)), axis=1)
    squares = squares.reshape(axis.repeats, -1).sum(axis=0) * scale
    return squares.reshape(-1, group.channels.unit).sum(axis=1)


def _squared_scale(arrays: Mapping[str, np.ndarray], layer: str) -> np.ndarray | float:
    """Return the factor that a layer's norm gives its squared outputs, [channels]; 1 without."""
    place, _, name = layer.rpartition("/")
    for norm in (f"{name}_norm", name.replace("conv", "norm")):
        for collection in ("params", "batch_stats"):
            scale = arrays.get(f"{collection}/{place}/{norm}/scale")
            if scale is not None:
                variance = arrays.get(f"batch_stats/{place}/{norm}/var", 1 - NORM_EPS)
                return np.square(np.asarray(scale, np.float64)) / (variance + NORM_EPS)
    return 1.0


def _normalize(norms: np.ndarray, limits: Limits) -> np.ndarray:
    whole = np.max(norms) if limits.normalizer == "max" else np.linalg.norm(norms)
    return norms / whole if whole > 0 else norms


def _merge(norms: list[np.ndarray], limits: Limits) -> np.ndarray:
    """Return one number per unit for several layers, each [units]."""
    stacked = np.stack(norms)
    if limits.equalization == "geometric_mean":
        return np.exp(np.mean(np.log(np.maximum(stacked, np.finfo(float).tiny)), axis=0))
    merge: dict[str, Any] = {"union": np.max, "intersection": np.min, "arithmetic_mean": np.mean}
    return merge[limits.equalization](stacked, axis=0)


def _allowed(wanted: int, group: Group, limits: Limits) -> int:
    """Return the width for so many wanted units, rounded up and within the limits."""
    count, unit = group.channels.count, group.channels.unit
    least = max(wanted * unit, min(limits.min_channels or 1, count))
    step = math.lcm(limits.granularity, unit)
    return min(-(-least // step) * step, count)


def _narrower(width: int, group: Group, limits: Limits) -> int:
    """Return the next width below, or the same if the limits allow none."""
    step = math.lcm(limits.granularity, group.channels.unit)
    narrower = (width - 1) // step * step
    return narrower if narrower >= _allowed(0, group, limits) else width


def _largest(importance: np.ndarray, width: int, group: Group) -> np.ndarray:
    """Return the channels whose units have the largest values; the first wins a tie."""
    unit = group.channels.unit
    best = np.sort(np.argsort(-importance, kind="stable")[: width // unit])
    return (best[:, None] * unit + np.arange(unit)).reshape(-1)
