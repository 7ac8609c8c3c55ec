"""RoIAlign's inner sum and its transpose as Pallas Mosaic GPU kernels.

The feature maps form one pixel table, [rows, C]. An output cell is a weighted sum of rows, with a
tap and a weight per axis: out[r, p, q] = sum yw[r, p, a] xw[r, q, b] table[y[r, p, a] + x[r, q,
b]]. The caller chooses taps and weights.

Letters: R boxes with P x Q cells each, T taps per cell along y and U along x, C channels.
"""

import functools
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
    table: jax.Array,
    y_taps: jax.Array,
    x_taps: jax.Array,
    y_weights: jax.Array,
    x_weights: jax.Array,
    interpret: Any = None,
) -> jax.Array:
    """out[r, p, q] = sum over taps of y_weight * x_weight * table[y_tap + x_tap].

    Args:
        table: [rows, C], float32, bfloat16 or float16; C is a multiple of 128, at most 1024.
        y_taps: [R, P, T] int32, first table row for a line of pixels.
        x_taps: [R, Q, U] int32, offsets within the line. Every sum of two taps must be a table row,
            even if a weight is 0: out of bounds is undefined.
        y_weights: [R, P, T] float32. Taps after the last nonzero weight cost little.
        x_weights: [R, Q, U] float32.
        interpret: as in `plgpu.kernel`.

    Returns:
        [R, P, Q, C] in the table's dtype; products and sums are float32. Gradients flow to the
        table only and are bit-reproducible.

    Raises:
        NotImplementedError: `unsupported` returns a reason.
    """
    if reason := unsupported(table.shape[1], table.dtype):
        raise NotImplementedError(f"gather_sum: {reason}")
    num, num_y, taps_y = y_taps.shape
    num_x, taps_x = x_taps.shape[1:]
    channels = table.shape[1]
    out_type = jax.ShapeDtypeStruct((num, num_y, num_x, channels), table.dtype)
    if 0 in out_type.shape:
        return jnp.zeros(out_type.shape, out_type.dtype)
    unrolled = taps_y * taps_x <= MAX_UNROLLED

    def gather_sum_kernel(y_taps, x_taps, y_weights, x_weights, *refs):
        *used, table, out = refs
        line = lax.axis_index("line")
        r, p = lax.div(line, num_y), lax.rem(line, num_y)

        def term(q, a, b):
            weight = y_weights[r, p, a] * x_weights[r, q, b]
            return table[y_taps[r, p, a] + x_taps[r, q, b]].astype(jnp.float32) * weight

        def cell(q, _):
            if unrolled:
                pairs = [(a, b) for a in range(taps_y) for b in range(taps_x)]
                total = sum((term(q, a, b) for a, b in pairs[1:]), term(q, *pairs[0]))
            else:
                used_y, used_x = used

                def add_line(a, total):
                    return lax.fori_loop(
                        0, used_x[r, q], lambda b, total: total + term(q, a, b), total
                    )

                zeros = jnp.zeros((channels,), jnp.float32)
                total = lax.fori_loop(0, used_y[r, p], add_line, zeros)
            out[r, p, q] = total.astype(out.dtype)
            return 0

        lax.fori_loop(0, num_x, cell, 0)

    used = () if unrolled else (_num_used(y_weights), _num_used(x_weights))
    # One axis, since only the last may exceed 65535.
    run = support.kernel(gather_sum_kernel, out_type, interpret, line=num * num_y)
    return run(y_taps, x_taps, y_weights, x_weights, *used, table)


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


def _gather_sum_fwd(table, y_taps, x_taps, y_weights, x_weights, interpret):
    taps = (y_taps, x_taps, y_weights, x_weights)
    # Backward only needs the table's length; save it as a table without channels.
    return gather_sum(table, *taps, interpret), (table[:, :0], taps)


def _gather_sum_bwd(interpret, saved, grad):
    empty, taps = saved
    table_grad = gather_sum_transpose(grad, *taps, num_rows=empty.shape[0], interpret=interpret)
    return table_grad, None, None, None, None


gather_sum.defvjp(_gather_sum_fwd, _gather_sum_bwd)


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
