"""Which ground truth an anchor or a proposal answers to, and which of them are trained on.

Labels are int32: 1 foreground, 0 background, -1 left out. The sampler has a fixed output size, so
that the training step has static shapes.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

LOW_QUALITY_RULES = ("best", "ties", "none")


def match_anchors(
    iou_of: Callable[[Array], Float[Array, "A G"]],
    anchors: Array,
    gt_valid: Bool[Array, "G"],
    *,
    fg_thresh: float,
    bg_thresh: float,
    low_quality: str = "best",
) -> tuple[Int[Array, "A"], Int[Array, "A"]]:
    """Ground-truth row of every anchor, and its label.

    `iou_of(anchors)` is the IoU with every ground truth. It is called anew for every look along
    that matrix, so that XLA reduces it while it computes it: 280 thousand anchors and 100 objects
    would be 112 MB an image.
    An anchor is foreground from IoU `fg_thresh` up, background below `bg_thresh`, else left out.
    A ground truth that no anchor reaches well enough still gets one or more, by `low_quality`:

    - "best": its single best anchor (the first of equals) becomes foreground and is given to it,
      even if that anchor fits another better; of two claimants the lower row wins (NVIDIA TF).
    - "ties": every anchor that reaches its best IoU becomes foreground, but keeps the ground truth
      that it fits best itself (torchvision, Detectron2).
    - "none": nothing is forced.

    Only a ground truth with an IoU above 0 can force an anchor: NVIDIA's code lets one that
    overlaps nothing claim anchor 0, and torchvision's would claim every anchor without overlap.
    Padded ground truth matches nothing; without any, all anchors are background with row 0.
    """
    if low_quality not in LOW_QUALITY_RULES:
        raise ValueError(f"low_quality is {low_quality!r}, expected one of {LOW_QUALITY_RULES}")

    def valid_iou(anchors: Array) -> Float[Array, "A G"]:
        return jnp.where(gt_valid[None, :], iou_of(anchors), 0.0)

    matched_idxs, best_iou = _first_max(valid_iou(anchors), axis=1)
    labels = _threshold(best_iou, fg_thresh, bg_thresh)
    if low_quality == "none":
        return matched_idxs, labels
    # Without the barrier XLA would see the same matrix twice, and store it.
    anchors = lax.optimization_barrier(anchors)
    best_anchor, reach = _first_max(valid_iou(anchors), axis=0)
    if low_quality == "best":
        num_anchors, num_gt = matched_idxs.shape[0], gt_valid.shape[0]
        claims = jnp.where(reach > 0.0, jnp.arange(num_gt, dtype=jnp.int32), num_gt)
        claimed = jnp.full(num_anchors, num_gt, jnp.int32).at[best_anchor].min(claims)
        matched_idxs = jnp.where(claimed < num_gt, claimed, matched_idxs)
        labels = jnp.where(claimed < num_gt, 1, labels)
    else:
        iou = valid_iou(lax.optimization_barrier(anchors))
        claimed = jnp.any((iou == reach[None, :]) & (reach[None, :] > 0.0), axis=1)
        labels = jnp.where(claimed, 1, labels)
    return matched_idxs, labels


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
    """Ground-truth row of every proposal, and its label; -1 for a padded proposal.

    Foreground from IoU `fg_thresh` up (only above it if `strict`, as in NVIDIA TF), background
    from `bg_thresh_low` up to below `bg_thresh`, else left out.
    """
    iou = jnp.where(gt_valid[None, :], iou, 0.0)
    matched_idxs, best_iou = _first_max(iou, axis=1)
    labels = _threshold(best_iou, fg_thresh, bg_thresh, strict=strict)
    usable = roi_valid & ((labels == 1) | (best_iou >= bg_thresh_low))
    return matched_idxs, jnp.where(usable, labels, -1)


def sample(
    key: PRNGKeyArray | None, labels: Int[Array, "N"], *, num: int, fg_fraction: float
) -> tuple[Int[Array, "num"], Int[Array, "num"], Bool[Array, "num"]]:
    """A random choice of `num` rows: foreground first, at most round(num * fg_fraction) of it.

    Background fills the rest; where that runs short the last rows are invalid (row 0, label 0).
    Without a key the lowest rows are taken, which makes comparisons with other systems exact.

    Returns:
        Rows chosen, their labels (1 or 0), and which of the `num` places are filled.
    """
    priority = jnp.ones(labels.shape)
    if key is not None:
        priority -= jax.random.uniform(key, labels.shape)  # still above 0, the unwanted rows' own
    max_fg = round(num * fg_fraction)
    fg_idxs = _highest(jnp.where(labels == 1, priority, 0.0), max_fg)
    bg_idxs = _highest(jnp.where(labels == 0, priority, 0.0), num)
    num_fg = jnp.minimum(jnp.sum(labels == 1), max_fg)
    num_bg = jnp.minimum(jnp.sum(labels == 0), num - num_fg)

    place = jnp.arange(num, dtype=jnp.int32)
    is_fg = place < num_fg
    valid = place < num_fg + num_bg
    padded_fg = jnp.concatenate([fg_idxs, jnp.zeros(num - max_fg, jnp.int32)])
    idxs = jnp.where(is_fg, padded_fg, jnp.take(bg_idxs, place - num_fg, mode="clip"))
    return jnp.where(valid, idxs, 0), is_fg.astype(jnp.int32), valid


def sample_mask(
    key: PRNGKeyArray | None, labels: Int[Array, "A"], *, num: int, fg_fraction: float
) -> Bool[Array, "A"]:
    """The same choice as `sample`, as a mask over all rows."""
    idxs, _, valid = sample(key, labels, num=num, fg_fraction=fg_fraction)
    count = labels.shape[0]
    return jnp.zeros(count, bool).at[jnp.where(valid, idxs, count)].set(True, mode="drop")


def _first_max(x: Float[Array, "A G"], *, axis: int) -> tuple[Int[Array, "N"], Float[Array, "N"]]:
    """Position of the first maximum along `axis`, and the maximum."""
    return jnp.argmax(x, axis=axis).astype(jnp.int32), jnp.max(x, axis=axis)


def _threshold(
    iou: Float[Array, "N"], fg_thresh: float, bg_thresh: float, *, strict: bool = False
) -> Int[Array, "N"]:
    fg = iou > fg_thresh if strict else iou >= fg_thresh
    return jnp.where(fg, 1, jnp.where(iou < bg_thresh, 0, -1)).astype(jnp.int32)


def _highest(priority: Float[Array, "N"], count: int) -> Int[Array, "count"]:
    """Rows of the `count` highest priorities, lower rows first among equals, padded with row 0."""
    _, idxs = jax.lax.top_k(priority, min(count, priority.shape[0]))
    return jnp.concatenate([idxs, jnp.zeros(count - idxs.shape[0], jnp.int32)]).astype(jnp.int32)
