"""Let the layers of a graph compute in float16, and all else in float32 as before.

Tensors are float16 from one layer to the next. Where something else reads them, such as the
decoding of boxes, they are cast.
"""

import numpy as np

from mask_rcnn_jax.jax_to_onnx.graph import Graph

LAYERS = ("Conv", "ConvTranspose", "Gemm")
# Operators that leave a float16 tensor in float16, by the places of such inputs; None: all inputs.
BETWEEN = {
    "Relu": [0],
    "MaxPool": [0],
    "Resize": [0],
    "Transpose": [0],
    "Reshape": [0],
    "Unsqueeze": [0],
    "Slice": [0],
    "Gather": [0],
    "Expand": [0],
    "Pad": [0, 2],
    "Where": [1, 2],
    "Concat": None,
    "Add": None,
}
LARGEST = float(np.finfo(np.float16).max)


def to_float16(graph: Graph) -> None:
    """Make the layers' weights float16, and cast tensors where they begin and end.

    Inputs and outputs of the graph keep their types. Raises ValueError for weights that are too
    large.
    """
    from onnx import TensorProto, helper

    halves: set[str] = set()  # float16 tensors
    casts: dict[str, str] = {}  # their float32 casts, or the other way round
    nodes = []

    def cast(name: str, dtype: str) -> str:
        if name not in casts:
            casts[name] = graph.unique(f"{name}/{dtype.lower()}")
            to = getattr(TensorProto, dtype)
            nodes.append(helper.make_node("Cast", [name], [casts[name]], casts[name], to=to))
        return casts[name]

    for node in graph.nodes:
        places = _halved(graph, node, halves)
        for i, name in enumerate(node.input):
            if i in places and name in graph.constants:
                node.input[i] = _constant(graph, name)
            elif i in places and name not in halves:
                node.input[i] = cast(name, "FLOAT16")
            elif i not in places and name in halves:
                node.input[i] = cast(name, "FLOAT")
        nodes.append(node)
        if places:
            halves.update(node.output)
    graph.nodes = nodes
    read = {name for node in nodes for name in node.input}
    graph.constants = {name: value for name, value in graph.constants.items() if name in read}


def _halved(graph: Graph, node, halves: set[str]) -> list[int]:
    """Return the places of a node's inputs that are to be float16."""
    every = [i for i, name in enumerate(node.input) if name]
    if node.op_type in LAYERS and node.input[1] in graph.constants:
        return every
    places = BETWEEN.get(node.op_type, [])
    places = every if places is None else [i for i in places if i in every]
    known = [i for i in places if node.input[i] in graph.constants]
    given = [i for i in places if i not in known]
    return places if given and all(node.input[i] in halves for i in given) else []


def _constant(graph: Graph, name: str) -> str:
    """Add a constant in float16."""
    value = graph.constants[name]
    if np.abs(value).max(initial=0) > LARGEST:
        raise ValueError(f"--float16: {name} has numbers above {LARGEST:.0f}")
    return graph.constant(value.astype(np.float16), f"{name}:float16")
