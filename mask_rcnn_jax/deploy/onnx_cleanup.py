"""Simplify a graph: norms and biases become part of layers, softmax one node, dead nodes go."""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from mask_rcnn_jax.deploy.onnx_graph import Graph

AFFINE = ("Add", "Sub", "Mul", "Div")


def clean_up(graph: Graph, outputs: Iterable[str]) -> None:
    """Simplify a graph with these outputs, whose names stay."""
    kept = set(outputs)
    _fuse_softmax(graph, kept)
    _fold_affine(graph, kept)
    _drop_dead(graph, kept)


def _readers(graph: Graph) -> Counter:
    return Counter(name for node in graph.nodes for name in node.input)


def _drop_dead(graph: Graph, kept: set[str]) -> None:
    needed, alive = set(kept), []
    for node in reversed(graph.nodes):
        if needed.intersection(node.output):
            alive.append(node)
            needed.update(node.input)
    graph.nodes = alive[::-1]
    graph.constants = {name: v for name, v in graph.constants.items() if name in needed}


def _rename(graph: Graph, names: dict[str, str]) -> None:
    for node in graph.nodes:
        for i, name in enumerate(node.input):
            while name in names:
                name = names[name]
            node.input[i] = name


def _fold_affine(graph: Graph, kept: set[str]) -> None:
    """Fold sums and products with a number per channel into the convolution or Gemm in front."""
    _drop_dead(graph, kept)
    readers, names, folded = _readers(graph), {}, []
    layers: dict[str, tuple] = {}  # by a tensor that only one node reads: layer, axes behind it
    for node in graph.nodes:
        source = next((name for name in node.input if name in layers), None)
        if node.op_type in ("Conv", "Gemm") and node.input[1] in graph.constants:
            own, target = node, node.output[0]
            behind = 2 if node.op_type == "Conv" else 0
            behind = graph.constants[node.input[1]].ndim - 2 if node.op_type == "Conv" else 0
        elif source and node.op_type == "Reshape" and layers[source][1] == 0:
            own, behind = layers[source]
            shape = graph.constants.get(node.input[1])
            weights = graph.constants[own.input[1]]
            if shape is None or shape[-1] != weights.shape[1]:
                continue
            target = node.output[0]
        elif source and node.op_type in AFFINE and _fold(graph, node, source, *layers[source]):
            own, behind = layers[source]
            names[node.output[0]] = source
            folded.append(node)
            target = node.output[0]
        else:
            continue
        if readers[target] == 1 and target not in kept:
            layers[target] = own, behind
        for name in node.input:
            layers.pop(name, None) if node not in folded else None
    dead = {id(node) for node in folded}
    graph.nodes = [node for node in graph.nodes if id(node) not in dead]
    _rename(graph, names)


def _fold(graph: Graph, node, source: str, layer, behind: int) -> bool:
    """Fold a node that reads `source` into a layer; return whether it could be."""
    first = node.input[0] == source
    number = graph.constants.get(node.input[1] if first else node.input[0])
    if (
        number is None
        or node.input[0] == node.input[1]
        or not (first or node.op_type in AFFINE[::2])
    ):
        return False
    if number.ndim and not behind and node.op_type in AFFINE and number.ndim > 1:
        number = number.reshape(number.shape[number.ndim - 1 :]) if _is_row(number) else number
    kernel = graph.constants[layer.input[1]]
    axis = 0 if layer.op_type == "Conv" else 1
    count = kernel.shape[axis]
    shape = number.shape
    if behind and number.ndim > behind + 1 and set(shape[: -behind - 1]) == {1}:
        shape = shape[-behind - 1 :]
    if number.size != 1 and shape != (count, *[1] * behind):
        return False
    if number.size == 1 and number.ndim > behind + 2:
        return False
    number = np.broadcast_to(number.reshape(-1), (count,)).astype(np.float32)
    bias = graph.constants[layer.input[2]] if len(layer.input) > 2 else np.zeros(count, np.float32)
    if node.op_type in ("Add", "Sub"):
        bias = bias + number if node.op_type == "Add" else bias - number
    else:
        scale = number if node.op_type == "Mul" else 1 / number
        bias = bias * scale
        along = scale.reshape([-1 if i == axis else 1 for i in range(kernel.ndim)])
        layer.input[1] = _replace(graph, f"{layer.name}/kernel", kernel * along)
    name = _replace(graph, f"{layer.name}/bias", bias)
    if len(layer.input) > 2:
        layer.input[2] = name
    else:
        layer.input.append(name)
    return True


def _is_row(number: np.ndarray) -> bool:
    return set(number.shape[:-1]) <= {1}


def _replace(graph: Graph, name: str, array: np.ndarray) -> str:
    """Add a constant under a name of its own."""
    return graph.constant(array, graph.unique(name))


def _fuse_softmax(graph: Graph, kept: set[str]) -> None:
    """exp(x - max) / sum of these."""
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
        if not (total and highest) or total.input[0] != power.output[0]:
            continue
        axes = graph.constants[total.input[1]].tolist()
        if len(axes) == 1 and highest.input[0] == shifted.input[0]:
            x = shifted.input[0]
            node.op_type = "Softmax"
            del node.input[:]
            node.input.append(x)
            from onnx import helper

            node.attribute.append(helper.make_attribute("axis", axes[0]))
