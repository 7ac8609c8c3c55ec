"""Rules from JAX primitives to ONNX operators: each alone against JAX, and those of layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from mask_rcnn_jax.jax_to_onnx.graph import OPSETS  # noqa: E402
from tests.jax_to_onnx.traced import converted  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 6, 5, 4)).astype(np.float32)  # [B, H, W, C]
SIDES = np.array([[7, 9], [12, 4]], np.int32)


def kinds(nodes):
    return [node.op_type for node in nodes]


def check(function, *arrays, opset=17, atol=1e-5):
    """Compare with JAX and return the kinds of the graph's nodes."""
    nodes, found = converted(function, *arrays, opset=opset)
    expected = jax.tree.leaves(jax.jit(function)(*arrays))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, np.asarray(theirs), rtol=1e-5, atol=atol)
    return kinds(nodes)


ELEMENTWISE = {
    "exp log sqrt": lambda x: jnp.log(jnp.sqrt(jnp.exp(x))),
    "tanh sigmoid": lambda x: jnp.tanh(x) * jax.nn.sigmoid(x),
    "erf": lambda x: lax.erf(x),
    "gelu": lambda x: nn.gelu(x, approximate=False),
    "gelu by tanh": lambda x: nn.gelu(x, approximate=True),
    "silu": nn.silu,
    "rounding": lambda x: (jnp.floor(x), jnp.ceil(x), jnp.round(x), jnp.sign(x)),
    "powers": lambda x: (x**2, x**3, jnp.square(x), lax.rsqrt(x * x + 1)),
    "log1p": lambda x: (jnp.log1p(x * x), jnp.expm1(x)),
    "clip": lambda x: jnp.clip(x, -0.5, 1.0),
    "compare": lambda x: ((x > 0) & (x <= 1) | (x == x[0, 0, 0, 0]), x != x, ~(x >= 0)),
    "finite": lambda x: jnp.isfinite(x / jnp.maximum(x, 0)),
    "where": lambda x: jnp.where(x > 0, x, -1.0),
    "larger of bools": lambda x: (jnp.maximum(x > 0, x < 1), jnp.minimum(x > 0, x < 1)),
    "selected by numbers": lambda x: lax.select_n((x > 0).astype(int), x > 1, x > -1),
    "of constants": lambda x: x[0, 0, 0] + jax.nn.relu(jnp.arange(4.0) - 2),
    "checkpoint": lambda x: jax.checkpoint(lambda y: jnp.sin(y) * 2)(x),
    "where of bools": lambda x: jnp.where(x > 0, x < 1, x > -1),
    "softplus": jax.nn.softplus,
    "rem": lambda x: lax.rem(x, jnp.float32(0.7)),
    "at least 0": lambda x: (jnp.maximum((9 * x).astype(int), 0), jnp.maximum(0, jnp.floor(x))),
}
SHAPES = {
    "transposed sum": lambda x: x.transpose(0, 3, 1, 2) + x.reshape(2, 4, 6, 5),
    "windows": lambda x: (
        jnp.pad(x, ((0, 0), (0, 0), (0, 1), (0, 0)))
        .reshape(2, 2, 3, 2, 3, 4)
        .swapaxes(2, 3)
        .reshape(-1, 3, 3, 4)
    ),
    "joined and split again": lambda x: x.reshape(-1, 4).reshape(12, 5, 2, 2) * 2,
    "sizes without a common division": lambda x: x.reshape(3, 80),
    "pixel shuffle": lambda x: (
        x.reshape(2, 6, 5, 2, 2).swapaxes(2, 3).reshape(2, 12, 10)[..., None]
    ),
    "split": lambda x: jnp.split(x, [1, 3], axis=3),
    "unpacked": lambda x: [row * (k + 1) for k, row in enumerate([*x.swapaxes(0, 2), *x[0, 0]])],
    "unpacked and packed": lambda x: jnp.stack([*jnp.moveaxis(x, 3, 0)][::-1], axis=2),
    "reversed": lambda x: x[:, ::-1, :, ::-1],
    "strided": lambda x: x[:, 1:6:2, ::3, 1],
    "cropped": lambda x: lax.pad(x, jnp.float32(0), [(0, 0, 0), (-1, 2, 0), (0, -2, 0), (0, 0, 0)]),
    "stacked": lambda x: jnp.stack([x[..., 0], x[..., 1], jnp.zeros_like(x[..., 0])], axis=-1),
    "joined": lambda x: jnp.concatenate([x, x[:, :1] * 2, jnp.ones((2, 2, 5, 4))], axis=1),
    "repeated": lambda x: jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2),
    "tiled": lambda x: jnp.tile(x[:, :1], (1, 3, 1, 2)),
    "outer": lambda x: x[:, 0, 0, 0][:, None] * x[0, :, 0, 0][None],
    "repeated inside": lambda x: jnp.broadcast_to(x[:1, 0][:, :, None], (1, 5, 3, 4)).reshape(
        1, 15, 4
    ),
    "edges": lambda x: jnp.pad(x, ((0, 0), (1, 2), (2, 0), (0, 0)), mode="edge"),
    "nothing": lambda x: jnp.concatenate([x[:, :3], x[:, :0], x[:, 3:] * 2], 1)[:, 3:],
    "row by an array": lambda x: x[jnp.int32(1)] + x[jnp.int32(9)],
    "repeated bools and integers": lambda x: [
        jnp.repeat(jnp.repeat(each, 2, axis=1), 3, axis=2) for each in (x > 0, x.astype(int))
    ],
    "repeated, with a row": lambda x: (
        jnp.broadcast_to(x[:, :, :1], x.shape) >= jnp.max(x, 2, keepdims=True),
        jnp.maximum(x[..., :1], jnp.zeros((1, 1, 1, 4))),
        x[..., :1] + jnp.zeros((1, 1, 1, 4)),
    ),
    "padded bools": lambda x: jnp.pad(x[0, 0] > 0, ((0, 1), (2, 0))),
}
LOOPS = {
    "parts in turn": lambda x: lax.map(lambda part: jnp.max(part, -1) * 2, x.swapaxes(0, 1)),
    "with a state": lambda x: lax.scan(lambda s, part: (s + part, s * x[0, 0, 0, 0]), x[0], x),
    "backwards": lambda x: lax.scan(lambda s, part: (s * 2, s + part), x[0], x, reverse=True),
    "without results": lambda x: lax.scan(lambda s, part: (s * part, None), x[0], x)[0],
}
REDUCTIONS = {
    "sums": lambda x: (jnp.sum(x, (1, 2)), jnp.mean(x, -1, keepdims=True), jnp.sum(x)),
    "extremes": lambda x: (jnp.max(x, (0, 3)), jnp.min(x, 2), jnp.prod(x[0, 0], 0)),
    "bools": lambda x: (jnp.all(x > -1, -1), jnp.any(x > 1, (1, 2))),
    "of repeated": lambda x: [
        reduce(jnp.broadcast_to(x[:, :, :1], x.shape), (2, 3))
        for reduce in (jnp.sum, jnp.max, jnp.prod)
    ],
    "layer norm": lambda x: (
        (x - jnp.mean(x, -1, keepdims=True)) * lax.rsqrt(jnp.var(x, -1) + 1)[..., None]
    ),
    "arguments": lambda x: (jnp.argmax(x, 1), jnp.argmin(x, -1)),
    "cumulative": lambda x: jnp.cumsum(x, 2),
    "top": lambda x: lax.top_k(x, 3),
    "of bools": lambda x: (jnp.max(x > 0, 1), jnp.min(x > 0, 2), jnp.argmax(x > 0, axis=1)),
    "nearly softmax": lambda x: (
        (e := jnp.exp(x - jnp.max(x, 3, keepdims=True))) / jnp.sum(e, 2, keepdims=True)
    ),
    "logsumexp": lambda x: (jax.nn.logsumexp(x, axis=0), jax.nn.log_softmax(x)),
}
PRODUCTS = {
    "dense": lambda x: x @ jnp.asarray(X[0, 0].T),
    "a number": lambda x: jnp.dot(x[0, 0, 0], jnp.arange(4.0)),
    "of integers": lambda x: x.astype(int) @ jnp.arange(8).reshape(4, 2),
    "weights first": lambda x: jnp.einsum("kc,bhwc->kbhw", X[1, 0], x),
    "attention": lambda x: jnp.einsum("bhwc,bvwc->bwhv", x, x * 2),
    "positions": lambda x: jnp.einsum("byxc,yjc->byxj", x, X[0, :, :3]),
    "class mask": lambda x: jnp.einsum("bhwc,bc->bhw", x, x[:, 0, 0]),
    "pools": lambda x: (nn.max_pool(x, (3, 3), (2, 2), "SAME"), nn.avg_pool(x, (2, 3), (2, 1))),
    "dilated": lambda x: lax.conv_general_dilated(
        x, X[:, :2].reshape(2, 2, 5, 4)[:, :, :4], (2, 1), ((1, 0), (0, 2)), rhs_dilation=(1, 2),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    ),
    "in groups": lambda x: lax.conv_general_dilated(
        x, X[:, :3, :2, :4], (1, 1), "SAME", feature_group_count=2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    ),
    "transposed": lambda x: lax.conv_transpose(
        x, X[:, :3, :4].reshape(2, 3, 4, 4), (2, 3), "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    ),
}  # fmt: skip
INDEXING = {
    "rows of each image": lambda x: jnp.take_along_axis(
        x.reshape(2, 30, 4), jnp.argmax(x, 1).reshape(2, 20)[:, :7, None], axis=1
    ),
    "of one image": lambda x: jnp.take_along_axis(
        x[:1, 0], jnp.argmax(x, 1)[:1, 0, :, None] % 5, axis=1
    ),
    "numbers": lambda x: jnp.take_along_axis(
        x[:, 0, :, 0], jnp.argmax(x[:, :5], 1)[:, :, 0], axis=1
    ),
    "rows of a table": lambda x: jnp.asarray(X[0])[jnp.argmax(x, 1)],
    "clipped": lambda x: (
        jnp.take(x, (9 * x[0, 0]).astype(int), axis=1, mode="clip"),
        jnp.take_along_axis(x[..., 0, 0], (9 * x[:, 0, :, 0]).astype(int), axis=1, mode="clip"),
    ),
    "one hot": lambda x: nn.one_hot(jnp.argmax(x, 3), 4),
}
CASES = ELEMENTWISE | SHAPES | LOOPS | REDUCTIONS | PRODUCTS | INDEXING


@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_jax_does(name):
    check(CASES[name], X)


@pytest.mark.parametrize("opset", OPSETS)
def test_reductions_in_every_opset(opset):
    check(REDUCTIONS["extremes"], X, opset=opset)


def test_integers_are_divided_downwards():
    def function(n):
        return -(-n // 5), n // -4, (n - 10) % 3, jnp.max(n, axis=0), lax.div(n - 10, 3)

    check(function, SIDES)


def conv_layer(x, kernel, scale, bias):
    y = lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    scale, bias = (jnp.reshape(each, (1, 1, 1, -1)) for each in (scale, bias))
    return jnp.maximum((y - bias) * scale + bias, 0)


def test_whole_numbers_that_are_not_negative_are_divided_without_mod():
    def divide(x):
        n = jax.lax.top_k(x.reshape(-1), 9)[1]
        return n // 5, n % 5

    assert "Mod" not in check(divide, X)


def test_a_trunk_has_no_transposed_maps_and_norms_are_part_of_convolutions():
    kernels = RNG.normal(size=(3, 3, 3, 4, 4)).astype(np.float32)
    scale, bias = RNG.normal(size=(2, 4)).astype(np.float32)

    def trunk(x):
        inside = (jnp.arange(6) < 5)[None, :, None, None]
        y = conv_layer(x, kernels[0], scale, bias)
        y = y + conv_layer(jnp.where(inside, y, 0), kernels[1], scale, bias)
        low = nn.max_pool(y, (2, 2), (2, 2))
        y = y[:, :, :4] + jnp.repeat(jnp.repeat(low, 2, axis=1), 2, axis=2)
        return conv_layer(y[:, ::2, ::2], kernels[2], scale, bias)

    found = check(trunk, X, atol=1e-3)
    assert sorted(found) == sorted(
        ["Transpose", "Conv", "Relu", "Where", "Conv", "Relu", "Add", "MaxPool", "Slice", "Resize"]
        + ["Add", "MaxPool", "Conv", "Relu", "Transpose"]
    )


def test_a_mean_of_channels_stays_in_place():
    kernel = RNG.normal(size=(3, 3, 4, 4)).astype(np.float32)

    def function(x):
        y = conv_layer(x, kernel, np.float32(1), np.float32(0))
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        return conv_layer(y, kernel, np.float32(2), np.float32(0))

    assert check(function, X, atol=1e-3).count("Transpose") == 2


def test_softmax_is_one_node():
    assert check(jax.nn.softmax, X) == ["Softmax"]


def test_forms_of_platforms_and_what_nobody_reads():
    def function(x):
        unused = lax.sort(x)  # has no rule
        y = lax.platform_dependent(x, cpu=lambda x: x + 1, default=lambda x: lax.sort(x))
        return lax.stop_gradient(y), unused[:0]

    assert check(lambda x: function(x)[0], X) == ["Add"]


def test_an_operation_without_a_rule_is_named():
    with pytest.raises(
        ValueError, match="it cannot convert the operation sort; --format=stablehlo"
    ):
        converted(lambda x: lax.sort(x), X)
    with pytest.raises(ValueError, match="it cannot convert the operation while"):
        converted(lambda x: lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: x + 1, x), X)


class Hidden(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.sort(nn.Dense(4)(x), axis=1)


class Outer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Hidden(name="trunk")(x)


def test_an_operation_inside_a_function_names_its_part_of_the_model():
    variables = jax.eval_shape(Outer().init, jax.random.key(0), X)
    variables = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), variables)
    with pytest.raises(ValueError, match="the operation sort in Outer/trunk; --format=stablehlo"):
        converted(Outer().apply, X, variables=variables)


REFUSED = {
    "numbers to uint8": lambda x: (x * 9).astype(jnp.uint8),
    "the operation reduce ": lambda x: lax.reduce(x, jnp.float32(0), lambda a, b: a + 2 * b, (1,)),
    "lt of bools": lambda x: (x > 0) < (x > 1),
    "padding between elements": lambda x: lax.pad(x, x[0, 0, 0, 0], [(1, 0, 0)] * 4),
    "this much padding": lambda x: lax.conv_general_dilated(
        x, X[:, :3, :4].reshape(2, 3, 4, 4), (1, 1), ((0, 3), (2, 0)), lhs_dilation=(2, 3),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_differ_is_refused(what):
    with pytest.raises(ValueError, match=f"it cannot convert .*{what.strip()}"):
        converted(REFUSED[what], X)


class TwiceGroupNorm(nn.GroupNorm):
    def __call__(self, x):
        return 2 * super().__call__(x)


class NormedTable(nn.Module):
    """A norm of what is the same for all images."""

    @nn.compact
    def __call__(self, x):
        return x + nn.LayerNorm()(self.param("table", nn.initializers.normal(1.0), (1, 1, 5, 4)))


LAYERS = {
    "GroupNorm": nn.GroupNorm(2),
    "RMSNorm": nn.RMSNorm(),
    "a user's GroupNorm": TwiceGroupNorm(2),
    "a norm of a table": NormedTable(),
    "a norm of several axes": nn.LayerNorm(reduction_axes=-1, feature_axes=(-2, -1)),
    "attention": nn.MultiHeadDotProductAttention(2, deterministic=True),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_users(name):
    layer = LAYERS[name]
    variables = jax.tree.map(
        lambda leaf: RNG.normal(size=leaf.shape).astype(np.float32),
        jax.eval_shape(layer.init, jax.random.key(0), X),
    )
    _, (found,) = converted(layer.apply, X, variables=variables)
    expected = jax.jit(layer.apply)(variables, X)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_constants_of_bfloat16_are_stored_as_float32():
    layer = nn.Conv(3, (3, 3), dtype=jnp.bfloat16)
    variables = jax.tree.map(np.asarray, layer.init(jax.random.key(0), X))
    _, (found,) = converted(
        lambda v, x: layer.apply(v, x).astype(jnp.float32), X, variables=variables
    )
    np.testing.assert_allclose(found, layer.apply(variables, X).astype(jnp.float32), atol=0.05)
