"""RoIAlign's inner sum and its transpose as Pallas Mosaic GPU kernels.

The feature maps are pixel tables, [rows, C], whose rows are numbered one table after the other. An
output cell is a weighted sum of rows, with a tap and a weight per axis: out[r, p, q] = sum yw[r, p,
a] xw[r, q, b] table[y[r, p, a] + x[r, q, b]]. The caller chooses taps and weights.

Letters: R boxes with P x Q cells each, T taps per cell along y and U along x, C channels.
"""

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import support

LANES = 128  # vector lengths are multiples of this
MAX_CHANNELS = 1024  # wider rows need almost all registers in a thread
DTYPES = ("float32", "bfloat16", "float16")
MAX_UNROLLED = 16  # largest T * U to unroll; more run in loops over the used taps
ROWS_PER_PROGRAM = 8  # table rows per program in the transpose
GROUPED_ENTRIES = 8  # entries in a table row's list in flight together, in the transpose
UNROLLED_ENTRIES = 4  # the same for the rest of the list; its checks take registers


def unsupported(channels: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Return why `gather_sum` and its transpose do not support such a table, or None."""
    if channels % LANES or not 0 < channels <= MAX_CHANNELS:
        return f"{channels} channels, expected a multiple of {LANES} up to {MAX_CHANNELS}"
    if jnp.dtype(dtype).name not in DTYPES:
        return f"dtype {jnp.dtype(dtype).name}, expected {', '.join(DTYPES)}"
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def gather_sum(
    tables: Sequence[jax.Array],
    y_taps: jax.Array,
    x_taps: jax.Array,
    y_weights: jax.Array,
    x_weights: jax.Array,
    interpret: Any = None,
) -> jax.Array:
    """out[r, p, q] = sum over taps of y_weight * x_weight * table[y_tap + x_tap].

    Args:
        tables: [rows, C] each, float32, bfloat16 or float16; C is a multiple of 128, at most 1024.
            They are read where they are: nothing joins them.
        y_taps: [R, P, T] int32, first table row for a line of pixels.
        x_taps: [R, Q, U] int32, offsets within the line. Every sum of two taps must be a row, even
            if a weight is 0, and of the table that has row y_taps[r, p, 0]: others are undefined.
        y_weights: [R, P, T] float32. Taps after the last nonzero weight cost little.
        x_weights: [R, Q, U] float32.
        interpret: as in `plgpu.kernel`.

    Returns:
        [R, P, Q, C] in the tables' dtype; products and sums are float32. Gradients flow to the
        tables only and are bit-reproducible.

    Raises:
        NotImplementedError: `unsupported` returns a reason.
    """
    channels, dtype = tables[0].shape[1], tables[0].dtype
    if reason := unsupported(channels, dtype):
        raise NotImplementedError(f"gather_sum: {reason}")
    num, num_y, taps_y = y_taps.shape
    num_x, taps_x = x_taps.shape[1:]
    out_type = jax.ShapeDtypeStruct((num, num_y, num_x, channels), dtype)
    if 0 in out_type.shape:
        return jnp.zeros(out_type.shape, out_type.dtype)
    unrolled = taps_y * taps_x <= MAX_UNROLLED
    starts = [0, *accumulate(len(table) for table in tables)][:-1]

    def gather_sum_kernel(y_taps, x_taps, y_weights, x_weights, *refs):
        *used, out = refs
        used, tables = used[: -len(starts)], used[-len(starts) :]
        line = lax.axis_index("line")
        r, p = lax.div(line, num_y), lax.rem(line, num_y)

        def cells_from(table, start):
            def cell(q, _):
                def term(a, b):
                    weight = y_weights[r, p, a] * x_weights[r, q, b]
                    row = y_taps[r, p, a] + x_taps[r, q, b] - start
                    return table[row].astype(jnp.float32) * weight

                if unrolled:
                    total = _sum_unrolled(term, taps_y, taps_x)
                else:
                    total = _sum_used(term, used[0][r, p], used[1][r, q], channels)
                out[r, p, q] = total.astype(out.dtype)
                return 0

            lax.fori_loop(0, num_x, cell, 0)

        number = sum((y_taps[r, p, 0] >= start).astype(jnp.int32) for start in starts[1:])
        reads = [functools.partial(cells_from, *pair) for pair in zip(tables, starts, strict=True)]
        lax.switch(number, reads)

    used = () if unrolled else (_num_used(y_weights), _num_used(x_weights))
    # One axis, since only the last may exceed 65535.
    run = support.kernel(gather_sum_kernel, out_type, interpret, line=num * num_y)
    return run(y_taps, x_taps, y_weights, x_weights, *used, *tables)


def gather_sum_transpose(
    grad: jax.Array,
    y_taps: jax.Array,
    x_taps: jax.Array,
    y_weights: jax.Array,
    x_weights: jax.Array,
    *,
    num_rows: int,
    interpret: Any = None,
) -> jax.Array:
    """Compute the table gradient [num_rows, C] from `grad` [R, P, Q, C], in grad's dtype.

    One sort lists the cells reading each table row, which are summed in that order in float32:
    without atomics, and bit-reproducible.

    Raises:
        NotImplementedError: `unsupported` returns a reason.
    """
    channels = grad.shape[-1]
    if reason := unsupported(channels, grad.dtype):
        raise NotImplementedError(f"gather_sum_transpose: {reason}")
    if 0 in (*grad.shape, num_rows):
        return jnp.zeros((num_rows, channels), grad.dtype)
    starts, cells, weights = _row_cells(y_taps, x_taps, y_weights, x_weights, num_rows)
    programs = -(-num_rows // ROWS_PER_PROGRAM)

    def gather_sum_transpose_kernel(starts, cells, weights, grad, out):
        program = lax.axis_index("program")

        def add(k, weight, total):
            return total + grad[cells[k]].astype(jnp.float32) * weight

        def row(turn, _):
            # Pixels with long lists are neighbors: leave them to different programs.
            i = program + turn * programs
            start, end = starts[i], starts[i + 1]
            groups = (end - start) // GROUPED_ENTRIES
            rest = start + groups * GROUPED_ENTRIES

            def add_group(group, total):
                first = start + group * GROUPED_ENTRIES
                for k in range(GROUPED_ENTRIES):
                    total = add(first + k, weights[first + k], total)
                return total

            def add_rest(step, total):
                for entry in range(UNROLLED_ENTRIES):
                    k = rest + step * UNROLLED_ENTRIES + entry
                    # Past the end, reuse the last entry, which is loaded already, with weight 0.
                    last = jnp.minimum(k, end - 1)
                    total = add(last, jnp.where(k < end, weights[last], 0.0), total)
                return total

            total = jnp.zeros((channels,), jnp.float32)
            total = lax.fori_loop(0, groups, add_group, total)
            steps = (end - rest + UNROLLED_ENTRIES - 1) // UNROLLED_ENTRIES
            total = lax.fori_loop(0, steps, add_rest, total)
            out[i] = total.astype(out.dtype)
            return 0

        lax.fori_loop(0, (num_rows - program + programs - 1) // programs, row, 0)

    out_type = jax.ShapeDtypeStruct((num_rows, channels), grad.dtype)
    run = support.kernel(gather_sum_transpose_kernel, out_type, interpret, program=programs)
    return run(starts, cells, weights, grad.reshape(-1, channels))


def _gather_sum_fwd(tables, y_taps, x_taps, y_weights, x_weights, interpret):
    taps = (y_taps, x_taps, y_weights, x_weights)
    # Backward only needs the tables' lengths; save them as tables without channels.
    return gather_sum(tables, *taps, interpret), ([table[:, :0] for table in tables], taps)


def _gather_sum_bwd(interpret, saved, grad):
    empty, taps = saved
    sizes = [len(table) for table in empty]
    # One array, of which the sum of a map's gradients reads a part.
    rows = gather_sum_transpose(grad, *taps, num_rows=sum(sizes), interpret=interpret)
    return lax.split(rows, sizes), None, None, None, None


gather_sum.defvjp(_gather_sum_fwd, _gather_sum_bwd)


def _sum_unrolled(term: Callable, num_y: int, num_x: int) -> jax.Array:
    first, *others = [(a, b) for a in range(num_y) for b in range(num_x)]
    return sum((term(*pair) for pair in others), term(*first))


def _sum_used(term: Callable, num_y: jax.Array, num_x: jax.Array, channels: int) -> jax.Array:
    def add_line(a, total):
        return lax.fori_loop(0, num_x, lambda b, total: total + term(a, b), total)

    return lax.fori_loop(0, num_y, add_line, jnp.zeros((channels,), jnp.float32))


def _num_used(weights: jax.Array) -> jax.Array:
    """[R, P] int32: each cell's leading taps up to the last one with a nonzero weight."""
    numbers = jnp.arange(1, weights.shape[-1] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(weights != 0.0, numbers[None, None, :], 0), axis=-1)


def _row_cells(y_taps, x_taps, y_weights, x_weights, num_rows):
    """Transpose the sum: row i reads cells[starts[i] : starts[i + 1]], with weights likewise.

    Cells are flat indices over R, P and Q. Taps with weight 0 are not listed.
    """
    weights = y_weights[:, :, None, :, None] * x_weights[:, None, :, None, :]
    rows = y_taps[:, :, None, :, None] + x_taps[:, None, :, None, :]
    rows = jnp.where(weights == 0.0, num_rows, rows).reshape(-1)
    # Stable, so that each row lists its cells in order.
    rows, order = lax.sort((rows, lax.iota(jnp.int32, rows.size)), num_keys=1)
    # Unrolled: each step of the default loop takes a few microseconds.
    queries = jnp.arange(num_rows + 1, dtype=jnp.int32)
    starts = jnp.searchsorted(rows, queries, method="scan_unrolled")
    taps_of_cell = y_taps.shape[-1] * x_taps.shape[-1]
    return starts.astype(jnp.int32), order // taps_of_cell, weights.reshape(-1)[order]
