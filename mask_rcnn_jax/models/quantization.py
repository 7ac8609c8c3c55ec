"""Int8 arithmetic emulated while a model trains (Jacob et al., "Quantization and Training of Neural
Networks for Efficient Integer-Arithmetic-Only Inference", 2018)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mask_rcnn_jax.ranges import PositiveFraction, Ranged

STEPS = 127  # int8 on both sides of zero, without -128
RANGE = "input_range"  # name of a layer's range in `batch_stats`
# Layers that stay float: they are small, and their outputs are scores and coordinates.
FLOAT_LAYERS = (
    *("objectness_logits", "anchor_deltas", "cls_score", "bbox_pred"),
    *("mask_predictor", "coarse_predictor", "keypoint_deconv"),
)


@dataclass(frozen=True)
class Quantization(Ranged):
    """Rounding of convolutions and fully connected layers to values of int8.

    Kernels are rounded per output channel, with the scale of a frozen norm multiplied in, as in an
    exported model. Inputs are rounded per tensor, symmetrically in the range of the layer: a
    moving average of the largest magnitude in each batch. It is stored in `batch_stats` as
    "input_range", float32 []; 0 is a layer that has seen no batch and does not round its inputs.
    The heads' last layers stay float. Gradients pass the rounding unchanged, and are 0 where an
    input is outside its range.

    Attributes:
        int8: round, in training and in prediction; `export --int8` then uses the trained ranges.
        range_momentum: share of a new batch in a range.
    """

    int8: bool = False
    range_momentum: PositiveFraction = 0.05

    def interceptor(self) -> Callable:
        """Return an interceptor for `nn.intercept_methods`, for one call of a model's method.

        Layers have a method `contract(x, kernel, ..)`, whose arguments are rounded, and the axis of
        the kernel's output channels as `output_axis`. A layer that is called several times, as on
        each pyramid level, has one range for all calls.
        """
        seen: dict[str, tuple[jax.Array, jax.Array]] = {}

        def contract_int8(call: Callable, args: tuple, kwargs: dict, context) -> Any:
            layer = context.module
            if context.method_name != "contract" or layer.name in FLOAT_LAYERS:
                return call(*args, **kwargs)
            x, kernel, *rest = args
            limit = layer.get_variable("batch_stats", RANGE, jnp.float32(0.0))
            if layer.is_initializing():
                layer.put_variable("batch_stats", RANGE, limit)
            elif layer.is_mutable_collection("batch_stats"):
                path = "/".join(layer.path)
                start, largest = seen.get(path, (limit, jnp.float32(0.0)))
                inputs = lax.stop_gradient(x) if not rest else _valid(lax.stop_gradient(x), *rest)
                largest = jnp.maximum(largest, jnp.max(jnp.abs(inputs)).astype(jnp.float32))
                seen[path] = start, largest
                moved = start + self.range_momentum * (largest - start)
                # A batch with no inputs but 0, as of masks without an object, says nothing.
                limit = jnp.where((start > 0) & (largest > 0), moved, jnp.maximum(start, largest))
                layer.put_variable("batch_stats", RANGE, limit)
            axes = [i for i in range(kernel.ndim) if i != layer.output_axis % kernel.ndim]
            per_channel = jnp.max(jnp.abs(lax.stop_gradient(kernel)), axes, keepdims=True)
            kernel = fake_quantize(kernel, per_channel.astype(jnp.float32))
            return call(fake_quantize(x, limit), kernel, *rest, **kwargs)

        return contract_int8


def fake_quantize(x: jax.Array, limit: jax.Array) -> jax.Array:
    """Round x to the int8 steps of -limit..limit, in its dtype; values outside are clipped.

    limit: float32, broadcasts to x; 0 leaves x as it is. The gradient is 1, and 0 where x is
    clipped.
    """
    wide = x.astype(jnp.float32)
    safe = jnp.where(limit > 0, limit, 1.0)
    step = safe / STEPS
    rounded = lax.stop_gradient(jnp.round(jnp.clip(wide, -safe, safe) / step) * step)
    # Not the gradient of `clip`, which halves it at the limit: each channel's largest weight is.
    inside = jnp.abs(wide) <= safe
    passed = rounded + jnp.where(inside, wide - lax.stop_gradient(wide), 0.0)
    return jnp.where(limit > 0, passed, wide).astype(x.dtype)


def _valid(x: jax.Array, valid: jax.Array | None) -> jax.Array:
    """Zero rows of x [N, ..] that are not in `valid` [N], which are unspecified."""
    return x if valid is None else jnp.where(valid[:, None, None, None], x, 0)


def trained_ranges(variables: dict) -> dict[str, float]:
    """Return the trained range of each layer by its path, such as "fpn/fpn_lateral2".

    Empty for a model that was trained without `Quantization.int8`.
    """
    found = {}
    for path, value in jax.tree_util.tree_leaves_with_path(variables.get("batch_stats", {})):
        names = [entry.key for entry in path]
        if names[-1] == RANGE:
            found["/".join(names[:-1])] = float(value)
    return found


def without_ranges(tree: dict) -> dict:
    """Return a tree of `batch_stats` without ranges, and without modules that had nothing else."""
    kept = {}
    for name, value in tree.items():
        value = without_ranges(value) if isinstance(value, dict) else value
        if name != RANGE and not (isinstance(value, dict) and not value):
            kept[name] = value
    return kept
