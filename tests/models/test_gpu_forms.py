"""Layers in the forms that GPUs run, computed on a CPU: the same numbers but for rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mask_rcnn_jax.models.conv import Conv, add_bias, add_conv_bias, pointwise, products
from mask_rcnn_jax.models.relu import relu
from mask_rcnn_jax.models.rpn import RPNHead

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


@pytest.fixture
def gpu_forms(monkeypatch):
    """A switch to the default of every choice by platform; returns a list of those taken."""
    taken = []

    def choose_default(*args, default, **platforms):
        taken.append(default)
        return default(*args)

    def switch():
        monkeypatch.setattr(lax, "platform_dependent", choose_default)
        return taken

    return switch


def with_gradients(function, *args):
    """Output, and gradients of a weighted sum of it, all float64."""

    def run(*args):
        out, pull = jax.vjp(function, *args)
        weights = np.random.default_rng(7).normal(size=out.shape)
        return out, *pull(jnp.asarray(weights, out.dtype))

    return [np.float64(x) for x in jax.jit(run)(*args)]


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
    taken = gpu_forms()
    out, *gradients = with_gradients(add_conv_bias, x, bias)
    assert len(taken) == (dtype != jnp.float32)
    for mine, theirs in zip(gradients, expected[1:], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    half = float(jnp.finfo(dtype).eps) / 2 if dtype != jnp.float32 else 0.0
    bound = half * (np.abs(bias) + 2.01 * np.abs(expected[0]))
    assert np.all(np.abs(out - expected[0]) <= bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stride", [1, 2])
def test_pointwise_convolution(dtype, stride, gpu_forms):
    """A convolution on a GPU equals a product on a CPU but for rounding, with gradients."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 5, 8, 6)), dtype)
    kernel = jnp.asarray(rng.normal(size=(1, 1, 6, 4)), dtype)

    def run(x, kernel):
        return pointwise(x, kernel, stride)

    expected = with_gradients(run, x, kernel)
    strided = np.float64(x[:, ::stride, ::stride])
    product = np.einsum("bhwc,ck->bhwk", strided, np.float64(kernel[0, 0]))
    bound = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(expected[0], product, rtol=bound, atol=8 * bound)
    taken = gpu_forms()
    for mine, theirs in zip(with_gradients(run, x, kernel), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=bound, atol=8 * bound)
    assert len(taken) == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_bottlenecks_leave_bias_residual_and_relu_to_a_convolution(dtype, gpu_forms):
    """In 16 bits, a folded norm makes a 1x1 convolution cuDNN's; without, it is a product."""
    layer = Conv(4, (1, 1), use_bias=False, dtype=dtype)
    x, affine = jnp.ones((1, 4, 6, 3)), (jnp.full(4, 2.0), jnp.ones(4))
    params = layer.init(jax.random.key(0), x)
    gpu_forms()
    folded = str(jax.make_jaxpr(layer.apply)(params, x, affine))
    alone = str(jax.make_jaxpr(layer.apply)(params, x))
    assert ("conv_general_dilated" in folded) == (dtype != jnp.float32)
    assert "conv_general_dilated" not in alone


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_bias_gradient_is_summed_in_float32(dtype, gpu_forms):
    taken = gpu_forms()
    x, bias = jnp.zeros((1, 96, 64, 2), dtype), jnp.zeros(2)
    gradient = jax.grad(lambda bias: jnp.sum(add_conv_bias(x, bias).astype(jnp.float32)))(bias)
    assert gradient.dtype == jnp.float32 and taken
    np.testing.assert_array_equal(gradient, 96 * 64)  # not representable in bfloat16


@pytest.mark.parametrize(
    "dtype, shape", [(jnp.float32, (2, 3, 5, 4)), (jnp.bfloat16, (1, 2, 3, 1)),
                     (jnp.float16, (0, 3, 5, 4))]
)  # fmt: skip
def test_products_at_once_and_in_turn(dtype, shape, gpu_forms):
    """Two layers by themselves, and one product; of integers, whose sums are exact."""
    rng = np.random.default_rng(0)

    def integers(*shape):
        return jnp.asarray(rng.integers(-2, 3, shape), jnp.float32)

    x = integers(*shape).astype(dtype)
    weights = [(integers(1, 1, shape[-1], width), integers(width)) for width in (3, 12)]
    grads = [integers(*shape[:3], width).astype(dtype) for width in (3, 12)]

    def by_layers(x, weights):
        layers = [Conv(len(bias), (1, 1), dtype=dtype) for _, bias in weights]
        return [
            layer.apply({"params": {"kernel": kernel, "bias": bias}}, x)
            for layer, (kernel, bias) in zip(layers, weights, strict=True)
        ]

    def results(function):
        def run(x, weights, grads):
            out, pull = jax.vjp(function, x, weights)
            return jax.tree.leaves((out, pull(grads)))

        return jax.jit(run)(x, weights, grads)

    expected = results(by_layers)
    in_turn = results(products)
    taken = gpu_forms()
    at_once = results(products)
    assert len(taken) == 2
    for one, two, three in zip(expected, in_turn, at_once, strict=True):
        assert one.dtype == two.dtype == three.dtype
        np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(one, three)


def test_the_proposal_head_keeps_its_parameters():
    head = RPNHead(anchors_per_cell=3, channels=8)
    maps = [jax.ShapeDtypeStruct((2, rows, 7, 4), jnp.float32) for rows in (5, 3)]
    (logits, deltas), variables = jax.eval_shape(head.init_with_output, jax.random.key(0), maps)
    assert [level.shape for level in logits] == [(2, 105), (2, 63)]
    assert [level.shape for level in deltas] == [(2, 105, 4), (2, 63, 4)]
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), variables["params"])
    assert shapes == {
        name: {"kernel": ((side, side, depth, width), jnp.float32), "bias": ((width,), jnp.float32)}
        for name, side, depth, width in (
            ("conv", 3, 4, 8), ("objectness_logits", 1, 8, 3), ("anchor_deltas", 1, 8, 12)
        )
    }  # fmt: skip


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
        args = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), args
        )
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


@pytest.mark.slow
def test_the_proposal_head_is_one_product_per_level(compile_for_gpu):
    """Forward, and for each of both gradients; the bias gradient is one sum."""
    x = jnp.zeros((2, 64, 96, 64), jnp.bfloat16)
    weights = [(jnp.zeros((1, 1, 64, width)), jnp.zeros(width)) for width in (3, 12)]

    def loss(x, weights):
        return sum(jnp.sum(y.astype(jnp.float32) ** 2) for y in products(x, weights))

    text = compile_for_gpu(jax.grad(loss, (0, 1)), x, weights)
    assert text.count(" dot(") == 3
    assert "15]" in text


@pytest.mark.slow
def test_the_proposal_head_reads_every_map_where_it_is(compile_for_gpu):
    """Maps of several levels are not copied into one, though one product for all reads it once."""
    kernel = jnp.zeros((3, 3, 64, 64), jnp.bfloat16)
    maps = [jnp.zeros((2, 64 >> k, 96 >> k, 64), jnp.bfloat16) for k in range(3)]
    weights = [(jnp.zeros((1, 1, 64, width)), jnp.zeros(width)) for width in (3, 12)]

    def outputs(maps, kernel, weights):
        layer = Conv(64, (3, 3), padding=1, use_bias=False, dtype=jnp.bfloat16)
        hidden = [relu(layer.apply({"params": {"kernel": kernel}}, x)) for x in maps]
        return [products(x, weights) for x in hidden]

    text = compile_for_gpu(outputs, maps, kernel, weights)
    pixels = sum(x.size for x in maps) // 64
    assert text.count(" dot(") == 3
    assert f"[{pixels},64]" not in text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_cudnn_reads_whole_vectors_of_an_image(dtype, compile_for_gpu):
    """Forward and for the gradient of a trained stem, whose kernel keeps its shape."""
    stem = Conv(16, (7, 7), 2, 3, dtype=dtype)
    x = jnp.zeros((2, 64, 96, 3))
    variables = stem.init(jax.random.key(0), x)
    assert variables["params"]["kernel"].shape == (7, 7, 3, 16)

    def loss(variables, x):
        return jnp.sum(relu(stem.apply(variables, x)).astype(jnp.float32) ** 2)

    text = compile_for_gpu(jax.grad(loss), variables, x)
    channels = 12 if dtype == jnp.float32 else 16
    assert f"[2,35,51,{channels}]" in text
    assert text.count('custom_call_target="__cudnn$conv') == 2
    assert '"activation_mode":"kRelu"' in text
