"""3x3 convolutions of many channels with less than half of the multiplications.

Winograd's minimal filtering F(2x2, 3x3), as in Lavin and Gray, Fast Algorithms for Convolutional
Neural Networks, section 4.1: the four outputs of a tile from sixteen products of sums of inputs and
sums of weights, for thirty-six. Rounding errors are no larger than those of XLA's convolution.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

TILES = 256  # at a time: their sums and products stay in the cache
WHOLE = 1200  # tiles that need no loop: cores share the work less well in one
OF_INPUT = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])
OF_KERNEL = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float32)
OF_OUTPUT = np.array([[1, 1, 1, 0], [0, 1, -1, -1]])
Pads = Sequence[tuple[int, int]]  # (before, after) of both axes


def pays(x: jax.Array, kernel_shape: Sequence[int], stride: int) -> bool:
    """Whether a CPU is faster with it: the sums cost as much for few channels as for many."""
    alike = tuple(kernel_shape[:2]) == (3, 3) and stride == 1 and x.dtype == jnp.float32
    return alike and min(kernel_shape[2:]) >= 256 and x.size >= 1000 * x.shape[-1]


def transform(kernel: jax.Array) -> jax.Array:
    """[3, 3, C, K] float32 to the weights [4, 4, C, K] that `conv3x3` multiplies with."""
    return jnp.einsum("ai,ijck,bj->abck", OF_KERNEL, kernel, OF_KERNEL, precision="highest")


def conv3x3(x: jax.Array, weights: jax.Array, pads: Pads) -> jax.Array:
    """[N, H, W, C] float32 and a kernel's `transform` to [N, h, w, K]."""
    tiling = _Tiling.of(x, pads)
    x = tiling.pad(x, pads)

    def add_block(i, out):
        sums = tiling.sums(x, i)
        products = [
            [lax.dot_general(sums[a][b], weights[a, b], (((3,), (0,)), ((), ()))) for b in range(4)]
            for a in range(4)
        ]
        tiles = [jnp.stack(row, axis=3) for row in _both_ways(OF_OUTPUT, products)]
        tiles = jnp.stack(tiles, axis=2).reshape(len(x), *tiling.block_size, -1)
        return lax.dynamic_update_slice_in_dim(out, tiles, i * tiling.block_size[0], axis=1)

    out = jnp.zeros((len(x), *tiling.size, weights.shape[-1]), x.dtype)
    height, width = tiling.output_size
    return lax.fori_loop(0, tiling.blocks, add_block, out)[:, :height, :width]


def kernel_gradient3x3(x: jax.Array, grad: jax.Array, pads: Pads) -> jax.Array:
    """The gradient [3, 3, C, K] of `conv3x3` from that of its output [N, h, w, K]."""
    tiling = _Tiling.of(x, pads)
    x = tiling.pad(x, pads)
    more = [size - real for size, real in zip(tiling.size, tiling.output_size, strict=True)]
    grad = jnp.pad(grad, ((0, 0), (0, more[0]), (0, more[1]), (0, 0)))

    def add_block(i, totals):
        sums = tiling.sums(x, i)
        part = lax.dynamic_slice_in_dim(
            grad, i * tiling.block_size[0], tiling.block_size[0], axis=1
        )
        tiles = part.reshape(len(x), tiling.block, 2, tiling.columns, 2, -1)
        spread = _both_ways(OF_OUTPUT.T, [[tiles[:, :, r, :, c] for c in (0, 1)] for r in (0, 1)])
        # Flat, or XLA would write the sums a second time, transposed.
        return [
            [
                totals[a][b]
                + sums[a][b].reshape(-1, x.shape[-1]).T @ spread[a][b].reshape(-1, grad.shape[-1])
                for b in range(4)
            ]
            for a in range(4)
        ]

    zeros = jnp.zeros((x.shape[-1], grad.shape[-1]), x.dtype)
    totals = lax.fori_loop(0, tiling.blocks, add_block, [[zeros] * 4] * 4)
    return jnp.einsum(
        "ai,abck,bj->ijck", OF_KERNEL, jnp.array(totals), OF_KERNEL, precision="highest"
    )


@dataclass(frozen=True)
class _Tiling:
    """An output cut into tiles of 2 x 2, of which some rows are looked at together."""

    output_size: tuple[int, int]
    columns: int  # of tiles
    block: int  # rows of tiles looked at together
    blocks: int

    @classmethod
    def of(cls, x: jax.Array, pads: Pads) -> "_Tiling":
        height, width = (size + sum(pad) - 2 for size, pad in zip(x.shape[1:3], pads, strict=True))
        rows, columns = -(-height // 2), -(-width // 2)
        tiles = len(x) * rows * columns
        block = rows if tiles <= WHOLE else -(-rows // max(1, round(tiles / TILES)))
        return cls((height, width), columns, block, -(-rows // block))

    @property
    def block_size(self) -> tuple[int, int]:
        return 2 * self.block, 2 * self.columns

    @property
    def size(self) -> tuple[int, int]:
        """Of all blocks: of the output, rounded up."""
        return self.blocks * self.block_size[0], self.block_size[1]

    def pad(self, x: jax.Array, pads: Pads) -> jax.Array:
        """x with all that the tiles see."""
        margins = [
            (before, size + 2 - before - inside, 0)
            for (before, _), size, inside in zip(pads, self.size, x.shape[1:3], strict=True)
        ]
        return lax.pad(x, jnp.float32(0), [(0, 0, 0), *margins, (0, 0, 0)])

    def sums(self, x: jax.Array, i: jax.Array) -> list[list[jax.Array]]:
        """4 x 4 arrays [N, block, columns, C] of the padded x, of the tiles of block i."""
        seen = lax.dynamic_slice_in_dim(x, i * 2 * self.block, 2 * self.block + 2, axis=1)
        seen = seen.reshape(len(x), self.block + 1, 2, self.columns + 1, 2, -1)

        def of_all_tiles(row, column):
            top, left = row // 2, column // 2
            return seen[:, top : top + self.block, row % 2, left : left + self.columns, column % 2]

        return _both_ways(OF_INPUT, [[of_all_tiles(r, c) for c in range(4)] for r in range(4)])


def _both_ways(matrix: np.ndarray, tiles: list[list[jax.Array]]) -> list[list[jax.Array]]:
    """matrix @ tiles @ matrix.T, where all numbers of the matrix are 0, 1 or -1."""
    rows = [[_sum(signs, column) for column in zip(*tiles, strict=True)] for signs in matrix]
    return [[_sum(signs, row) for signs in matrix] for row in rows]


def _sum(signs: np.ndarray, terms: Sequence[jax.Array]) -> jax.Array:
    plus = sum(term for sign, term in zip(signs, terms, strict=True) if sign > 0)
    return plus - sum(term for sign, term in zip(signs, terms, strict=True) if sign < 0)
