"""Convolution in groups of channels and its gradients on a CPU, against slow sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.cpu_kernels import grouped as module
from mask_rcnn_jax.cpu_kernels.grouped import grouped_conv
from mask_rcnn_jax.models.conv import Conv


def slow(x, kernel, grad, groups, stride):
    """The result and both gradients, cell by cell and group by group in float64."""
    side, _, inputs, outputs = kernel.shape
    pad, share = side // 2, outputs // groups
    padded = np.pad(np.float64(x), ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    kernel, grad = np.float64(kernel), np.float64(grad)
    out, x_grad, kernel_grad = (np.zeros(each.shape) for each in (grad, padded, kernel))
    for n, row, column, group in np.ndindex(*grad.shape[:3], groups):
        into = slice(group * share, (group + 1) * share)
        rows, columns = (slice(stride * at, stride * at + side) for at in (row, column))
        window = (n, rows, columns, slice(group * inputs, (group + 1) * inputs))
        cell = grad[n, row, column, into]
        out[n, row, column, into] = np.einsum("hwi,hwio->o", padded[window], kernel[..., into])
        x_grad[window] += kernel[..., into] @ cell
        kernel_grad[..., into] += padded[window][..., None] * cell
    return out, x_grad[:, pad : pad + x.shape[1], pad : pad + x.shape[2]], kernel_grad


@pytest.mark.parametrize(
    ("shape", "outputs", "groups", "stride", "dtype"),
    [
        ((2, 6, 9, 12), 6, 3, 2, jnp.float32),
        ((1, 1, 2, 4), 4, 2, 1, jnp.float32),  # smaller than the kernel
        ((2, 5, 4, 8), 8, 8, 1, jnp.bfloat16),
    ],
)
def test_sums_are_right(monkeypatch, shape, outputs, groups, stride, dtype):
    monkeypatch.setattr(module, "SMALLEST", 0)
    rng = np.random.default_rng(0)
    cells = [-(-length // stride) for length in shape[1:3]]
    sizes = shape, (3, 3, shape[-1] // groups, outputs), (shape[0], *cells, outputs)
    arrays = [jnp.asarray(rng.normal(size=size), dtype) for size in sizes]

    @jax.jit
    def run(x, kernel, grad):
        pads = ((1, 1), (1, 1))
        out, vjp = jax.vjp(lambda *given: grouped_conv(*given, groups, stride, pads), x, kernel)
        return out, *vjp(grad)

    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    expected = slow(*map(np.float32, arrays), groups, stride)
    for ours, theirs in zip(run(*arrays), expected, strict=True):
        assert ours.dtype == dtype
        limit = tolerance * np.abs(theirs).max()
        np.testing.assert_allclose(np.float32(ours), theirs, rtol=0, atol=limit)


@pytest.mark.parametrize(
    ("groups", "shape", "expected"),
    [(32, (1, 16, 16, 64), True), (32, (1, 15, 16, 64), False), (1, (1, 16, 16, 64), False)],
)
def test_only_large_maps_in_groups_take_this_form(groups, shape, expected):
    conv = Conv(64, (3, 3), padding=1, groups=groups)
    images = jax.ShapeDtypeStruct(shape, jnp.float32)
    run = jax.make_jaxpr(lambda x: conv.init_with_output(jax.random.key(0), x)[0])
    assert ("name=_grouped" in str(run(images))) == expected
