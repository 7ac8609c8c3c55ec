"""The sum in RoIAlign in a form that suits TPUs: windows of the maps times weights.

A TPU reads memory in large pieces, and taking single rows of the table, as the definition does,
costs it a transfer for each. Here the table is cut into blocks of `BLOCK` rows, and each row of
output cells takes a window of `BLOCKS` blocks for each tap along y; a product with the weights
picks and sums the taps. Boxes that are wider take several windows. Pairs of a box and a window come
`PAIRS` at a time in a device loop, which bounds the memory and costs nothing for boxes that are not
pooled. The loop's length depends on the boxes; a TPU decides that alone, without its host.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

BLOCK = 8  # table rows, as in a TPU's tiles of memory; larger slices would be copied in a loop
BLOCKS = 3  # in a window, which with 4 taps along y fill 96 of a product's 128 rows
WIDTH = BLOCK * (BLOCKS - 1) + 1  # table rows that a window holds wherever it begins in a block
PAIRS = 128  # of a box and a window, at a time


class _Windows(NamedTuple):
    """For `PAIRS` pairs, those beyond the last one with weights of 0."""

    box: Int[Array, "J"]
    blocks: Int[Array, "J P T BLOCKS"]
    weights: Float[Array, "J P Q T BLOCKS*BLOCK"]


def gather_sum(
    tables: Sequence[Float[Array, "_pixels C"]],
    y_taps: Int[Array, "R P T"],
    x_taps: Int[Array, "R Q U"],
    y_weights: Float[Array, "R P T"],
    x_weights: Float[Array, "R Q U"],
) -> Float[Array, "R P Q C"]:
    """Compute what `roi_align.xla_gather_sum` does, with weights rounded to the tables' dtype."""
    taps = y_taps, x_taps, y_weights, x_weights
    channels, dtype = tables[0].shape[1], tables[0].dtype
    pooled = jnp.zeros((*y_taps.shape[:2], x_taps.shape[1], channels), jnp.float32)
    if not len(pooled):
        return pooled.astype(dtype)
    num_rows = sum(map(len, tables))
    beyond = jnp.zeros((_padded(num_rows) - num_rows, channels), dtype)
    table = jnp.concatenate([*tables, beyond]).reshape(-1, BLOCK * channels)
    count, first = _count_windows(x_taps, y_weights, x_weights)

    def add(turn: Array, pooled: Array) -> Array:
        windows = _windows_of(turn, count, first, *taps)
        found = table.at[windows.blocks].get(mode="promise_in_bounds")
        found = found.reshape(*windows.blocks.shape[:3], BLOCKS * BLOCK, channels)
        cells = jnp.einsum(
            "jptwc,jpqtw->jpqc", found, windows.weights.astype(dtype),
            precision="highest", preferred_element_type=jnp.float32,
        )  # fmt: skip
        return pooled.at[windows.box].add(cells, indices_are_sorted=True, mode="promise_in_bounds")

    return lax.fori_loop(0, _turns(count), add, pooled).astype(dtype)


def gather_sum_transpose(
    grad: Float[Array, "R P Q C"], *taps: Array, num_rows: int
) -> Float[Array, "pixels C"]:
    """Compute what `roi_align.xla_gather_sum_transpose` does, with weights rounded likewise."""
    channels, dtype = grad.shape[-1], grad.dtype
    total = jnp.zeros((_padded(num_rows) // BLOCK, BLOCK * channels), jnp.float32)
    if not len(grad):
        return total.reshape(-1, channels)[:num_rows].astype(dtype)
    count, first = _count_windows(*taps[1:])

    def add(turn: Array, total: Array) -> Array:
        windows = _windows_of(turn, count, first, *taps)
        cells = grad.at[windows.box].get(mode="promise_in_bounds")
        found = jnp.einsum(
            "jpqc,jpqtw->jptwc", cells, windows.weights.astype(dtype),
            precision="highest", preferred_element_type=jnp.float32,
        )  # fmt: skip
        found = found.reshape(*windows.blocks.shape, BLOCK * channels)
        return total.at[windows.blocks].add(found, mode="promise_in_bounds")

    total = lax.fori_loop(0, _turns(count), add, total)
    return total.reshape(-1, channels)[:num_rows].astype(dtype)


def _padded(num_rows: int) -> int:
    """Return the rows of a table in whole blocks, where a window may begin at the last row."""
    return -(-num_rows // BLOCK) * BLOCK + (BLOCKS - 1) * BLOCK


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
    live = pair < ends[-1]
    column = jnp.where(live, columns + (pair - before) * WIDTH, 0)[:, None, None]
    start = y_taps + column  # [J, P, T]
    place = x_taps - column  # [J, Q, U]
    inside = live[:, None, None] & (place >= 0) & (place < WIDTH)
    weights = jnp.where(inside, x_weights, 0.0)
    picks = jnp.zeros((*start.shape[:2], x_taps.shape[1], start.shape[2], BLOCKS * BLOCK))
    cell = lax.broadcasted_iota(jnp.int32, picks.shape, 4)
    for u in range(x_taps.shape[-1]):
        at = place[:, None, :, None, u] + (start % BLOCK)[:, :, None, :]  # [J, P, Q, T]
        is_there = at[..., None] == cell
        picks += jnp.where(is_there, weights[:, None, :, None, u, None], 0.0)
    picks *= y_weights[:, :, None, :, None]
    blocks = (start // BLOCK)[..., None] + lax.broadcasted_iota(jnp.int32, (1, 1, 1, BLOCKS), 3)
    return _Windows(box, blocks, picks)
