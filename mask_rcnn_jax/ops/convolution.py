"""Convolution, with a gradient for the kernel that is quick on a CPU too."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

DIMENSIONS = ("NHWC", "HWIO", "NHWC")
POSITIONS = 1024  # of the output at a time: their patches stay in the cache


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def conv(
    x: jax.Array, kernel: jax.Array, stride: int, padding: str | tuple[tuple[int, int], ...]
) -> jax.Array:
    """[N, H, W, C] and a kernel [kh, kw, C, K] of the same dtype to [N, h, w, K].

    padding: (before, after) of both axes in pixels, or "SAME": TensorFlow's rule.
    """
    return _conv(x, kernel, stride, padding)


def _conv(x: jax.Array, kernel: jax.Array, stride: int, padding) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=DIMENSIONS
    )


def _forward(x, kernel, stride, padding):
    return _conv(x, kernel, stride, padding), (x, kernel)


def _backward(stride, padding, saved, grad):
    x, kernel = saved
    of_x = jax.linear_transpose(lambda x: _conv(x, kernel, stride, padding), x)

    def default(x, grad):
        of_kernel = jax.linear_transpose(lambda kernel: _conv(x, kernel, stride, padding), kernel)
        return of_kernel(grad)[0]

    cpu = partial(kernel_gradient, kernel_size=kernel.shape[:2], stride=stride, padding=padding)
    return *of_x(grad), lax.platform_dependent(x, grad, cpu=cpu, default=default)


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
    height, width = x.shape[1:3]
    batch, rows, columns, features = grad.shape
    kh, kw = kernel_size
    if isinstance(padding, str):
        padding = lax.padtype_to_pads((height, width), kernel_size, (stride, stride), padding)
    (top, _), (left, _) = padding
    blocks = max(1, round(batch * rows * columns / POSITIONS))
    block = -(-rows // blocks)
    blocks = -(-rows // block)
    # As many rows and columns as the windows reach. Rows beyond the last one have no gradient.
    reach = stride * (blocks * block - 1) + kh, stride * (columns - 1) + kw
    margins = [(0, 0), (top, reach[0] - top - height), (left, reach[1] - left - width), (0, 0)]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(*margin, 0) for margin in margins])
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
