"""Region proposal network (Ren et al., "Faster R-CNN", 2015): the head, and its proposals."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.typing import DTypeLike

from mask_rcnn_jax.models.conv import Conv
from mask_rcnn_jax.ops import boxes as box_ops
from mask_rcnn_jax.ops.nms import nms
from mask_rcnn_jax.structures import Proposals


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
                    name="conv")  # fmt: skip
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


def select_proposals(
    logits: list[jax.Array],
    deltas: list[jax.Array],
    anchors: list[jax.Array],
    image_sizes: jax.Array,
    *,
    pre_nms_topk: int,
    post_nms_topk: int,
    nms_thresh: float,
    box_offset: float,
) -> Proposals:
    """Best boxes per level, de-duplicated per level, then the best `post_nms_topk` of an image.

    logits [B, A_l], deltas [B, A_l, 4] and anchors [A_l, 4] per level; image_sizes [B, 2].
    Returns `post_nms_topk` rows an image by falling score; boxes lie inside the image.
    """
    widest = min(pre_nms_topk, max(level.shape[1] for level in logits))
    decode = jax.vmap(
        lambda d, a, size: box_ops.clip(
            box_ops.decode(d, a, weights=(1.0, 1.0, 1.0, 1.0), offset=box_offset),
            size, offset=box_offset,
        )
    )  # fmt: skip
    level_boxes, level_logits = [], []
    for level_logit, level_delta, level_anchors in zip(logits, deltas, anchors, strict=True):
        k = min(pre_nms_topk, level_logit.shape[1])
        top, index = lax.top_k(level_logit, k)
        top_deltas = jnp.take_along_axis(level_delta, index[..., None], axis=1)
        boxes = decode(top_deltas, jnp.asarray(level_anchors)[index], image_sizes)
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
    ).reshape(batch, levels * widest)
    kept = jnp.where(keep, scores.reshape(batch, -1), -jnp.inf)
    count = min(post_nms_topk, kept.shape[1])
    top, index = lax.top_k(kept, count)
    valid = jnp.isfinite(top)
    top_boxes = jnp.take_along_axis(boxes.reshape(batch, -1, 4), index[..., None], axis=1)
    pad = post_nms_topk - count
    return Proposals(
        boxes=jnp.pad(jnp.where(valid[..., None], top_boxes, 0.0), ((0, 0), (0, pad), (0, 0))),
        scores=jnp.pad(jnp.where(valid, nn.sigmoid(top), 0.0), ((0, 0), (0, pad))),
        valid=jnp.pad(valid, ((0, 0), (0, pad))),
    )
