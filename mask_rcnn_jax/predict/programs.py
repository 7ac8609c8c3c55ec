"""Exported programs as functions: StableHLO in JAX, ONNX in onnxruntime and OpenVINO."""

import math
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export

from mask_rcnn_jax.optional_packages import import_package
from mask_rcnn_jax.predict.onnx_file import check_whole
from mask_rcnn_jax.structures import Detections

# A program's outputs are these of `Detections`, but those of tasks that the model lacks.
FIELDS = ("boxes", "scores", "classes", "masks", "valid", "keypoints")
_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # of a container


def load_stablehlo(program: bytes) -> Callable:
    """Load a program as a jitted function (images, image_sizes) -> dict of arrays."""
    return jax.jit(export.deserialize(bytearray(program)).call)


def run_program(program: Callable, batch: int | None, images, image_sizes) -> Detections:
    """Run a StableHLO program, repeating the last image to fill a fixed batch."""
    rows = np.minimum(np.arange(batch or len(images)), len(images) - 1)
    found = program(np.asarray(images)[rows], np.asarray(image_sizes, np.int32)[rows])
    found = {name: np.asarray(value)[: len(images)] for name, value in found.items()}
    return Detections(**{"masks": None, **found})


def load_onnx(model: bytes) -> Callable:
    """Load a model as a function (images [n, H, W, C], image_sizes [n, 2]) -> `Detections`.

    It accepts any number of images, or up to the model's batch if that is fixed, on a canvas at
    least as large as the model's, of which it reads the upper left part. Raises ValueError for a
    model with weights in other files.
    """
    session = onnx_session(model)
    inputs = {value.name: value for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]

    def run(images: np.ndarray, image_sizes: np.ndarray) -> Detections:
        dtype = {"tensor(uint8)": "uint8", "tensor(float)": "float32"}[inputs["images"].type]
        feeds = make_feeds(images, image_sizes, inputs["images"].shape, dtype)
        feeds = {name: value for name, value in feeds.items() if name in inputs}
        found = dict(zip(names, session.run(names, feeds), strict=True))
        found["valid"] = found["valid"].astype(bool)
        found = {name: value[: len(images)] for name, value in found.items()}
        return Detections(**{"masks": None, **found})

    return run


def onnx_session(model: bytes) -> Any:
    """Load a model into an `onnxruntime.InferenceSession` on the CPUs that this process may use.

    Raises ValueError for a model with weights in other files.
    """
    onnxruntime = import_package("onnxruntime")
    check_whole(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.add_session_config_entry("session.load_model_format", "ONNX")  # which was checked
    options.intra_op_num_threads, options.inter_op_num_threads = usable_cpus(), 1
    # Threads that spin while they wait would take half of the CPU time, also from one another.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def usable_cpus() -> int:
    """Return how many CPUs this process may use, by its affinity and its container's limit."""
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # also "max", which is no limit
        quota, period = map(int, _CPU_LIMIT.read_text().split())
        count = min(count, math.ceil(quota / period))
    return count


def make_feeds(
    images: np.ndarray, image_sizes: np.ndarray, shape: Sequence[int | str], dtype: str
) -> dict:
    """Convert images to model inputs, repeating the last image to fill a fixed batch.

    shape, dtype: of the input `images`, such as ["batch", 3, 64, 64] and "float32".
    """
    planar = shape[3] != images.shape[3]
    height, width = shape[2:] if planar else shape[1:3]
    batch = shape[0] if isinstance(shape[0], int) else len(images)
    rows = np.minimum(np.arange(batch), len(images) - 1)
    images = np.asarray(images)[rows, :height, :width]
    images = images.transpose(0, 3, 1, 2) if planar else images
    sizes = np.asarray(image_sizes)[rows]
    return {"images": np.ascontiguousarray(images, dtype), "image_sizes": sizes.astype(np.int32)}


def load_openvino(path: str | os.PathLike, precision: str = "f32") -> Callable:
    """Load an ONNX file for OpenVINO on the CPU, as `load_onnx` does for onnxruntime.

    precision: "f32" or "bf16", in which it computes, int8 layers aside.
    """
    openvino = import_package("openvino")
    check_whole(Path(path).read_bytes())
    core = openvino.Core()
    options = {"INFERENCE_PRECISION_HINT": precision, "PERFORMANCE_HINT": "LATENCY"}
    request = core.compile_model(str(path), "CPU", options).create_infer_request()
    inputs = {name: port for port in request.model_inputs for name in port.get_names()}
    # A tensor may have several names.
    outputs = {name for port in request.model_outputs for name in port.get_names()} & {*FIELDS}
    sizes = inputs["images"].get_partial_shape()
    shape = [size.get_length() if size.is_static else str(size) for size in sizes]
    dtype = {"u8": "uint8", "f32": "float32"}[inputs["images"].get_element_type().get_type_name()]
    lock = threading.Lock()  # of the request, which runs once at a time

    def run(images: np.ndarray, image_sizes: np.ndarray) -> Detections:
        feeds = make_feeds(images, image_sizes, shape, dtype)
        with lock:
            request.infer({name: value for name, value in feeds.items() if name in inputs})
            found = {name: np.array(request.get_tensor(name).data) for name in outputs}
        found["valid"] = found["valid"].astype(bool)
        found = {name: value[: len(images)] for name, value in found.items()}
        return Detections(**{"masks": None, **found})

    return run
