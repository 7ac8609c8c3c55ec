"""A model with its variables, compiled when it is needed, on all devices of this process."""

import threading
from functools import partial

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mask_rcnn_jax import device
from mask_rcnn_jax.data.resize import ResizePlan
from mask_rcnn_jax.models.build import prepare_for_gpu
from mask_rcnn_jax.models.detect import Detect
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.structures import Detections
from mask_rcnn_jax.terminal import console


class LiveModel:
    """A function (images [B, H, W, C], image_sizes [B, 2]) -> `Detections`, which are computed
    while the caller goes on. Thread-safe; each canvas is compiled once for each B.

    Attributes:
        num_devices: of this process; B is a multiple.
    """

    def __init__(self, model: MaskRCNN, detect: Detect, variables: dict):
        devices = jax.local_devices()
        if devices[0].platform == "gpu":
            variables = prepare_for_gpu(model, variables)
        self.num_devices = len(devices)
        predict = partial(model.apply, method="predict", detect=detect)
        if len(devices) == 1:
            self._predict, self._variables = jax.jit(predict), jax.device_put(variables)
        else:
            mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
            shardings = [NamedSharding(mesh, spec) for spec in (P(), P("data"), P("data"))]
            self._predict = jax.jit(
                jax.shard_map(
                    predict,
                    mesh=mesh,
                    in_specs=(P(), P("data"), P("data")),
                    out_specs=P("data"),
                    check_vma=False,
                ),
                in_shardings=tuple(shardings),
            )
            self._variables = jax.device_put(variables, shardings[0])
        self._compiled: dict[tuple[int, ...], jax.stages.Compiled] = {}
        self._lock = threading.Lock()

    def check(self, plan: ResizePlan) -> None:
        """Any size will do."""

    def __call__(self, images: np.ndarray, image_sizes: np.ndarray) -> Detections:
        executable = self._executable(images, image_sizes)
        return executable(self._variables, images, image_sizes)

    def _executable(self, images: np.ndarray, sizes: np.ndarray) -> jax.stages.Compiled:
        """Return the program for these shapes, compiled by the first thread that needs it."""
        with self._lock:
            key = images.shape[:3]
            if key not in self._compiled:
                doing = f"compiling the detector for images of {key[1]} x {key[2]}"
                with console.lasting(doing, "compiled"):
                    with device.traced_forms():
                        lowered = self._predict.lower(self._variables, images, sizes)
                    device.log_kernels()
                    self._compiled[key] = lowered.compile()
            return self._compiled[key]
