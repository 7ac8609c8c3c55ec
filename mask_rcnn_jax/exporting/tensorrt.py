"""TensorRT's documented limits of ONNX models, checked without it, and its calibration cache.

The table holds the operators of our models: types and restrictions as in docs/operators.md of
onnx-tensorrt 10.1, and BOOL for NonZero as in its source.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx

VERSION = "10.1"
OPSETS = range(9, 21)
MAX_TOPK = 3840

_FLOAT = frozenset(("FLOAT", "FLOAT16", "BFLOAT16"))
_NUMBER = _FLOAT | {"INT32", "INT64"}
_ANY = _NUMBER | {"BOOL"}
_TYPES = {
    _FLOAT: """
        AveragePool BatchNormalization Ceil Clip Conv ConvTranspose CumSum Einsum Erf Exp Floor Gemm
        GlobalAveragePool GroupNormalization HardSwish InstanceNormalization LayerNormalization Log
        MatMul MaxPool Pow QuantizeLinear Reciprocal Resize Round Sigmoid Softmax Sqrt Tanh
    """,
    _NUMBER: """
        Abs Add ArgMax ArgMin Div Equal Greater GreaterOrEqual Less LessOrEqual Max Min Mod Mul Neg
        Pad Range ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum Relu ScatterElements ScatterND
        Sign Sub Sum TopK
    """,
    _ANY: """
        Concat Constant ConstantOfShape Expand Flatten Gather GatherElements GatherND Identity
        NonZero OneHot Reshape Shape Slice Split Squeeze Tile Transpose Unsqueeze Where
    """,
    _ANY | {"UINT8"}: "Cast",
    frozenset(("BOOL",)): "And Not Or",
    frozenset(("FLOAT", "FLOAT16")): "NonMaxSuppression RoiAlign",
    frozenset(("INT8",)): "DequantizeLinear",
}
# Types of an operator's data; indices, sizes and thresholds are beside them.
OPERATORS = {name: types for types, names in _TYPES.items() for name in names.split()}
# Position of the input that must be known when the engine is built.
_CONSTANT_INPUTS = {"CumSum": 1, "OneHot": 1, "Slice": 3, "Squeeze": 1, "Unsqueeze": 1}
_CONSTANT_INPUTS |= {f"Reduce{kind}": 1 for kind in ("Max", "Mean", "Min", "Prod", "Sum")}
_RESIZES = {
    "coordinate_transformation_mode": (
        *("half_pixel", "pytorch_half_pixel", "tf_half_pixel_for_nn", "asymmetric"),
        "align_corners",
    ),
    "mode": ("nearest", "linear"),
    "nearest_mode": ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil"),
}


def tensorrt_problems(model: "onnx.ModelProto") -> list[str]:
    """Return a line for each kind of node that TensorRT `VERSION` does not document to support."""
    import onnx
    from onnx import TensorProto, numpy_helper

    found: dict[str, list[str]] = {}
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    if opset not in OPSETS:
        found[f"opset {opset}; it reads {OPSETS.start} to {OPSETS.stop - 1}"] = []
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    values = [*graph.value_info, *graph.input, *graph.output]
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    types |= {array.name: array.data_type for array in graph.initializer}
    names = {name: TensorProto.DataType.Name(number) for name, number in types.items()}
    constants = {array.name: array for array in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            constants[node.output[0]] = node.attribute[0].t
    outputs = {value.name for value in graph.output}

    def constant(name: str) -> np.ndarray | None:
        return numpy_helper.to_array(constants[name]) if name in constants else None

    for node in graph.node:
        problems = list(_node_problems(node, names, constant))
        if any(names.get(name) == "UINT8" and name not in outputs for name in node.output):
            problems.append(f"{node.op_type} makes UINT8, which it has at inputs and outputs only")
        for problem in problems:
            found.setdefault(problem, []).append(node.name or node.output[0])
    return [_line(problem, nodes) for problem, nodes in found.items()]


def _node_problems(
    node: "onnx.NodeProto", types: Mapping[str, str], constant: Callable
) -> Iterator[str]:
    """Yield the problems of a node.

    types: of all values, by name. constant: function from a name to an array or None.
    """
    op_type, inputs = node.op_type, list(node.input)
    if node.domain not in ("", "ai.onnx"):
        yield f"{node.domain}.{op_type}, which is not an operator of ONNX"
        return
    if op_type not in OPERATORS:
        yield f"{op_type}, which is not in the table of exporting/tensorrt.py"
        return
    data = inputs[1:] if op_type == "Where" else inputs[:1]
    for given in dict.fromkeys(types.get(name, "") for name in data):
        if given and given not in OPERATORS[op_type]:
            yield f"{op_type} of {given}"
    position = _CONSTANT_INPUTS.get(op_type)
    if position is not None and len(inputs) > position and inputs[position]:
        if constant(inputs[position]) is None:
            yield f"{op_type} whose input {position} is not constant"
    if op_type == "Slice" and any(constant(name) is None for name in inputs[1:3]):
        yield "Slice to a size that the values of an input tell, not its shape: --picture_size"
    if op_type == "TopK":
        count = constant(inputs[1])
        if count is not None and count.max() > MAX_TOPK:
            yield (
                f"TopK of {count.max()} rows, at most {MAX_TOPK}: "
                f"--config.eval.pre_nms_topk={MAX_TOPK} or model.rpn.pre_nms_topk_test"
            )
    if op_type in ("QuantizeLinear", "DequantizeLinear") and len(inputs) > 2:
        zero_point = constant(inputs[2])
        if zero_point is None or zero_point.dtype != np.int8 or zero_point.any():
            yield f"{op_type} with a zero point: --int8_for tensorrt"
    if op_type == "Resize":
        for attribute in node.attribute:
            value = attribute.s.decode()
            if attribute.name in _RESIZES and value not in _RESIZES[attribute.name]:
                yield f"Resize with {attribute.name} {value}"


def _line(problem: str, nodes: list[str]) -> str:
    more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
    return f"{problem} ({nodes[0]}{more})" if nodes else problem


def calibration_cache(ranges: Mapping[str, Sequence[float]]) -> str:
    """Return the text of a calibration cache, for the float model.

    Args:
        ranges: lowest and highest value by name of a tensor.

    After a header, a line has a tensor's name and the bits of its float32 scale, from the largest
    magnitude to 127, in hexadecimal digits with the highest first. Tensors without a line are
    computed in float.
    """
    lines = ["TRT-8600-EntropyCalibration2"]
    for name, (low, high) in ranges.items():
        scale = max(abs(low), abs(high)) / 127.0
        lines.append(f"{name}: {struct.pack('>f', scale).hex()}")
    return "\n".join(lines) + "\n"


def manifest_entry(
    files: Mapping[str, bytes], batch: int, engines: Mapping[str, Callable[[bool], str]]
) -> dict[str, Any]:
    """Return the manifest's `tensorrt`: of each ONNX file, the problems and how to build an engine.

    Args:
        files: content by name. A `calibration.cache` among them is for the float model.
        batch: most images at a time in engines of models that take any number.
        engines: by a file, the engine's name for whether it is in int8. It keeps the file's
            precision, others may compute in float16.
    """
    import onnx

    entry: dict[str, Any] = {"compared_with": VERSION, "trtexec": [], "problems": {}}
    for name in sorted(files):
        if name.endswith(".onnx"):
            model = onnx.load_from_string(files[name])
            is_int8 = any(node.op_type == "QuantizeLinear" for node in model.graph.node)
            stem, kind = name.removesuffix(".onnx"), ["--int8"] if is_int8 else []
            kinds = {f"{stem}.engine": [*kind, "--fp16"]}
            if name in engines:
                kinds = {engines[name](is_int8): kind}
            elif "calibration.cache" in files and not is_int8:
                calibrated = ["--int8", "--fp16", "--calib=calibration.cache"]
                kinds[f"{stem}_calibrated.engine"] = calibrated
            for engine, flags in kinds.items():
                command = ["trtexec", f"--onnx={name}", f"--saveEngine={engine}", *flags]
                entry["trtexec"].append(" ".join([*command, *_profile(model, batch)]))
            entry["problems"][name] = tensorrt_problems(model)
    return entry


def _profile(model: "onnx.ModelProto", batch: int) -> list[str]:
    """Flags of trtexec for 1 to `batch` images, built for `batch`; none if the batch is fixed."""
    inputs = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input}
    if all(sizes[0].HasField("dim_value") for sizes in inputs.values()):
        return []
    flags = []
    for kind, rows in (("min", 1), ("opt", batch), ("max", batch)):
        shapes = (
            f"{name}:" + "x".join(map(str, [rows, *(size.dim_value for size in sizes[1:])]))
            for name, sizes in inputs.items()
        )
        flags.append(f"--{kind}Shapes={','.join(shapes)}")
    return flags
