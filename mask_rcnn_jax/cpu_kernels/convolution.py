"""Convolution, with gradients that are quick on a CPU too."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mask_rcnn_jax.cpu_kernels import winograd

DIMENSIONS = ("NHWC", "HWIO", "NHWC")
POSITIONS = 1024  # of the output at a time: their patches stay in the cache
CHUNK = 20  # images at a time at the most, where some are not valid
FEW = 256  # positions with a gradient at a time, where there are few


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def conv(
    x: jax.Array,
    kernel: jax.Array,
    valid: jax.Array | None,
    stride: int,
    padding: str | tuple[tuple[int, int], ...],
    sparse_cotangent: bool = False,
) -> jax.Array:
    """[N, H, W, C] and a kernel [kh, kw, C, K] of the same dtype to [N, h, w, K].

    valid: [N] bool, rows of the output that anybody reads; None for all. What is in the others is
    not defined, and their gradient must be 0; a CPU leaves them out, forward and backward.
    padding: (before, after) of both axes in pixels, or "SAME": TensorFlow's rule.
    sparse_cotangent: the output's gradient is expected to be zero nearly everywhere; see
    `sparse_gradients`.
    """
    if valid is None and not winograd.pays(x, kernel.shape, stride):
        return _conv(x, kernel, stride, padding)

    def default(x, kernel, valid):
        return _conv(x, kernel, stride, padding)

    def cpu(x, kernel, valid):
        if valid is None or not len(x):
            return _conv_on_cpu(x, kernel, stride, padding)(x)
        convolve = _conv_on_cpu(_chunk(x, 0), kernel, stride, padding)

        def compute(i, out):
            part = convolve(_chunk(x, i))
            return lax.dynamic_update_slice_in_dim(out, part, i * len(part), axis=0)

        shape = jax.eval_shape(default, x, kernel, valid)
        return _over_valid_chunks(valid, compute, jnp.zeros(shape.shape, shape.dtype))

    return lax.platform_dependent(x, kernel, valid, cpu=cpu, default=default)


def _conv(x: jax.Array, kernel: jax.Array, stride: int, padding) -> jax.Array:
    if kernel.shape[:2] == (1, 1) and stride == 1:
        return lax.dot_general(x, kernel[0, 0], (((3,), (0,)), ((), ())))
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=DIMENSIONS
    )


def _conv_on_cpu(x: jax.Array, kernel: jax.Array, stride: int, padding) -> Callable:
    """The convolution of any array of x's shape, where the kernel is prepared once for all."""
    if winograd.pays(x, kernel.shape, stride):
        pads, weights = _pads(x, (3, 3), stride, padding), winograd.transform(kernel)
        return lambda x: winograd.conv3x3(x, weights, pads)
    return lambda x: _conv(x, kernel, stride, padding)


def _forward(x, kernel, valid, stride, padding, sparse_cotangent):
    return conv(x, kernel, valid, stride, padding, sparse_cotangent), (x, kernel, valid)


def _backward(stride, padding, sparse_cotangent, saved, grad):
    def default(x, kernel, valid, grad):
        of_x = jax.linear_transpose(lambda x: _conv(x, kernel, stride, padding), x)
        of_kernel = jax.linear_transpose(lambda kernel: _conv(x, kernel, stride, padding), kernel)
        return of_x(grad)[0], of_kernel(grad)[0]

    def cpu(x, kernel, valid, grad):
        pads = _pads(x, kernel.shape[:2], stride, padding)
        if sparse_cotangent:
            return sparse_gradients(x, kernel, grad, stride=stride, padding=pads)

        def of_kernel(x, grad):
            if winograd.pays(x, kernel.shape, stride):
                return winograd.kernel_gradient3x3(x, grad, pads)
            return kernel_gradient(
                x, grad, kernel_size=kernel.shape[:2], stride=stride, padding=pads
            )

        if valid is None or not len(x):
            return _input_gradient(x, grad, kernel, stride, pads)(grad), of_kernel(x, grad)
        of_x = _input_gradient(_chunk(x, 0), _chunk(grad, 0), kernel, stride, pads)

        def add(i, totals):
            x_part, grad_part = _chunk(x, i), _chunk(grad, i)
            part = of_x(grad_part)
            of_all_x = lax.dynamic_update_slice_in_dim(totals[0], part, i * len(part), axis=0)
            return of_all_x, totals[1] + of_kernel(x_part, grad_part).astype(jnp.float32)

        of_all_x, total = _over_valid_chunks(
            valid, add, (jnp.zeros_like(x), jnp.zeros(kernel.shape, jnp.float32))
        )
        return of_all_x, total.astype(kernel.dtype)

    return *lax.platform_dependent(*saved, grad, cpu=cpu, default=default), None


conv.defvjp(_forward, _backward)


def _input_gradient(
    x: jax.Array, grad: jax.Array, kernel: jax.Array, stride: int, pads
) -> Callable:
    """What any gradient of grad's shape gives an input of x's, as in `_conv_on_cpu`."""
    if stride > 1:
        pull = jax.linear_transpose(lambda x: _conv(x, kernel, stride, pads), x)
        return lambda grad: pull(grad)[0]
    around = jnp.flip(kernel, (0, 1)).swapaxes(2, 3)
    sides = zip(kernel.shape[:2], pads, strict=True)
    margins = [(k - 1 - before, k - 1 - after) for k, (before, after) in sides]
    return _conv_on_cpu(grad, around, 1, margins)


def _pads(x: jax.Array, kernel_size: Sequence[int], stride: int, padding):
    """(before, after) of both axes."""
    if isinstance(padding, str):
        return lax.padtype_to_pads(x.shape[1:3], kernel_size, (stride, stride), padding)
    return padding


def _chunk_rows(rows: int) -> int:
    return max(size for size in range(1, CHUNK + 1) if rows % size == 0)


def _chunk(x: jax.Array, i: jax.Array) -> jax.Array:
    size = _chunk_rows(len(x))
    return lax.dynamic_slice_in_dim(x, i * size, size, axis=0)


def _over_valid_chunks(valid: jax.Array, body: Callable, start):
    """`body(i, carry)` for each chunk i that has a valid row."""
    used = jnp.any(valid.reshape(-1, _chunk_rows(len(valid))), axis=1)
    order = jnp.nonzero(used, size=len(used), fill_value=0)[0]
    return lax.fori_loop(0, jnp.sum(used), lambda i, carry: body(order[i], carry), start)


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
        patches = jnp.concatenate(
            [
                seen[
                    :,
                    dy : dy + stride * (block - 1) + 1 : stride,
                    dx : dx + stride * (columns - 1) + 1 : stride,
                ]
                for dy in range(kh)
                for dx in range(kw)
            ],
            axis=-1,
        )
        part = lax.dynamic_slice_in_dim(grad, i * block, block, axis=1)
        return total + lax.dot_general(
            part, patches, (((0, 1, 2), (0, 1, 2)), ((), ())), preferred_element_type=jnp.float32
        )

    total = jnp.zeros((features, kh * kw * x.shape[-1]), jnp.float32)
    total = lax.fori_loop(0, blocks, add_block, total)
    return total.T.reshape(kh, kw, -1, features).astype(x.dtype)


def sparse_gradients(
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
        valid = i * FEW + jnp.arange(FEW) < count
        part = jnp.where(valid[:, None], grad[here], 0)
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
    padding = _pads(x, kernel_size, stride, padding)
    margins = [(0, 0)]
    for axis, (count, size) in enumerate(zip(output_size, kernel_size, strict=True)):
        before = padding[axis][0]
        margins.append((before, stride * (count - 1) + size - before - x.shape[1 + axis]))
    margins.append((0, 0))
    zero = jnp.zeros((), x.dtype)
    return lax.pad(x, zero, [(*margin, 0) for margin in margins]), margins
