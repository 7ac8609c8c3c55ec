"""The precision that a model computes in."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from mask_rcnn_jax.models.quantization import Quantization


@dataclass(frozen=True)
class Precision:
    """Computation dtype, rounding of float32 products on GPUs, and int8."""

    dtype: DTypeLike = jnp.float32  # parameters are float32
    matmul: str | None = None  # see jax.default_matmul_precision
    quantization: Quantization = Quantization()


def in_precision(method):
    """Run a model method at its `precision`, including gradients."""

    @wraps(method)
    def wrapped(self, *args, **kwargs):
        matmul, quantization = self.precision.matmul, self.precision.quantization
        with ExitStack() as stack:
            if matmul is not None:
                stack.enter_context(jax.default_matmul_precision(matmul))
            if quantization.int8:
                stack.enter_context(nn.intercept_methods(quantization.interceptor()))
            return method(self, *args, **kwargs)

    return wrapped
