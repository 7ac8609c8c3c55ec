"""Layer initializers, by their names in recipes."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from mask_rcnn_jax.models.conv import Dense

he_fan_out = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
# Each output has one input channel: kernels are [k, k, 1, C].
he_depthwise = nn.initializers.variance_scaling(2.0, "fan_in", "normal")
# Up-convolution kernels are [2, 2, out, in].
he_fan_out_up = nn.initializers.variance_scaling(2.0, "fan_out", "normal", in_axis=3, out_axis=2)
# Transformers'.
normal = nn.initializers.truncated_normal(0.02)
normal_dense = partial(Dense, kernel_init=normal, bias_init=nn.initializers.zeros)


def fan_init(name: str) -> nn.initializers.Initializer:
    """Return a uniform initializer: "glorot" (TensorFlow), "xavier_fill" (Caffe2: bound
    sqrt(3 / fan_in)) or "linear" (torch's nn.Linear: bound sqrt(1 / fan_in))."""
    scales = {"xavier_fill": 1.0, "linear": 1.0 / 3.0}
    if name == "glorot":
        return nn.initializers.glorot_uniform()
    if name not in scales:
        raise ValueError(f"init is {name!r}, expected one of {['glorot', *scales]}")
    return nn.initializers.variance_scaling(scales[name], "fan_in", "uniform")


def dense(
    x: jax.Array,
    features: int,
    init: str | nn.initializers.Initializer,
    name: str,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Apply a fully connected layer; "linear" also draws a random bias, as torch does."""
    bias_init = nn.initializers.zeros
    if init == "linear":
        bound = x.shape[-1] ** -0.5

        def bias_init(key, shape, dtype=jnp.float32):  # type: ignore[misc]
            return jax.random.uniform(key, shape, dtype, -bound, bound)

    kernel_init = fan_init(init) if isinstance(init, str) else init
    return Dense(features, kernel_init, bias_init, dtype, name=name)(x)
