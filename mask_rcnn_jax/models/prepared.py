"""Weights of convolutions as a GPU's prediction reads them, computed once for all predictions.

In 16 bits a kernel takes the scale of a fixed norm, is rounded and is brought to cuDNN's order, and
its bias is rounded. For a single image that is half of what a GPU launches, and what lies between
convolutions, which keeps them out of CUDA graphs.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

PREPARED = "prepared"  # collection of variables
Weights = tuple[jax.Array, jax.Array | None]  # kernel [h, w, in, out] and bias [out]


def prepared(layer: nn.Module, compute: Callable[[], Weights], *, round_bias: bool) -> Weights:
    """Return a layer's weights: those in `PREPARED`, else those to compute.

    Where that collection is mutable, it receives what is computed, with the bias in the kernel's
    dtype if it is to be rounded.
    """
    if layer.has_variable(PREPARED, "kernel"):
        kernel = layer.get_variable(PREPARED, "kernel")
        bias = (
            layer.get_variable(PREPARED, "bias") if layer.has_variable(PREPARED, "bias") else None
        )
        return jnp.transpose(kernel, (1, 2, 3, 0)), bias
    kernel, bias = compute()
    if layer.is_mutable_collection(PREPARED) and not layer.is_initializing():
        layer.put_variable(PREPARED, "kernel", jnp.transpose(kernel, (3, 0, 1, 2)))
        if bias is not None:
            layer.put_variable(PREPARED, "bias", bias.astype(kernel.dtype) if round_bias else bias)
    return kernel, bias
