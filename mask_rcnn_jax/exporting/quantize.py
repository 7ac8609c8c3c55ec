"""Post-training static int8 quantization of an exported ONNX model.

Convolutions and fully connected layers get QuantizeLinear / DequantizeLinear pairs (QDQ): weights
per output channel, activations per tensor, with ranges measured on calibration images. The heads'
last layers stay float: they are small, and their outputs are scores and coordinates.

Runtimes differ in the pairs that they can merge into int8 operators. "cpu" is for onnxruntime and
OpenVINO: activations are uint8 with a zero point, so that a ReLU is a matter of the range and
vanishes into its convolution, and sums, pooling and resizing between convolutions are quantized as
well. With symmetric ranges, onnxruntime leaves every convolution before a ReLU in float32.
"tensorrt" is symmetric, as TensorRT requires, at the layers alone: it merges the rest by itself.
"""

import hashlib
import json
import tempfile
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from mask_rcnn_jax.disk import write_whole
from mask_rcnn_jax.jax_to_onnx.graph import strip_number
from mask_rcnn_jax.models.quantization import FLOAT_LAYERS
from mask_rcnn_jax.optional_packages import import_package

CALIBRATORS = ("minmax", "entropy")
RUNTIMES = ("cpu", "tensorrt")
OP_TYPES = ["Conv", "Gemm", "ConvTranspose"]
BETWEEN = ["Relu", "Add", "MaxPool", "Resize"]  # what "cpu" quantizes between layers

# Histogram bins for entropy calibration. onnxruntime's default equals the number of quantization
# steps, which disables clipping.
HISTOGRAM_BINS = 2048


def quantize_onnx(
    model: bytes,
    feeds: Iterable[dict[str, np.ndarray]],
    *,
    calibrator: str,
    cache: Path,
    runtime: str = "cpu",
    trained: Mapping[str, float] | None = None,
    in_float: Collection[str] = (),
) -> tuple[bytes, bool]:
    """Quantize a model.

    Args:
        model: serialized model from `build_onnx`.
        feeds: inputs by name for each run; not run if the cache has their ranges.
        calibrator: "minmax" uses the observed extremes; "entropy" clips them to minimize the
            information lost in the int8 histogram and is less sensitive to outliers.
        runtime: one of `RUNTIMES`, for which the pairs are placed.
        cache: json file with the ranges; replaced unless its model, calibrator and images match.
        trained: largest input of layers by name, from training in emulated int8; takes the place
            of the measured ones.
        in_float: names of more layers that stay float, and read what is not rounded.

    Returns:
        The int8 model, and whether its ranges came from the cache.

    Raises:
        ValueError: for an unknown calibrator, no feeds or an unreadable cache.
    """
    if calibrator not in CALIBRATORS:
        raise ValueError(f"--calibrator is {calibrator!r}, expected one of {list(CALIBRATORS)}")
    feeds = list(feeds)
    if not feeds:
        raise ValueError("no calibration images")
    key = _fingerprint(model, feeds, f"{calibrator} {runtime}")
    ranges = _read_cache(cache, key)
    cached = ranges is not None
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        source.write_bytes(model)
        if ranges is None:
            ranges = _measure(source, feeds, calibrator, runtime)
            found = {"key": key, "calibrator": calibrator, "ranges": ranges}
            write_whole(cache, json.dumps(found))
        ranges = with_trained(model, ranges, trained or {})
        _insert_qdq(source, target, ranges, runtime, in_float)
        return target.read_bytes(), cached


def quantized_layers(model: bytes) -> list[str]:
    """Return the names of the layers that `quantize_onnx` quantizes, in the order of the graph."""
    import onnx

    graph_model = onnx.load_from_string(model)
    return list(dict.fromkeys(map(strip_number, _quantized_nodes(graph_model, [], ()))))


def _measure(
    source: Path, feeds: list[dict], calibrator: str, runtime: str
) -> dict[str, list[float]]:
    """Lowest and highest value of every tensor at a quantized layer."""
    calibrate = import_package("onnxruntime.quantization.calibrate")
    kinds = calibrate.CalibrationMethod
    method = {"minmax": kinds.MinMax, "entropy": kinds.Entropy}[calibrator]
    augmented = str(source.with_name("augmented.onnx"))
    options = {"symmetric": runtime == "tensorrt", "num_bins": HISTOGRAM_BINS}
    types = OP_TYPES + BETWEEN if runtime == "cpu" else OP_TYPES
    worker = calibrate.create_calibrator(
        source, types, augmented, calibrate_method=method, extra_options=options
    )
    for feed in feeds:
        # One feed per call: the calibrator keeps all activations of a call in memory.
        worker.collect_data(SimpleNamespace(get_next=partial(next, iter([feed]), None)))
        getattr(worker, "clear_collected_data", list)()
    found = worker.compute_data().data
    limits = {name: data.range_value for name, data in found.items()}
    return {name: [float(np.min(low)), float(np.max(high))] for name, (low, high) in limits.items()}


def with_trained(
    model: bytes, ranges: dict[str, list[float]], trained: Mapping[str, float]
) -> dict[str, list[float]]:
    """Return the ranges with those of layers' inputs that training has fixed."""
    import onnx

    limits: dict[str, float] = {}
    for node in onnx.load_from_string(model).graph.node:
        limit = trained.get(strip_number(node.name), 0.0)
        if node.op_type in OP_TYPES and limit > 0:  # a tensor that several layers read has one
            limits[node.input[0]] = max(limits.get(node.input[0], 0.0), limit)
    fixed = {name: [max(ranges[name][0], -limit), limit] for name, limit in limits.items()}
    return ranges | fixed


def _insert_qdq(
    source: Path,
    target: Path,
    ranges: dict[str, list[float]],
    runtime: str,
    in_float: Collection[str],
) -> None:
    import onnx

    quantization = import_package("onnxruntime.quantization")
    calibrate, kinds = quantization.calibrate, quantization.QuantType
    model = onnx.load(source)
    symmetric = runtime == "tensorrt"
    names = _quantized_nodes(model, [] if symmetric else BETWEEN, in_float)
    if not names:  # which the quantizer takes for all
        onnx.save(model, target)
        return
    # Entropy takes ranges around zero, also of values that are never negative.
    positive = {node.output[0] for node in model.graph.node if node.op_type == "Relu"}
    data = {
        name: calibrate.TensorData(
            lowest=np.float32(max(low, 0.0) if name in positive and not symmetric else low),
            highest=np.float32(high),
        )
        for name, (low, high) in ranges.items()
    }
    quantizer = quantization.qdq_quantizer.QDQQuantizer(
        model,
        True,  # weights per channel
        False,  # full int8 range
        kinds.QInt8,
        kinds.QInt8 if symmetric else kinds.QUInt8,
        calibrate.TensorsData(calibrate.CalibrationMethod.MinMax, data),
        names,
        [],
        OP_TYPES if symmetric else OP_TYPES + BETWEEN,
        # TensorRT has no DequantizeLinear of int32, in which onnxruntime keeps biases.
        {
            "ActivationSymmetric": symmetric,
            "WeightSymmetric": True,
            "QuantizeBias": not symmetric,
        },
    )
    quantizer.quantize_model()
    _read_unrounded(quantizer.model.graph(), in_float)
    quantizer.model.save_model_to_file(str(target), False)
    onnx.checker.check_model(str(target))


def _read_unrounded(graph, layers: Collection[str]) -> None:
    """Let layers read the tensors that others read rounded."""
    makers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        if node.op_type in OP_TYPES and strip_number(node.name) in layers:
            pair = makers.get(node.input[0])
            if pair is not None and pair.op_type == "DequantizeLinear":
                node.input[0] = makers[pair.input[0]].input[0]


def _quantized_nodes(model, between: list[str], in_float: Collection[str]) -> list[str]:
    """Return the names of the layers, and of operators `between` them that read nothing else.

    in_float: paths of layers to leave out, beside `FLOAT_LAYERS`.
    """
    names, quantized = [], set()
    for node in model.graph.node:
        inputs = node.input if node.op_type == "Add" else node.input[:1]
        layer = strip_number(node.name)
        floats = layer in in_float or layer.split("/")[-1] in FLOAT_LAYERS
        is_layer = node.op_type in OP_TYPES and not floats
        if is_layer or (node.op_type in between and quantized.issuperset(inputs)):
            names.append(node.name)
            quantized.update(node.output)
    return names


def _fingerprint(model: bytes, feeds: list[dict], calibrator: str) -> str:
    digest = hashlib.sha256(model)
    digest.update(calibrator.encode())
    for feed in feeds:
        for name in sorted(feed):
            digest.update(np.ascontiguousarray(feed[name]).tobytes())
    return digest.hexdigest()


def _read_cache(cache: Path, key: str) -> dict[str, list[float]] | None:
    """Return the cached ranges if their key matches."""
    if not cache.is_file():
        return None
    try:
        content = json.loads(cache.read_text())
        return content["ranges"] if content["key"] == key else None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{cache} is not a calibration cache: {error!r}; remove it") from error
