"""The second stage (He et al., "Mask R-CNN", 2017): sampling RoIs, two heads, final detections."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax import lax
from jax.typing import DTypeLike

from mask_rcnn_jax.models.conv import Conv, UpConv, pixel_shuffle
from mask_rcnn_jax.models.init import dense, he_fan_out, he_fan_out_up
from mask_rcnn_jax.ops import boxes as box_ops
from mask_rcnn_jax.ops import masks as mask_ops
from mask_rcnn_jax.ops import matching
from mask_rcnn_jax.ops.nms import nms
from mask_rcnn_jax.ops.polygons import polygon_mask_targets
from mask_rcnn_jax.structures import Detections, Proposals, Targets


class BoxHead(nn.Module):
    """Two fully connected layers, then class logits and class-specific box deltas."""

    num_classes: int
    channels: int
    fc_init: str
    predictor_init: str  # "normal" (standard deviations 0.01 and 0.001) or as fc_init
    dtype: DTypeLike

    @nn.compact
    def __call__(self, roi_features: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B, R, P, P, C] to logits [B, R, K + 1] and deltas [B, R, K + 1, 4], float32."""
        x = roi_features.reshape(*roi_features.shape[:2], -1)
        x = nn.relu(dense(x, self.channels, self.fc_init, "fc1", self.dtype))
        x = nn.relu(dense(x, self.channels, self.fc_init, "fc2", self.dtype))
        x = x.astype(jnp.float32)
        rows = self.num_classes + 1
        class_init = box_init = self.predictor_init
        if self.predictor_init == "normal":
            class_init, box_init = nn.initializers.normal(0.01), nn.initializers.normal(0.001)
        logits = dense(x, rows, class_init, "cls_score")
        deltas = dense(x, 4 * rows, box_init, "bbox_pred")
        return logits, deltas.reshape(*deltas.shape[:2], rows, 4)


class MaskHead(nn.Module):
    """Four 3x3 convolutions, a 2x2 up-convolution and a 1x1 convolution to a mask per class.

    Of the masks only that of the RoI's class is computed.
    """

    num_classes: int
    channels: int
    predictor_init: str  # "he" or "normal" (standard deviation 0.001)
    dtype: DTypeLike

    @nn.compact
    def __call__(self, roi_features: jax.Array, classes: jax.Array) -> jax.Array:
        """[B, R, P, P, C] and classes [B, R] to the logits of those classes, [B, R, 2P, 2P].

        Logits of class 0, of background and of rows that are not valid, mean nothing.
        """
        batch, rois, size = roi_features.shape[:3]
        classes = classes.reshape(-1)
        x = roi_features.reshape(batch * rois, *roi_features.shape[2:])
        for i in range(1, 5):
            conv = Conv(self.channels, (3, 3), padding=1, kernel_init=he_fan_out, dtype=self.dtype,
                        name=f"mask_fcn{i}")  # fmt: skip
            x = nn.relu(conv(x, live=classes > 0))
        up = UpConv(self.channels, self.dtype, he_fan_out_up, name="mask_deconv")
        x = nn.relu(up(x, classes > 0))
        inits = {"he": he_fan_out, "normal": nn.initializers.normal(0.001)}
        if self.predictor_init not in inits:
            raise ValueError(
                f"model.mask_predictor_init is {self.predictor_init!r}, expected one of "
                f"{list(inits)}"
            )
        predictor = ClassMask(
            self.num_classes, inits[self.predictor_init], self.dtype, name="mask_predictor"
        )
        logits = predictor(x, classes)
        return pixel_shuffle(logits).reshape(batch, rois, 2 * size, 2 * size)


class ClassMask(nn.Module):
    """A 1x1 convolution to K + 1 channels, of which each RoI has one; parameters of `nn.Conv`."""

    num_classes: int
    kernel_init: nn.initializers.Initializer
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, classes: jax.Array) -> jax.Array:
        """[N, .., C] and classes [N] to [N, ..], float32."""
        num, rows = len(classes), self.num_classes + 1
        shape = (1, 1, x.shape[-1], rows)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (rows,), jnp.float32)
        # A product and not a gather, whose gradient would add up in any order on a GPU. Exact: one
        # factor is 1, the others are 0.
        is_class = nn.one_hot(classes, rows)
        weights = jnp.matmul(is_class, kernel[0, 0].T, precision="highest")  # [N, C]
        bias = jnp.matmul(is_class, bias, precision="highest")
        pixels = x.reshape(num, -1, x.shape[-1])
        logits = jnp.einsum("npc,nc->np", pixels, weights.astype(self.dtype))
        return (logits.astype(jnp.float32) + bias[:, None]).reshape(x.shape[:-1])


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
    fg_strict: bool,
    bg_thresh: tuple[float, float],
    box_weights: tuple[float, ...],
    box_offset: float,
    iou_offset: float,
) -> SampledRois:
    """Draw the RoIs of one image from its proposals and its ground-truth boxes.

    Without a key the lowest rows are taken. fg_strict: foreground only above `fg_thresh`.
    bg_thresh: background from the first to below the second IoU.
    """
    candidates = jnp.concatenate([proposals.boxes, targets.boxes])
    iou = box_ops.pairwise_iou(candidates, targets.boxes, offset=iou_offset)
    matched_idxs, labels = matching.match_rois(
        iou,
        targets.valid,
        jnp.concatenate([proposals.valid, targets.valid]),
        fg_thresh=fg_thresh,
        bg_thresh=bg_thresh[1],
        bg_thresh_low=bg_thresh[0],
        strict=fg_strict,
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


def mask_targets(
    targets: Targets,
    rois: jax.Array,
    matched_idxs: jax.Array,
    image_size: jax.Array,
    *,
    kind: str,
    half_pixel: bool,
    min_side: float,
    implementation: str | None = None,
) -> jax.Array:
    """[F, 28, 28] targets of one image's foreground RoIs [F, 4], 0..1.

    kind: "crops" thresholds crops of the ground truth, "soft" averages them, "whole" averages masks
    of the whole image, "polygons" draws outlines, and crops where there is none. half_pixel: of
    crops, see `ops.masks`. min_side: of polygons, see `ops.polygons`.
    """
    sources = targets.masks, targets.boxes, rois, matched_idxs
    if kind == "crops":
        return mask_ops.mask_targets(*sources, half_pixel=half_pixel)
    if kind == "soft":
        return mask_ops.soft_mask_targets(*sources)
    if kind == "whole":
        return mask_ops.soft_mask_targets(*sources, image_size=image_size)
    if kind == "polygons":
        drawn, is_drawn = polygon_mask_targets(
            targets.polygons, rois, matched_idxs, min_side=min_side,
            implementation=implementation,
        )  # fmt: skip
        crops = mask_ops.mask_targets(*sources, half_pixel=half_pixel)
        return jnp.where(is_drawn[:, None, None], drawn, crops)
    kinds = ["crops", "soft", "whole", "polygons"]
    raise ValueError(f"model.mask_targets is {kind!r}, expected one of {kinds}")


def select_detections(
    class_logits: jax.Array,
    box_deltas: jax.Array,
    proposals: Proposals,
    image_sizes: jax.Array,
    *,
    box_weights: tuple[float, ...],
    box_offset: float,
    iou_offset: float,
    score_threshold: float,
    min_box_size: float,
    nms_thresh: float,
    pre_nms_topk: int,
    detections_per_image: int,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Per-class NMS over the best candidates of all classes.

    class_logits [B, N, K + 1], box_deltas [B, N, K + 1, 4], proposals and image_sizes with a B
    axis. Boxes whose width or height is not above `min_box_size` are left out. One greedy pass over
    all classes by falling score, suppressing within a class, keeps what an NMS per class followed
    by a top-k keeps, and can stop at `detections_per_image`.
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
    sides = boxes[..., 2:] - boxes[..., :2] + box_offset
    candidate = (top >= 0) & jnp.all(sides > min_box_size, axis=-1)
    keep = nms(
        boxes, candidate, groups=class_index, iou_thresh=nms_thresh,
        max_out=detections_per_image, offset=iou_offset, implementation=implementation,
    )  # fmt: skip
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
