"""One rule per JAX primitive: shapes, parts of arrays and indexing."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from jax import lax

from mask_rcnn_jax.jax_to_onnx import values
from mask_rcnn_jax.jax_to_onnx.graph import CannotConvert, Graph, ints
from mask_rcnn_jax.jax_to_onnx.values import Equation, Known, Value, arrange, tensor


def iota(graph: Graph, eqn: Equation, given: list) -> Known:
    shape, axis = eqn.params["shape"], eqn.params["dimension"]
    line = np.arange(shape[axis], dtype=eqn.params["dtype"])
    line = line.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return Known(np.broadcast_to(line, shape))


def broadcast(graph: Graph, eqn: Equation, given: list) -> Value | Known:
    shape, places = eqn.outvars[0].aval.shape, eqn.params["broadcast_dimensions"]
    x = given[0]
    if isinstance(x, Known):
        full = [1] * len(shape)
        for size, place in zip(x.array.shape, places, strict=True):
            full[place] = size
        return x._replace(array=np.broadcast_to(x.array.reshape(full), shape))
    return values.broadcast(x, shape, places)


def tile(graph: Graph, eqn: Equation, given: list) -> Value:
    x, counts = given[0], eqn.params["reps"]
    repeated = [((-count,) if count > 1 else ()) for count in counts]
    return x._replace(axes=tuple(r + axis for r, axis in zip(repeated, x.axes, strict=True)))


def reshape(graph: Graph, eqn: Equation, given: list) -> Value | Known:
    """Also of axes of size 1 that are left out or put in."""
    x, shape = given[0], eqn.outvars[0].aval.shape
    if isinstance(x, Known):
        return x._replace(array=x.array.reshape(shape))
    return values.reshape(graph, x, shape)


def transpose(graph: Graph, eqn: Equation, given: list) -> Value | Known:
    x, order = given[0], eqn.params["permutation"]
    if isinstance(x, Known):
        return x._replace(array=x.array.transpose(order))
    return values.transpose(x, order)


def single(graph: Graph, value: Value, axes: Sequence[int]) -> Value:
    """Return an array whose tensor has each of these axes as a whole."""
    if all(len(value.axes[i]) == 1 and value.axes[i][0] >= 0 for i in axes):
        return value
    return tensor(arrange(graph, value), value.sizes)


def cut(
    graph: Graph,
    value: Value,
    starts: Sequence[int],
    stops: Sequence[int],
    steps: Sequence[int],
    *,
    is_map: bool = False,
) -> Value:
    """Take a part of an array. is_map: subsample by MaxPool where that is possible."""
    sizes = value.sizes
    wanted = [
        i
        for i, bounds in enumerate(zip(starts, stops, steps, strict=True))
        if bounds != (0, sizes[i], 1)
    ]
    value = single(graph, value, wanted)
    if not wanted:
        return value
    if any(graph.is_batch(sizes[i]) for i in wanted):
        raise CannotConvert("a part of a batch without --batch")
    places = [value.axes[i][0] for i in wanted]
    if value.name in graph.pieces and len(wanted) == 1 and steps[wanted[0]] == 1:
        axis, names, shapes = graph.pieces[value.name]
        ends = np.cumsum([0, *(each[axis] for each in shapes)]).tolist()
        bounds = starts[wanted[0]], stops[wanted[0]]
        if axis == places[0] and bounds in list(zip(ends, ends[1:], strict=False)):
            k = ends.index(bounds[0])
            return value._replace(name=names[k], shape=shapes[k])
    shape = list(value.shape)
    for i, place in zip(wanted, places, strict=True):
        shape[place] = len(range(starts[i], stops[i], steps[i]))
    subsampled = all(starts[i] == 0 and 1 < steps[i] and stops[i] == sizes[i] for i in wanted)
    if is_map and len(shape) == 4 and subsampled and places == [2, 3]:
        options: dict[str, Any] = dict(kernel_shape=[1, 1], strides=[steps[i] for i in wanted])
        return value._replace(name=graph.op("MaxPool", value.name, **options), shape=tuple(shape))
    limits = ([each[i] for i in wanted] for each in (starts, stops))
    inputs = [*(ints(*limit) for limit in limits), ints(*places)]
    if any(steps[i] != 1 for i in wanted):
        inputs.append(ints(*(steps[i] for i in wanted)))
    return value._replace(name=graph.op("Slice", value.name, *inputs), shape=tuple(shape))


def slice_rule(graph: Graph, eqn: Equation, given: list) -> Value | Known:
    starts, stops = eqn.params["start_indices"], eqn.params["limit_indices"]
    steps = eqn.params["strides"] or (1,) * len(starts)
    if isinstance(given[0], Known):
        return given[0]._replace(array=given[0].array[tuple(map(slice, starts, stops, steps))])
    is_map = eqn.invars[0].aval.dtype.kind == "f"
    return cut(graph, given[0], starts, stops, steps, is_map=is_map)


def dynamic_slice(graph: Graph, eqn: Equation, given: list) -> Value | None:
    """With known places, as of x[i] with an array i."""
    x, *places = given
    if not isinstance(x, Value) or not all(isinstance(each, Known) for each in places):
        return None
    sides = eqn.params["slice_sizes"]
    limits = (size - side for size, side in zip(x.sizes, sides, strict=True))
    starts = [
        int(np.clip(each.array, 0, limit)) for each, limit in zip(places, limits, strict=True)
    ]
    stops = [start + side for start, side in zip(starts, sides, strict=True)]
    return cut(graph, x, starts, stops, (1,) * len(starts))


def split(graph: Graph, eqn: Equation, given: list) -> list[Value]:
    return parts(graph, given[0], eqn.params["axis"], eqn.params["sizes"])


def unstack(graph: Graph, eqn: Equation, given: list) -> list[Value]:
    rows = parts(graph, given[0], eqn.params["axis"], [1] * len(eqn.outvars))
    return [values.reshape(graph, row, eqn.outvars[0].aval.shape) for row in rows]


def parts(graph: Graph, x: Value, axis: int, sizes: Sequence[int]) -> list[Value]:
    """Cut an array along an axis into parts of these sizes."""
    start, found = 0, []
    for size in map(int, sizes):
        starts, stops = [0] * len(x.sizes), list(x.sizes)
        starts[axis], stops[axis] = start, start + size
        found.append(cut(graph, x, starts, stops, (1,) * len(starts)))
        start += size
    return found


def reverse(graph: Graph, eqn: Equation, given: list) -> Value:
    axes = eqn.params["dimensions"]
    x = single(graph, given[0], axes)
    count = len(axes)
    limits = ints(*[-1] * count), ints(*[-(2**31)] * count), ints(*(x.axes[i][0] for i in axes))
    return x._replace(name=graph.op("Slice", x.name, *limits, ints(*[-1] * count)))


def concatenate(graph: Graph, eqn: Equation, given: list) -> Value:
    """Along an axis that each tensor has as a whole, as all other axes."""
    axis = eqn.params["dimension"]
    return join(graph, given, [atom.aval.shape for atom in eqn.invars], axis)


def stack(graph: Graph, eqn: Equation, given: list) -> Value:
    axis = eqn.params["axis"]
    shape = list(eqn.invars[0].aval.shape)
    shape.insert(axis, 1)
    apart: list[Value | Known] = []
    for each in given:
        if isinstance(each, Known):
            apart.append(each._replace(array=each.array.reshape(shape)))
        else:
            apart.append(values.reshape(graph, each, shape))
    return join(graph, apart, [tuple(shape)] * len(apart), axis)


def join(graph: Graph, given: list, shapes: list[tuple[int, ...]], axis: int) -> Value:
    given = [each for each, shape in zip(given, shapes, strict=True) if shape[axis]]
    shapes = [shape for shape in shapes if shape[axis]]
    shape = list(shapes[0])
    shape[axis] = sum(each[axis] for each in shapes)
    leader = max(given, key=lambda each: prod(each.sizes) * isinstance(each, Value))
    order = list(range(len(shape)))
    if all(len(parts) <= 1 for parts in leader.axes) and len(leader.shape) == len(shape):
        places = [parts[0] if parts else -1 for parts in leader.axes]
        if sorted(places) == order:
            order = np.argsort(places).tolist()
    names = [arrange(graph, each, order) for each in given]
    name = graph.concat(*names, axis=order.index(axis))
    graph.pieces[name] = order.index(axis), names, [tuple(s[i] for i in order) for s in shapes]
    return tensor(name, [shape[i] for i in order], np.argsort(order).tolist())


def pad(graph: Graph, eqn: Equation, given: list) -> Value:
    x, filler = given
    config = eqn.params["padding_config"]
    if any(inner for _, _, inner in config) or not isinstance(filler, Known):
        raise CannotConvert("a padding between elements, or with a computed number")
    if isinstance(x, Known):
        x = tensor(arrange(graph, x), x.sizes)
    starts = [max(-low, 0) for low, _, _ in config]
    stops = [size - max(-high, 0) for size, (_, high, _) in zip(x.sizes, config, strict=True)]
    x = cut(graph, x, starts, stops, (1,) * len(stops))
    wanted = [i for i, (low, high, _) in enumerate(config) if low > 0 or high > 0]
    if not wanted:
        return x
    x = single(graph, x, wanted)
    before, after = [0] * len(x.shape), [0] * len(x.shape)
    for i in wanted:
        before[x.axes[i][0]], after[x.axes[i][0]] = (max(side, 0) for side in config[i][:2])
    shape = [sum(each) for each in zip(before, x.shape, after, strict=True)]
    name, is_bool = x.name, eqn.outvars[0].aval.dtype == bool
    value = filler.array.astype(np.int64 if filler.array.dtype.kind in "biu" else np.float32)
    name = graph.cast(name, "INT64") if is_bool else name
    name = graph.op("Pad", name, ints(*before, *after), value)
    return x._replace(name=graph.cast(name, "BOOL") if is_bool else name, shape=tuple(shape))


def top_k(graph: Graph, eqn: Equation, given: list) -> list[Value]:
    """Equal values keep their order in both."""
    if eqn.params.get("axis", len(given[0].sizes) - 1) != len(given[0].sizes) - 1:
        raise CannotConvert("top_k along another axis than the last")
    names = graph.top_k(arrange(graph, given[0]), eqn.params["k"])
    graph.nonnegative.add(names[1])
    return [tensor(name, eqn.outvars[0].aval.shape) for name in names]


def gather(graph: Graph, eqn: Equation, given: list) -> Value:
    """Take rows along one axis: x[index], or `take_along_axis` with images in front."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    x, index = given
    shape, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    index_shape = eqn.invars[1].aval.shape[:-1]
    rows = tuple(numbers.start_index_map)
    images = tuple(numbers.operand_batching_dims)
    single_row = len(rows) == 1 and tuple(numbers.collapsed_slice_dims) == rows
    whole = all(sizes[i] == shape[i] for i in range(len(shape)) if i not in rows + images)
    in_front = images == tuple(range(len(images))) == tuple(numbers.start_indices_batching_dims)
    if not single_row or not whole or not in_front:
        raise CannotConvert("this form of indexing")
    data, axis, places = arrange(graph, x), rows[0], arrange(graph, index)
    if graph.is_batch(shape[axis]):
        raise CannotConvert("a part of a batch without --batch")
    if eqn.params["mode"] == lax.GatherScatterMode.CLIP:
        places = graph.op("Min", graph.op("Max", places, ints(0)), ints(shape[axis] - 1))
    if not images:
        places = graph.reshape(places, *index_shape)
        name = graph.op("Gather", data, places, axis=axis)
        found = [*shape[:axis], *index_shape, *shape[axis + 1 :]]
        order = iter([i for i in range(len(found)) if axis <= i < axis + len(index_shape)])
        others = iter([i for i in range(len(found)) if not axis <= i < axis + len(index_shape)])
        places_of = [next(others if i in numbers.offset_dims else order) for i in range(len(out))]
        return tensor(name, found, places_of)
    if axis != len(images):
        raise CannotConvert("indexing along a later axis")
    name = graph.op("GatherND", data, places, batch_dims=len(images))
    found = [*index_shape, *shape[axis + 1 :]]
    order, others = iter(range(len(index_shape))), iter(range(len(index_shape), len(found)))
    return tensor(
        name, found, [next(others if i in numbers.offset_dims else order) for i in range(len(out))]
    )


def scatter(graph: Graph, eqn: Equation, given: list) -> Value:
    """Write numbers to places of the last axis, in each row of the axes in front."""
    numbers, shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    front, last = tuple(range(len(shape) - 1)), (len(shape) - 1,)
    batching = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    places_of = numbers.inserted_window_dims, numbers.scatter_dims_to_operand_dims
    if batching != (front, front) or places_of != (last, last) or numbers.update_window_dims:
        raise CannotConvert("this form of writing to places")
    x, index, values = (arrange(graph, each) for each in given)
    index = graph.reshape(index, *eqn.invars[1].aval.shape[:-1])
    return tensor(graph.op("ScatterElements", x, index, values, axis=last[0]), shape)


for _rule in (broadcast, reshape, transpose, iota, slice_rule):
    _rule.keeps_known = True  # type: ignore[attr-defined]


RULES: dict[str, Any] = {
    "iota": iota,
    "broadcast_in_dim": broadcast,
    "reshape": reshape,
    "squeeze": reshape,
    "expand_dims": reshape,
    "transpose": transpose,
    "tile": tile,
    "slice": slice_rule,
    "dynamic_slice": dynamic_slice,
    "split": split,
    "rev": reverse,
    "concatenate": concatenate,
    "stack": stack,
    "unstack": unstack,
    "pad": pad,
    "top_k": top_k,
    "gather": gather,
    "scatter": scatter,
}
