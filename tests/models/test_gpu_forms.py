"""Layers in the forms that GPUs run, computed on a CPU: the same numbers but for rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

from mask_rcnn_jax.models.conv import Conv, add_bias, add_conv_bias, relu

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


@pytest.fixture
def gpu_forms(monkeypatch):
    """A switch to the default of every choice by platform."""

    def choose_default(*args, default, **platforms):
        return default(*args)

    return lambda: monkeypatch.setattr(lax, "platform_dependent", choose_default)


def with_gradients(function, *args):
    """Output, and gradients of a weighted sum of it, all float64."""
    out, pull = jax.vjp(function, *args)
    weights = np.random.default_rng(7).normal(size=out.shape)
    return [np.float64(x) for x in (out, *pull(jnp.asarray(weights, out.dtype)))]


@pytest.mark.parametrize("dtype", DTYPES)
def test_relu_is_that_of_flax(dtype):
    tiny = float(jnp.finfo(dtype).tiny)
    x = jnp.array([-np.inf, -2, -tiny, -0.0, 0, tiny, 3, np.inf], dtype)
    for mine, theirs in zip(with_gradients(relu, x), with_gradients(nn.relu, x), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert np.isnan(relu(jnp.array(np.nan, dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 5, 3, 4), (0, 5, 3, 4), (3, 1, 2, 2, 2, 1)])
def test_bias_of_a_convolution(dtype, shape, gpu_forms):
    """A bias rounded to the output's dtype; its gradient is the same float32 sum."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=shape), dtype)
    bias = jnp.asarray(rng.normal(size=shape[-1]), jnp.float32)
    expected = with_gradients(add_bias, x, bias)
    for mine, theirs in zip(with_gradients(add_conv_bias, x, bias), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    gpu_forms()
    out, *gradients = with_gradients(add_conv_bias, x, bias)
    for mine, theirs in zip(gradients, expected[1:], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    half = float(jnp.finfo(dtype).eps) / 2 if dtype != jnp.float32 else 0.0
    bound = half * (np.abs(bias) + 2.01 * np.abs(expected[0]))
    assert np.all(np.abs(out - expected[0]) <= bound)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_bias_gradient_is_summed_in_float32(dtype, gpu_forms):
    gpu_forms()
    x, bias = jnp.zeros((1, 96, 64, 2), dtype), jnp.zeros(2)
    gradient = jax.grad(lambda bias: jnp.sum(add_conv_bias(x, bias).astype(jnp.float32)))(bias)
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, 96 * 64)  # not representable in bfloat16


GPU = "h100"


@pytest.fixture(scope="module")
def compile_for_gpu():
    """A function that compiles for a GPU that is not there and returns the program's text."""
    check_compile = pytest.importorskip("pallas_kernels.check_compile")
    problem = check_compile.missing_requirement(GPU)
    if problem:
        pytest.skip(problem)
    check_compile.use_cuda_tools()
    mesh, context = check_compile.absent_gpus(GPU, 1)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def compile_text(function, *args):
        args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere) for x in args]
        with jax.sharding.use_abstract_mesh(context):
            return jax.jit(function).lower(*args).compile().as_text()

    return compile_text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_cudnn_adds_the_bias_and_rectifies(dtype, compile_for_gpu):
    """In training too, where two convolutions follow each other, and nothing else does it."""
    layers = [Conv(16, (3, 3), padding=1, dtype=dtype) for _ in range(2)]
    x = jnp.zeros((2, 24, 32, 16))
    variables = [layer.init(jax.random.key(0), x) for layer in layers]
    leaves, tree = jax.tree.flatten(variables)

    def loss(x, *leaves):
        for layer, weights in zip(layers, jax.tree.unflatten(tree, leaves), strict=True):
            x = relu(layer.apply(weights, x))
        return jnp.sum(x.astype(jnp.float32) ** 2)

    text = compile_for_gpu(jax.grad(loss, range(1 + len(leaves))), x, *leaves)
    assert text.count('custom_call_target="__cudnn$convBiasActivationForward"') == 2
    assert text.count('"activation_mode":"kRelu"') == 2
    assert text.count(" maximum(") == 0
