"""Region proposal network (Ren et al., "Faster R-CNN", 2015): the head, and its proposals."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.typing import DTypeLike

from mask_rcnn_jax.models.conv import Conv
from mask_rcnn_jax.ops import boxes as box_ops
from mask_rcnn_jax.ops import matching
from mask_rcnn_jax.ops.nms import nms
from mask_rcnn_jax.structures import Proposals, Targets


class RPNHead(nn.Module):
    """Objectness and box deltas for every anchor; one head shared by all levels."""

    anchors_per_location: int
    channels: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, pyramid: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Logits [B, A_l] and deltas [B, A_l, 4] per level, float32; anchors in (y, x, shape)."""
        normal = nn.initializers.normal(0.01)
        conv = Conv(self.channels, (3, 3), padding=1, kernel_init=normal, dtype=self.dtype,
                    few_gradients=True, name="conv")  # fmt: skip
        objectness = Conv(self.anchors_per_location, (1, 1), kernel_init=normal, dtype=self.dtype,
                          name="objectness_logits")  # fmt: skip
        anchor_deltas = Conv(4 * self.anchors_per_location, (1, 1), kernel_init=normal,
                             dtype=self.dtype, name="anchor_deltas")  # fmt: skip
        logits, deltas = [], []
        for feature in pyramid:
            batch = feature.shape[0]
            hidden = nn.relu(conv(feature))
            logits.append(objectness(hidden).reshape(batch, -1).astype(jnp.float32))
            deltas.append(anchor_deltas(hidden).reshape(batch, -1, 4).astype(jnp.float32))
        return logits, deltas


def label_anchors(
    anchors: jax.Array,
    exists: list[jax.Array] | None,
    targets: Targets,
    image_size: jax.Array,
    key: jax.Array | None,
    *,
    fg_thresh: float,
    bg_thresh: float,
    low_quality: str,
    straddle: float,
    anchors_per_image: int,
    fg_fraction: float,
    encode_offset: float,
    iou_offset: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What the anchors [A, 4] of one image should say.

    exists: per level [A_l], which anchors there are; None for all. Without a key the lowest rows
    are sampled. straddle: anchors that reach further over the image are left out; -1: none is.
    Returns labels 1 / 0 / -1 before and after sampling, [A] each, and regression targets [A, 4],
    zero unless foreground.
    """

    def iou_of(anchors: jax.Array) -> jax.Array:
        iou = box_ops.pairwise_iou(anchors, targets.boxes, offset=iou_offset)
        return iou if exists is None else jnp.where(jnp.concatenate(exists)[:, None], iou, 0.0)

    matched_idxs, labels = matching.match_anchors(
        iou_of, anchors, targets.valid,
        fg_thresh=fg_thresh, bg_thresh=bg_thresh, low_quality=low_quality,
    )  # fmt: skip
    if exists is not None:
        labels = jnp.where(jnp.concatenate(exists), labels, -1)
    if straddle >= 0:
        limit = image_size[::-1][None] + straddle
        inside = (anchors[:, :2] >= -straddle) & (anchors[:, 2:] < limit)
        labels = jnp.where(jnp.all(inside, axis=1), labels, -1)
    sampled = matching.sample_mask(key, labels, num=anchors_per_image, fg_fraction=fg_fraction)
    deltas = box_ops.encode(targets.boxes[matched_idxs], anchors, offset=encode_offset)
    deltas = jnp.where((labels == 1)[:, None], deltas, 0.0)
    return labels, jnp.where(sampled, labels, -1), deltas


def select_proposals(
    logits: list[jax.Array],
    deltas: list[jax.Array],
    anchors: list[jax.Array],
    exists: list[jax.Array] | None,
    image_sizes: jax.Array,
    *,
    pre_nms_topk: int,
    post_nms_topk: int,
    scope: str,
    nms_thresh: float,
    min_size: float,
    box_offset: float,
    iou_offset: float,
    implementation: str | None = None,
) -> Proposals:
    """Best boxes per level, de-duplicated per level, then the best `post_nms_topk` of all levels.

    logits [B, A_l], deltas [B, A_l, 4] and anchors [A_l, 4] per level; image_sizes [B, 2].
    exists: per level [A_l], which anchors there are; None for all.
    scope: "image" keeps that many of each image, "batch" that many of the whole batch.
    min_size: boxes whose clipped width or height is not above it are dropped; -1 keeps all.
    Returns rows by falling score, boxes inside the image; `post_nms_topk` of them an image, or
    fewer where the levels together cannot give as many and `scope` is "batch".
    """
    if scope not in ("image", "batch"):
        raise ValueError(f"model.post_nms_scope is {scope!r}, expected 'image' or 'batch'")
    ks = [min(pre_nms_topk, level.shape[1]) for level in logits]
    widest = max(ks)
    decode = jax.vmap(
        lambda d, a, size: box_ops.clip(
            box_ops.decode(d, a, weights=(1.0, 1.0, 1.0, 1.0), offset=box_offset),
            size, offset=box_offset,
        )
    )  # fmt: skip
    level_boxes, level_logits = [], []
    for level, k in enumerate(ks):
        scores = logits[level]
        if exists is not None:
            scores = jnp.where(exists[level][None], scores, -jnp.inf)
        top, index = lax.top_k(scores, k)
        top_deltas = jnp.take_along_axis(deltas[level], index[..., None], axis=1)
        boxes = decode(top_deltas, jnp.asarray(anchors[level])[index], image_sizes)
        sides = boxes[..., 2:] - boxes[..., :2] + box_offset
        top = jnp.where(jnp.all(sides > min_size, axis=-1), top, -jnp.inf)
        level_boxes.append(jnp.pad(boxes, ((0, 0), (0, widest - k), (0, 0))))
        level_logits.append(jnp.pad(top, ((0, 0), (0, widest - k)), constant_values=-jnp.inf))
    boxes = jnp.stack(level_boxes, axis=1)  # [B, L, k, 4]
    scores = jnp.stack(level_logits, axis=1)  # [B, L, k]
    batch, levels = scores.shape[:2]
    keep = nms(
        boxes.reshape(batch * levels, widest, 4),
        jnp.isfinite(scores).reshape(batch * levels, widest),
        iou_thresh=nms_thresh,
        max_out=post_nms_topk,
        offset=iou_offset,
        implementation=implementation,
    ).reshape(batch, levels * widest)
    kept = jnp.where(keep, scores.reshape(batch, -1), -jnp.inf)
    count = min(post_nms_topk, sum(ks))
    rows = post_nms_topk
    if scope == "batch":
        rows = count
        if batch > 1:  # one image cannot exceed the limit of the batch
            kept = _best_of_batch(kept, post_nms_topk)
    top, index = lax.top_k(kept, count)
    valid = jnp.isfinite(top)
    top_boxes = jnp.take_along_axis(boxes.reshape(batch, -1, 4), index[..., None], axis=1)
    pad = rows - count
    return Proposals(
        boxes=jnp.pad(jnp.where(valid[..., None], top_boxes, 0.0), ((0, 0), (0, pad), (0, 0))),
        scores=jnp.pad(jnp.where(valid, nn.sigmoid(top), 0.0), ((0, 0), (0, pad))),
        valid=jnp.pad(valid, ((0, 0), (0, pad))),
    )


def _best_of_batch(scores: jax.Array, count: int) -> jax.Array:
    """[B, N] with all but the `count` highest of all rows at -inf."""
    flat = scores.reshape(-1)
    _, best = lax.top_k(flat, min(count, flat.shape[0]))
    chosen = jnp.zeros(flat.shape, bool).at[best].set(True)
    return jnp.where(chosen, flat, -jnp.inf).reshape(scores.shape)
