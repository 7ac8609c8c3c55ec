"""Rules for convolutions, matrix products and pooling.

A layer's node has the name of its variables, such as backbone/res2_0/conv1, by which quantization
tells layers apart. Products with weights are Conv on maps and Gemm elsewhere: runtimes have int8
kernels for both.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from mask_rcnn_jax.jax_to_onnx import values
from mask_rcnn_jax.jax_to_onnx.graph import CannotConvert, Graph, floats
from mask_rcnn_jax.jax_to_onnx.values import (
    Equation,
    Known,
    Value,
    arrange,
    in_order,
    reshaped,
    stored,
    tensor,
    transpose,
)


def layer_name(graph: Graph, weights: Value | Known) -> str:
    """Return a new name for a node, that of the layer whose weights it has."""
    origin = weights.origin if isinstance(weights, Known) else ""
    return graph.unique(origin.rpartition("/")[0]) if "/" in origin else ""


def convolution(graph: Graph, eqn: Equation, given: list) -> Value:
    x, kernel = given
    params = eqn.params
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    if params["batch_group_count"] != 1:
        raise CannotConvert("a convolution in groups of images")
    image, weights = arrange(graph, x, numbers.lhs_spec), arrange(graph, kernel, numbers.rhs_spec)
    pads, dilation = params["padding"], params["rhs_dilation"]
    options: dict[str, Any] = {}
    if set(dilation) != {1}:
        options["dilations"] = dilation
    if groups > 1:
        options["group"] = groups
    sides = [kernel.sizes[axis] for axis in numbers.rhs_spec[2:]]
    options |= dict(kernel_shape=sides)
    name = layer_name(graph, kernel)
    op, strides = "Conv", params["window_strides"]
    if set(params["lhs_dilation"]) != {1}:
        if groups > 1 or not isinstance(kernel, Known) or set(strides) != {1}:
            raise CannotConvert("this transposed convolution")
        op, strides = "ConvTranspose", params["lhs_dilation"]
        flipped = np.flip(kernel.array.transpose(numbers.rhs_spec), tuple(range(2, len(sides) + 2)))
        weights = stored(graph, flipped.swapaxes(0, 1), kernel)
        spans = [d * (side - 1) for d, side in zip(dilation, sides, strict=True)]
        ends = [(span - low, span - high) for span, (low, high) in zip(spans, pads, strict=True)]
        extra = [max(-end, 0) for _, end in ends]  # rows behind the last
        if any(n >= max(pair) for n, *pair in zip(extra, strides, dilation, strict=True)):
            raise CannotConvert("a transposed convolution with this much padding")
        options["output_padding"] = extra
        pads = [(start, end + more) for (start, end), more in zip(ends, extra, strict=True)]
    if min(min(each) for each in pads) < 0:
        raise CannotConvert("a convolution with negative padding")
    edges = [low for low, _ in pads] + [high for _, high in pads]
    options |= dict(strides=strides, pads=edges)
    y = graph.op(op, image, weights, name=name, **options)
    shape = [eqn.outvars[0].aval.shape[axis] for axis in numbers.out_spec]
    return tensor(y, shape, np.argsort(numbers.out_spec).tolist())


def product(graph: Graph, eqn: Equation, given: list) -> Value:
    lhs, rhs = given
    (left, right), (left_images, right_images) = eqn.params["dimension_numbers"]
    is_layer = not left_images and eqn.outvars[0].aval.dtype.kind not in "iu"
    if isinstance(rhs, Known) and is_layer:
        return weighted(graph, lhs, left, rhs, right)
    if isinstance(lhs, Known) and is_layer:
        turned = weighted(graph, rhs, right, lhs, left)
        own = len(rhs.sizes) - len(right)
        return transpose(turned, [*range(own, len(turned.axes)), *range(own)])
    sides = (lhs, left, left_images), (rhs, right, right_images)
    for (big, inner, images), other in (sides, sides[::-1]):
        if isinstance(big, Value) and _is_between(big, inner, images):
            if len(other[0].sizes) == len(images) + 1:
                return _in_place(graph, big, inner, images, *other)
    free = [
        [i for i in range(len(v.sizes)) if i not in (*inner, *images)] for v, inner, images in sides
    ]
    images_shape = [lhs.sizes[i] for i in left_images]
    inner = prod(lhs.sizes[i] for i in left)
    rows, columns = ([v.sizes[i] for i in f] for v, f in zip((lhs, rhs), free, strict=True))
    summed = [lhs.sizes[i] for i in left]
    a = arrange(graph, lhs, [*left_images, *free[0], *left])
    a = reshaped(graph, a, [*images_shape, *rows, *summed], [*images_shape, prod(rows), inner])
    b = arrange(graph, rhs, [*right_images, *right, *free[1]])
    held = [*images_shape, *summed, *columns]
    b = reshaped(graph, b, held, [*images_shape, inner, prod(columns)])
    y = graph.op("MatMul", a, b)
    wanted = [*images_shape, *rows, *columns]
    y = reshaped(graph, y, [*images_shape, prod(rows), prod(columns)], wanted)
    return tensor(y, wanted)


def weighted(
    graph: Graph, x: Value, axes: Sequence[int], weights: Known, weight_axes: Sequence[int]
) -> Value:
    """Multiply by known weights and sum over axes; the weights' other axes come last."""
    if any(min(parts, default=0) < 0 for parts in x.axes):
        x = tensor(arrange(graph, x), x.sizes)
    own = [i for i in range(weights.array.ndim) if i not in weight_axes]
    sizes = [weights.array.shape[i] for i in own]
    inner = [part for i in axes for part in x.axes[i] if x.size(part) > 1]
    matrix = weights.array.transpose((*weight_axes, *own))
    matrix = matrix.reshape([x.size(part) for part in inner] + [prod(sizes)])
    matrix = matrix.transpose((*np.argsort(inner), len(inner)))  # as the tensor has them
    matrix = matrix.reshape(-1, prod(sizes))
    outer = [parts for i, parts in enumerate(x.axes) if i not in axes]
    name = layer_name(graph, weights)
    if len(x.shape) == 4 and inner == [1]:
        kernel = stored(graph, matrix.T[:, :, None, None], weights)
        y = graph.op("Conv", x.name, kernel, name=name, kernel_shape=[1, 1])
        result = Value(y, (x.shape[0], prod(sizes), *x.shape[2:]), (*outer, (1,)))
    else:
        rest = [i for i in range(len(x.shape)) if i not in inner]
        lines, shape = in_order(graph, x.name, x.shape, [*rest, *sorted(inner)])
        shape = shape[: len(rest)]
        flat = (prod(shape), len(matrix))
        before = tuple(x.shape[i] for i in [*rest, *sorted(inner)])
        lines = reshaped(graph, lines, before, flat)
        y = graph.op("Gemm", lines, stored(graph, matrix, weights), name=name)
        y = reshaped(graph, y, (flat[0], prod(sizes)), (*shape, prod(sizes)))
        places = {part: place for place, part in enumerate(rest)}
        kept = (tuple(places[part] for part in parts if part in places) for parts in outer)
        result = Value(y, (*shape, prod(sizes)), (*kept, (len(rest),)))
    wanted = [*result.sizes[:-1], *sizes]
    return result if len(sizes) == 1 else values.reshape(graph, result, wanted)


def _is_between(x: Value, axes: Sequence[int], images: Sequence[int]) -> bool:
    """Whether the images' axes come first in the tensor and the summed one before others."""
    first = [part for i in images for part in x.axes[i]]
    inner = [part for i in axes for part in x.axes[i]]
    is_plain = all(part >= 0 for parts in x.axes for part in parts)
    leads = first == list(range(len(images))) and list(images) == list(range(len(images)))
    return is_plain and leads and len(inner) == 1 and inner[0] < len(x.shape) - 1


def _in_place(
    graph: Graph,
    x: Value,
    axes: Sequence[int],
    images: Sequence[int],
    vector: Value | Known,
    vector_axes: Sequence[int],
    vector_images: Sequence[int],
) -> Value:
    """Sum over an axis of a large tensor, times a vector for each image, where it stands."""
    count, place = len(images), x.axes[axes[0]][0]
    before, size, after = x.shape[count:place], x.shape[place], x.shape[place + 1 :]
    row = arrange(graph, vector, [*vector_images, *vector_axes])
    lead = x.shape[:count]
    row = reshaped(graph, row, (*lead, size), (*lead, 1, 1, size))
    cells = reshaped(graph, x.name, x.shape, (*lead, prod(before), size, prod(after)))
    y = graph.op("MatMul", row, cells)
    shape = (*lead, *before, *after)
    y = reshaped(graph, y, (*lead, prod(before), 1, prod(after)), shape)
    kept = [parts for i, parts in enumerate(x.axes) if i not in axes]
    moved = (tuple(part - (part > place) for part in parts) for parts in kept)
    return Value(y, shape, tuple(moved))


def _pool(graph: Graph, eqn: Equation, x: Value, op: str, **options: Any) -> Value:
    params = eqn.params
    sides, steps = params["window_dimensions"], params["window_strides"]
    if len(sides) != 4 or {*params["base_dilation"], *params["window_dilation"]} != {1}:
        raise CannotConvert("this pooling")
    moving = [i for i in range(4) if (sides[i], steps[i]) != (1, 1)]
    if len(moving) > 2:
        raise CannotConvert("pooling along more than two axes")
    moving += [i for i in (2, 1) if i not in moving][: 2 - len(moving)]
    order = [i for i in range(4) if i not in moving] + sorted(moving)
    pads = [params["padding"][i] for i in order[2:]]
    options |= dict(kernel_shape=[sides[i] for i in order[2:]])
    options |= dict(strides=[steps[i] for i in order[2:]])
    options["pads"] = [low for low, _ in pads] + [high for _, high in pads]
    y = graph.op(op, arrange(graph, x, order), **options)
    shape = eqn.outvars[0].aval.shape
    return tensor(y, [shape[i] for i in order], np.argsort(order).tolist())


def max_pool(graph: Graph, eqn: Equation, given: list) -> Value:
    return _pool(graph, eqn, given[0], "MaxPool")


def sum_pool(graph: Graph, eqn: Equation, given: list) -> Value:
    y = _pool(graph, eqn, given[0], "AveragePool", count_include_pad=1)
    count = floats(float(prod(eqn.params["window_dimensions"])))
    return y._replace(name=graph.op("Mul", y.name, count))


RULES: dict[str, Any] = {
    "conv_general_dilated": convolution,
    "dot_general": product,
    "reduce_window_max": max_pool,
    "reduce_window_sum": sum_pool,
}
