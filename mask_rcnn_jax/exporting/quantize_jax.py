"""Post-training static quantization of a JAX program: int8 weights, 255-step activations.

Every convolution and fully connected layer emulates int8 arithmetic: weights are int8 per output
channel, and inputs are rounded to the steps of their calibrated range. Sums run in the model's
precision, because XLA for GPUs has no reliable integer convolution. The program is a quarter of the
size, but not faster.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from mask_rcnn_jax.models.conv import Conv, Dense, UpConv
from mask_rcnn_jax.models.quantization import FLOAT_LAYERS, STEPS


def measure_ranges(
    predict: Callable, variables: dict, inputs: Iterable[tuple[np.ndarray, np.ndarray]]
) -> dict[str, float]:
    """Measure the largest input magnitude of each quantized layer, by layer path.

    Args:
        predict: function (variables, images, image_sizes) -> anything.
        variables: its first argument.
        inputs: (images, image_sizes) pairs. Raises ValueError if empty.
    """

    @jax.jit
    def largest_inputs(images, image_sizes):
        seen: dict[str, jax.Array] = {}

        def watch(call, args, kwargs, context):
            path = _quantized_path(context)
            if path:
                largest = jnp.max(jnp.abs(args[0])).astype(jnp.float32)
                seen[path] = jnp.maximum(seen[path], largest) if path in seen else largest
            return call(*args, **kwargs)

        with nn.intercept_methods(watch):
            predict(variables, images, image_sizes)
        return seen

    ranges: dict[str, float] = {}
    for images, image_sizes in inputs:
        for path, largest in largest_inputs(images, image_sizes).items():
            ranges[path] = max(ranges.get(path, 0.0), float(largest))
    if not ranges:
        raise ValueError("no calibration images")
    return ranges


def quantize_jax(
    predict: Callable, variables: dict, ranges: dict[str, float], example: tuple[Any, Any]
) -> tuple[Callable, dict]:
    """Return int8 versions of `predict` and of its first argument, `variables`.

    A kernel becomes {"int8", "scale"}, with float values int8 * scale.
    ranges: largest input by layer path; 0 leaves a layer's inputs as they are. example: images and
    image_sizes, arrays or their shapes.
    """
    axes = _output_axes(predict, variables, example)
    flat = flatten_dict(variables["params"])
    for path in ranges:
        key = (*path.split("/"), "kernel")
        flat[key] = _quantize_kernel(np.asarray(flat[key], np.float32), axes[path])
    packed = {**variables, "params": unflatten_dict(flat)}

    def quantized(packed, images, image_sizes):
        def round_input(call, args, kwargs, context):
            path = _quantized_path(context)
            if ranges.get(path, 0.0) == 0:  # as `models.quantization`: it saw nothing but 0
                return call(*args, **kwargs)
            step = ranges[path] / STEPS
            x = jnp.clip(jnp.round(args[0].astype(jnp.float32) / step), -STEPS, STEPS) * step
            return call(x.astype(args[0].dtype), *args[1:], **kwargs)

        params = jax.tree.map(
            _dequantize, packed["params"], is_leaf=lambda x: isinstance(x, dict) and "int8" in x
        )
        with nn.intercept_methods(round_input):
            return predict({**packed, "params": params}, images, image_sizes)

    return quantized, packed


def _quantized_path(context: nn.module.InterceptorContext) -> str:
    """Return the called layer's path, or "" if it is not quantized."""
    layer = context.module
    if context.method_name != "__call__" or not isinstance(layer, (Conv, Dense, UpConv)):
        return ""
    return "" if layer.name in FLOAT_LAYERS else "/".join(layer.path)


def _output_axes(predict: Callable, variables: dict, example: tuple[Any, Any]) -> dict[str, int]:
    """Return the axis of each quantized layer's kernel that has its output channels."""
    axes: dict[str, int] = {}

    def watch(call, args, kwargs, context):
        if path := _quantized_path(context):
            axes[path] = context.module.output_axis
        return call(*args, **kwargs)

    with nn.intercept_methods(watch):
        # A function of its own: JAX remembers what it traced, and then calls nothing.
        jax.eval_shape(lambda *arguments: predict(*arguments), variables, *example)
    return axes


def _quantize_kernel(kernel: np.ndarray, output_axis: int) -> dict[str, np.ndarray]:
    """Quantize per output channel."""
    axes = tuple(i for i in range(kernel.ndim) if i != output_axis % kernel.ndim)
    scale = np.maximum(np.abs(kernel).max(axes, keepdims=True), 1e-12) / STEPS
    steps = np.clip(np.round(kernel / scale), -STEPS, STEPS)
    return {"int8": steps.astype(np.int8), "scale": scale.astype(np.float32)}


def _dequantize(leaf):
    if isinstance(leaf, dict):
        return leaf["int8"].astype(jnp.float32) * leaf["scale"]
    return leaf
