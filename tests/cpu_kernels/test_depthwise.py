"""Depthwise convolution and its gradients on a CPU, against slow sums."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.cpu_kernels import depthwise as module
from mask_rcnn_jax.cpu_kernels.depthwise import depthwise
from mask_rcnn_jax.models.conv import Conv


def slow(x, kernel, grad, stride=1):
    """The result and both gradients, cell by cell in float64."""
    side = len(kernel)
    pads = ((0, 0), (side // 2, side // 2), (side // 2, side // 2), (0, 0))
    padded, kernel = np.pad(np.float64(x), pads), np.float64(kernel[:, :, 0])
    out, x_grad, kernel_grad = np.zeros(grad.shape), np.zeros(padded.shape), np.zeros(kernel.shape)
    for n, row, column in np.ndindex(grad.shape[:3]):
        top, left = row * stride, column * stride
        at = n, slice(top, top + side), slice(left, left + side)
        seen, cell = padded[at], np.float64(grad[n, row, column])
        out[n, row, column] = (seen * kernel).sum(axis=(0, 1))
        x_grad[at] += kernel * cell
        kernel_grad += seen * cell
    pad, (height, width) = side // 2, x.shape[1:3]
    x_grad = x_grad[:, pad : pad + height, pad : pad + width]
    return out, x_grad, kernel_grad[:, :, None]


def run(x, kernel, grad, stride=1):
    @jax.jit
    def outputs(x, kernel, grad):
        out, vjp = jax.vjp(partial(depthwise, stride=stride), x, kernel)
        return out, *vjp(grad)

    return outputs(x, kernel, grad)


@pytest.mark.parametrize(
    ("shape", "side", "dtype"),
    [
        ((2, 5, 9, 3), 7, jnp.float32),
        ((1, 2, 1, 4), 7, jnp.float32),  # smaller than the kernel
        ((2, 6, 4, 5), 3, jnp.bfloat16),
    ],
)
def test_sums_are_right(monkeypatch, shape, side, dtype):
    monkeypatch.setattr(module, "SMALLEST", 0)
    rng = np.random.default_rng(0)
    sizes = (shape, (side, side, 1, shape[-1]), shape)
    arrays = [jnp.asarray(rng.normal(size=size), dtype) for size in sizes]
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2  # sums in float32, then rounded
    for ours, theirs in zip(run(*arrays), slow(*map(np.float32, arrays)), strict=True):
        assert ours.dtype == dtype
        limit = tolerance * np.abs(theirs).max()
        np.testing.assert_allclose(np.float32(ours), theirs, rtol=0, atol=limit)


@pytest.mark.parametrize(
    ("shape", "side", "stride"),
    [
        ((2, 5, 8, 3), 5, 2),  # an odd and an even length
        ((1, 1, 2, 4), 3, 2),  # smaller than the kernel
        ((1, 9, 7, 2), 3, 3),
    ],
)
def test_strides_skip_cells(monkeypatch, shape, side, stride):
    monkeypatch.setattr(module, "SMALLEST", 0)
    rng = np.random.default_rng(0)
    out = (shape[0], *(-(-length // stride) for length in shape[1:3]), shape[3])
    sizes = (shape, (side, side, 1, shape[-1]), out)
    arrays = [jnp.asarray(rng.normal(size=size), jnp.float32) for size in sizes]
    found, expected = run(*arrays, stride), slow(*map(np.float32, arrays), stride)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


def is_own_form(conv, shape):
    text = str(jax.make_jaxpr(lambda x: conv.init_with_output(jax.random.key(0), x)[0])(
        jax.ShapeDtypeStruct(shape, jnp.float32)
    ))  # fmt: skip
    return "name=_depthwise" in text


@pytest.mark.parametrize(
    ("options", "shape", "expected"),
    [
        (dict(padding=3, groups=64), (1, 16, 16, 64), True),
        (dict(padding=3, groups=64, stride=2), (1, 16, 16, 64), True),
        (dict(padding=3, groups=64), (1, 15, 16, 64), False),  # small
        (dict(padding=3, groups=32), (1, 16, 16, 64), False),  # groups of two
        (dict(padding=2, groups=64), (1, 16, 16, 64), False),
        (dict(padding="SAME", groups=64, stride=2), (1, 16, 16, 64), False),
    ],
)
def test_only_large_depthwise_convolutions_take_this_form(options, shape, expected):
    assert is_own_form(Conv(64, (7, 7), **options), shape) == expected
