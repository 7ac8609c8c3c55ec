"""Check that an ONNX model is whole: engines take external weights from files that it names."""

from mask_rcnn_jax import protobuf

# The messages of onnx.proto that lead to tensors: field numbers, and the message in each.
_MESSAGES: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
_NAME, _EXTERNAL_DATA, _DATA_LOCATION = 8, 13, 14  # fields of a tensor


def check_whole(model: bytes) -> None:
    """Raise ValueError, naming the tensor, if the content of one is not in the model itself.

    onnxruntime would look for it in the current folder, whatever the model's is.
    """
    stack: list[tuple[str, bytes | memoryview]] = [("model", model)]
    while stack:
        kind, message = stack.pop()
        if kind == "tensor":
            _check_tensor(message)
            continue
        inside = _MESSAGES[kind]
        for number, value in protobuf.fields(message):
            if number in inside and isinstance(value, memoryview):
                stack.append((inside[number], value))


def _check_tensor(message: bytes | memoryview) -> None:
    name, is_external = "", False
    for number, value in protobuf.fields(message):
        if number == _NAME and isinstance(value, memoryview):
            name = bytes(value).decode(errors="replace")
        is_external |= number == _EXTERNAL_DATA or number == _DATA_LOCATION and value != 0
    if is_external:
        raise ValueError(f"the weights {name!r} are in another file, expected a model without such")
