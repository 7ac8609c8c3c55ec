"""The model configuration of Triton Inference Server for an exported ONNX model."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

# Names of onnx.TensorProto and of Triton's `DataType`.
DTYPES = {
    "FLOAT": "TYPE_FP32",
    "INT32": "TYPE_INT32",
    "INT64": "TYPE_INT64",
    "UINT8": "TYPE_UINT8",
    "BOOL": "TYPE_BOOL",
}
MAX_BATCH = 8


def model_config(model: "onnx.ModelProto", platform: str = "onnxruntime_onnx") -> str:
    """Return the text of `config.pbtxt`.

    Args:
        model: a model whose inputs and outputs begin with the same batch axis. If that is symbolic,
            Triton makes batches of up to `MAX_BATCH` images that arrive at the same time. Otherwise
            a request has the model's whole batch, as Triton batches only symbolic axes.
        platform: "onnxruntime_onnx" for `1/model.onnx`, "tensorrt_plan" for `1/model.plan`.

    The configuration has no name: the model's is that of its folder.
    """
    graph = model.graph
    is_symbolic = not graph.input[0].type.tensor_type.shape.dim[0].HasField("dim_value")
    lines = [f'platform: "{platform}"', f"max_batch_size: {MAX_BATCH if is_symbolic else 0}"]
    for kind, values in (("input", graph.input), ("output", graph.output)):
        for value in values:
            lines += _tensor(kind, value, without_batch=is_symbolic)
    lines += ["instance_group [", "  {", "    count: 1", "    kind: KIND_AUTO", "  }", "]"]
    if is_symbolic:
        lines += ["dynamic_batching {", "}"]
    return "\n".join(lines) + "\n"


def _tensor(kind: str, value: "onnx.ValueInfoProto", *, without_batch: bool) -> list[str]:
    from onnx import TensorProto

    tensor = value.type.tensor_type
    sizes = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim]
    dtype = DTYPES[TensorProto.DataType.Name(tensor.elem_type)]
    shape = ", ".join(map(str, sizes[without_batch:]))
    entries = [f'name: "{value.name}"', f"data_type: {dtype}", f"dims: [ {shape} ]"]
    return [f"{kind} [", "  {", *(f"    {entry}" for entry in entries), "  }", "]"]
