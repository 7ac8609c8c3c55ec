"""Simplify a graph: norms and biases become part of layers, softmax one node, dead nodes go."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from mask_rcnn_jax.jax_to_onnx.graph import Graph


def clean_up(graph: Graph, outputs: Iterable[str]) -> None:
    """Simplify a graph with these outputs, whose names stay."""
    kept = set(outputs)
    _fuse_softmax(graph)
    _drop_dead(graph, kept)
    _fold_affine(graph, kept)
    _move_reshapes(graph, kept)
    _drop_dead(graph, kept)


def _drop_dead(graph: Graph, kept: set[str]) -> None:
    needed, alive = set(kept), []
    for node in reversed(graph.nodes):
        if needed.intersection(node.output):
            alive.append(node)
            needed.update(node.input)
    graph.nodes = alive[::-1]
    graph.constants = {name: v for name, v in graph.constants.items() if name in needed}


def _fuse_softmax(graph: Graph) -> None:
    """Make exp(x - max(x)) / sum(exp(x - max(x))) one node."""
    from onnx import helper

    made = {name: node for node in graph.nodes for name in node.output}

    def producer(name: str, kind: str):
        node = made.get(name)
        return node if node is not None and node.op_type == kind else None

    for node in graph.nodes:
        if node.op_type != "Div":
            continue
        power, total = producer(node.input[0], "Exp"), producer(node.input[1], "ReduceSum")
        shifted = power and producer(power.input[0], "Sub")
        highest = shifted and producer(shifted.input[1], "ReduceMax")
        if not total or not highest or total.input[0] != power.output[0]:
            continue
        axes = graph.constants[total.input[1]].tolist()
        if (
            len(axes) == 1
            and _axes(graph, highest) == axes
            and highest.input[0] == shifted.input[0]
        ):
            node.op_type = "Softmax"
            del node.input[:]
            node.input.append(shifted.input[0])
            node.attribute.append(helper.make_attribute("axis", axes[0]))


def _axes(graph: Graph, node) -> list[int]:
    """Axes of a reduction: since opset 18, an input."""
    if len(node.input) > 1:
        return graph.constants[node.input[1]].tolist()
    return list(next(each.ints for each in node.attribute if each.name == "axes"))


def _fold_affine(graph: Graph, kept: set[str]) -> None:
    """Fold sums and products with a number per channel into the convolution or Gemm in front."""
    readers = Counter(name for node in graph.nodes for name in node.input)
    layers: dict[str, Any] = {}  # by a tensor that one node reads: the layer that makes it
    names: dict[str, str] = {}  # new names of tensors
    left = []
    for node in graph.nodes:
        for i, name in enumerate(node.input):
            node.input[i] = names.get(name, name)
        layer = next((layers.pop(name) for name in list(node.input) if name in layers), None)
        if node.op_type in ("Conv", "Gemm") and node.input[1] in graph.constants:
            layer = node
        elif layer is not None and _is_folded(graph, layer, node):
            source = next(name for name in node.input if name not in graph.constants)
            names[node.output[0]] = source
            if readers[node.output[0]] == 1 and node.output[0] not in kept:
                layers[source] = layer
            continue
        elif layer is None or not _keeps_channels(graph, layer, node):
            layer = None
        left.append(node)
        if layer is not None and readers[node.output[0]] == 1 and node.output[0] not in kept:
            layers[node.output[0]] = layer
    graph.nodes = left


def _keeps_channels(graph: Graph, layer, node) -> bool:
    """Whether a node reshapes a Gemm's rows and leaves the last axis alone."""
    shape = graph.constants.get(node.input[1]) if node.op_type == "Reshape" else None
    channels = graph.constants[layer.input[1]].shape[-1]
    return layer.op_type == "Gemm" and shape is not None and shape[-1:].tolist() == [channels]


def _is_folded(graph: Graph, layer, node) -> bool:
    """Fold a node into the layer whose output it reads, if it can be."""
    if node.op_type not in ("Add", "Sub", "Mul", "Div") or len(set(node.input)) != 2:
        return False
    number = graph.constants.get(node.input[1])
    if number is None and node.op_type in ("Add", "Mul"):
        number = graph.constants.get(node.input[0])
    kernel = graph.constants[layer.input[1]]
    axis = 0 if layer.op_type == "Conv" else 1  # of the kernel's outputs
    count, behind = kernel.shape[axis], kernel.ndim - 2 if layer.op_type == "Conv" else 0
    if number is None:
        return False
    places = [count, *[1] * behind]  # of channels, among the last axes
    shape = [1] * (behind + 1 - number.ndim) + list(number.shape)
    if number.size != 1 and (shape[-behind - 1 :] != places or number.size != count):
        return False
    number = np.broadcast_to(number.reshape(-1), (count,)).astype(np.float32)
    has_bias = len(layer.input) > 2
    bias = graph.constants[layer.input[2]] if has_bias else np.zeros(count, np.float32)
    if node.op_type in ("Mul", "Div"):
        scale = number if node.op_type == "Mul" else 1 / number
        along = scale.reshape([-1 if i == axis else 1 for i in range(kernel.ndim)])
        name = graph.unique(f"{layer.name}/kernel")
        layer.input[1] = graph.constant(kernel * along, name)
        bias = bias * scale
    else:
        bias = bias + number if node.op_type == "Add" else bias - number
    name = graph.constant(bias, graph.unique(f"{layer.name}/bias"))
    if has_bias:
        layer.input[2] = name
    else:
        layer.input.append(name)
    return True


def _move_reshapes(graph: Graph, kept: set[str]) -> None:
    """Put a ReLU directly behind its layer, before a Reshape, and leave out those that undo others.

    As in a graph for one image; else int8 would round a layer's output before and after its ReLU.
    """
    readers = Counter(name for node in graph.nodes for name in node.input)
    made: dict[str, Any] = {}
    names: dict[str, str] = {}  # new names of tensors
    left = []
    for node in graph.nodes:
        for i, name in enumerate(node.input):
            node.input[i] = names.get(name, name)
        before = made.get(node.input[0]) if node.input else None
        if before is not None and before.op_type == "Reshape":
            (middle,) = before.output
            if node.op_type == "Reshape":
                node.input[0] = before.input[0]
            elif node.op_type == "Relu" and readers[middle] == 1 and middle not in kept:
                shape = before.input.pop()
                before.op_type, node.op_type = "Relu", "Reshape"
                before.name, node.name = node.name, before.name
                node.input.append(shape)
        if node.op_type == "Reshape" and not kept.intersection(node.output):
            if _has_rows(graph, made, node):
                names[node.output[0]] = node.input[0]
                continue
        made.update((name, node) for name in node.output)
        left.append(node)
    graph.nodes = left


def _has_rows(graph: Graph, made: dict[str, Any], reshape) -> bool:
    """Whether what a node reshapes to [n, C] is that already, from a Gemm."""
    source = made.get(reshape.input[0])
    if source is not None and source.op_type == "Relu":
        source = made.get(source.input[0])
    shape, kernel = graph.constants.get(reshape.input[1]), None
    if source is not None and source.op_type == "Gemm":
        kernel = graph.constants.get(source.input[1])
    return (
        shape is not None
        and kernel is not None
        and len(shape) == 2
        and (shape[1] == kernel.shape[1])
    )
