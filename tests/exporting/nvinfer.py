"""What DeepStream's nvinfer builds from a configuration, by the rules in its published sources.

They are those of DeepStream 6.2: gstnvinfer_property_parser.h (`KEYS`), `buildModel` of
nvdsinfer_context_impl.cpp, and nvdsinfer_model_builder.cpp: `configCommonOptions`,
`createDynamicParams`, `configExplicitOptions` and `buildModel`. The graph runs in onnxruntime.
"""

import configparser
from pathlib import Path
from typing import NamedTuple

import numpy as np

KEYS = frozenset(
    """
    batch-size cluster-mode custom-lib-path gie-unique-id gpu-id infer-dims int8-calib-file
    labelfile-path maintain-aspect-ratio model-color-format model-engine-file net-scale-factor
    network-input-order network-mode network-type num-detected-classes offsets onnx-file
    output-blob-names output-instance-mask parse-bbox-instance-mask-func-name process-mode
    scaling-filter segmentation-threshold symmetric-padding
    """.split()
)


class Engine(NamedTuple):
    """An engine as nvinfer builds it."""

    file: str  # that it writes
    precision: str  # "fp32", "fp16" or "int8"
    profile: dict[str, tuple[int, ...]]  # shape of the input for min, opt and max


def build(folder: Path) -> Engine:
    """Build what nvinfer.txt in a folder says.

    Raises ValueError where nvinfer or TensorRT would not, and what onnxruntime raises for a graph
    that does not run with every batch of the engine.
    """
    config = configparser.ConfigParser()
    config.read_string((folder / "nvinfer.txt").read_text())
    entries = config["property"]
    if unknown := set(entries) - KEYS:
        raise ValueError(f"unknown keys: {unknown}")
    precision = {"0": "fp32", "1": "int8", "2": "fp16"}[entries["network-mode"]]
    cache = entries.get("int8-calib-file", "")
    if precision == "int8" and not (cache and (folder / cache).is_file()):
        precision = "fp16"  # "INT8 calibration file not specified. Trying FP16 mode."
    most = int(entries["batch-size"])
    sides = tuple(map(int, entries["infer-dims"].split(";")))
    profile = {"min": (1, *sides), "opt": (most, *sides), "max": (most, *sides)}
    names = entries["output-blob-names"].split(";")
    _run(folder / entries["onnx-file"], precision, profile, names)
    device = f"gpu{entries['gpu-id']}"
    return Engine(f"{entries['onnx-file']}_b{most}_{device}_{precision}.engine", precision, profile)


def _run(path: Path, precision: str, profile: dict[str, tuple], names: list[str]) -> None:
    import onnx
    import onnxruntime

    model = onnx.load(path)
    if precision != "int8" and any(n.op_type == "QuantizeLinear" for n in model.graph.node):
        raise ValueError(f"quantized layers in {precision}: TensorRT needs its flag for int8")
    (image,) = model.graph.input  # other inputs are not filled
    if image.type.tensor_type.elem_type != onnx.TensorProto.FLOAT:
        raise ValueError("nvinfer gives float32 images")
    image.type.tensor_type.shape.dim[0].dim_param = "any"  # it does so whatever the model says
    for output in model.graph.output:
        output.type.tensor_type.shape.dim[0].dim_param = "any"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # the caller sees what is raised
    content, providers = model.SerializeToString(), ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(content, options, providers=providers)
    for batch in range(profile["min"][0], profile["max"][0] + 1):
        feed = {image.name: np.zeros((batch, *profile["opt"][1:]), np.float32)}
        for values in session.run(names, feed):
            assert len(values) == batch
