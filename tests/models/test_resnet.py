"""ResNet trunks: shapes of every depth, paddings, norms and frozen stages."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from mask_rcnn_jax.models.conv import Conv, UpConv, pixel_shuffle
from mask_rcnn_jax.models.resnet import ResNet
from tests.bounds import assert_within, rounding_bound
from tests.helpers import drawn


def small_trunk(**fields):
    """A trunk of 10 layers, its variables and images; positive weights need no program to draw."""
    model = ResNet(**{"depth": 10, "frozen_stages": 0, **fields})
    rng = np.random.default_rng(0)
    images = rng.normal(size=(1, 64, 96, 3)).astype(np.float32)
    shapes = jax.eval_shape(partial(model.init, train=False), jax.random.key(1), images)

    def draw(leaf):  # a kernel averages what it sees
        values = rng.uniform(0.5, 1.5, leaf.shape) / np.prod(leaf.shape[:-1])
        return jnp.asarray(values, leaf.dtype)

    return model, jax.tree.map(draw, shapes), images


def test_entries_have_names():
    """Their order is not kept, and another norm would be taken for a stride."""
    with pytest.raises(TypeError, match="positional"):
        ResNet(50, "batch")


# Trainable weights without norms and classifier, in millions: torchvision's parameter counts less
# the classifier and the batch norms' scales and biases.
@pytest.mark.parametrize(
    ("depth", "channels", "millions"),
    [(10, 512, 4.90), (18, 512, 11.17), (34, 512, 21.27), (50, 2048, 23.45), (101, 2048, 42.39),
     (152, 2048, 57.99)],
)  # fmt: skip
def test_every_depth_has_its_shapes_and_size(depth, channels, millions):
    model = ResNet(depth=depth, frozen_stages=0)
    images = jax.ShapeDtypeStruct((2, 128, 192, 3), jnp.float32)
    features, variables = jax.eval_shape(
        lambda x: model.init_with_output(jax.random.key(0), x, train=False), images
    )
    expected = [(2, 128 // s, 192 // s, channels // d)
                for s, d in zip((4, 8, 16, 32), (8, 4, 2, 1), strict=True)]  # fmt: skip
    assert [f.shape for f in features] == expected
    size = sum(np.prod(p.shape) for p in jax.tree.leaves(variables["params"])) / 1e6
    assert size == pytest.approx(millions, abs=0.006)


@pytest.mark.parametrize("stride_in", ["3x3", "1x1"])
def test_the_named_convolution_strides(stride_in):
    model = ResNet(depth=50, stride_in=stride_in, frozen_stages=0)
    images = jax.ShapeDtypeStruct((1, 64, 96, 3), jnp.float32)
    run = partial(model.init_with_output, train=False, mutable=True, capture_intermediates=True)
    _, state = jax.eval_shape(run, jax.random.key(0), images)
    block = state["intermediates"]["res3_0"]
    sides = block["conv1"]["__call__"][0].shape[1:3]
    assert sides == ((8, 12) if stride_in == "1x1" else (16, 24))


def test_same_padding_shifts_what_torch_padding_centers():
    kernel = np.zeros((3, 3, 1, 1), np.float32)
    kernel[1, 1] = 1.0
    ramp = jnp.arange(8.0)[None, None, :, None] * jnp.ones((1, 8, 1, 1))
    model, variables, images = small_trunk(padding="same")
    same = nn.Conv(1, (3, 3), 2, "SAME", use_bias=False).apply({"params": {"kernel": kernel}}, ramp)
    torch = nn.Conv(1, (3, 3), 2, 1, use_bias=False).apply({"params": {"kernel": kernel}}, ramp)
    np.testing.assert_array_equal(same[0, 0, :, 0], [1, 3, 5, 7])
    np.testing.assert_array_equal(torch[0, 0, :, 0], [0, 2, 4, 6])
    outputs = (
        jax.jit(partial(m.apply, train=False))(variables, images)[0]
        for m in (model, ResNet(depth=10, frozen_stages=0))
    )
    assert not np.allclose(*outputs)


@pytest.mark.parametrize("frozen_stages", [pytest.param(0, marks=pytest.mark.slow), 1, 4])
def test_frozen_stages_have_no_gradient_and_the_others_do(frozen_stages):
    model, variables, images = small_trunk(norm="group", frozen_stages=frozen_stages)

    def loss(params):
        return sum(
            jnp.sum(jnp.square(f)) for f in model.apply({"params": params}, images, train=False)
        )

    grads = jax.jit(jax.grad(loss))(variables["params"])
    frozen = ["stem", "res2", "res3", "res4", "res5"][:frozen_stages]
    for module, tree in grads.items():
        largest = max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(tree))
        assert (largest == 0.0) == (module.split("_")[0] in frozen), module


def test_which_norms_move_their_statistics_and_which_have_parameters():
    model, variables, images = small_trunk(norm="batch")
    train = partial(model.apply, train=True, mutable=["batch_stats"])
    _, updated = jax.jit(train)(variables, images)
    before = variables["batch_stats"]["stem_norm"]["mean"]
    assert not np.allclose(updated["batch_stats"]["stem_norm"]["mean"], before)
    model, variables, images = small_trunk(norm="affine")
    train = partial(model.apply, train=True, mutable=["batch_stats"])
    _, updated = jax.jit(train)(variables, images)
    assert jax.tree.all(
        jax.tree.map(np.array_equal, updated, {"batch_stats": variables["batch_stats"]})
    )
    assert set(variables["params"]["stem_norm"]) == {"scale", "bias"}
    _, frozen, _ = small_trunk(norm="frozen")
    assert set(frozen["batch_stats"]["stem_norm"]) == {"scale", "bias"}
    assert "stem_norm" not in frozen["params"]


@pytest.mark.parametrize(
    ("side", "stride", "padding"),
    [(1, 1, 0), (1, 2, 0), (1, 2, "SAME"), (3, 1, 1), (3, 2, 1), (3, 2, "SAME"), (7, 2, 3),
     (7, 2, "SAME")],
)  # fmt: skip
def test_convolution_equals_flax(side, stride, padding):
    x = jax.random.normal(jax.random.key(0), (2, 9, 8, 4))
    ours, theirs = Conv(3, (side, side), stride, padding), nn.Conv(3, (side, side), stride, padding)
    variables = drawn(theirs, x)
    magnitude = theirs.apply(jax.tree.map(jnp.abs, variables), jnp.abs(x))
    bound = rounding_bound(2 * (side * side * 4 + 1), magnitude)
    assert_within(ours.apply(variables, x), theirs.apply(variables, x), bound)
    assert jax.tree.map(jnp.shape, drawn(ours, x)) == jax.tree.map(jnp.shape, variables)


@pytest.mark.parametrize("use_bias", [False, True])
def test_fixed_norm_in_the_convolution_equals_one_behind_it(use_bias):
    x = jax.random.normal(jax.random.key(0), (2, 6, 5, 4))
    conv = Conv(3, (3, 3), padding=1, use_bias=use_bias)
    params = drawn(conv, x)["params"]
    scale, shift = jnp.array([2.0, 0.0, -0.5]), jnp.array([1.0, 3.0, -2.0])

    def folded(params, x):
        return conv.apply({"params": params}, x, (scale, shift))

    def apart(params, x):
        y = conv.apply({"params": params}, x)
        return y * scale[None, None, None] + shift[None, None, None]

    def magnitude(params, x):
        y = conv.apply({"params": params}, x)
        return y * abs(scale)[None, None, None] + abs(shift)[None, None, None]

    def run(f, w, args):
        def loss(params, x):
            y = f(params, x)
            return jnp.sum(y * w), y

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(*args)

    sizes = jax.tree.map(jnp.abs, (params, x))
    weights = jax.random.normal(jax.random.key(2), (2, 6, 5, 3))
    grads, y = run(folded, weights, (params, x))
    expected, other = run(apart, weights, (params, x))
    grad_sizes, size = run(magnitude, abs(weights), sizes)
    assert_within(y, other, rounding_bound(2 * 40, size))
    positions = weights[..., 0].size
    bounds = jax.tree.map(lambda size: rounding_bound(2 * (positions + 40), size), grad_sizes)
    jax.tree.map(assert_within, grads, expected, bounds)


def test_up_convolution_equals_flax_transposed_convolution():
    x = jax.random.normal(jax.random.key(0), (2, 3, 5, 4))
    up = UpConv(6, jnp.float32, nn.initializers.normal())
    variables = drawn(up, x)
    reference = nn.ConvTranspose(6, (2, 2), (2, 2), transpose_kernel=True)
    y = pixel_shuffle(jnp.moveaxis(up.apply(variables, x), -1, 1))
    np.testing.assert_allclose(jnp.moveaxis(y, 1, -1), reference.apply(variables, x), atol=1e-6)
