"""Soft non-maximum suppression (Bodla et al., 2017): scores fall instead of boxes being dropped."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from mask_rcnn_jax.ops import boxes as box_ops


def linear(overlap: Float[Array, "N"], *, iou_thresh: float) -> Float[Array, "N"]:
    """1 - IoU for an IoU above `iou_thresh`, else 1."""
    return jnp.where(overlap > iou_thresh, 1.0 - overlap, 1.0)


def gaussian(overlap: Float[Array, "N"], *, sigma: float) -> Float[Array, "N"]:
    """exp(-IoU^2 / sigma)."""
    return jnp.exp(-(overlap**2) / sigma)


def soft_nms(
    boxes: Float[Array, "N 4"],
    scores: Float[Array, "N"],
    groups: Int[Array, "N"],
    *,
    factor: Callable[[Array], Array],
    min_score: float,
    max_out: int,
    offset: float = 0.0,
) -> tuple[Int[Array, "M"], Float[Array, "M"]]:
    """Return the rows of the best boxes and their new scores, by descending score.

    The best box is taken, the scores of the others of its group fall with their overlap, and so on.
    Scores only fall within a group, so that the first `max_out` over all groups are those of each
    group's own pass.

    Args:
        scores: 0..1; -1 for rows that are never taken.
        groups: such as classes.
        factor: what a score is multiplied by for an IoU, `linear` or `gaussian`.
        min_score: a box whose score is this or less, or falls to it, is dropped.
        max_out: M, the number of rows returned.
        offset: 1 for inclusive-pixel widths, see `boxes`.

    Returns:
        index [M] and scores [M], -1 for rows that are left over.
    """

    def take(k: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        left, index, taken = state
        best = jnp.argmax(left)
        kept = factor(box_ops.pairwise_iou(boxes[best][None], boxes, offset=offset)[0])
        fallen = jnp.where(groups == groups[best], left * kept, left)
        following = enough(fallen).at[best].set(-1.0)
        return following, index.at[k].set(best), taken.at[k].set(left[best])

    def enough(scores: Array) -> Array:
        return jnp.where(scores > min_score, scores, -1.0)

    start = enough(scores), jnp.zeros(max_out, jnp.int32), jnp.full(max_out, -1.0)
    _, index, taken = lax.fori_loop(0, max_out, take, start)
    return index, taken
