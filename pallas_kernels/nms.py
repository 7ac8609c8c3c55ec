"""Exact greedy non-maximum suppression for many problems at once, in two kernels.

A program of the first kernel compares 32 suppressing boxes with a tile of boxes from one problem:
bit b in a word tells whether box b out of the 32 overlaps the word's box too much. A program of the
second handles one problem: it takes 32 boxes per step, resolves them among themselves, and drops
every later box overlapped by a survivor.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import support

BLOCK = 32  # boxes whose suppressions fill one word
LANES = 128  # vector lengths are multiples of this
TILE = 512  # boxes compared with the 32 in a program of the first kernel
FIRST_MINIMUM = 8, 0  # compute capability of the first GPUs with a minimum that returns NaN
MAX_BOXES = 8192  # per problem; the second kernel keeps them in registers


def unsupported(num_boxes: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Return why `nms` does not support that box count or dtype, or None."""
    if num_boxes > MAX_BOXES:
        return f"{num_boxes} boxes a problem, expected at most {MAX_BOXES}"
    if jnp.dtype(dtype) != jnp.float32:
        return f"dtype {jnp.dtype(dtype).name}, expected float32"
    return None


def nms(
    boxes: jax.Array,
    valid: jax.Array,
    groups: jax.Array | None,
    *,
    iou_thresh: float,
    max_out: int,
    offset: float = 0.0,
    interpret: Any = None,
) -> jax.Array:
    """Return the mask [B, N] of surviving boxes for B problems sorted by descending score.

    A box is suppressed if a surviving box in its group with a higher score has
    intersection > `iou_thresh` * union with it, in float32. Invalid rows neither survive nor
    suppress, whatever their values. Only the first `max_out` survivors per problem are kept.

    Args:
        boxes: [B, N, 4] float32, x1, y1, x2, y2; N is at most 8192.
        valid: [B, N] bool.
        groups: [B, N] int32, such as classes; None for one group.
        offset: added to widths and heights, 1 for inclusive pixels.
        interpret: as in `plgpu.kernel`.

    Raises:
        NotImplementedError: `unsupported` returns a reason.
    """
    problems, num = valid.shape
    if not problems or not num:
        return jnp.zeros((problems, num), bool)
    if reason := unsupported(num, boxes.dtype):
        raise NotImplementedError(f"nms: {reason}")
    padded = num + -num % (LANES if num <= TILE else TILE)
    padding = (0, 0), (0, padded - num)
    planes = jnp.moveaxis(jnp.pad(boxes, (*padding, (0, 0))), -1, 1)  # [B, 4, N]
    groups = () if groups is None else (jnp.pad(groups.astype(jnp.int32), padding),)
    ends = jnp.max(jnp.where(valid, jnp.arange(1, num + 1, dtype=jnp.int32), 0), axis=1)
    words = _suppression_words(
        planes, ends, *groups, iou_thresh=iou_thresh, offset=offset, interpret=interpret
    )
    alive = jnp.pad(valid, padding).astype(jnp.int32)
    keep = _resolve(words, alive, ends, max_out=max_out, interpret=interpret)
    return keep[:, :num] != 0


def _suppression_words(planes, ends, *groups, iou_thresh, offset, interpret):
    """Return [B, N / 32, N] int32: bit b in [p, k, j] is set if box 32 k + b suppresses box j.

    ends: [B] int32, row count up to a problem's last valid one.
    """
    problems, _, num = planes.shape
    tile = min(num, TILE)
    minimum, maximum = jnp.minimum, jnp.maximum
    if support.compute_capability() < FIRST_MINIMUM:
        minimum, maximum = _smaller, _larger

    def nms_words(planes, ends, *refs):
        *groups, words = refs
        problem, block = lax.axis_index("problem"), lax.axis_index("block")
        start = lax.axis_index("tile") * tile
        columns = pl.ds(start, tile)
        x1, y1, x2, y2 = (planes[problem, i, columns] for i in range(4))
        # Nothing exceeds NaN, which `minimum` and `maximum` may not return for a column with one.
        area = _area(x2 - x1 + offset, y2 - y1 + offset, otherwise=jnp.nan)
        index = lax.iota(jnp.int32, tile) + start
        group = groups[0][problem, columns] if groups else None

        def suppress(bit, words):
            row = block * BLOCK + bit
            left, top, right, bottom = (planes[problem, i, row] for i in range(4))
            row_area = _area(right - left + offset, bottom - top + offset)
            inter = _area(
                minimum(x2, right) - maximum(x1, left) + offset,
                minimum(y2, bottom) - maximum(y1, top) + offset,
            )
            hit = (inter > iou_thresh * (row_area + area - inter)) & (index > row)
            if groups:
                hit &= group == groups[0][problem, row]
            return words | jnp.where(hit, lax.shift_left(jnp.int32(1), bit), 0)

        # Tiles before the block have no later boxes.
        end = ends[problem]
        needed = (start + tile > block * BLOCK) & (start < end) & (block * BLOCK < end)
        steps = jnp.where(needed, BLOCK, 0)
        words[problem, block, columns] = lax.fori_loop(0, steps, suppress, index * 0)

    out_type = jax.ShapeDtypeStruct((problems, num // BLOCK, num), jnp.int32)
    grid = dict(problem=problems, block=num // BLOCK, tile=num // tile)
    return support.kernel(nms_words, out_type, interpret, **grid)(planes, ends, *groups)


def _smaller(column, row):
    """The smaller one, or NaN if `row` is NaN."""
    return jnp.where(column < row, column, row)


def _larger(column, row):
    """The larger one, or NaN if `row` is NaN."""
    return jnp.where(column > row, column, row)


def _area(width, height, otherwise=0.0):
    """width * height, or `otherwise` unless both are positive.

    A select instead of two maxima keeps the compiler from fusing the product with a sum: fused, the
    result for an overlap exactly at the threshold would depend on the product's rounding.
    """
    return jnp.where((width > 0.0) & (height > 0.0), width * height, otherwise)


def _resolve(words, alive, ends, *, max_out, interpret):
    """Return [B, N] int32, 1 for the first `max_out` survivors; `alive` is 1 for valid rows."""
    problems, num = alive.shape

    def nms_resolve(words, valid, ends, keep):
        problem = lax.axis_index("problem")
        index, end = lax.iota(jnp.int32, num), ends[problem]

        def unfinished(state):
            block, count, _ = state
            return (block * BLOCK < end) & (count < max_out)

        def next_block(state):
            block, count, alive = state
            bit = index - block * BLOCK
            here = (bit >= 0) & (bit < BLOCK)
            candidates = jnp.sum(jnp.where(here, lax.shift_left(alive, jnp.where(here, bit, 0)), 0))
            kept = jnp.int32(0)
            for i in range(BLOCK):
                better = words[problem, block, block * BLOCK + i] & kept
                keeps = (better == 0) & (count < max_out)
                keep_bit = lax.shift_right_logical(candidates, jnp.int32(i)) & 1
                keep_bit = keep_bit * keeps.astype(jnp.int32)
                kept |= lax.shift_left(keep_bit, jnp.int32(i))
                count += keep_bit
            survives = lax.shift_right_logical(kept, jnp.where(here, bit, 0)) & 1
            later = jnp.where((words[problem, block] & kept) != 0, 0, alive)
            return block + 1, count, jnp.where(here, survives, later)

        start = jnp.int32(0), jnp.int32(0), valid[problem]
        block, _, alive = lax.while_loop(unfinished, next_block, start)
        keep[problem] = jnp.where(index < block * BLOCK, alive, 0)

    out_type = jax.ShapeDtypeStruct((problems, num), jnp.int32)
    return support.kernel(nms_resolve, out_type, interpret, problem=problems)(words, alive, ends)
