"""Post-training static quantisation of an exported ONNX model to int8.

Convolutions and fully connected layers get QuantizeLinear / DequantizeLinear pairs (QDQ), symmetric
as TensorRT wants them: weights per output channel, activations per tensor, by the ranges seen on
calibration pictures. The last layers of the heads stay float: they are small, and their outputs are
scores and coordinates.
"""

import hashlib
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

CALIBRATORS = ("minmax", "entropy")
OP_TYPES = ["Conv", "Gemm", "ConvTranspose"]
FLOAT_LAYERS = ("objectness_logits", "anchor_deltas", "cls_score", "bbox_pred", "mask_predictor")

# Of the histograms that "entropy" cuts. By default they are as many as the steps: it cuts nothing.
BINS = 2048


def quantize_onnx(
    model: bytes, feeds: Iterable[dict[str, np.ndarray]], *, calibrator: str, cache: Path
) -> tuple[bytes, bool]:
    """The int8 model, and whether its ranges came from the cache.

    Args:
        model: of `build_onnx`, serialised.
        feeds: inputs by name, one for each run; not read if the cache holds their ranges.
        calibrator: "minmax" takes the extremes seen; "entropy" clips them where the int8 histogram
            tells most about the float one, which outliers move less.
        cache: json file of the ranges. One of the same model, calibrator and pictures is used,
            any other replaced.

    Raises ValueError for another calibrator, for no feeds, and for a cache that cannot be read.
    """
    if calibrator not in CALIBRATORS:
        raise ValueError(f"--calibrator is {calibrator!r}, expected one of {list(CALIBRATORS)}")
    feeds = list(feeds)
    if not feeds:
        raise ValueError("no calibration pictures")
    key = _fingerprint(model, feeds, calibrator)
    ranges = _read_cache(cache, key)
    cached = ranges is not None
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        source.write_bytes(model)
        if not cached:
            ranges = _measure(source, feeds, calibrator)
            cache.parent.mkdir(parents=True, exist_ok=True)
            cache.write_text(json.dumps({"key": key, "calibrator": calibrator, "ranges": ranges}))
        _insert_pairs(source, target, ranges)
        return target.read_bytes(), cached


def _measure(source: Path, feeds: list[dict], calibrator: str) -> dict[str, list[float]]:
    """Lowest and highest value of every tensor at a quantised layer."""
    from onnxruntime.quantization import CalibrationMethod
    from onnxruntime.quantization.calibrate import create_calibrator

    method = {"minmax": CalibrationMethod.MinMax, "entropy": CalibrationMethod.Entropy}[calibrator]
    augmented = str(source.with_name("augmented.onnx"))
    worker = create_calibrator(
        source,
        OP_TYPES,
        augmented_model_path=augmented,
        calibrate_method=method,
        extra_options={"symmetric": True, "num_bins": BINS},
    )
    for feed in feeds:
        # One at a time: the calibrator holds every activation of what it is given at once.
        worker.collect_data(_Reader(feed))
        getattr(worker, "clear_collected_data", list)()
    found = worker.compute_data().data
    lows_highs = {name: data.range_value for name, data in found.items()}
    return {name: [float(np.min(a)), float(np.max(b))] for name, (a, b) in lows_highs.items()}


class _Reader:
    """The inputs of one run, as calibrators want to be fed."""

    def __init__(self, feed: dict):
        self._feeds = iter([feed])

    def get_next(self) -> dict | None:
        return next(self._feeds, None)


def _insert_pairs(source: Path, target: Path, ranges: dict[str, list[float]]) -> None:
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantType
    from onnxruntime.quantization.calibrate import TensorData, TensorsData
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

    model = onnx.load(source)
    data = {
        name: TensorData(lowest=np.float32(low), highest=np.float32(high))
        for name, (low, high) in ranges.items()
    }
    floats = [
        node.name
        for node in model.graph.node
        if node.op_type in OP_TYPES and node.name.split("/")[-1] in FLOAT_LAYERS
    ]
    quantizer = QDQQuantizer(
        model,
        True,  # weights per channel
        False,  # the whole int8 range
        QuantType.QInt8,
        QuantType.QInt8,
        TensorsData(CalibrationMethod.MinMax, data),
        [],
        floats,
        OP_TYPES,
        {"ActivationSymmetric": True, "WeightSymmetric": True},
    )
    quantizer.quantize_model()
    quantizer.model.save_model_to_file(str(target), False)
    onnx.checker.check_model(str(target))


def _fingerprint(model: bytes, feeds: list[dict], calibrator: str) -> str:
    digest = hashlib.sha256(model)
    digest.update(calibrator.encode())
    for feed in feeds:
        for name in sorted(feed):
            digest.update(np.ascontiguousarray(feed[name]).tobytes())
    return digest.hexdigest()


def _read_cache(cache: Path, key: str) -> dict[str, list[float]] | None:
    """The ranges of the cache if they are those of `key`."""
    if not cache.is_file():
        return None
    try:
        content = json.loads(cache.read_text())
        return content["ranges"] if content["key"] == key else None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{cache} is no calibration cache: {error!r}; remove it") from error
