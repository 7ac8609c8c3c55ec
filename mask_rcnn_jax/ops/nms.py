"""Exact greedy non-maximum suppression in tiles.

A sequential greedy pass takes N dependent steps, and the full N x N matrix is too large. Here each
tile of boxes is first suppressed by the boxes already kept, then resolved within itself. The
dependent steps are the tiles times a short fixed-point iteration, and the largest intermediate is
B * TILE * TILE.
This is the definition; the kernel in `pallas_kernels` gives the same result.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from mask_rcnn_jax.ops import boxes as box_ops
from mask_rcnn_jax.ops import dispatch

TILE = 128


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
    if groups is None:
        groups = jnp.zeros(valid.shape, jnp.int32)
    padding = (0, 0), (0, -num % TILE if num else TILE)
    boxes = jnp.pad(boxes, (*padding, (0, 0)))
    valid, groups = jnp.pad(valid, padding), jnp.pad(groups, padding)
    num_tiles = boxes.shape[1] // TILE

    def get_tile(x: Array, t: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, t * TILE, TILE, axis=1)

    def hits(a: tuple[Array, Array], b: tuple[Array, Array]) -> Bool[Array, "B T T"]:
        """Whether a box of tile `a` suppresses one of `b`; a tile is (boxes, groups)."""
        (a_boxes, a_groups), (b_boxes, b_groups) = a, b
        overlaps = _overlaps(a_boxes, b_boxes, iou_thresh, offset)
        return overlaps & (a_groups[:, :, None] == b_groups[:, None, :])

    def unfinished(state: tuple[Array, Array]) -> Array:
        t, keep = state
        return (t < num_tiles) & jnp.any(jnp.sum(keep, axis=1) < max_out)

    def next_tile(state: tuple[Array, Array]) -> tuple[Array, Array]:
        t, keep = state
        tile = get_tile(boxes, t), get_tile(groups, t)

        def suppress(earlier: Array, alive: Array) -> Array:
            hit = hits((get_tile(boxes, earlier), get_tile(groups, earlier)), tile)
            return alive & ~jnp.any(hit & get_tile(keep, earlier)[:, :, None], axis=1)

        alive = lax.fori_loop(0, t, suppress, get_tile(valid, t))
        kept = _resolve_tile(hits(tile, tile), alive)
        return t + 1, lax.dynamic_update_slice_in_dim(keep, kept, t * TILE, axis=1)

    # Tiles after the early exit stay False.
    start = jnp.zeros((), jnp.int32), jnp.zeros_like(valid)
    keep = lax.while_loop(unfinished, next_tile, start)[1][:, :num]
    return keep & (jnp.cumsum(keep, axis=1) <= max_out)


def _resolve_tile(hit: Bool[Array, "B T T"], alive: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    """Greedy survivors within one tile; hit: whether a box would suppress another.

    Iterates `keep = alive and not suppressed by keep`, starting at `keep = alive`. Row i is correct
    once all earlier rows are, so the only fixed point is the greedy result, reached in as many
    iterations as the longest suppression chain: a handful in practice.
    """
    hit &= jnp.triu(jnp.ones((TILE, TILE), bool), k=1)[None]  # [suppressor, suppressed]

    def iterate(state: tuple[Array, Array]) -> tuple[Array, Array]:
        keep, changed = state
        new = alive & ~jnp.any(hit & keep[:, :, None], axis=1)
        return new, changed & jnp.any(new != keep)  # IREE needs loops that read all their state

    return lax.while_loop(lambda state: state[1], iterate, (alive, jnp.ones((), bool)))[0]


def _overlaps(
    a: Float[Array, "B T 4"], b: Float[Array, "B T 4"], iou_thresh: float, offset: float
) -> Bool[Array, "B T T"]:
    """Whether IoU(a_i, b_j) > `iou_thresh`, without a division."""
    a, b = a[:, :, None, :], b[:, None, :, :]
    width = jnp.minimum(a[..., 2], b[..., 2]) - jnp.maximum(a[..., 0], b[..., 0]) + offset
    height = jnp.minimum(a[..., 3], b[..., 3]) - jnp.maximum(a[..., 1], b[..., 1]) + offset
    inter = jnp.maximum(width, 0.0) * jnp.maximum(height, 0.0)
    union = box_ops.area(a, offset=offset) + box_ops.area(b, offset=offset) - inter
    return inter > iou_thresh * union
