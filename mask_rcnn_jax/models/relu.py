"""ReLU that keeps only its output for the backward pass."""

import jax
import jax.numpy as jnp
from jax import lax

from mask_rcnn_jax.platforms import by_platform


@jax.custom_jvp
def relu(x: jax.Array) -> jax.Array:
    """Return max(x, 0); its gradient reads the output instead of x.

    The numbers are those of `jax.nn.relu`, except that the gradient at NaN is 1. Training keeps no
    x, so that a CPU has one map in memory instead of two, and XLA leaves the ReLU to cuDNN.
    """
    return jnp.maximum(x, 0)


@relu.defjvp
def _relu_jvp(primals, tangents):
    # XLA for CPUs would duplicate the maximum and keep x, see `training.step.compiler_options`.
    y = by_platform(relu(*primals), cpu=lax.optimization_barrier, default=lambda y: y)
    # Not y > 0, which XLA turns back into x > 0.
    return y, lax.select(y != 0, tangents[0], lax.full_like(tangents[0], 0))
