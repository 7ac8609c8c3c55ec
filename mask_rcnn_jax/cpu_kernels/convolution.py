"""Convolution with gradients that are fast on a CPU too."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mask_rcnn_jax.cpu_kernels import winograd
from mask_rcnn_jax.platforms import by_platform

DIMENSIONS = ("NHWC", "HWIO", "NHWC")
BLOCK_POSITIONS = 1024  # output positions at a time: their patches stay in the cache
MAX_CHUNK_IMAGES = 20  # images at a time if some are not valid
FEW_CHANNELS = 4  # with no more, a GPU convolves blocks of pixels
ALIGNED_BYTES = 16  # of a pixel's channels, for the tensor cores of GPUs
SPARSE_BLOCK_POSITIONS = 256  # nonzero positions at a time in `sparse_gradients`


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def conv(
    x: jax.Array,
    kernel: jax.Array,
    valid: jax.Array | None,
    stride: int,
    padding: str | tuple[tuple[int, int], ...],
    sparse_cotangent: bool = False,
) -> jax.Array:
    """Convolve [N, H, W, C] with a kernel [kh, kw, C, K] of the same dtype to [N, h, w, K].

    Args:
        valid: [N] bool, valid output rows; None for all. Other rows are unspecified, and their
            gradient must be 0; a CPU skips them, forward and backward.
        padding: (before, after) for both axes in pixels, or "SAME": TensorFlow's rule.
        sparse_cotangent: expect an output gradient that is zero nearly everywhere; see
            `sparse_gradients`.
    """
    is_plain = not winograd.is_profitable(x, kernel.shape, stride)
    if valid is None and is_plain and x.shape[-1] > FEW_CHANNELS:
        return _conv(x, kernel, stride, padding)

    def default(x, kernel, valid):
        return _conv_on_gpu(x, kernel, stride, padding)

    def cpu(x, kernel, valid):
        if valid is None and len(x) > MAX_CHUNK_IMAGES and not is_plain:
            valid = jnp.ones(len(x), bool)  # a few images' sums at a time are in memory
        if valid is None or not len(x):
            return _conv_on_cpu(x, kernel, stride, padding)(x)
        convolve = _conv_on_cpu(_chunk(x, 0), kernel, stride, padding)

        def compute(i, out):
            chunk = convolve(_chunk(x, i))
            return lax.dynamic_update_slice_in_dim(out, chunk, i * len(chunk), axis=0)

        shape = jax.eval_shape(default, x, kernel, valid)
        return _over_valid_chunks(valid, compute, jnp.zeros(shape.shape, shape.dtype))

    def tpu(x, kernel, valid):
        return _conv(x, kernel, stride, padding)

    return by_platform(x, kernel, valid, cpu=cpu, tpu=tpu, default=default)


def _conv(x: jax.Array, kernel: jax.Array, stride: int, padding) -> jax.Array:
    if kernel.shape[:2] == (1, 1) and stride == 1:
        return lax.dot_general(x, kernel[0, 0], (((3,), (0,)), ((), ())))
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=DIMENSIONS
    )


def _conv_on_gpu(x: jax.Array, kernel: jax.Array, stride: int, padding) -> jax.Array:
    """Convolve images by blocks of `stride` x `stride` pixels, whose channels are all of a block's.

    The sums are equal. cuDNN's tensor cores read `ALIGNED_BYTES` of a pixel's channels at a time,
    and an image has three channels. For a TPU, XLA arranges blocks of pixels itself.
    """
    kh, kw, channels, features = kernel.shape
    out = jax.eval_shape(lambda x, kernel: _conv(x, kernel, stride, padding), x, kernel)
    if channels > FEW_CHANNELS or 0 in out.shape:
        return _conv(x, kernel, stride, padding)
    padding, size = _pads(x, (kh, kw), stride, padding), (-(-kh // stride), -(-kw // stride))
    sides = [side * stride for side in size]
    x = _pad_to_windows(x, out.shape[1:3], sides, stride, padding)[0]
    kernel = jnp.pad(kernel, ((0, sides[0] - kh), (0, sides[1] - kw), (0, 0), (0, 0)))
    batch, rows, columns = len(x), x.shape[1] // stride, x.shape[2] // stride
    x = x.reshape(batch, rows, stride, columns, stride, channels)
    x = x.swapaxes(2, 3).reshape(batch, rows, columns, -1)
    kernel = kernel.reshape(size[0], stride, size[1], stride, channels, features)
    kernel = kernel.swapaxes(1, 2).reshape(*size, -1, features)
    missing = -x.shape[-1] % (ALIGNED_BYTES // x.dtype.itemsize)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing)))
    kernel = jnp.pad(kernel, ((0, 0), (0, 0), (0, missing), (0, 0)))
    return _conv(x, kernel, 1, ((0, 0), (0, 0)))


def _conv_on_cpu(x: jax.Array, kernel: jax.Array, stride: int, padding) -> Callable:
    """Return the convolution for arrays shaped like x, with the kernel transformed only once."""
    if winograd.is_profitable(x, kernel.shape, stride):
        pads, weights = _pads(x, (3, 3), stride, padding), winograd.transform(kernel)
        return lambda x: winograd.conv3x3(x, weights, pads)
    return lambda x: _conv(x, kernel, stride, padding)


def _forward(x, kernel, valid, stride, padding, sparse_cotangent):
    return conv(x, kernel, valid, stride, padding, sparse_cotangent), (x, kernel, valid)


def _backward(stride, padding, sparse_cotangent, saved, grad):
    def transposed(convolve, x, kernel, valid, grad):
        x_vjp = jax.linear_transpose(lambda x: convolve(x, kernel, stride, padding), x)
        kernel_vjp = jax.linear_transpose(
            lambda kernel: convolve(x, kernel, stride, padding), kernel
        )
        return x_vjp(grad)[0], kernel_vjp(grad)[0]

    def cpu(x, kernel, valid, grad):
        pads = _pads(x, kernel.shape[:2], stride, padding)
        if sparse_cotangent:
            return sparse_gradients(x, kernel, grad, stride=stride, padding=pads)

        def kernel_vjp(x, grad):
            if winograd.is_profitable(x, kernel.shape, stride):
                return winograd.kernel_gradient3x3(x, grad, pads)
            options = dict(kernel_size=kernel.shape[:2], stride=stride, padding=pads)
            return kernel_gradient(x, grad, **options)

        if valid is None or not len(x):
            return _input_vjp(x, grad, kernel, stride, pads)(grad), kernel_vjp(x, grad)
        x_vjp = _input_vjp(_chunk(x, 0), _chunk(grad, 0), kernel, stride, pads)

        def add(i, totals):
            x_grad, kernel_grad = totals
            grad_chunk = _chunk(grad, i)
            chunk = x_vjp(grad_chunk)
            x_grad = lax.dynamic_update_slice_in_dim(x_grad, chunk, i * len(chunk), axis=0)
            return x_grad, kernel_grad + kernel_vjp(_chunk(x, i), grad_chunk).astype(jnp.float32)

        totals = jnp.zeros_like(x), jnp.zeros(kernel.shape, jnp.float32)
        x_grad, kernel_grad = _over_valid_chunks(valid, add, totals)
        return x_grad, kernel_grad.astype(kernel.dtype)

    tpu, default = (partial(transposed, form) for form in (_conv, _conv_on_gpu))
    return *by_platform(*saved, grad, cpu=cpu, tpu=tpu, default=default), None


conv.defvjp(_forward, _backward)


def _input_vjp(x: jax.Array, grad: jax.Array, kernel: jax.Array, stride: int, pads) -> Callable:
    """Return a function computing dL/dx for cotangents shaped like `grad`; see `_conv_on_cpu`."""
    if stride > 1:
        transpose = jax.linear_transpose(lambda x: _conv(x, kernel, stride, pads), x)
        return lambda grad: transpose(grad)[0]
    flipped = jnp.flip(kernel, (0, 1)).swapaxes(2, 3)
    sides = zip(kernel.shape[:2], pads, strict=True)
    margins = tuple((k - 1 - before, k - 1 - after) for k, (before, after) in sides)
    return _conv_on_cpu(grad, flipped, 1, margins)


def _pads(x: jax.Array, kernel_size: Sequence[int], stride: int, padding):
    """Return (before, after) for both axes."""
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(x.shape[1:3], kernel_size, (stride, stride), padding)
    return tuple(padding)


def _chunk_rows(rows: int) -> int:
    return max(size for size in range(1, MAX_CHUNK_IMAGES + 1) if rows % size == 0)


def _chunk(x: jax.Array, i: int | jax.Array) -> jax.Array:
    size = _chunk_rows(len(x))
    return lax.dynamic_slice_in_dim(x, i * size, size, axis=0)


def _over_valid_chunks(valid: jax.Array, body: Callable, start):
    """Fold `body(i, carry)` over every chunk i with a valid row."""
    order, count = _used_chunks(valid.reshape(-1, _chunk_rows(len(valid))))
    return lax.fori_loop(0, count, lambda i, carry: body(order[i], carry), start)


@jax.jit  # traced once for layers with equally many rows
def _used_chunks(valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the chunks with a valid row of valid [chunks, rows], and their number."""
    used = jnp.any(valid, axis=1)
    return jnp.nonzero(used, size=len(used), fill_value=0)[0], jnp.sum(used)


def kernel_gradient(
    x: jax.Array,
    grad: jax.Array,
    *,
    kernel_size: Sequence[int],
    stride: int,
    padding: str | Sequence[tuple[int, int]],
) -> jax.Array:
    """Compute the kernel gradient [kh, kw, C, K] of a convolution on x [N, H, W, C].

    Multiplies the concatenated patches of a few rows with the rows' gradients. XLA's own form on a
    CPU, a convolution with a kernel as large as the map, is up to five times slower.
    """
    batch, rows, columns, features = grad.shape
    kh, kw = kernel_size
    blocks = max(1, round(batch * rows * columns / BLOCK_POSITIONS))
    block = -(-rows // blocks)
    blocks = -(-rows // block)
    # Rows beyond the last have no gradient.
    x = _pad_to_windows(x, (blocks * block, columns), kernel_size, stride, padding)[0]
    grad = jnp.pad(grad, ((0, 0), (0, blocks * block - rows), (0, 0), (0, 0)))
    contract_positions = (((0, 1, 2), (0, 1, 2)), ((), ()))

    def add_block(i, total):
        window = lax.dynamic_slice_in_dim(x, i * block * stride, stride * (block - 1) + kh, axis=1)
        ys = [slice(dy, dy + stride * (block - 1) + 1, stride) for dy in range(kh)]
        xs = [slice(dx, dx + stride * (columns - 1) + 1, stride) for dx in range(kw)]
        patches = jnp.concatenate([window[:, y, x] for y in ys for x in xs], axis=-1)
        part = lax.dynamic_slice_in_dim(grad, i * block, block, axis=1)
        return total + lax.dot_general(
            part, patches, contract_positions, preferred_element_type=jnp.float32
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
    """Compute input and kernel gradients in time proportional to the nonzero positions in `grad`.

    The region proposal network learns from a few hundred out of a hundred thousand positions.
    """
    kh, kw, channels, features = kernel.shape
    _, rows, columns, _ = grad.shape
    padded, margins = _pad_to_windows(x, (rows, columns), (kh, kw), stride, padding)
    _, padded_rows, padded_columns, _ = padded.shape
    flat, grad = padded.reshape(-1, channels), grad.reshape(-1, features)
    weights = kernel.reshape(-1, features)
    used = jnp.any(grad != 0, axis=1)
    count = jnp.sum(used)
    size = SPARSE_BLOCK_POSITIONS
    positions = jnp.nonzero(used, size=-(-len(grad) // size) * size, fill_value=0)[0]
    offsets = (np.arange(kh)[:, None] * padded_columns + np.arange(kw)[None]).reshape(-1)

    def add_block(i, totals):
        x_grad, kernel_grad = totals
        block = lax.dynamic_slice_in_dim(positions, i * size, size)
        valid = i * size + jnp.arange(size) < count
        part = jnp.where(valid[:, None], grad[block], 0)
        image, pixel = block // (rows * columns), block % (rows * columns)
        row, column = pixel // columns * stride, pixel % columns * stride
        taps = ((image * padded_rows + row) * padded_columns + column)[:, None] + offsets[None]
        patches = flat[taps].reshape(size, -1)
        updates = lax.dot_general(
            part, weights, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        kernel_grad += lax.dot_general(
            part, patches, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return x_grad.at[taps].add(updates.reshape(size, -1, channels)), kernel_grad

    totals = jnp.zeros(flat.shape, jnp.float32), jnp.zeros(weights.T.shape, jnp.float32)
    x_grad, kernel_grad = lax.fori_loop(0, (count + size - 1) // size, add_block, totals)
    unpad = [(-before, -after, 0) for before, after in margins]
    x_grad = lax.pad(x_grad.reshape(padded.shape), jnp.float32(0), unpad)
    return x_grad.astype(x.dtype), kernel_grad.T.reshape(kernel.shape).astype(kernel.dtype)


def _pad_to_windows(
    x: jax.Array, output_size: Sequence[int], kernel_size: Sequence[int], stride: int, padding
) -> tuple[jax.Array, list[tuple[int, int]]]:
    """Pad x to cover all windows for that output size; also return the margins per axis."""
    padding = _pads(x, kernel_size, stride, padding)
    margins = [(0, 0)]
    for axis, (count, size) in enumerate(zip(output_size, kernel_size, strict=True)):
        before = padding[axis][0]
        margins.append((before, stride * (count - 1) + size - before - x.shape[1 + axis]))
    margins.append((0, 0))
    zero = jnp.zeros((), x.dtype)
    return lax.pad(x, zero, [(*margin, 0) for margin in margins]), margins
