"""Build an ONNX graph from operators, constants and small operator combinations.

Values are referenced by name (str); numpy arrays passed instead become constants.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

OPSETS = range(16, 22)  # RoiAlign has half_pixel since 16; operators used are unchanged up to 21
# Score of invalid rows. Finite, so that half precision runtimes do not produce NaN.
INVALID_SCORE = -1e30


class Map(NamedTuple):
    """A feature map, [B, C, height, width]."""

    name: str
    height: int
    width: int


class Graph:
    """Nodes in execution order and constants."""

    def __init__(self):
        self.nodes, self.initializers = [], []
        self._constants: dict[str | tuple, str] = {}
        self._count = 0

    def op(self, op_type: str, *inputs: str | np.ndarray, name: str = "", **attributes: Any) -> str:
        """Append an operator with one output and return the output's name."""
        return self._node(op_type, inputs, attributes, name=name)[0]

    def _node(
        self, op_type: str, inputs: Sequence, attributes: dict, outputs: int = 1, name: str = ""
    ) -> list[str]:
        from onnx import helper

        self._count += 1
        name = name or f"{op_type}_{self._count}"
        results = [name] if outputs == 1 else [f"{name}:{i}" for i in range(outputs)]
        names = [value if isinstance(value, str) else self.constant(value) for value in inputs]
        self.nodes.append(helper.make_node(op_type, names, results, name=name, **attributes))
        return results

    def constant(self, value: np.ndarray, name: str = "") -> str:
        """Add a constant and return its name. Equal names or small equal values are shared."""
        from onnx import numpy_helper

        value = np.ascontiguousarray(value)
        small = value.size <= 64
        key = name or (small and (value.dtype.str, value.shape, value.tobytes()))
        if key and key in self._constants:
            return self._constants[key]
        name = name or f"constant_{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(value, name))
        if key:
            self._constants[key] = name
        return name

    def reshape(self, x: str, *shape: int) -> str:
        return self.op("Reshape", x, ints(*shape))

    def unsqueeze(self, x: str, axis: int) -> str:
        return self.op("Unsqueeze", x, ints(axis))

    def slice(self, x: str, start: int, stop: int, axis: int) -> str:
        return self.op("Slice", x, ints(start), ints(stop), ints(axis))

    def concat(self, *parts: str | np.ndarray, axis: int) -> str:
        first, *more = parts
        if isinstance(first, str) and not more:
            return first
        return self.op("Concat", *parts, axis=axis)

    def cast(self, x: str, dtype: str, name: str = "") -> str:
        """Cast to a dtype of onnx.TensorProto, such as "FLOAT"."""
        from onnx import TensorProto

        return self.op("Cast", x, to=getattr(TensorProto, dtype), name=name)

    def gather_rows(self, x: str, index: str) -> str:
        """Gather x[b, index[b, m]], [B, M, ...], from x [B, N, ...] and index [B, M]."""
        return self.op("GatherND", x, self.unsqueeze(index, 2), batch_dims=1)

    def top_k(self, x: str, count: int) -> list[str]:
        """Values and int64 indices of the largest elements on the last axis, in descending order;
        ties are sorted by index."""
        attributes = {"axis": -1, "largest": 1, "sorted": 1}
        return self._node("TopK", (x, ints(count)), attributes, outputs=2)

    def pad_rows(self, x: str, shape: Sequence[int], count: int, dtype) -> str:
        """Pad x [B, shape[1], ...] with zero rows to [B, count, ...]."""
        if shape[1] == count:
            return x
        zeros = np.zeros((shape[0], count - shape[1], *shape[2:]), dtype)
        return self.concat(x, zeros, axis=1)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def floats(*values: float) -> np.ndarray:
    """Return a float32 array [n], or a scalar for a single value."""
    return np.array(values if len(values) > 1 else values[0], np.float32)


def make_model_proto(
    graph: Graph, name: str, inputs: dict[str, tuple], outputs: dict[str, tuple], opset: int
):
    """Make and check an `onnx.ModelProto`.

    inputs, outputs: (dtype as in TensorProto, shape) by name. Raises ValueError for an unsupported
    opset.
    """
    import onnx
    from onnx import helper

    if opset not in OPSETS:
        raise ValueError(f"--opset is {opset}, expected {OPSETS.start} to {OPSETS.stop - 1}")

    def infos(values):
        return [
            helper.make_tensor_value_info(key, getattr(onnx.TensorProto, dtype), shape)
            for key, (dtype, shape) in values.items()
        ]

    body = helper.make_graph(
        graph.nodes, name, infos(inputs), infos(outputs), initializer=graph.initializers
    )
    imports = [helper.make_opsetid("", opset)]
    # The oldest file format version with this opset, for compatibility with old readers.
    version = helper.find_min_ir_version_for(imports)
    model = helper.make_model(
        body, opset_imports=imports, ir_version=version, producer_name="mask_rcnn_jax"
    )
    onnx.checker.check_model(model, full_check=True)
    return model
