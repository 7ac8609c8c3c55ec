"""Build an ONNX graph from operators, constants and small operator combinations.

Values are referenced by name (str); numpy arrays passed instead become constants.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

OPSETS = range(16, 22)  # RoiAlign has half_pixel since 16; see `Graph.opset`
# The batch size of a program that is traced for batches of any size. Sizes that are multiples of
# it are multiples of the batch: it is a prime number that no other size should contain.
ANY = 4099
BATCH = "batch"  # name of the first axis of such inputs and outputs


class CannotConvert(ValueError):
    """What cannot be converted; `trace` adds where it is."""


class Graph:
    """Nodes in execution order, and constants by name.

    Attributes:
        opset: that of the model, for operators that differ.
        nonnegative: tensors of integers that cannot be negative.
        not_float: tensors of integers or bools.
        pieces: by the result of a Concat, its axis, inputs and their shapes.
        batch: tensor [1] with the batch size, for programs that are traced for `ANY`.
    """

    def __init__(self, opset: int = OPSETS.start):
        self.nodes: list = []  # onnx.NodeProto
        self.constants: dict[str, np.ndarray] = {}
        self.opset = opset
        self.nonnegative: set[str] = set()
        self.not_float: set[str] = set()
        self.pieces: dict[str, tuple[int, list[str], list[tuple[int, ...]]]] = {}
        self.batch = ""
        self.stored: dict[tuple, str] = {}  # see values
        self.reshaped: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._shared: dict[tuple, Any] = {}
        self._names: set[str] = set()
        self._count = 0

    def op(self, op_type: str, *inputs: str | np.ndarray, name: str = "", **attributes: Any) -> str:
        """Add an operator with one output and return the output's name."""
        return self.node(op_type, inputs, attributes, name=name)[0]

    def node(
        self, op_type: str, inputs: Sequence, attributes: dict, outputs: int = 1, name: str = ""
    ) -> list[str]:
        """Add an operator and return the names of its outputs; unnamed equal ones are shared."""
        from onnx import helper

        names = [value if isinstance(value, str) else self.constant(value) for value in inputs]
        key = (op_type, *names, *sorted((key, str(value)) for key, value in attributes.items()))
        if not name and key in self._shared:
            return self._shared[key]
        self._count += 1
        label = name or f"{op_type}_{self._count}"
        results = [label] if outputs == 1 else [f"{label}:{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op_type, names, results, name=label, **attributes))
        if not name:
            self._shared[key] = results
        return results

    def unique(self, name: str) -> str:
        """Return a name that no other call returns: `part/layer`, then `part_2/layer`, .."""
        first, slash, rest = name.partition("/")
        count, found = 1, name
        while found in self._names:
            count += 1
            found = f"{first}_{count}{slash}{rest}"
        self._names.add(found)
        return found

    def constant(self, value: np.ndarray, name: str = "") -> str:
        """Add a constant and return its name. Equal names or small equal values are shared."""
        value = np.asarray(value)
        if self.batch and value.size == 1 and value.item() and value.item() % ANY == 0:
            raise CannotConvert("a number made of the batch's size without --batch")
        if name and name in self.constants:
            return name
        key = (value.dtype.str, value.shape, value.tobytes()) if value.size <= 64 else None
        if not name and key in self._shared:
            return self._shared[key]
        label = name or self.unique("constant")
        self.constants[label] = value
        if key and not name:
            self._shared[key] = label
        return label

    def reshape(self, x: str, *shape: int) -> str:
        return self.op("Reshape", x, ints(*(-1 if self.is_batch(size) else size for size in shape)))

    def is_batch(self, size: int) -> bool:
        """Whether a size is that of a batch of any size, or a multiple."""
        return bool(self.batch) and size > 0 and size % ANY == 0

    def sizes(self, *sizes: int) -> str | np.ndarray:
        """Sizes [n] as int64, a constant unless some are multiples of the batch."""
        if not any(map(self.is_batch, sizes)):
            return ints(*sizes)
        parts = []
        for size in sizes:
            times, rest = divmod(size, ANY)
            one = ints(size) if rest else self.batch
            parts.append(self.op("Mul", one, ints(times)) if not rest and times > 1 else one)
        return self.concat(*parts, axis=0)

    def count(self, number: int) -> str | np.ndarray:
        """int64 [number]: 0, 1, .."""
        if not self.is_batch(number):
            return ints(*range(number))
        limit = self.op("Squeeze", self.sizes(number), ints(0))
        return self.op("Range", np.array(0), limit, np.array(1))

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

    def top_k(self, x: str, count: int) -> list[str]:
        """Values and int64 indices of the largest elements on the last axis, in descending order;
        ties are sorted by index."""
        attributes = {"axis": -1, "largest": 1, "sorted": 1}
        return self.node("TopK", (x, ints(count)), attributes, outputs=2)


def strip_number(node_name: str) -> str:
    """Return the name that `Graph.unique` was given: `part/layer` for `part_2/layer`."""
    return re.sub(r"^([^/]*)_\d+/", r"\1/", node_name)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def floats(*values: float) -> np.ndarray:
    """Return a float32 array [n], or a scalar for a single value."""
    return np.array(values if len(values) > 1 else values[0], np.float32)


def check_opset(opset: int) -> None:
    """Raise ValueError for an unsupported opset."""
    if opset not in OPSETS:
        raise ValueError(f"--opset is {opset}, expected {OPSETS.start} to {OPSETS.stop - 1}")


def make_model_proto(
    graph: Graph, name: str, inputs: dict[str, tuple], outputs: dict[str, tuple], opset: int
):
    """Make and check an `onnx.ModelProto`.

    inputs, outputs: (dtype as in TensorProto, shape) by name. Raises ValueError for an unsupported
    opset.
    """
    import onnx
    from onnx import helper, numpy_helper

    check_opset(opset)

    def infos(values):
        return [
            helper.make_tensor_value_info(
                key,
                getattr(onnx.TensorProto, dtype),
                [BATCH if graph.is_batch(size) else int(size) for size in shape],
            )
            for key, (dtype, shape) in values.items()
        ]

    stored = [
        numpy_helper.from_array(np.asarray(value, order="C"), key)
        for key, value in graph.constants.items()
    ]
    body = helper.make_graph(graph.nodes, name, infos(inputs), infos(outputs), initializer=stored)
    imports = [helper.make_opsetid("", opset)]
    # The oldest file format version with this opset, for compatibility with old readers.
    version = helper.find_min_ir_version_for(imports)
    model = helper.make_model(
        body, opset_imports=imports, ir_version=version, producer_name="mask_rcnn_jax"
    )
    onnx.checker.check_model(model, full_check=True)
    return model
