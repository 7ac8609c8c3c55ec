"""Exact greedy non-maximum suppression in tiles.

A sequential greedy pass takes N dependent steps, and the full N x N matrix is too large. Here one
loop over tiles of boxes resolves a tile within itself, on bits, and drops all later boxes that its
survivors overlap. The loop has N / TILE turns whatever the boxes, so that no accelerator waits for
its host to decide on the next, and the largest intermediate has B * N * TILE / 32 words.
This is the definition; the kernel in `pallas_kernels` gives the same result.
"""

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from mask_rcnn_jax.ops import boxes as box_ops
from mask_rcnn_jax.ops import dispatch

TILE = 64
WORD = 32  # bits


@dispatch.named
def nms(
    boxes: Float[Array, "B N 4"],
    valid: Bool[Array, "B N"],
    *,
    groups: Int[Array, "B N"] | None = None,
    iou_thresh: float,
    max_out: int | None = None,
    offset: float = 0.0,
    implementation: str | None = None,
) -> Bool[Array, "B N"]:
    """Return the mask of surviving boxes for B independent problems sorted by descending score.

    A box is suppressed if a surviving box with a higher score has IoU > `iou_thresh` with it.
    Invalid rows neither survive nor suppress.

    Args:
        groups: boxes only suppress boxes in their group, such as a class; None for one group.
        max_out: keep only this many survivors per problem, and stop once every problem has them.
        offset: 1 for inclusive-pixel widths, see `boxes`.
        implementation: "xla", "pallas" for the GPU kernel, or None for the kernel in programs
            compiled for an NVIDIA GPU, where supported.

    Raises:
        NotImplementedError: "pallas" is not supported; the message gives the reason.
    """
    num = boxes.shape[1]
    max_out = num if max_out is None else min(max_out, num)
    options: dict[str, Any] = dict(iou_thresh=iou_thresh, max_out=max_out, offset=offset)

    def load_kernel():
        from pallas_kernels import nms as kernels

        return kernels.unsupported(num, boxes.dtype), partial(kernels.nms, **options)

    xla = partial(xla_nms, **options)
    run = dispatch.choose("nms", implementation, xla=xla, load_kernel=load_kernel)
    return run(lax.stop_gradient(boxes), valid, groups)


def xla_nms(
    boxes: Float[Array, "B N 4"],
    valid: Bool[Array, "B N"],
    groups: Int[Array, "B N"] | None,
    *,
    iou_thresh: float,
    max_out: int,
    offset: float,
) -> Bool[Array, "B N"]:
    num = boxes.shape[1]
    padding = (0, 0), (0, -num % TILE if num else TILE)
    sides = [*jnp.moveaxis(boxes, -1, 0), box_ops.area(boxes, offset=offset)]
    sides = [jnp.pad(side, padding) for side in (sides if groups is None else [*sides, groups])]
    alive = jnp.pad(valid, padding)
    batch, num_tiles = alive.shape[0], alive.shape[1] // TILE
    rows = [side.reshape(batch, num_tiles, TILE // WORD, WORD) for side in sides]
    tiles = [side.reshape(batch, num_tiles, 1, TILE) for side in sides]
    words = _pack(_hits(rows, tiles, iou_thresh, offset))
    everyone = [side[:, None] for side in sides]

    def next_tile(t: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        """Drop what the last tile's survivors overlap, then resolve tile `t`.

        In this order, as XLA would resolve a tile again for each pair that reads its survivors.
        """
        alive, keep = state
        last = [lax.dynamic_index_in_dim(side, t - 1, axis=1, keepdims=False) for side in rows]
        kept = _unpack(lax.dynamic_index_in_dim(keep, t - 1, keepdims=False))  # none at first
        hit = _hits(last, everyone, iou_thresh, offset) & kept[..., None]
        alive &= ~jnp.any(hit, axis=(1, 2))
        tile = lax.dynamic_slice_in_dim(alive, t * TILE, TILE, axis=1)
        found = _resolve_tile(lax.dynamic_index_in_dim(words, t, keepdims=False), tile)
        return alive, lax.dynamic_update_index_in_dim(keep, found, t, axis=0)

    # Like the words, so that `shard_map` may check that the loop's state varies over devices.
    start = alive, jnp.zeros_like(jnp.moveaxis(words[:, 0], 1, 2))
    keep = _unpack(lax.fori_loop(0, num_tiles, next_tile, start)[1])
    keep = jnp.moveaxis(keep, 0, 1).reshape(alive.shape)[:, :num]
    return keep & (jnp.cumsum(keep, axis=1) <= max_out)


def _pack(hit: Bool[Array, "B n W w T"]) -> UInt32[Array, "n T W B"]:
    """Return for each box of a tile the bits of the boxes that would suppress it, 32 a word."""
    shifts = jnp.arange(WORD, dtype=jnp.uint32).reshape(1, 1, 1, WORD, 1)
    bits = hit.astype(jnp.uint32) << shifts
    return jnp.sum(bits, axis=3, dtype=jnp.uint32).transpose(1, 3, 2, 0)


def _unpack(words: UInt32[Array, "*dims"]) -> Bool[Array, "*dims w"]:
    shifts = jnp.arange(WORD, dtype=jnp.uint32).reshape((1,) * words.ndim + (WORD,))
    return words[..., None] >> shifts & 1 != 0


def _resolve_tile(words: UInt32[Array, "T W B"], alive: Bool[Array, "B T"]) -> UInt32[Array, "B W"]:
    """Greedy survivors within one tile, whose boxes have `words` of their suppressors.

    One box at a time, element by element of [B], so that all of it is one launch on a GPU.
    """
    kept: list[Array] = []
    for w in range(TILE // WORD):
        kept.append(jnp.zeros_like(words[0, w]))
        for bit in range(WORD):
            row = w * WORD + bit
            better = reduce(jnp.bitwise_or, [kept[k] & words[row, k] for k in range(w + 1)])
            keeps = alive[:, row] & (better == 0)
            kept[w] |= jnp.where(keeps, jnp.uint32(1 << bit), jnp.uint32(0))
    return jnp.stack(kept, axis=1)


def _hits(a: Sequence[Array], b: Sequence[Array], iou_thresh: float, offset: float) -> Array:
    """Whether IoU(a_i, b_j) > `iou_thresh` and their groups are equal, without a division.

    a: x1, y1, x2, y2, area and, if there are any, groups, [.., n] each; b: the same, [.., m].
    Returns [.., n, m].
    """
    a, b = [side[..., :, None] for side in a], [side[..., None, :] for side in b]
    width = jnp.minimum(a[2], b[2]) - jnp.maximum(a[0], b[0]) + offset
    height = jnp.minimum(a[3], b[3]) - jnp.maximum(a[1], b[1]) + offset
    inter = jnp.maximum(width, 0.0) * jnp.maximum(height, 0.0)
    hit = inter > iou_thresh * (a[4] + b[4] - inter)
    return hit & (a[5] == b[5]) if len(a) > 5 else hit
