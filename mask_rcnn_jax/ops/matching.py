"""Match anchors and proposals to ground truth and subsample them for training.

Labels are int32: 1 foreground, 0 background, -1 ignored. The sampler's output size is fixed, so the
training step has static shapes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from mask_rcnn_jax.ops.top_k import top_k
from mask_rcnn_jax.platforms import by_platform

LOW_QUALITY_RULES = ("best", "ties", "none")
COUNTS = (16, 32, 64, 256)  # ground truth rows that a GPU has a branch for
BLOCK = 1 << 19  # IoUs in memory at a time on a CPU: 2 MiB stay in its cache


def match_anchors(
    iou_fn: Callable[[Any], Float[Array, "A G"]],
    anchors: Any,
    gt_valid: Bool[Array, "G"],
    used: Int[Array, ""] | None = None,
    *,
    fg_thresh: float,
    bg_thresh: float,
    low_quality: str = "best",
) -> tuple[Int[Array, "A"], Int[Array, "A"]]:
    """Return each anchor's ground-truth row and label.

    Anchors are foreground at IoU >= `fg_thresh`, background below `bg_thresh`, otherwise ignored.
    `low_quality` decides which anchors a ground truth gets if none reaches `fg_thresh`:

    - "best": its best anchor (the first if tied) becomes foreground and is assigned to it, even if
      that anchor fits another better; the lower of two claiming rows wins (NVIDIA TF).
    - "ties": every anchor reaching its best IoU becomes foreground, but keeps its own best ground
      truth (torchvision, Detectron2).
    - "none": no anchor is forced.

    Only a ground truth with an IoU above 0 can force an anchor: in NVIDIA's code one without any
    overlap claims anchor 0, in torchvision's it would claim every anchor without overlap. Padded
    ground truth matches nothing; without ground truth, all anchors are background with row 0.

    Args:
        iou_fn: returns the IoU between anchors, any number of them, and all ground truth. The whole
            matrix is never stored: 280 thousand anchors and 2,000 objects would take 2.2 GB per
            image. A GPU gets a call for each reduction, so that XLA fuses both; a CPU takes blocks
            of anchors.
        anchors: argument for `iou_fn`, arrays with a leading axis A.
        used: leading rows of ground truth with all valid ones of a batch. A GPU computes no more of
            them than the next of `COUNTS`; this number must not differ between images, since a
            branch for each would be all branches. None: all.
    """
    if low_quality not in LOW_QUALITY_RULES:
        raise ValueError(f"low_quality is {low_quality!r}, expected one of {LOW_QUALITY_RULES}")

    def valid_iou(anchors: Any) -> Float[Array, "A G"]:
        return jnp.where(gt_valid[None, :], iou_fn(anchors), 0.0)

    ties = low_quality == "ties"
    matched_idxs, best_iou, best_anchor, reach, tied = by_platform(
        anchors,
        cpu=partial(_extremes_by_blocks, valid_iou, num_gt=gt_valid.shape[0], ties=ties),
        cuda=partial(_extremes_of_used, valid_iou, used, num_gt=gt_valid.shape[0], ties=ties),
        default=partial(_extremes, valid_iou, ties=ties),
    )
    labels = _threshold(best_iou, fg_thresh, bg_thresh)
    if low_quality == "best":
        num_anchors, num_gt = matched_idxs.shape[0], gt_valid.shape[0]
        claims = jnp.where(reach > 0.0, jnp.arange(num_gt, dtype=jnp.int32), num_gt)
        claimed = jnp.full(num_anchors, num_gt, jnp.int32).at[best_anchor].min(claims)
        matched_idxs = jnp.where(claimed < num_gt, claimed, matched_idxs)
        labels = jnp.where(claimed < num_gt, 1, labels)
    elif ties:
        labels = jnp.where(tied, 1, labels)
    return matched_idxs, labels


class _Extremes(NamedTuple):
    """What is known of an IoU matrix that is not kept."""

    best_gt: Int[Array, "A"]  # the first with each anchor's highest IoU
    best_iou: Float[Array, "A"]
    best_anchor: Int[Array, "G"]  # the first with each object's highest IoU
    reach: Float[Array, "G"]
    tied: Bool[Array, "A"] | None  # whether an anchor has the highest IoU of an object, above 0


def _extremes(iou: Callable[[Any], Array], anchors: Any, *, ties: bool) -> _Extremes:
    best_gt, best_iou = _first_max(iou(anchors), axis=1)
    # Without the barrier, XLA would see the same matrix twice and store it.
    anchors = lax.optimization_barrier(anchors)
    best_anchor, reach = _first_max(iou(anchors), axis=0)
    tied = _tied(iou(lax.optimization_barrier(anchors)), reach) if ties else None
    return _Extremes(best_gt, best_iou, best_anchor, reach, tied)


def _extremes_of_used(
    iou: Callable[[Any], Array], used: Array | None, anchors: Any, *, num_gt: int, ties: bool
) -> _Extremes:
    """`_extremes` of the leading columns that are `used`, whose IoUs alone can be above 0."""
    counts = [count for count in COUNTS if count < num_gt]

    def leading(count: int, anchors: Any) -> _Extremes:
        found = _extremes(lambda anchors: iou(anchors)[:, :count], anchors, ties=ties)
        best_anchor, reach = (
            jnp.pad(x, (0, num_gt - count)) for x in (found.best_anchor, found.reach)
        )
        return found._replace(best_anchor=best_anchor, reach=reach)

    if used is None or not counts:
        return leading(num_gt, anchors)
    index = jnp.sum(used > jnp.array(counts))
    return lax.switch(index, [partial(leading, count) for count in [*counts, num_gt]], anchors)


def _extremes_by_blocks(
    iou: Callable[[Any], Array], anchors: Any, *, num_gt: int, ties: bool
) -> _Extremes:
    """`_extremes`, with one block of anchors after the other, in a sixth of a CPU's time."""
    count = len(jax.tree.leaves(anchors)[0])
    size = max(1, min(count, BLOCK // max(1, num_gt)))
    starts = jnp.arange(0, count, size, dtype=jnp.int32)
    # The last anchor fills up the last block: it is never the first of its equals there.
    rows = jnp.minimum(starts[:, None] + jnp.arange(size)[None], max(count - 1, 0))
    blocks = jax.tree.map(lambda x: x[rows], anchors)

    # A turn reads the matrix of the turn before, which XLA therefore stores: the same bits in both
    # passes. Fused with what reads it, it may be rounded less. A barrier in the loop would do, too,
    # but XLA of JAX 0.12 cannot compile it for a CPU where it inlines the loop.
    following = jax.tree.map(lambda x: jnp.roll(x, -1, axis=0), blocks)
    first = lax.optimization_barrier(iou(jax.tree.map(lambda x: x[0], blocks)))

    def look(carry: tuple[Array, Array, Array], block: Any) -> tuple[Any, Any]:
        (found, best_anchor, reach), (start, following) = carry, block
        index, highest = _first_equal_max(found, axis=0)
        best_anchor = jnp.where(highest > reach, start + index, best_anchor)
        best = _first_equal_max(found, axis=1)
        return (iou(following), best_anchor, jnp.maximum(reach, highest)), best

    def look_again(found: Array, following: Any) -> tuple[Array, Array]:
        return iou(following), _tied(found, reach)

    def join(blocks: Array) -> Array:
        return blocks.reshape(-1)[:count]

    nothing = first, jnp.zeros(num_gt, jnp.int32), jnp.zeros(num_gt)
    (_, best_anchor, reach), of_rows = lax.scan(look, nothing, (starts, following))
    best_gt, best_iou = map(join, of_rows)
    tied = join(lax.scan(look_again, first, following)[1]) if ties else None
    return _Extremes(best_gt, best_iou, best_anchor, reach, tied)


def _tied(iou: Float[Array, "A G"], reach: Float[Array, "G"]) -> Bool[Array, "A"]:
    return jnp.any((iou == reach[None, :]) & (reach[None, :] > 0.0), axis=1)


def match_rois(
    iou: Float[Array, "N G"],
    gt_valid: Bool[Array, "G"],
    roi_valid: Bool[Array, "N"],
    *,
    fg_thresh: float,
    bg_thresh: float,
    bg_thresh_low: float = 0.0,
    strict: bool = False,
) -> tuple[Int[Array, "N"], Int[Array, "N"]]:
    """Return each proposal's ground-truth row and label; the label of padding is -1.

    Proposals are foreground at IoU >= `fg_thresh` (> if `strict`, as in NVIDIA TF), background at
    `bg_thresh_low` <= IoU < `bg_thresh`, otherwise ignored.
    """
    iou = jnp.where(gt_valid[None, :], iou, 0.0)
    matched_idxs, best_iou = _first_max(iou, axis=1)
    labels = _threshold(best_iou, fg_thresh, bg_thresh, strict=strict)
    usable = roi_valid & ((labels == 1) | (best_iou >= bg_thresh_low))
    return matched_idxs, jnp.where(usable, labels, -1)


def sample(
    key: PRNGKeyArray | None, labels: Int[Array, "N"], *, num: int, fg_fraction: float
) -> tuple[Int[Array, "num"], Int[Array, "num"], Bool[Array, "num"]]:
    """Sample `num` rows: foreground first, at most round(num * fg_fraction), then background.

    If there are too few, the last rows are invalid (row 0, label 0). Without a key the lowest rows
    are sampled, which allows exact comparisons with other systems.

    Returns:
        Sampled rows, their labels (1 or 0) and a validity mask.
    """
    priority = jnp.ones(labels.shape)
    if key is not None:
        priority -= jax.random.uniform(key, labels.shape)  # stays above 0, which excludes a row
    max_fg = round(num * fg_fraction)
    fg_idxs = _highest(jnp.where(labels == 1, priority, 0.0), max_fg)
    bg_idxs = _highest(jnp.where(labels == 0, priority, 0.0), num)
    num_fg = jnp.minimum(jnp.sum(labels == 1), max_fg)
    num_bg = jnp.minimum(jnp.sum(labels == 0), num - num_fg)

    slot = jnp.arange(num, dtype=jnp.int32)
    is_fg, valid = slot < num_fg, slot < num_fg + num_bg
    padded_fg = jnp.pad(fg_idxs, (0, num - max_fg))
    idxs = jnp.where(is_fg, padded_fg, jnp.take(bg_idxs, slot - num_fg, mode="clip"))
    return jnp.where(valid, idxs, 0), is_fg.astype(jnp.int32), valid


def sample_mask(
    key: PRNGKeyArray | None, labels: Int[Array, "A"], *, num: int, fg_fraction: float
) -> Bool[Array, "A"]:
    """`sample` as a mask over all rows."""
    idxs, _, valid = sample(key, labels, num=num, fg_fraction=fg_fraction)
    count = labels.shape[0]
    return jnp.zeros(count, bool).at[jnp.where(valid, idxs, count)].set(True, mode="drop")


def _first_max(x: Float[Array, "A G"], *, axis: int) -> tuple[Int[Array, "N"], Float[Array, "N"]]:
    """Index of the first maximum along `axis`, and the maximum."""
    return jnp.argmax(x, axis=axis).astype(jnp.int32), jnp.max(x, axis=axis)


def _first_equal_max(
    x: Float[Array, "A G"], *, axis: int
) -> tuple[Int[Array, "N"], Float[Array, "N"]]:
    """`_first_max` of numbers without NaN, by two reductions that a CPU does eight at a time."""
    highest = jnp.max(x, axis=axis, initial=0.0)
    place = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    is_highest = x == jnp.expand_dims(highest, axis)
    last = max(x.shape[axis] - 1, 0)
    return jnp.min(jnp.where(is_highest, place, last), axis=axis, initial=last), highest


def _threshold(
    iou: Float[Array, "N"], fg_thresh: float, bg_thresh: float, *, strict: bool = False
) -> Int[Array, "N"]:
    fg = iou > fg_thresh if strict else iou >= fg_thresh
    return jnp.where(fg, 1, jnp.where(iou < bg_thresh, 0, -1)).astype(jnp.int32)


def _highest(priority: Float[Array, "N"], count: int) -> Int[Array, "count"]:
    """Rows with the `count` highest priorities, lower rows first if tied, padded with row 0."""
    _, idxs = top_k(priority, min(count, priority.shape[0]))
    return jnp.pad(idxs, (0, count - idxs.shape[0]))
