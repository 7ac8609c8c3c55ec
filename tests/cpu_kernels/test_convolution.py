"""Convolution against loops in numpy, and its gradients against those that JAX derives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mask_rcnn_jax.cpu_kernels import convolution, winograd
from mask_rcnn_jax.cpu_kernels.convolution import conv, kernel_gradient
from mask_rcnn_jax.ops.dispatch import replaced
from mask_rcnn_jax.platforms import traced_for
from tests.bounds import UNIT_ROUNDOFF, assert_within, rounding_bound

ONE = ((1, 1), (1, 1))
# Map, kernel, features in and out, stride, padding: blocks of one row, of several, an uneven rest.
CASES = {
    "3x3": ((2, 7, 5), (3, 3), (3, 4), 1, ONE),
    "3x3, stride 2": ((2, 8, 7), (3, 3), (3, 2), 2, ONE),
    "stem": ((1, 15, 18), (7, 7), (3, 4), 2, ((3, 3), (3, 3))),
    "SAME, stride 2": ((1, 8, 9), (3, 3), (2, 3), 2, "SAME"),
    "no padding": ((1, 6, 6), (2, 3), (2, 2), 1, ((0, 0), (0, 0))),
    "uneven padding": ((2, 5, 9), (3, 3), (2, 3), 1, ((0, 2), (3, 0))),
    "one pixel": ((3, 1, 1), (3, 3), (2, 2), 1, ONE),
    "1x1": ((2, 5, 4), (1, 1), (3, 4), 1, ((0, 0), (0, 0))),
    "stride past the end": ((1, 8, 8), (1, 1), (2, 2), 3, ((0, 0), (0, 0))),
}


def problem(case, dtype=np.float32):
    (batch, height, width), kernel_size, (channels, features), stride, padding = CASES[case]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, height, width, channels)).astype(dtype)
    kernel = rng.normal(size=(*kernel_size, channels, features)).astype(dtype)
    return jnp.asarray(x), jnp.asarray(kernel), stride, padding


def by_loops(x, kernel, stride, padding):
    if padding == "SAME":
        padding = lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], (stride, stride), "SAME")
    x = np.pad(np.float64(x), ((0, 0), *padding, (0, 0)))
    kh, kw = kernel.shape[:2]
    rows, columns = ((x.shape[1 + i] - kernel.shape[i]) // stride + 1 for i in range(2))
    out = np.zeros((len(x), rows, columns, kernel.shape[3]))
    for i, j in np.ndindex(rows, columns):
        window = x[:, i * stride : i * stride + kh, j * stride : j * stride + kw]
        out[:, i, j] = np.einsum("nhwc,hwck->nk", window, np.float64(kernel))
    return out


def with_gradients(x, kernel, valid, grad, stride, padding, few=False):
    """Output, and gradients of input and kernel for this one of the output, as one new program."""

    def run(x, kernel, valid, grad):
        forward = functools.partial(conv, stride=stride, padding=padding, sparse_cotangent=few)
        out, pull = jax.vjp(lambda x, kernel: forward(x, kernel, valid), x, kernel)
        return out, *pull(grad)

    return jax.jit(run)(x, kernel, valid, grad)


def bounds(x, kernel, stride, padding, grad):
    """Rounding bounds of the output and, for this gradient of it, of both gradients.

    The same programs run on absolute values, so that their results are the magnitudes; Winograd's
    sums of inputs, weights and products add at most 10 roundings to those of the long sum.
    """
    with pytest.MonkeyPatch.context() as patch, replaced():
        for name in ("INPUT_TRANSFORM", "KERNEL_TRANSFORM", "OUTPUT_TRANSFORM"):
            patch.setattr(winograd, name, np.abs(getattr(winograd, name)))
        magnitudes = with_gradients(abs(x), abs(kernel), None, abs(grad), stride, padding)
    terms = [kernel[..., 0].size, kernel[:, :, 0].size, grad[..., 0].size]
    return [
        rounding_bound(count + 10, np.asarray(magnitude))
        for count, magnitude in zip(terms, magnitudes, strict=True)
    ]


@functools.cache
def bounds_of(case, few, with_winograd):
    x, kernel, stride, padding = problem(case)
    out = jax.eval_shape(lambda x, k: conv(x, k, None, stride, padding), x, kernel)
    return bounds(x, kernel, stride, padding, output_gradient(out.shape, few))


def output_gradient(shape, few):
    rng = np.random.default_rng(1)
    grad = rng.normal(size=shape).astype(np.float32)
    return grad * (rng.uniform(size=(*shape[:3], 1)) < 0.3) if few else grad


@pytest.mark.parametrize("case", CASES)
def test_values(case, with_winograd=False):
    x, kernel, stride, padding = problem(case)
    out = conv(x, kernel, None, stride, padding)
    bound = bounds_of(case, False, with_winograd)[0]
    assert_within(out, by_loops(x, kernel, stride, padding), bound)


def slow_unless(quick, *values):
    return pytest.param(*values, marks=[] if quick else pytest.mark.slow)


# Some positions at a time; one, and all: what changes is the loop over blocks, and not what is in
# them. Blocks of nonzero positions know no case from another.
BLOCKS = [(case, 12, few) for case in CASES for few in (False, True)]
BLOCKS += [(case, n, few) for case in ("3x3", "stem", "uneven padding") for n in (1, 1024)
           for few in (False, True)]  # fmt: skip
FEW = ("3x3, stride 2", "SAME, stride 2", "uneven padding", "one pixel")


@pytest.mark.parametrize(
    ("case", "positions", "few"),
    [
        slow_unless(case in FEW if few else n == 12 or case == "uneven padding", case, n, few)
        for case, n, few in BLOCKS
    ],
)
def test_gradients(case, positions, few, monkeypatch, with_winograd=False):
    """The convolution is linear in each argument, so differences are exact but for rounding."""
    name = "SPARSE_BLOCK_POSITIONS" if few else "BLOCK_POSITIONS"
    monkeypatch.setattr(convolution, name, positions)
    x, kernel, stride, padding = problem(case)
    shape = jax.eval_shape(lambda x, k: conv(x, k, None, stride, padding), x, kernel).shape
    grad = output_gradient(shape, few)
    _, *gradients = with_gradients(x, kernel, None, jnp.asarray(grad), stride, padding, few)
    of_x, of_kernel = map(np.float64, gradients)
    _, bound_of_x, bound_of_kernel = bounds_of(case, few, with_winograd)
    rng = np.random.default_rng(2)
    for _ in range(3):
        dx, dk = (rng.normal(size=a.shape).astype(np.float32) for a in (x, kernel))
        assert_within(
            np.sum(of_x * dx), np.sum(grad * by_loops(dx, kernel, stride, padding)),
            np.sum(bound_of_x * abs(dx)),
        )  # fmt: skip
        assert_within(
            np.sum(of_kernel * dk), np.sum(grad * by_loops(x, dk, stride, padding)),
            np.sum(bound_of_kernel * abs(dk)),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("case", "tiles"),
    [
        slow_unless(
            (case, tiles) in [("3x3", 1), ("uneven padding", 5), ("one pixel", 512)], case, tiles
        )
        for case in ("3x3", "one pixel", "uneven padding")
        for tiles in (1, 5, 512)
    ],
)
def test_with_fewer_multiplications(case, tiles, monkeypatch):
    """Values and both gradients of maps that are large enough, which none of the others is."""
    if jax.default_backend() != "cpu":
        pytest.skip("other devices do not have it")
    monkeypatch.setattr(winograd, "BLOCK_TILES", tiles)
    monkeypatch.setattr(winograd, "MAX_TILES_WITHOUT_LOOP", 0 if tiles == 1 else 6)
    monkeypatch.setattr(winograd, "is_profitable", lambda *_: True)
    monkeypatch.setattr(convolution, "kernel_gradient", None)  # it is not to be used
    with replaced():  # not what was traced with other blocks
        test_values(case, with_winograd=True)
        test_gradients(case, 1024, False, monkeypatch, with_winograd=True)


@pytest.mark.parametrize("channels", [64, 256])
def test_rounding_with_fewer_multiplications(channels):
    """winograd.py derives the bound, which holds for any order of the sums."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 16, 16, channels)).astype(np.float32)
    kernel = rng.normal(size=(3, 3, channels, 64)).astype(np.float32)
    ours = winograd.conv3x3(jnp.asarray(x), winograd.transform(jnp.asarray(kernel)), ONE)
    error = np.asarray(ours) - by_loops(x, kernel, 1, ONE)
    bound = UNIT_ROUNDOFF / np.sqrt(3) * np.sqrt(25 * (channels**2 + 10 * channels))
    assert np.sqrt(np.mean(error**2)) < bound


@pytest.mark.parametrize("shape", [(1, 128, 128, 256), (1, 32, 32, 256), (40, 14, 14, 256)])
def test_many_channels_have_fewer_multiplications(shape):
    if jax.default_backend() != "cpu":
        pytest.skip("other devices do not have it")
    x, kernel = jnp.zeros(shape), jnp.zeros((3, 3, 256, 256))
    valid = jnp.ones(len(x), bool) if len(x) > 1 else None
    program = jax.jit(lambda x, k: conv(x, k, valid, 1, ONE)).lower(x, kernel).compile()
    assert program.cost_analysis()["flops"] < 2 * 9 * x[..., 0].size * 256**2
    assert " convolution(" not in program.as_text()


ROWS = {"3x3": (0, 37), "3x3, stride 2": (36,), "SAME, stride 2": (7,), "1x1": (1,)}


@pytest.mark.parametrize(
    ("case", "rows"),
    [
        slow_unless(rows in ROWS.get(case, ()), case, rows)
        for case in (*ROWS, "no padding")
        for rows in (0, 1, 7, 36, 37)
    ],
)
def test_rows_that_nobody_reads_are_left_out(case, rows):
    """In chunks of 1, 7, 12 and 1 rows, and none at all."""
    x, kernel, stride, padding = problem(case)
    rng = np.random.default_rng(0)
    valid = np.arange(rows) % 5 == 0
    x = jnp.asarray(rng.normal(size=(rows, *x.shape[1:])), jnp.float32)

    shape = jax.eval_shape(lambda x, k: conv(x, k, None, stride, padding), x, kernel).shape
    grad = jnp.asarray(rng.normal(size=shape) * valid[:, None, None, None], jnp.float32)
    out, *gradients = with_gradients(x, kernel, jnp.asarray(valid), grad, stride, padding)
    plain, *expected = with_gradients(x, kernel, None, grad, stride, padding)
    bound, *gradient_bounds = bounds(x, kernel, stride, padding, grad)
    assert_within(out[valid], plain[valid], 2 * bound[valid])
    for mine, theirs, bound in zip(gradients, expected, gradient_bounds, strict=True):
        assert_within(mine, theirs, 2 * bound)


def test_a_cpu_computes_nothing_where_no_row_is_live():
    if jax.default_backend() != "cpu":
        pytest.skip("other devices compute what nobody reads")
    x, kernel, stride, padding = problem("3x3")
    dead, grad = jnp.zeros(len(x), bool), jnp.zeros((*x.shape[:3], kernel.shape[3]))
    out, _, of_kernel = with_gradients(x * jnp.nan, kernel, dead, grad, stride, padding)
    assert not np.any(out) and not np.any(of_kernel)


def test_no_gradient_at_all_and_one_that_is_not_a_number():
    x, kernel, stride, padding = problem("3x3")
    forward = functools.partial(conv, valid=None, stride=stride, padding=padding)
    nothing = np.zeros((*x.shape[:3], kernel.shape[3]), np.float32)
    pull = jax.jit(
        lambda grad: jax.vjp(lambda x, k: forward(x, k, sparse_cotangent=True), x, kernel)[1](grad)
    )
    assert not any(np.any(gradient) for gradient in pull(nothing))
    nothing[0, 2, 3] = np.nan
    of_x, of_kernel = pull(nothing)
    assert np.isnan(of_kernel).all() and np.isnan(of_x).sum() == 9 * x.shape[-1]


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("case", ["stem", "SAME, stride 2", "stride past the end"])
def test_few_channels_as_on_gpus_and_tpus(case, platform):
    """Values and both gradients are those of the CPU's program."""
    x, kernel, stride, padding = problem(case)
    shape = jax.eval_shape(lambda x, k: conv(x, k, None, stride, padding), x, kernel).shape
    grad = jnp.asarray(output_gradient(shape, False))
    expected = with_gradients(x, kernel, None, grad, stride, padding)
    every_bound = bounds(x, kernel, stride, padding, grad)
    with traced_for(platform):
        results = with_gradients(x, kernel, None, grad, stride, padding)
    for mine, theirs, bound in zip(results, expected, every_bound, strict=True):
        assert_within(mine, theirs, 2 * bound)


@pytest.mark.parametrize("dtype, channels", [(jnp.float32, 12), (jnp.bfloat16, 16)])
def test_gpus_read_whole_vectors_of_channels(dtype, channels):
    """Of blocks of 2 x 2 pixels for 7 x 7 with stride 2, so 4 x 4 of them."""
    x, kernel, stride, padding = problem("stem")
    forward = jax.jit(lambda x, kernel: conv(x, kernel, None, stride, padding))
    traced = forward.trace(x.astype(dtype), kernel.astype(dtype))
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert f"x{channels}x" in program and f"<4x4x{channels}x4x" in program


def test_tpus_convolve_pixels_as_they_are():
    """Forward and for the kernel's gradient: a copy of the images by blocks takes as long."""
    x, kernel, stride, padding = problem("stem")

    @jax.jit
    def gradient(x, kernel):
        out, pull = jax.vjp(lambda *inputs: conv(*inputs, None, stride, padding), x, kernel)
        return pull(out)[1]

    program = gradient.trace(x, kernel).lower(lowering_platforms=("tpu",)).as_text()
    assert "stablehlo.convolution" in program and "x4x4x" not in program and "<4x4x" not in program


@pytest.mark.parametrize(
    "shape", [(0, 9, 12, 3), (2, 9, 12, 1), (2, 3, 9, 3), (2, 6, 7, 3), (2, 9, 12, 5)]
)
def test_blocks_of_few_or_no_windows(shape):
    """No image, one channel, no window at all, a single row of them, too many channels."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-4, 5, shape), jnp.float32)
    kernel = jnp.asarray(rng.integers(-4, 5, (5, 7, shape[-1], 2)), jnp.float32)
    options = 2, ((0, 0), (0, 0))
    with traced_for("cuda"):
        out = jax.jit(lambda x, kernel: conv(x, kernel, None, *options))(x, kernel)
    np.testing.assert_array_equal(out, by_loops(x, kernel, *options))


def test_sums_of_bfloat16_are_made_in_float32():
    x = jnp.ones((1, 64, 64, 1), jnp.bfloat16)
    gradient = kernel_gradient(x, x, kernel_size=(1, 1), stride=1, padding=((0, 0), (0, 0)))
    assert gradient.dtype == jnp.bfloat16 and gradient.item() == 64 * 64


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_are_those_of_the_plain_convolution(dtype):
    x, kernel, stride, padding = problem("3x3, stride 2", np.float32)
    x, kernel = x.astype(dtype), kernel.astype(dtype)

    def plain(x, kernel):
        options = dict(dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return lax.conv_general_dilated(x, kernel, (stride, stride), padding, **options)

    shape = jax.eval_shape(plain, x, kernel).shape
    grad = jnp.asarray(output_gradient(shape, False), dtype)
    _, *ours = with_gradients(x, kernel, None, grad, stride, padding)
    expected = jax.jit(lambda grad: jax.vjp(plain, x, kernel)[1](grad))(grad)
    exact = (a.astype(jnp.float32) for a in (x, kernel))
    _, *gradient_bounds = bounds(*exact, stride, padding, grad.astype(jnp.float32))
    # Sums in float32, then one rounding to the eight bits of bfloat16, on either side.
    half = 0.0 if dtype == jnp.float32 else 2 * 2.0**-8
    for mine, theirs, bound in zip(ours, expected, gradient_bounds, strict=True):
        assert mine.dtype == dtype
        mine, theirs = np.float32(mine), np.float32(theirs)
        assert_within(mine, theirs, 2 * bound + half * (abs(theirs) + bound))
