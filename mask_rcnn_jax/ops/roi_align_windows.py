"""The sum in RoIAlign in a form that suits TPUs: windows of the maps times weights.

A TPU reads memory in large pieces, and taking single rows of the table, as the definition does,
costs it a transfer for each. Here a row of output cells takes `WIDTH` neighboring table rows at
once for each tap along y, and a product with the weights along x picks and sums its taps. Boxes
that are wider take several windows. Pairs of a box and a window come `PAIRS` at a time in a device
loop, which bounds the memory and costs nothing for boxes that are not pooled. The loop's length
depends on the boxes; a TPU decides that alone, without its host.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

WIDTH = 16  # table rows in a window
PAIRS = 128  # of a box and a window, at a time


class _Windows(NamedTuple):
    """For `PAIRS` pairs, those beyond the last one with weights of 0."""

    box: Int[Array, "J"]
    start: Int[Array, "J P T"]  # first table row of each window
    y_weights: Float[Array, "J P T"]
    x_weights: Float[Array, "J Q WIDTH"]


def gather_sum(
    tables: Sequence[Float[Array, "_pixels C"]],
    y_taps: Int[Array, "R P T"],
    x_taps: Int[Array, "R Q U"],
    y_weights: Float[Array, "R P T"],
    x_weights: Float[Array, "R Q U"],
) -> Float[Array, "R P Q C"]:
    """Compute what `roi_align.xla_gather_sum` does."""
    taps = y_taps, x_taps, y_weights, x_weights
    channels = tables[0].shape[1]
    pooled = jnp.zeros((*y_taps.shape[:2], x_taps.shape[1], channels), jnp.float32)
    if not len(pooled):
        return pooled.astype(tables[0].dtype)
    beyond = jnp.zeros((WIDTH, channels), tables[0].dtype)  # a window may begin at the last row
    table = jnp.concatenate([*tables, beyond])
    count, first = _count_windows(x_taps, y_weights, x_weights)

    def add(turn: Array, pooled: Array) -> Array:
        windows = _windows_of(turn, count, first, *taps)
        found = lax.gather(
            table, windows.start[..., None], _window_dimensions(lax.GatherDimensionNumbers),
            slice_sizes=(WIDTH, channels), mode="promise_in_bounds",
        )  # fmt: skip
        rows = jnp.sum(found.astype(jnp.float32) * windows.y_weights[..., None, None], axis=2)
        cells = jnp.einsum("jpwc,jqw->jpqc", rows, windows.x_weights, precision="highest")
        return pooled.at[windows.box].add(cells, indices_are_sorted=True, mode="promise_in_bounds")

    return lax.fori_loop(0, _turns(count), add, pooled).astype(table.dtype)


def gather_sum_transpose(
    grad: Float[Array, "R P Q C"], *taps: Array, num_rows: int
) -> Float[Array, "pixels C"]:
    """Compute what `roi_align.xla_gather_sum_transpose` does."""
    total = jnp.zeros((num_rows + WIDTH, grad.shape[-1]), jnp.float32)
    if not len(grad):
        return total[:num_rows].astype(grad.dtype)
    count, first = _count_windows(*taps[1:])

    def add(turn: Array, total: Array) -> Array:
        windows = _windows_of(turn, count, first, *taps)
        cells = grad.at[windows.box].get(mode="promise_in_bounds").astype(jnp.float32)
        rows = jnp.einsum("jpqc,jqw->jpwc", cells, windows.x_weights, precision="highest")
        return lax.scatter_add(
            total, windows.start[..., None], rows[:, :, None] * windows.y_weights[..., None, None],
            _window_dimensions(lax.ScatterDimensionNumbers), mode="promise_in_bounds",
        )  # fmt: skip

    return lax.fori_loop(0, _turns(count), add, total)[:num_rows].astype(grad.dtype)


def _window_dimensions(kind):
    """Return how [J, P, T] first rows address windows [J, P, T, WIDTH, C] of a table."""
    if kind is lax.GatherDimensionNumbers:
        return kind(offset_dims=(3, 4), collapsed_slice_dims=(), start_index_map=(0,))
    return kind(
        update_window_dims=(3, 4), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,)
    )


def _count_windows(
    x_taps: Int[Array, "R Q U"], y_weights: Float[Array, "R P T"], x_weights: Float[Array, "R Q U"]
) -> tuple[Int[Array, "R"], Int[Array, "R"]]:
    """Return how many windows side by side hold each box's taps, and the first one's column."""
    used: Bool[Array, "R Q U"] = x_weights != 0.0
    last = jnp.max(jnp.where(used, x_taps, -1), axis=(1, 2))
    first = jnp.min(jnp.where(used, x_taps, last[:, None, None]), axis=(1, 2))
    pooled = (last >= 0) & jnp.any(y_weights != 0.0, axis=(1, 2))
    return jnp.where(pooled, (last - first) // WIDTH + 1, 0), jnp.maximum(first, 0)


def _turns(count: Int[Array, "R"]) -> Int[Array, ""]:
    return -(-jnp.sum(count) // PAIRS)


def _windows_of(
    turn: Array, count: Int[Array, "R"], first: Int[Array, "R"], *taps: Array
) -> _Windows:
    """Return the pairs of a turn, in the order of the boxes."""
    ends = jnp.cumsum(count)
    pair = turn * PAIRS + jnp.arange(PAIRS, dtype=jnp.int32)
    box = jnp.minimum(jnp.sum(ends[None, :] <= pair[:, None], axis=1), len(count) - 1)
    before, columns, *picked = (
        x.at[box].get(mode="promise_in_bounds") for x in (ends - count, first, *taps)
    )
    y_taps, x_taps, y_weights, x_weights = picked
    column = columns + (pair - before) * WIDTH
    live = pair < ends[-1]
    column = jnp.where(live, column, 0)[:, None, None]
    place = jnp.where(live[:, None, None], x_taps - column, -1)
    is_there = place[..., None] == lax.broadcasted_iota(jnp.int32, (*place.shape, WIDTH), 3)
    picks = jnp.sum(jnp.where(is_there, x_weights[..., None], 0.0), axis=2)
    return _Windows(box, y_taps + column, y_weights, picks)
