"""Weights of convolutions as a GPU's prediction reads them, computed once for all predictions.

In 16 bits a kernel takes the scale of a fixed norm, is rounded and is brought to cuDNN's order, and
its bias is rounded. For a single image that is half of what a GPU launches, and what lies between
convolutions, which keeps them out of CUDA graphs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

PREPARED = "prepared"  # collection of variables
Weights = tuple[jax.Array, jax.Array | None]  # kernel [h, w, in, out] and bias [out]


def prepared(layer: nn.Module, compute: Callable[[], Weights], *, round_bias: bool) -> Weights:
    """Return a layer's weights: those in `PREPARED`, else those to compute.

    Where that collection is mutable, it receives what is computed for layers of our own modules,
    with the bias in the kernel's dtype if it is to be rounded.
    """
    if layer.has_variable(PREPARED, "kernel"):
        kernel = layer.get_variable(PREPARED, "kernel")
        bias = (
            layer.get_variable(PREPARED, "bias") if layer.has_variable(PREPARED, "bias") else None
        )
        return jnp.transpose(kernel, (1, 2, 3, 0)), bias
    kernel, bias = compute()
    is_wanted = layer.is_mutable_collection(PREPARED) and not layer.is_initializing()
    if is_wanted and _is_fixed(layer):
        layer.put_variable(PREPARED, "kernel", jnp.transpose(kernel, (3, 0, 1, 2)))
        if bias is not None:
            layer.put_variable(PREPARED, "bias", bias.astype(kernel.dtype) if round_bias else bias)
    return kernel, bias


def _is_fixed(layer: nn.Module) -> bool:
    """Whether each call of a layer has the same weights: it is in no module of a user, which may
    fold in what depends on the image, or another norm each time."""
    module: Any = layer
    while isinstance(module, nn.Module):
        if not type(module).__module__.startswith(__package__):
            return False
        module = module.parent
    return True
