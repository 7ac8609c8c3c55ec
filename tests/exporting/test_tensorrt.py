"""What is said about TensorRT's support of small graphs, its calibration cache, and Triton."""

import struct

import numpy as np
import pytest

from mask_rcnn_jax.exporting.tensorrt import MAX_TOPK, calibration_cache, manifest_entry
from mask_rcnn_jax.exporting.tensorrt import tensorrt_problems as problems
from mask_rcnn_jax.exporting.triton import model_config

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402


def model_of(nodes, inputs, output, constants=(), opset=17, domains=()):
    """A model of nodes (operator, inputs, outputs, attributes), whose values are in `inputs`."""

    def info(name, dtype, shape):
        return helper.make_tensor_value_info(name, getattr(TensorProto, dtype), shape)

    graph = helper.make_graph(
        [
            helper.make_node(op_type, given, made, name=f"node_{i}", **attributes)
            for i, (op_type, given, made, attributes) in enumerate(nodes)
        ],
        "test",
        [info(name, *value) for name, value in inputs.items()],
        [info(*output)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants],
    )
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=imports)


X = {"x": ("FLOAT", [1, 3, 8, 6])}


def test_supported_graph():
    nodes = [
        ("Cast", ["u"], ["x"], {"to": TensorProto.FLOAT}),
        ("Resize", ["x", "", "scales"], ["y"], {"mode": "nearest", "nearest_mode": "floor"}),
        ("Greater", ["y", "zero"], ["b"], {}),
        ("NonZero", ["b"], ["n"], {}),
        ("TopK", ["flat", "k"], ["values", "rows"], {}),
    ]
    inputs = {"u": ("UINT8", [1, 3, 8, 6]), "flat": ("FLOAT", [1, 9000])}
    scales, k = np.array([1, 1, 2, 2], np.float32), np.array([MAX_TOPK])
    constants = [("scales", scales), ("zero", np.float32(0)), ("k", k)]
    assert problems(model_of(nodes, inputs, ("n", "INT64", [4, None]), constants)) == []


@pytest.mark.parametrize(
    ("node", "inputs", "dtype", "constants", "message"),
    [
        (
            ("TopK", ["x", "k"], ["values", "y"], {}),
            {"x": ("FLOAT", [1, 5000])},
            "INT64",
            [("k", np.array([4096]))],
            "TopK of 4096 rows, at most 3840: --config.eval.pre_nms_topk=3840",
        ),
        (
            ("BitwiseNot", ["x"], ["y"], {}),
            {"x": ("INT32", [3, 5])},
            "INT32",
            [],
            "BitwiseNot, which is not in the table",
        ),
        (("Sigmoid", ["x"], ["y"], {}), {"x": ("DOUBLE", [3])}, "DOUBLE", [], "Sigmoid of DOUBLE"),
        (
            ("Where", ["c", "x", "x"], ["y"], {}),
            {"c": ("BOOL", [3]), "x": ("UINT8", [3])},
            "UINT8",
            [],
            "Where of UINT8",
        ),
        (
            ("CumSum", ["x", "axis"], ["y"], {}),
            X | {"axis": ("INT64", [])},
            "FLOAT",
            [],
            "CumSum whose input 1 is not constant",
        ),
        (
            ("Slice", ["x", "start", "end"], ["y"], {}),
            X | {"end": ("INT64", [4])},
            "FLOAT",
            [("start", np.zeros(4, np.int64))],
            "Slice to a size that the values of an input tell, not its shape: --picture_size",
        ),
        (
            ("QuantizeLinear", ["x", "scale", "zero"], ["y"], {}),
            X,
            "INT8",
            [("scale", np.float32(0.1)), ("zero", np.int8(3))],
            "QuantizeLinear with a zero point: --int8_for tensorrt",
        ),
        (
            ("Resize", ["x", "", "scales"], ["y"], {"mode": "cubic"}),
            X,
            "FLOAT",
            [("scales", np.array([1, 1, 2, 2], np.float32))],
            "Resize with mode cubic",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_each_problem_is_named(node, inputs, dtype, constants, message):
    (line,) = problems(model_of([node], inputs, ("y", dtype, None), constants))
    assert line.startswith(message) and line.endswith("(node_0)")


def test_equal_problems_are_one_line():
    nodes = [("Det", ["x"], ["y"], {}), ("Det", ["x"], ["z"], {}), ("Add", ["y", "z"], ["s"], {})]
    model = model_of(nodes, X, ("s", "FLOAT", None))
    assert problems(model) == [
        "Det, which is not in the table of exporting/tensorrt.py (node_0 and 1 more)"
    ]


def test_opsets_and_types_within_the_graph():
    quantize = ("QuantizeLinear", ["x", "scale", "zero"], ["q"], {})
    nodes = [quantize, ("DequantizeLinear", ["q", "scale", "zero"], ["y"], {})]
    constants = [("scale", np.float32(0.1)), ("zero", np.uint8(0))]
    found = problems(model_of(nodes, X, ("y", "FLOAT", None), constants, opset=21))
    assert found[0] == "opset 21; it reads 9 to 20"
    assert any(line.startswith("QuantizeLinear makes UINT8") for line in found)
    nodes = [("Gelu", ["x"], ["y"], {"domain": "com.microsoft"})]
    (line,) = problems(model_of(nodes, X, ("y", "FLOAT", None), domains=("com.microsoft",)))
    assert line == "com.microsoft.Gelu, which is not an operator of ONNX (node_0)"


def test_calibration_cache_holds_scales_as_tensorrt_prints_them():
    # 1.0 and 0.5 are 3f800000 and 3f000000.
    text = calibration_cache({"images": (-3.0, 127.0), "conv1": (-63.5, 12.0), "relu": (0.0, 0.0)})
    header, *lines = text.splitlines()
    assert header.startswith("TRT-") and header.endswith("-EntropyCalibration2")
    assert lines == ["images: 3f800000", "conv1: 3f000000", "relu: 00000000"]
    (value,) = struct.unpack(">f", bytes.fromhex(calibration_cache({"a": (0, 2.64)}).split()[-1]))
    assert value == pytest.approx(2.64 / 127)


def test_manifest_says_how_to_build_an_engine():
    fine = model_of([("Relu", ["x"], ["y"], {})], X, ("y", "FLOAT", None)).SerializeToString()
    odd = model_of([("Det", ["x"], ["y"], {})], X, ("y", "FLOAT", None)).SerializeToString()
    files = {"model.onnx": fine, "odd.onnx": odd, "calibration.cache": b"", "labels.txt": b""}
    engines = {"odd.onnx": lambda int8: f"odd_{int8}.plan"}
    entry = manifest_entry(files, 4, engines)
    assert entry["problems"]["model.onnx"] == [] and len(entry["problems"]["odd.onnx"]) == 1
    assert entry["trtexec"] == [
        "trtexec --onnx=model.onnx --saveEngine=model.engine --fp16",
        "trtexec --onnx=model.onnx --saveEngine=model_calibrated.engine --int8 --fp16 "
        "--calib=calibration.cache",
        "trtexec --onnx=odd.onnx --saveEngine=odd_False.plan",
    ]


def test_an_engine_takes_from_one_image_to_a_batch():
    inputs = {"images": ("FLOAT", ["batch", 64, 96, 3]), "image_sizes": ("FLOAT", ["batch", 2])}
    nodes = [("Relu", ["images"], ["y"], {})]
    model = model_of(nodes, inputs, ("y", "FLOAT", ["batch", 64, 96, 3])).SerializeToString()
    (command,) = manifest_entry({"model.onnx": model}, 4, {})["trtexec"]
    shapes = [f"images:{n}x64x96x3,image_sizes:{n}x2" for n in (1, 4, 4)]
    flags = (f"--{kind}Shapes={s}" for kind, s in zip(("min", "opt", "max"), shapes, strict=True))
    assert command.split(" --fp16 ")[1] == " ".join(flags)


def test_triton_batches_a_symbolic_axis():
    inputs = {"images": ("UINT8", ["batch", 64, 96, 3]), "image_sizes": ("INT32", ["batch", 2])}
    nodes = [("Cast", ["images"], ["y"], {"to": TensorProto.FLOAT})]
    text = model_config(model_of(nodes, inputs, ("y", "FLOAT", ["batch", 64, 96, 3])))
    assert text.splitlines() == [
        'platform: "onnxruntime_onnx"',
        "max_batch_size: 8",
        *("input [", "  {", '    name: "images"', "    data_type: TYPE_UINT8"),
        *("    dims: [ 64, 96, 3 ]", "  }", "]"),
        *("input [", "  {", '    name: "image_sizes"', "    data_type: TYPE_INT32"),
        *("    dims: [ 2 ]", "  }", "]"),
        *("output [", "  {", '    name: "y"', "    data_type: TYPE_FP32"),
        *("    dims: [ 64, 96, 3 ]", "  }", "]"),
        *("instance_group [", "  {", "    count: 1", "    kind: KIND_AUTO", "  }", "]"),
        *("dynamic_batching {", "}"),
    ]
