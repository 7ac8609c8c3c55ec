"""JAX arrays as ONNX tensors whose axes may be in another order, joined or left out.

A convolution's output is a tensor [B, C, H, W], which stands for an array [B, H, W, C]. To
transpose, reshape or broadcast an array changes how its tensor is read, and only an operator that
needs the axes in order has them put there. So a trunk has no transposed maps, and doubling a map by
`jnp.repeat` is one Resize.
"""

import hashlib
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mask_rcnn_jax.jax_to_onnx.graph import CannotConvert, Graph, floats

Equation: TypeAlias = Any  # a JaxprEqn, whose inputs' and outputs' shapes have no type


class Known(NamedTuple):
    """An array that does not depend on the model's inputs; axes of equal elements have stride 0."""

    array: np.ndarray
    origin: str = ""  # the variable that it is made from, such as backbone/stem_conv/kernel

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def once(self) -> np.ndarray:
        """The array with axes of equal elements shortened to 1."""
        return self.array[tuple(slice(None if step else 1) for step in self.array.strides)]


class Value(NamedTuple):
    """A tensor, and how an array is read from it.

    Attributes:
        name: of the tensor.
        shape: its shape.
        axes: what each axis of the array consists of, the slowest part first: axes of the tensor,
            and -n for n equal elements. Axes of size 1 may be left out.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(prod(self.size(part) for part in axis) for axis in self.axes)

    def size(self, part: int) -> int:
        return -part if part < 0 else self.shape[part]


def tensor(name: str, shape: Sequence[int], order: Sequence[int] | None = None) -> Value:
    """Return the array whose axis i is axis order[i] of a tensor, by default i."""
    return Value(name, tuple(shape), tuple((axis,) for axis in order or range(len(shape))))


def transpose(value: Value, order: Sequence[int]) -> Value:
    return value._replace(axes=tuple(value.axes[axis] for axis in order))


def broadcast(value: Value, shape: Sequence[int], places: Sequence[int]) -> Value:
    """Put axis i at places[i] of an array of this shape, and repeat along the others."""
    axes: list[tuple[int, ...]] = [() if size == 1 else (-size,) for size in shape]
    for axis, size, place in zip(value.axes, value.sizes, places, strict=True):
        if size == shape[place]:
            axes[place] = axis
    return value._replace(axes=tuple(axes))


def reshape(graph: Graph, value: Value, shape: Sequence[int]) -> Value:
    """Join and split axes, in the tensor itself where a part of an axis is split."""
    left = [(part, value.size(part)) for axis in value.axes for part in axis]
    left = [(part, size) for part, size in left if size > 1][::-1]
    cuts: dict[int, list[int]] = {}  # sizes that axes of the tensor are split into
    axes: list[list[tuple[int, int]]] = []  # of (axis of the tensor, number of its part)
    for wanted in shape:
        axis: list[tuple[int, int]] = []
        while wanted > 1:
            part, size = left.pop()
            taken = min(size, wanted)
            if size % taken or wanted % taken:  # no common division
                return tensor(graph.reshape(arrange(graph, value), *shape), shape)
            if taken < size:
                left.append((part, size // taken))
            wanted //= taken
            if part >= 0:
                cuts.setdefault(part, []).append(taken)
                axis.append((part, len(cuts[part]) - 1))
            elif axis and axis[-1][0] < 0:
                axis[-1] = axis[-1][0] * taken, 0
            else:
                axis.append((-taken, 0))
        axes.append(axis)
    sizes = [cuts.get(part, [size]) for part, size in enumerate(value.shape)]
    starts = np.cumsum([0, *map(len, sizes)])
    name, split = value.name, tuple(size for each in sizes for size in each)
    if split != value.shape:
        name = reshaped(graph, name, value.shape, split)
    places = (tuple(p if p < 0 else int(starts[p]) + k for p, k in axis) for axis in axes)
    return Value(name, split, tuple(places))


def reshaped(graph: Graph, name: str, shape: Sequence[int], wanted: Sequence[int]) -> str:
    """Reshape a tensor, or what it was reshaped from."""
    if name in graph.constants:
        return derived(graph, name, graph.constants[name].reshape(wanted))
    source, before = graph.reshaped.get(name, (name, tuple(shape)))
    if before == tuple(wanted):
        return source
    result = graph.reshape(source, *wanted)
    graph.reshaped[result] = source, before
    return result


def arrange(graph: Graph, value: Value | Known, order: Sequence[int] | None = None) -> str:
    """Return a tensor whose axis i is axis order[i] of the array, by default i."""
    order = range(len(value.sizes)) if order is None else order
    if isinstance(value, Known):
        array = value.array.transpose(tuple(order))
        if not any(map(graph.is_batch, array.shape)):
            return stored(graph, array, value)
        part = value.once.transpose(tuple(order))
        return graph.op("Expand", stored(graph, part, value), graph.sizes(*array.shape))
    axes = [[part for part in value.axes[axis] if value.size(part) > 1] for axis in order]
    sizes = [value.sizes[axis] for axis in order]
    parts = [part for axis in axes for part in axis]
    real = [part for part in parts if part >= 0]
    name, shape = in_order(graph, value.name, value.shape, real)
    if real == parts:
        return name if list(shape) == sizes else reshaped(graph, name, shape, sizes)
    repeats = [-axis[1] if len(axis) == 2 and axis[0] >= 0 > axis[1] else 1 for axis in axes]
    once = [size // repeat for size, repeat in zip(sizes, repeats, strict=True)]
    is_float = value.name not in graph.not_float
    if is_float and len(sizes) == 4 and prod(once) == prod(value.shape[part] for part in real):
        nearest = {"mode": "nearest", "nearest_mode": "floor"}
        nearest["coordinate_transformation_mode"] = "asymmetric"
        name = name if list(shape) == once else reshaped(graph, name, shape, once)
        return graph.op("Resize", name, "", floats(*map(float, repeats)), **nearest)
    ones = [1 if part < 0 else value.size(part) for part in parts]
    name = reshaped(graph, name, shape, ones)
    full = [value.size(part) for part in parts]
    name = graph.op("Expand", name, graph.sizes(*(-min(part, -1) for part in parts)))
    return name if full == sizes else graph.reshape(name, *sizes)


def in_order(
    graph: Graph, name: str, shape: tuple[int, ...], wanted: Sequence[int]
) -> tuple[str, tuple[int, ...]]:
    """Transpose a tensor so that these axes follow each other; the others have size 1."""
    if list(wanted) == sorted(wanted):
        return name, shape
    order = [axis for axis in range(len(shape)) if axis not in wanted] + list(wanted)
    if name in graph.constants:
        array = graph.constants[name].transpose(order)
        return derived(graph, name, array), array.shape
    return graph.op("Transpose", name, perm=order), tuple(shape[axis] for axis in order)


def stored(graph: Graph, array: np.ndarray, source: Known) -> str:
    """Add a constant made from `source` under its name; equal ones are shared."""
    if array.dtype != bool:
        array = array.astype(np.int64 if array.dtype.kind in "iu" else np.float32, copy=False)
    if any(map(graph.is_batch, array.shape)):
        raise CannotConvert("numbers for each place in a batch without --batch")
    if array.size <= 64:
        return graph.constant(array)
    content = hashlib.blake2b(np.asarray(array, order="C").tobytes()).digest()
    key = array.shape, array.dtype.str, content
    if key not in graph.stored:
        graph.stored[key] = graph.constant(array, graph.unique(source.origin or "constant"))
    return graph.stored[key]


def derived(graph: Graph, name: str, array: np.ndarray) -> str:
    """Add a constant with the elements of another one in other places."""
    if array.size <= 64:
        return graph.constant(array)
    return graph.constant(array, f"{name}:{array.shape}:{array.strides}".replace(" ", ""))


class Layout(NamedTuple):
    """How the tensors of arrays with one shape are combined: the parts of their axes, in order."""

    parts: list[tuple[int, int]]  # (axis, number of its part); axis -1: size 1 in a tensor
    sizes: list[int]
    divided: list[list[int]]  # sizes of the parts of each axis

    def result(self, name: str) -> Value:
        """Return the array that an operator has made of such tensors."""
        axes = []
        for axis, sizes in enumerate(self.divided):
            places = {part: place for place, part in enumerate(self.parts)}
            axes.append(tuple(places.get((axis, k), -size) for k, size in enumerate(sizes)))
        return Value(name, tuple(self.sizes), tuple(axes))


def align(
    graph: Graph, values: Sequence[Value | Known], shape: Sequence[int]
) -> tuple[list[str], Layout]:
    """Return tensors that operators can broadcast, and how to read what these make of them.

    Arrays have this shape, with some axes of size 1, or no axes.
    """
    given = [_full(graph, value, shape) for value in values]
    found = [_division([value.axes[i] for value in given], given) for i in range(len(shape))]
    divided = [sizes for sizes in found if sizes is not None]
    if len(divided) < len(shape):  # axes are split in ways that do not fit
        given = [tensor(arrange(graph, value), shape) for value in given]
        divided = [[size] if size > 1 else [] for size in shape]
    split = [_split(graph, value, divided) for value in given]
    leader = max(split, key=lambda each: prod(each[1]))
    parts = list(leader[2])
    for axis, sizes in enumerate(divided):
        for k in range(len(sizes)):
            if (axis, k) not in parts and any((axis, k) in each[2] for each in split):
                before = [p for p in parts if p[0] >= 0 and p < (axis, k)]
                parts.insert(parts.index(max(before)) + 1 if before else 0, (axis, k))
    lengths = [divided[axis][k] if axis >= 0 else 1 for axis, k in parts]
    names = []
    for name, held, own in split:
        at = {part: place for place, part in enumerate(own)}
        real = [part for part in parts if part[0] >= 0 and part in at]
        name, held = in_order(graph, name, held, [at[part] for part in real])
        wanted = tuple(n if p in real else 1 for p, n in zip(parts, lengths, strict=True))
        few = own is not leader[2]  # operators add leading axes of size 1 by themselves
        fits = _stripped(held) == _stripped(wanted) and len(held) <= len(parts)
        if not (fits if few and name not in graph.constants else held == wanted):
            name = reshaped(graph, name, held, _stripped(wanted) if few else wanted)
        names.append(name)
    return names, Layout(parts, lengths, divided)


def _stripped(shape: Sequence[int]) -> tuple[int, ...]:
    """Leave out leading axes of size 1."""
    first = next((i for i, size in enumerate(shape) if size > 1), len(shape))
    return tuple(shape[first:])


def _full(graph: Graph, value: Value | Known, shape: Sequence[int]) -> Value:
    """Return an array as a `Value` of this shape, whose axes are repeated as a whole or not."""
    if isinstance(value, Known):
        part = value._replace(array=np.broadcast_to(value.array, shape)).once
        whole = enumerate(zip(part.shape, shape, strict=True))
        kept = tuple((i,) if held == size else (-size,) for i, (held, size) in whole)
        return Value(stored(graph, part, value), part.shape, kept)
    if value.sizes != tuple(shape):
        value = broadcast(value, shape, range(len(value.sizes)))
    if not any(min(axis, default=0) < 0 <= max(axis, default=0) for axis in value.axes):
        return value
    # Repeat parts of axes in the tensor, and leave those that are repeated as a whole.
    free = [i for i, axis in enumerate(value.axes) if axis and max(axis) < 0]
    axes = [() if i in free else axis for i, axis in enumerate(value.axes)]
    once = value._replace(axes=tuple(axes))
    first = [min((p for p in axis if p >= 0), default=-1) for axis in axes]
    order = sorted(range(len(shape)), key=first.__getitem__)
    sizes = [once.sizes[i] for i in order]
    made = tensor(arrange(graph, once, order), sizes, np.argsort(order).tolist())
    axes = [(-shape[i],) if i in free else axis for i, axis in enumerate(made.axes)]
    return made._replace(axes=tuple(axes))


def _division(axes: list[tuple[int, ...]], values: list[Value]) -> list[int] | None:
    """Sizes of parts that an axis has in every array, where it is not repeated."""
    lists = [
        [value.size(part) for part in axis if value.size(part) > 1]
        for axis, value in zip(axes, values, strict=True)
    ]
    free = [bool(axis) and axis[0] < 0 for axis in axes]
    fixed = [sizes for sizes, is_free in zip(lists, free, strict=True) if not is_free]
    finest = max(fixed or lists, key=len)
    ends = set(np.cumprod(finest).tolist())
    if all(ends.issuperset(np.cumprod(sizes).tolist()) for sizes in fixed):
        return finest
    return None


def _split(
    graph: Graph, value: Value, divided: Sequence[Sequence[int]]
) -> tuple[str, tuple[int, ...], list[tuple[int, int]]]:
    """Split a tensor's axes into these parts; return it, its shape and the part on each axis."""
    pieces: dict[int, list[tuple[int, int]]] = {}
    for axis, parts in enumerate(value.axes):
        k, sizes = 0, divided[axis]
        for part in (part for part in parts if part >= 0 and value.size(part) > 1):
            left = value.size(part)
            while left > 1:
                pieces.setdefault(part, []).append((axis, k))
                left //= sizes[k]
                k += 1
    shape, owners = [], []
    for part, size in enumerate(value.shape):
        for owner in pieces.get(part, [(-1, part)]):
            owners.append(owner)
            shape.append(divided[owner[0]][owner[1]] if owner[0] >= 0 else size)
    name = value.name
    if tuple(shape) != value.shape:
        name = reshaped(graph, name, value.shape, shape)
    return name, tuple(shape), owners
