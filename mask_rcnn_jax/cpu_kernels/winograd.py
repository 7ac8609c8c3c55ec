"""3x3 convolutions of many channels with less than half of the multiplications.

Winograd's minimal filtering F(2x2, 3x3), as in Lavin and Gray, Fast Algorithms for Convolutional
Neural Networks, section 4.1: the four outputs of a tile from sixteen products of sums of inputs and
sums of weights, for thirty-six.

Rounding: an output is made of nine sums of C products whose variances add up to 25 C, in place of
one sum of 9 C products. With u = 2^-24 the unit roundoff, and with independent inputs and weights
of mean 0 and variance 1, the root mean square error is at most

    u / sqrt(3) * sqrt(25 (C^2 + 10 C))    here, 10 C for the sums before and after the products,
    u / sqrt(3) * 9 C                      for the direct convolution,

in whatever order a processor adds. The order decides which of the two is better. Measured against
float64 for 256 channels: 5e-7 of the root mean square output, which is 1.3 times the error of XLA's
convolution on a processor with AVX-512 (1.6 times behind a ReLU; 1.7 and 2.1 times for 512
channels) and 0.7 times with only AVX2 (0.8; 0.9 and 1.1).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCK_TILES = 256  # tiles at a time: their sums and products stay in the cache
MAX_TILES_WITHOUT_LOOP = 800  # larger inputs loop over blocks
INPUT_TRANSFORM = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])
KERNEL_TRANSFORM = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float32)
OUTPUT_TRANSFORM = np.array([[1, 1, 1, 0], [0, 1, -1, -1]])
Pads = tuple[tuple[int, int], ...]  # (before, after) for both axes


def is_profitable(x: jax.Array, kernel_shape: Sequence[int], stride: int) -> bool:
    """Whether this is faster on a CPU: the transforms only pay off with many channels."""
    supported = tuple(kernel_shape[:2]) == (3, 3) and stride == 1 and x.dtype == jnp.float32
    return supported and min(kernel_shape[2:]) >= 256 and x.size >= 1000 * x.shape[-1]


def transform(kernel: jax.Array) -> jax.Array:
    """Transform a kernel [3, 3, C, K] float32 to the weights [4, 4, C, K] for `conv3x3`."""
    matrix = KERNEL_TRANSFORM
    return jnp.einsum("ai,ijck,bj->abck", matrix, kernel, matrix, precision="highest")


@partial(jax.jit, static_argnames="pads")  # traced once for layers of equal shapes
def conv3x3(x: jax.Array, weights: jax.Array, pads: Pads) -> jax.Array:
    """Convolve [N, H, W, C] float32 with a kernel's `transform` to [N, h, w, K]."""
    tiling = _Tiling.from_input(x, pads)
    x, flat = tiling.pad(x, pads), weights.reshape(16, *weights.shape[2:])

    def add_block(i, carry):
        out, sums = carry
        sums = tiling.input_sums(x, i, sums)
        found = lax.dot_general(sums, flat, (((2,), (1,)), ((0,), (0,))))
        found = found.reshape(4, 4, len(x), tiling.block, tiling.columns, -1)
        products = [[found[a, b] for b in range(4)] for a in range(4)]
        tiles = [jnp.stack(row, axis=3) for row in _transform_tiles(OUTPUT_TRANSFORM, products)]
        block = jnp.stack(tiles, axis=2).reshape(len(x), *tiling.block_size, -1)
        out = lax.dynamic_update_slice_in_dim(out, block, i * tiling.block_size[0], axis=1)
        return out, sums

    out = jnp.zeros((len(x), *tiling.size, weights.shape[-1]), x.dtype)
    height, width = tiling.output_size
    out, _ = lax.fori_loop(0, tiling.blocks, add_block, (out, tiling.sums(x)))
    return out[:, :height, :width]


@partial(jax.jit, static_argnames="pads")
def kernel_gradient3x3(x: jax.Array, grad: jax.Array, pads: Pads) -> jax.Array:
    """Compute the kernel gradient [3, 3, C, K] from `conv3x3`'s output gradient [N, h, w, K]."""
    tiling = _Tiling.from_input(x, pads)
    x = tiling.pad(x, pads)
    extra = [size - real for size, real in zip(tiling.size, tiling.output_size, strict=True)]
    grad = jnp.pad(grad, ((0, 0), (0, extra[0]), (0, extra[1]), (0, 0)))
    rows = tiling.block_size[0]

    def add_block(i, carry):
        total, sums, grads = carry
        sums = tiling.input_sums(x, i, sums)
        part = lax.dynamic_slice_in_dim(grad, i * rows, rows, axis=1)
        tiles = part.reshape(len(x), tiling.block, 2, tiling.columns, 2, -1)
        grads = _over_sixteen(partial(_output_sum, tiles), grads)
        total += lax.dot_general(sums, grads, (((1,), (1,)), ((0,), (0,))))
        return total, sums, grads

    total = jnp.zeros((16, x.shape[-1], grad.shape[-1]), x.dtype)
    start = total, tiling.sums(x), tiling.sums(grad)
    total, _, _ = lax.fori_loop(0, tiling.blocks, add_block, start)
    matrix, totals = KERNEL_TRANSFORM, total.reshape(4, 4, *total.shape[1:])
    return jnp.einsum("ai,abck,bj->ijck", matrix, totals, matrix, precision="highest")


@dataclass(frozen=True)
class _Tiling:
    """An output split into 2 x 2 tiles, processed in blocks of tile rows."""

    output_size: tuple[int, int]
    columns: int  # tiles per row
    block: int  # tile rows per block
    blocks: int

    @classmethod
    def from_input(cls, x: jax.Array, pads: Pads) -> "_Tiling":
        height, width = (size + sum(pad) - 2 for size, pad in zip(x.shape[1:3], pads, strict=True))
        rows, columns = -(-height // 2), -(-width // 2)
        tiles = len(x) * rows * columns
        block = rows
        if tiles > MAX_TILES_WITHOUT_LOOP:
            block = -(-rows // max(1, round(tiles / BLOCK_TILES)))
        return cls((height, width), columns, block, -(-rows // block))

    @property
    def block_size(self) -> tuple[int, int]:
        return 2 * self.block, 2 * self.columns

    @property
    def size(self) -> tuple[int, int]:
        """Output size rounded up to whole blocks."""
        return self.blocks * self.block_size[0], self.block_size[1]

    def pad(self, x: jax.Array, pads: Pads) -> jax.Array:
        """Pad x so that every tile's input window is in bounds."""
        margins = [
            (before, size + 2 - before - inside, 0)
            for (before, _), size, inside in zip(pads, self.size, x.shape[1:3], strict=True)
        ]
        return lax.pad(x, jnp.float32(0), [(0, 0, 0), *margins, (0, 0, 0)])

    def sums(self, x: jax.Array) -> jax.Array:
        """Room for the transform of a block, [16, tiles, C]: written once, not for each block.

        Filled with an entry of x, or XLA would make it long before x is there.
        """
        shape = 16, len(x) * self.block * self.columns, x.shape[-1]
        return jnp.broadcast_to(x[0, 0, 0, 0], shape)

    def input_sums(self, x: jax.Array, i: jax.Array, out: jax.Array) -> jax.Array:
        """Transform block i of the padded x: [16, tiles, C], in the place of `out`."""
        rows = lax.dynamic_slice_in_dim(x, i * 2 * self.block, 2 * self.block + 2, axis=1)
        rows = rows.reshape(len(x), self.block + 1, 2, self.columns + 1, 2, -1)
        size = (len(x), self.block, 1, self.columns, 1, x.shape[-1])

        def pixel(row, column):  # in all tiles
            start = (0, row >> 1, row & 1, column >> 1, column & 1, 0)
            return lax.dynamic_slice(rows, start, size)[:, :, 0, :, 0]

        taps = np.array([np.flatnonzero(row) for row in INPUT_TRANSFORM])
        signs = jnp.array(np.take_along_axis(INPUT_TRANSFORM, taps, axis=1), x.dtype)
        pairs = jnp.array(taps)

        def add(a, b):
            top, bottom = pairs[a]
            left, right = (
                signs[a, 0] * pixel(top, column) + signs[a, 1] * pixel(bottom, column)
                for column in pairs[b]
            )
            return signs[b, 0] * left + signs[b, 1] * right

        return _over_sixteen(add, out)


def _over_sixteen(compute: Callable, out: jax.Array) -> jax.Array:
    """Write `compute(a, b)` for the 4 x 4 entries of transformed tiles to `out` [16, tiles, C].

    In a loop: unrolled, they would take half of the time that a detector compiles on a CPU.
    """

    def write(n, out):
        entry = compute(n >> 2, n & 3).reshape(out.shape[1:])
        return lax.dynamic_update_index_in_dim(out, entry, n, 0)

    return lax.fori_loop(0, 16, write, out)


def _output_sum(tiles: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Entry (a, b) of OUTPUT_TRANSFORM.T @ tiles @ OUTPUT_TRANSFORM, of [N, rows, 2, columns, 2,
    K]."""
    matrix = jnp.array(OUTPUT_TRANSFORM.T, tiles.dtype)
    columns = [
        matrix[a, 0] * tiles[:, :, 0, :, c] + matrix[a, 1] * tiles[:, :, 1, :, c] for c in (0, 1)
    ]
    return matrix[b, 0] * columns[0] + matrix[b, 1] * columns[1]


def _transform_tiles(matrix: np.ndarray, tiles: list[list[jax.Array]]) -> list[list[jax.Array]]:
    """matrix @ tiles @ matrix.T for a matrix with entries 0, 1 and -1."""
    rows = [[_sum(signs, column) for column in zip(*tiles, strict=True)] for signs in matrix]
    return [[_sum(signs, row) for signs in matrix] for row in rows]


def _sum(signs: np.ndarray, terms: Sequence[jax.Array]) -> jax.Array:
    plus = sum(term for sign, term in zip(signs, terms, strict=True) if sign > 0)
    minus = sum(term for sign, term in zip(signs, terms, strict=True) if sign < 0)
    return plus - minus  # type: ignore[return-value]
