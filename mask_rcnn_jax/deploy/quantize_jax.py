"""Post-training static quantisation of a JAX program: int8 weights, activations in 255 steps.

Every convolution and fully connected layer computes what int8 arithmetic would: weights are int8
per output channel, and its input is rounded to the steps of its calibrated range. The sums
themselves run in the model's own precision, because XLA for GPUs has no dependable integer
convolution. The program is a quarter of the size, and not faster.
"""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from mask_rcnn_jax.deploy.quantize import FLOAT_LAYERS
from mask_rcnn_jax.models.conv import Conv, Dense, UpConv

STEPS = 127


def measure_ranges(
    predict: Callable, variables: dict, pictures: Iterable[tuple[np.ndarray, np.ndarray]]
) -> dict[str, float]:
    """Largest magnitude that enters each quantised layer, by its path.

    predict: (variables, images, image_sizes) to anything; pictures: its last two arguments.
    Raises ValueError without pictures.
    """

    @jax.jit
    def largest_inputs(images, image_sizes):
        seen: dict[str, jax.Array] = {}

        def watch(call, args, kwargs, context):
            path = _quantised_path(context)
            if path:
                size = jnp.max(jnp.abs(args[0])).astype(jnp.float32)
                seen[path] = jnp.maximum(seen[path], size) if path in seen else size
            return call(*args, **kwargs)

        with nn.intercept_methods(watch):
            predict(variables, images, image_sizes)
        return seen

    ranges: dict[str, float] = {}
    for images, image_sizes in pictures:
        for path, size in largest_inputs(images, image_sizes).items():
            ranges[path] = max(ranges.get(path, 0.0), float(size))
    if not ranges:
        raise ValueError("no calibration pictures")
    return ranges


def quantize_jax(
    predict: Callable, variables: dict, ranges: dict[str, float]
) -> tuple[Callable, dict]:
    """`predict` and `variables` in int8; the second goes into the first.

    A kernel becomes {"int8", "scale"}, its float values int8 * scale.
    """
    flat = flatten_dict(variables["params"])
    for path in ranges:
        key = (*path.split("/"), "kernel")
        flat[key] = _quantise_kernel(np.asarray(flat[key], np.float32), _is_up(key))
    packed = {**variables, "params": unflatten_dict(flat)}

    def quantised(packed, images, image_sizes):
        def rounded(call, args, kwargs, context):
            path = _quantised_path(context)
            if path not in ranges:
                return call(*args, **kwargs)
            step = max(ranges[path], 1e-12) / STEPS
            x = jnp.clip(jnp.round(args[0].astype(jnp.float32) / step), -STEPS, STEPS) * step
            return call(x.astype(args[0].dtype), *args[1:], **kwargs)

        params = jax.tree.map(
            _to_float, packed["params"], is_leaf=lambda x: isinstance(x, dict) and "int8" in x
        )
        with nn.intercept_methods(rounded):
            return predict({**packed, "params": params}, images, image_sizes)

    return quantised, packed


def _quantised_path(context: nn.module.InterceptorContext) -> str:
    """The path of the layer that is being called, or "" if it stays as it is."""
    layer = context.module
    kinds = (Conv, Dense, UpConv)
    if context.method_name != "__call__" or not isinstance(layer, kinds):
        return ""
    return "" if layer.name in FLOAT_LAYERS else "/".join(layer.path)


def _is_up(key: tuple[str, ...]) -> bool:
    return "mask_deconv" in key


def _quantise_kernel(kernel: np.ndarray, is_up: bool) -> dict[str, np.ndarray]:
    """int8 and one scale per output channel, the last axis, or the one before of an `UpConv`."""
    axes = tuple(i for i in range(kernel.ndim) if i != (2 if is_up else kernel.ndim - 1))
    scale = np.maximum(np.abs(kernel).max(axes, keepdims=True), 1e-12) / STEPS
    steps = np.clip(np.round(kernel / scale), -STEPS, STEPS)
    return {"int8": steps.astype(np.int8), "scale": scale.astype(np.float32)}


def _to_float(leaf):
    if isinstance(leaf, dict):
        return leaf["int8"].astype(jnp.float32) * leaf["scale"]
    return leaf
