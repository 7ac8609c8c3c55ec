"""The second stage (He et al., "Mask R-CNN", 2017): sampling RoIs, two heads, final detections."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax import lax
from jax.typing import DTypeLike

from mask_rcnn_jax.models.conv import Conv, UpConv
from mask_rcnn_jax.models.resnet import he_fan_out
from mask_rcnn_jax.ops import boxes as box_ops
from mask_rcnn_jax.ops import matching
from mask_rcnn_jax.ops.nms import nms
from mask_rcnn_jax.structures import Detections, Proposals, Targets

# The kernel of an up-convolution is [2, 2, out, in].
_he_fan_out_up = nn.initializers.variance_scaling(2.0, "fan_out", "normal", in_axis=3, out_axis=2)


class BoxHead(nn.Module):
    """Two fully connected layers, then class logits and class-specific box deltas."""

    num_classes: int
    channels: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, roi_features: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B, R, P, P, C] to logits [B, R, K + 1] and deltas [B, R, K + 1, 4], float32."""
        glorot = nn.initializers.glorot_uniform()
        x = roi_features.reshape(*roi_features.shape[:2], -1)
        x = nn.relu(nn.Dense(self.channels, kernel_init=glorot, dtype=self.dtype, name="fc1")(x))
        x = nn.relu(nn.Dense(self.channels, kernel_init=glorot, dtype=self.dtype, name="fc2")(x))
        x = x.astype(jnp.float32)
        rows = self.num_classes + 1
        logits = nn.Dense(rows, kernel_init=nn.initializers.normal(0.01), name="cls_score")(x)
        init = nn.initializers.normal(0.001)
        deltas = nn.Dense(4 * rows, kernel_init=init, name="bbox_pred")(x)
        return logits, deltas.reshape(*deltas.shape[:2], rows, 4)


class MaskHead(nn.Module):
    """Four 3x3 convolutions, a 2x2 up-convolution and a mask per class."""

    num_classes: int
    channels: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, roi_features: jax.Array, classes: jax.Array) -> jax.Array:
        """[B, R, P, P, C] and classes [B, R] to the logits of those classes, [B, R, 2P, 2P]."""
        batch, rois = roi_features.shape[:2]
        x = roi_features.reshape(batch * rois, *roi_features.shape[2:])
        for i in range(1, 5):
            conv = Conv(self.channels, (3, 3), padding=1, kernel_init=he_fan_out, dtype=self.dtype,
                        name=f"mask_fcn{i}")  # fmt: skip
            x = nn.relu(conv(x))
        up = UpConv(self.channels, self.dtype, _he_fan_out_up, name="mask_deconv")
        x = nn.relu(up(x))
        predictor = Conv(self.num_classes + 1, (1, 1), kernel_init=he_fan_out, dtype=self.dtype,
                         name="mask_predictor")  # fmt: skip
        logits = predictor(x).reshape(batch, rois, *x.shape[1:3], -1)
        # A masked sum and not a gather, whose gradient would be a slow scatter.
        is_class = (
            jnp.arange(self.num_classes + 1)[None, None, None, None, :]
            == (classes[:, :, None, None, None])
        )
        return jnp.sum(jnp.where(is_class, logits, 0), axis=-1).astype(jnp.float32)


@struct.dataclass
class SampledRois:
    """The RoIs of one image that the second stage trains on; foreground rows come first."""

    boxes: jax.Array  # [R, 4]
    classes: jax.Array  # [R] int32, 0 for background
    deltas: jax.Array  # [R, 4] regression targets; zero unless foreground
    matched_idxs: jax.Array  # [R] int32 ground-truth row
    foreground: jax.Array  # [R] bool
    valid: jax.Array  # [R] bool


def sample_rois(
    key: jax.Array,
    proposals: Proposals,
    targets: Targets,
    *,
    rois_per_image: int,
    fg_fraction: float,
    fg_thresh: float,
    box_weights: tuple[float, ...],
    box_offset: float,
) -> SampledRois:
    """Draw the RoIs of one image from its proposals and its ground-truth boxes."""
    candidates = jnp.concatenate([proposals.boxes, targets.boxes])
    iou = box_ops.pairwise_iou(candidates, targets.boxes)
    matched_idxs, labels = matching.match_rois(
        iou,
        targets.valid,
        jnp.concatenate([proposals.valid, targets.valid]),
        fg_thresh=fg_thresh,
        bg_thresh=fg_thresh,
        strict=True,
    )
    idxs, labels, valid = matching.sample(key, labels, num=rois_per_image, fg_fraction=fg_fraction)
    foreground = valid & (labels == 1)
    boxes = jnp.where(valid[:, None], candidates[idxs], 0.0)
    matched_idxs = matched_idxs[idxs]
    deltas = box_ops.encode(
        targets.boxes[matched_idxs], boxes, weights=box_weights, offset=box_offset
    )
    return SampledRois(
        boxes=boxes,
        classes=jnp.where(foreground, targets.classes[matched_idxs], 0),
        deltas=jnp.where(foreground[:, None], deltas, 0.0),
        matched_idxs=matched_idxs,
        foreground=foreground,
        valid=valid,
    )


def select_detections(
    class_logits: jax.Array,
    box_deltas: jax.Array,
    proposals: Proposals,
    image_sizes: jax.Array,
    *,
    box_weights: tuple[float, ...],
    box_offset: float,
    score_threshold: float,
    nms_thresh: float,
    pre_nms_topk: int,
    detections_per_image: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Per-class NMS over the best candidates of all classes.

    class_logits [B, N, K + 1], box_deltas [B, N, K + 1, 4], proposals and image_sizes with a B
    axis. One greedy pass over all classes by falling score, suppressing within a class, keeps what
    an NMS per class followed by a top-k keeps, and can stop at `detections_per_image`.
    Returns boxes [B, D, 4], scores [B, D], classes [B, D] and valid [B, D].
    """
    batch, rows, classes = class_logits.shape
    scores = nn.softmax(class_logits)[..., 1:]
    usable = proposals.valid[..., None] & (scores > score_threshold)
    scores = jnp.where(usable, scores, -1.0).reshape(batch, -1)
    top, index = lax.top_k(scores, min(pre_nms_topk, scores.shape[1]))
    roi, class_index = index // (classes - 1), index % (classes - 1) + 1
    deltas = jnp.take_along_axis(
        box_deltas.reshape(batch, rows * classes, 4), (roi * classes + class_index)[..., None], 1
    )
    origin = jnp.take_along_axis(proposals.boxes, roi[..., None], axis=1)
    boxes = box_ops.decode(deltas, origin, weights=box_weights, offset=box_offset)
    boxes = jax.vmap(lambda b, size: box_ops.clip(b, size, offset=box_offset))(boxes, image_sizes)
    keep = nms(
        boxes, top >= 0, groups=class_index, iou_thresh=nms_thresh, max_out=detections_per_image
    )
    count = min(detections_per_image, keep.shape[1])
    top, order = lax.top_k(jnp.where(keep, top, -1.0), count)
    valid = top >= 0
    boxes = jnp.take_along_axis(boxes, order[..., None], axis=1)
    class_index = jnp.take_along_axis(class_index, order, axis=1)
    pad = ((0, 0), (0, detections_per_image - count))
    return (
        jnp.pad(jnp.where(valid[..., None], boxes, 0.0), (*pad, (0, 0))),
        jnp.pad(jnp.where(valid, top, 0.0), pad),
        jnp.pad(jnp.where(valid, class_index, 0), pad),
        jnp.pad(valid, pad),
    )


def to_detections(selected: tuple[jax.Array, ...], mask_logits: jax.Array) -> Detections:
    """The final struct: `select_detections`' result with mask probabilities [B, D, 28, 28]."""
    boxes, scores, classes, valid = selected
    masks = jnp.where(valid[..., None, None], nn.sigmoid(mask_logits), 0.0)
    return Detections(boxes=boxes, scores=scores, classes=classes, masks=masks, valid=valid)
