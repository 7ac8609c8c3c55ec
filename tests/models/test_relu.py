"""ReLU: values and gradients of `jax.nn.relu`, from the output alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.models.relu import relu
from mask_rcnn_jax.training.step import compiler_options, make_mesh


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_values_and_gradients_are_those_of_jax(dtype):
    tiny = float(jnp.finfo(dtype).tiny)
    x = jnp.array([-jnp.inf, -2, -tiny, -0.0, 0, tiny, 3, jnp.inf], dtype)
    gradient = jnp.array([2, jnp.nan, -3, 5, jnp.inf, -7, 0.5, -jnp.inf], dtype)
    for run in (lambda f: f(x), lambda f: jax.vjp(f, x)[1](gradient)[0]):
        found, expected = run(relu), run(jax.nn.relu)
        assert found.dtype == dtype
        np.testing.assert_array_equal(np.float32(found), np.float32(expected))


def test_nan_passes():
    value, gradient = jax.value_and_grad(relu)(jnp.float32(jnp.nan))
    assert np.isnan(value) and gradient == 1


def test_backward_pass_reads_the_outputs_on_a_cpu():
    """XLA keeps the barriers, and so the outputs, as long as the options disable their removal."""

    def loss(kernels, x):
        for kernel in kernels:
            x = relu(x @ kernel)
        return jnp.sum(x * x)

    x, kernels = jnp.ones((15, 6)), [jnp.ones((6, 6))] * 3
    step = jax.jit(jax.grad(loss), compiler_options=compiler_options(make_mesh()))
    assert step.lower(kernels, x).compile().as_text().count(" opt-barrier(") == len(kernels)
