"""Fill polygons by pycocotools' rule, for many regions at once.

Each program handles one region: it walks the region's edges and keeps a bit per row for every
column. Vectors hold the columns.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import support

LANES = 128  # vector length, which limits the columns
WORD = 32  # column rows per integer
REFINE = 5  # refined pixels per pixel, as in pycocotools
UNROLLED = 4  # edges per step, so that their loads overlap


def unsupported(size: int) -> str | None:
    """Return why `fill_polygons` does not support that size, or None."""
    if size > LANES:
        return f"size {size}, expected at most {LANES}"
    return None


def fill_polygons(
    edges: jax.Array, begins: jax.Array, used: jax.Array, *, size: int, interpret: Any = None
) -> jax.Array:
    """Set the pixels inside any part of each region's polygons: [R, size, size] float32, 0 or 1.

    A pixel is inside a part if an odd number of its edges lies above.

    Args:
        edges: [R, V, 4] int32, edges as x1, y1, x2, y2 in refined pixels, five per pixel, within
            20000 of 0; parts are consecutive, each a closed outline.
        begins: [R, V] bool, whether an edge is the first in its part.
        used: [R, V] bool, valid edges.
        size: at most 128.
        interpret: as in `plgpu.kernel`.

    Raises:
        NotImplementedError: `unsupported` returns a reason.
    """
    if reason := unsupported(size):
        raise NotImplementedError(f"fill_polygons: {reason}")
    rois, vertices = used.shape
    if not rois or not vertices:
        return jnp.zeros((rois, size, size), jnp.float32)
    kinds = jnp.where(used, 1 + 2 * begins.astype(jnp.int32), 0)
    ends = jnp.max(jnp.where(used, jnp.arange(1, vertices + 1, dtype=jnp.int32), 0), axis=1)
    pad = -vertices % UNROLLED
    edges = jnp.pad(edges, ((0, 0), (0, pad), (0, 0)))
    kinds = jnp.pad(kinds, ((0, 0), (0, pad)))
    words = _inside_words(edges, kinds, ends, size=size, interpret=interpret)[:, :, None, :size]
    bits = lax.shift_right_logical(words, jnp.arange(WORD, dtype=jnp.int32)[None, None, :, None])
    return (bits & 1).astype(jnp.float32).reshape(rois, -1, size)[:, :size]


def _inside_words(edges, kinds, ends, *, size, interpret):
    """Return [R, words, 128] int32: bit b in [r, w, c] is pixel (row 32 w + b, column c).

    kinds: [R, V] int32, 0 for an unused edge, 3 for a part's first edge, else 1.
    ends: [R] int32, edge count up to a region's last one.
    """
    rois = len(ends)
    num_words = -(-size // WORD)

    def fill_polygons(edges, kinds, ends, out):
        roi = lax.axis_index("roi")
        # The refined column in the middle of each pixel; edges cross its right border.
        middle = REFINE * lax.iota(jnp.int32, LANES) + REFINE // 2
        nothing = middle * 0

        def add_edge(index, state):
            unions, parts = state
            kind = kinds[roi, index]
            is_used, begins = -(kind & 1), -lax.shift_right_logical(kind, 1)  # 0 or all bits
            row = _first_row(*(edges[roi, index, i] for i in range(4)), middle, size)
            for word in range(num_words):
                above = jnp.clip(row - WORD * word, 0, WORD)
                below = lax.shift_left(nothing - 1, jnp.minimum(above, WORD - 1))
                below = jnp.where(above < WORD, below, 0) & is_used
                unions[word] |= parts[word] & begins
                parts[word] = (parts[word] & ~begins) ^ below
            return unions, parts

        def add_edges(step, state):
            for i in range(UNROLLED):
                state = add_edge(step * UNROLLED + i, state)
            return state

        start = [nothing] * num_words
        steps = lax.div(ends[roi] + (UNROLLED - 1), UNROLLED)
        unions, parts = lax.fori_loop(0, steps, add_edges, (start, start))
        for word in range(num_words):
            out[roi, word] = unions[word] | parts[word]

    out_type = jax.ShapeDtypeStruct((rois, num_words, LANES), jnp.int32)
    return support.kernel(fill_polygons, out_type, interpret, roi=rois)(edges, kinds, ends)


def _first_row(x1, y1, x2, y2, middle, size):
    """First row below an edge in each column; `size` if the edge does not cross the column.

    x1, y1, x2, y2 are scalars. pycocotools walks an edge's longer axis and rounds the other
    coordinate; the height where it crosses the border is an integer division with a numerator
    linear in the column.
    """
    width, height = jnp.abs(x2 - x1), jnp.abs(y2 - y1)
    crossed = (jnp.minimum(x1, x2) <= middle) & (jnp.maximum(x1, x2) > middle)
    wide = width >= height
    # Walk right along a wide edge, down along a tall one.
    swap = jnp.where(wide, x1 > x2, y1 > y2)
    x1, x2 = jnp.where(swap, x2, x1), jnp.where(swap, x1, x2)
    y1, y2 = jnp.where(swap, y2, y1), jnp.where(swap, y1, y2)
    rightward = x2 > x1
    slope = 2 * jnp.where(wide, y2 - y1, jnp.where(rightward, height, -height))
    # Wide: round(slope * steps) at the crossing's upper pixel.
    wide_base = 2 * (y2 - y1) * ((y2 < y1).astype(jnp.int32) - x1) + width
    # Tall: the last step for which round(x1 + slope * steps) is still before the border.
    tall_base = jnp.where(rightward, (1 - 2 * x1) * height - 1, (2 * x1 - 1) * height)
    rise = slope * middle + jnp.where(wide, wide_base, tall_base)
    divisor = jnp.maximum(2 * width, 1)
    quotient = lax.div(rise, middle * 0 + divisor)
    quotient -= (rise < quotient * divisor).astype(jnp.int32)
    # Rounds toward zero, but negative rows are clipped anyway.
    row = lax.div(y1 + quotient + REFINE // 2, middle * 0 + REFINE)
    return jnp.where(crossed, jnp.clip(row, 0, size), size)
