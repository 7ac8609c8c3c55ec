"""Convolution, with gradients that are quick on a CPU too."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

DIMENSIONS = ("NHWC", "HWIO", "NHWC")
POSITIONS = 1024  # of the output at a time: their patches stay in the cache
FEW = 256  # positions with a gradient at a time, where there are few


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def conv(
    x: jax.Array,
    kernel: jax.Array,
    stride: int,
    padding: str | tuple[tuple[int, int], ...],
    few_gradients: bool = False,
) -> jax.Array:
    """[N, H, W, C] and a kernel [kh, kw, C, K] of the same dtype to [N, h, w, K].

    padding: (before, after) of both axes in pixels, or "SAME": TensorFlow's rule. few_gradients:
    the output's gradient is expected to be zero nearly everywhere; see `few_gradients_of`.
    """
    return _conv(x, kernel, stride, padding)


def _conv(x: jax.Array, kernel: jax.Array, stride: int, padding) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=DIMENSIONS
    )


def _forward(x, kernel, stride, padding, few_gradients):
    return _conv(x, kernel, stride, padding), (x, kernel)


def _backward(stride, padding, few_gradients, saved, grad):
    def gradient_of_x(x, kernel, grad):
        return jax.linear_transpose(lambda x: _conv(x, kernel, stride, padding), x)(grad)[0]

    def default(x, kernel, grad):
        of_kernel = jax.linear_transpose(lambda kernel: _conv(x, kernel, stride, padding), kernel)
        return gradient_of_x(x, kernel, grad), of_kernel(grad)[0]

    def cpu(x, kernel, grad):
        if few_gradients:
            return few_gradients_of(x, kernel, grad, stride=stride, padding=padding)
        of_kernel = kernel_gradient(
            x, grad, kernel_size=kernel.shape[:2], stride=stride, padding=padding
        )
        return gradient_of_x(x, kernel, grad), of_kernel

    return lax.platform_dependent(*saved, grad, cpu=cpu, default=default)


conv.defvjp(_forward, _backward)


def kernel_gradient(
    x: jax.Array,
    grad: jax.Array,
    *,
    kernel_size: Sequence[int],
    stride: int,
    padding: str | Sequence[tuple[int, int]],
) -> jax.Array:
    """The gradient [kh, kw, C, K] of a convolution of x [N, H, W, C] from that of its output.

    Patches of a few rows are laid side by side and multiplied with the rows' gradients. XLA's own
    form for a CPU, a convolution with a kernel as large as the map, is up to five times slower.
    """
    batch, rows, columns, features = grad.shape
    kh, kw = kernel_size
    blocks = max(1, round(batch * rows * columns / POSITIONS))
    block = -(-rows // blocks)
    blocks = -(-rows // block)
    # Rows beyond the last one have no gradient.
    x = _reach(x, (blocks * block, columns), kernel_size, stride, padding)[0]
    grad = jnp.pad(grad, ((0, 0), (0, blocks * block - rows), (0, 0), (0, 0)))

    def add_block(i, total):
        seen = lax.dynamic_slice_in_dim(x, i * block * stride, stride * (block - 1) + kh, axis=1)
        patches = jnp.concatenate([
            seen[:, dy : dy + stride * (block - 1) + 1 : stride,
                 dx : dx + stride * (columns - 1) + 1 : stride]
            for dy in range(kh) for dx in range(kw)
        ], axis=-1)  # fmt: skip
        part = lax.dynamic_slice_in_dim(grad, i * block, block, axis=1)
        return total + lax.dot_general(
            part, patches, (((0, 1, 2), (0, 1, 2)), ((), ())), preferred_element_type=jnp.float32
        )

    total = jnp.zeros((features, kh * kw * x.shape[-1]), jnp.float32)
    total = lax.fori_loop(0, blocks, add_block, total)
    return total.T.reshape(kh, kw, -1, features).astype(x.dtype)


def few_gradients_of(
    x: jax.Array,
    kernel: jax.Array,
    grad: jax.Array,
    *,
    stride: int,
    padding: str | Sequence[tuple[int, int]],
) -> tuple[jax.Array, jax.Array]:
    """The gradients of x and of the kernel, in time that follows the positions of `grad` that are
    not zero.

    The region proposal network learns from a few hundred of a hundred thousand positions.
    """
    kh, kw, channels, features = kernel.shape
    _, rows, columns, _ = grad.shape
    padded, margins = _reach(x, (rows, columns), (kh, kw), stride, padding)
    _, padded_rows, padded_columns, _ = padded.shape
    flat, grad = padded.reshape(-1, channels), grad.reshape(-1, features)
    weights = kernel.reshape(-1, features)
    used = jnp.any(grad != 0, axis=1)
    count = jnp.sum(used)
    room = -(-len(grad) // FEW) * FEW
    positions = jnp.nonzero(used, size=room, fill_value=0)[0]
    offsets = (np.arange(kh)[:, None] * padded_columns + np.arange(kw)[None]).reshape(-1)

    def add_block(i, totals):
        of_x, of_kernel = totals
        here = lax.dynamic_slice_in_dim(positions, i * FEW, FEW)
        live = i * FEW + jnp.arange(FEW) < count
        part = jnp.where(live[:, None], grad[here], 0)
        image, pixel = here // (rows * columns), here % (rows * columns)
        row, column = pixel // columns * stride, pixel % columns * stride
        taps = ((image * padded_rows + row) * padded_columns + column)[:, None] + offsets[None]
        patches = flat[taps].reshape(FEW, -1)
        spread = lax.dot_general(
            part, weights, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        of_kernel += lax.dot_general(
            part, patches, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return of_x.at[taps].add(spread.reshape(FEW, -1, channels)), of_kernel

    totals = jnp.zeros(flat.shape, jnp.float32), jnp.zeros(weights.T.shape, jnp.float32)
    of_x, of_kernel = lax.fori_loop(0, (count + FEW - 1) // FEW, add_block, totals)
    back = [(-before, -after, 0) for before, after in margins]
    of_x = lax.pad(of_x.reshape(padded.shape), jnp.float32(0), back)
    return of_x.astype(x.dtype), of_kernel.T.reshape(kernel.shape).astype(kernel.dtype)


def _reach(
    x: jax.Array, output_size: Sequence[int], kernel_size: Sequence[int], stride: int, padding
) -> tuple[jax.Array, list[tuple[int, int]]]:
    """x, padded to what the windows of an output of that size see, and the margins of its axes."""
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(x.shape[1:3], kernel_size, (stride, stride), padding)
    margins = [(0, 0)]
    for axis, (count, size) in enumerate(zip(output_size, kernel_size, strict=True)):
        before = padding[axis][0]
        margins.append((before, stride * (count - 1) + size - before - x.shape[1 + axis]))
    margins.append((0, 0))
    zero = jnp.zeros((), x.dtype)
    return lax.pad(x, zero, [(*margin, 0) for margin in margins]), margins
