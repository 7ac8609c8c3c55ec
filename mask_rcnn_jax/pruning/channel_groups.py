"""Which arrays and which products depend on which channels that pruning may narrow.

Nothing is listed by hand. The model is built a second time, as shapes alone, where each group has
its own prime number as width, in units: an array's axis whose length that prime divides holds these
channels, and a product whose multiply-adds it divides depends on them.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count, islice
from typing import Any, NamedTuple

import jax
from flax.traverse_util import flatten_dict
from jax.extend.core import ClosedJaxpr, Jaxpr

from mask_rcnn_jax import parts
from mask_rcnn_jax.models.build import PARTS, ModelOptions, abstract_variables, build_model
from mask_rcnn_jax.models.channels import Channels
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.models.protocols import PartLike, ability, taken

MAPS = "fpn/fpn_output"
SMALLEST_PRIME = 10_000  # beyond classes, RoIs and the sides of maps


class Axis(NamedTuple):
    """An axis along which an array has a group's channels.

    Attributes:
        path: the array's, such as "params/backbone/stem_conv/kernel".
        axis: number, from 0.
        repeats: times that the channels follow each other: 49 in the first fully connected layer.
        is_output: whether a layer writes these channels; otherwise it reads them.
    """

    path: str
    axis: int
    repeats: int
    is_output: bool


class Group(NamedTuple):
    """Channels that are narrowed together, and where they are."""

    channels: Channels
    axes: tuple[Axis, ...]


class Term(NamedTuple):
    """Multiply-adds in products and convolutions: a factor times the units in some groups.

    Attributes:
        part: module that they are in; "" for none.
        factor: number with one unit in each group.
        groups: names; twice where a group multiplies twice.
    """

    part: str
    factor: int
    groups: tuple[str, ...]


Widths = Mapping[str, int]  # channels of groups by name, as "backbone/res2"


def prunable_channels(model: MaskRCNN) -> dict[str, Channels]:
    """Return all channels that can be narrowed, by section and name.

    Not those of the maps that a mask head reads beside others, as `sample`.
    """
    found = {
        f"{section}/{name}": channels
        for section in PARTS
        for part in [getattr(model, section, None)]
        for name, channels in ability(part, PartLike, "prunable").items()
        if channels.unit < channels.full
    }
    if model.mask_head is not None and taken(model.mask_head, sample=None):
        found = {name: each for name, each in found.items() if not name.startswith(MAPS)}
    return found


def with_widths(model: ModelOptions, widths: Widths) -> ModelOptions:
    """Return a `model` section with these widths, and others as they were."""
    for section in PARTS:
        start = f"{section}/"
        new = {n.removeprefix(start): int(w) for n, w in widths.items() if n.startswith(start)}
        if new:
            part: Any = getattr(model, section)  # a user's may take widths without naming them
            both = tuple({**dict(ability(part, PartLike, "widths")), **new}.items())
            model = replace(model, **{section: parts.change(part, widths=both)})
    return model


def find_groups(options: ModelOptions) -> dict[str, Group]:
    """Return a model's groups by section and name."""
    model = build_model(options, implementation="xla")
    channels = prunable_channels(model)
    narrowed = {name: _current(options, name, c) for name, c in channels.items()}
    primes = _primes(channels)
    widths = {name: primes[name] * c.unit for name, c in channels.items()}
    probe = build_model(with_widths(options, widths))
    shapes, probed = (_shapes(each) for each in (model, probe))
    axes: dict[str, list[Axis]] = {name: [] for name in channels}
    for path, shape in probed.items():
        layer, _, leaf = path.rpartition("/")
        outputs = probed.get(f"{layer}/bias", shape[-1:])
        for number, (length, before) in enumerate(zip(shape, shapes[path], strict=True)):
            for name in _groups_in(length, primes):
                unit = primes[name] * channels[name].unit
                repeats, rest = divmod(length, unit)
                if rest or repeats * narrowed[name].count != before:
                    raise ValueError(f"{path} does not follow the channels of {name}")
                writes = leaf != "kernel" or number == _output_axis(shape, outputs)
                axes[name].append(Axis(path, number, repeats, writes))
    return {name: Group(narrowed[name], tuple(axes[name])) for name in channels}


def find_operations(options: ModelOptions, predict: Callable[[MaskRCNN, dict], Any]) -> list[Term]:
    """Return a prediction's multiply-adds as a polynomial in the groups' units.

    Where platforms differ, a GPU's form counts.

    Args:
        options: of the model.
        predict: calls the model with these variables, on arrays or shapes.
    """
    channels = prunable_channels(build_model(options, implementation="xla"))
    primes = _primes(channels)
    widths = {name: primes[name] * c.unit for name, c in channels.items()}
    probe = build_model(with_widths(options, widths), implementation="xla")
    program = jax.make_jaxpr(lambda v: predict(probe, v))(abstract_variables(probe))
    modules = (*PARTS, "rpn_head")
    terms: dict[tuple[str, tuple[str, ...]], int] = {}
    for where, number in _products(program.jaxpr, ""):
        groups = tuple(_groups_in(number, primes))
        factor = number // math.prod(primes[name] for name in groups)
        part = next((name for name in where.split("/") if name in modules), "")
        terms[part, groups] = terms.get((part, groups), 0) + factor
    return [Term(part, factor, groups) for (part, groups), factor in terms.items()]


def count_operations(terms: list[Term], channels: Mapping[str, Channels]) -> dict[str, int]:
    """Return each part's multiply-adds with these channels."""
    units = {name: c.count // c.unit for name, c in channels.items()}
    found: dict[str, int] = {}
    for part, factor, groups in terms:
        found[part] = found.get(part, 0) + factor * math.prod(units[name] for name in groups)
    return found


def _current(options: ModelOptions, name: str, channels: Channels) -> Channels:
    """Return a group's channels, which may have been narrowed before."""
    section, _, rest = name.partition("/")
    widths = dict(ability(getattr(options, section), PartLike, "widths"))
    return replace(channels, count=widths.get(rest, channels.full))


def _shapes(model: MaskRCNN) -> dict[str, tuple[int, ...]]:
    return {
        path: leaf.shape for path, leaf in flatten_dict(abstract_variables(model), sep="/").items()
    }


def _output_axis(shape: tuple[int, ...], outputs: tuple[int, ...]) -> int:
    """Return a kernel's last axis that is as long as its bias: the third in a transposed
    convolution, the last in all others."""
    return max(axis for axis, length in enumerate(shape) if length == outputs[0])


def _primes(names: Mapping[str, Any]) -> dict[str, int]:
    found = (n for n in count(SMALLEST_PRIME) if all(n % d for d in range(2, math.isqrt(n) + 1)))
    return dict(zip(names, islice(found, len(names)), strict=True))


def _groups_in(number: int, primes: Mapping[str, int]) -> list[str]:
    """Return the groups whose primes divide a number, each as often as it does."""
    found = []
    for name, prime in primes.items():
        while number and number % prime == 0:
            found.append(name)
            number //= prime
    return found


def _products(jaxpr: Jaxpr, where: str) -> Iterator[tuple[str, int]]:
    """Yield place and multiply-adds for each product and convolution."""
    for equation in jaxpr.eqns:
        kind, params = equation.primitive.name, equation.params
        inputs: list[Any] = [each.aval for each in equation.invars]
        outputs: list[Any] = [each.aval for each in equation.outvars]
        inside = f"{where}/{equation.source_info.name_stack}"
        if kind == "dot_general":
            contracted = [inputs[0].shape[axis] for axis in params["dimension_numbers"][0][0]]
            yield inside, outputs[0].size * math.prod(contracted)
        elif kind == "conv_general_dilated":
            kernel, features = inputs[1], params["dimension_numbers"].rhs_spec[0]
            yield inside, outputs[0].size * kernel.size // kernel.shape[features]
        elif kind == "cond":  # of `lax.platform_dependent`, the default is the last
            yield from _products(params["branches"][-1].jaxpr, inside)
        else:
            times = params["length"] if kind == "scan" else 1
            for value in params.values():
                for each in value if isinstance(value, tuple | list) else (value,):
                    inner = each.jaxpr if isinstance(each, ClosedJaxpr) else each
                    if isinstance(inner, Jaxpr):
                        yield from ((w, times * n) for w, n in _products(inner, inside))
