"""Mask R-CNN (He et al., 2017) on a feature pyramid: the whole forward story."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct
from jax import lax
from jax.typing import DTypeLike

from mask_rcnn_jax.models.fpn import FPN
from mask_rcnn_jax.models.resnet import ResNet
from mask_rcnn_jax.models.roi_heads import (
    BoxHead,
    MaskHead,
    SampledRois,
    sample_rois,
    select_detections,
    to_detections,
)
from mask_rcnn_jax.models.rpn import RPNHead, select_proposals
from mask_rcnn_jax.ops import boxes as box_ops
from mask_rcnn_jax.ops import matching
from mask_rcnn_jax.ops.anchors import anchor_grid
from mask_rcnn_jax.ops.masks import mask_targets
from mask_rcnn_jax.ops.roi_align import roi_align
from mask_rcnn_jax.structures import Batch, Detections, Proposals, Targets

STRIDES = (4, 8, 16, 32, 64)
PRECISIONS = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@struct.dataclass
class TrainOutputs:
    """Raw outputs of both stages beside what they should have been. A lists all anchors."""

    rpn_logits: list[jax.Array]  # per level [B, A_l]
    rpn_deltas: list[jax.Array]  # per level [B, A_l, 4]
    anchor_labels: jax.Array  # [B, A] 1 / 0 / -1, matched
    sampled_labels: jax.Array  # [B, A] 1 / 0 / -1, sampled for the objectness loss
    anchor_deltas: jax.Array  # [B, A, 4] regression targets
    rois: SampledRois  # with a B axis
    class_logits: jax.Array  # [B, R, K + 1]
    box_deltas: jax.Array  # [B, R, K + 1, 4]
    mask_logits: jax.Array  # [B, F, 28, 28] of the true class, for the first F = foreground RoIs
    mask_targets: jax.Array  # [B, F, 28, 28] 0 or 1


class MaskRCNN(nn.Module):
    """Mask R-CNN. The fields are the recipe's model section; configs/ say what each value is from.

    `model.apply(variables, batch, keys, method="forward_train")` gives raw outputs and targets,
    `model.apply(variables, images, image_sizes, method="predict", ...)` gives `Detections`.
    """

    num_classes: int  # K, without background
    depth: int
    norm: str
    stride_in: str
    padding: str
    frozen_stages: int
    pixel_mean: tuple[float, ...]  # RGB, in 0..255
    pixel_std: tuple[float, ...]
    fpn_channels: int
    anchor_sizes: tuple[float, ...]  # pixels, one per level P2..P6
    anchor_shapes: tuple[tuple[float, float], ...]  # (width, height) multiples of the size
    rpn_channels: int
    rpn_fg_thresh: float
    rpn_bg_thresh: float
    rpn_low_quality: str
    rpn_anchors_per_image: int
    rpn_fg_fraction: float
    rpn_nms_thresh: float
    pre_nms_topk_train: int  # per level
    pre_nms_topk_test: int
    post_nms_topk_train: int  # per image
    post_nms_topk_test: int
    box_offset: float  # 1.0: inclusive pixels (width = x2 - x1 + 1) when boxes are decoded
    rois_per_image: int
    roi_fg_fraction: float
    roi_fg_thresh: float
    roi_sampling: int  # RoIAlign points per bin and axis
    roi_half_pixel: bool
    box_weights: tuple[float, ...]
    box_channels: int
    mask_channels: int
    dtype: DTypeLike = jnp.float32

    def setup(self):
        self.backbone = ResNet(
            depth=self.depth, norm=self.norm, stride_in=self.stride_in, padding=self.padding,
            frozen_stages=self.frozen_stages, dtype=self.dtype,
        )  # fmt: skip
        self.fpn = FPN(self.fpn_channels, self.dtype)
        self.rpn_head = RPNHead(len(self.anchor_shapes), self.rpn_channels, self.dtype)
        self.box_head = BoxHead(self.num_classes, self.box_channels, self.dtype)
        self.mask_head = MaskHead(self.num_classes, self.mask_channels, self.dtype)

    def init_all(self, images: jax.Array, image_sizes: jax.Array) -> None:
        """Touch every parameter once; for `model.init(key, images, image_sizes, method=...)`."""
        pyramid = self.pyramid(images, image_sizes, train=False)
        self.rpn_head(pyramid)
        boxes = jnp.zeros((len(images), 1, 4))
        self.box_head(self._pool(pyramid, boxes, 7))
        self.mask_head(self._pool(pyramid, boxes, 14), jnp.zeros((len(images), 1), jnp.int32))

    def forward_train(self, batch: Batch, keys: jax.Array, *, train: bool) -> TrainOutputs:
        """Both stages with sampling. `keys` [B]: one PRNG key an image. `train`: for batch norm."""
        targets = batch.targets
        pyramid = self.pyramid(batch.images, batch.image_sizes, train)
        logits, deltas = self.rpn_head(pyramid)
        anchors = self.anchors(batch.images.shape[1:3])
        rpn_keys, roi_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
        labels, sampled, anchor_deltas = jax.vmap(self._label_anchors, in_axes=(None, 0, 0))(
            jnp.concatenate(anchors), targets, rpn_keys
        )
        proposals = self._proposals(
            logits, deltas, anchors, batch.image_sizes,
            self.pre_nms_topk_train, self.post_nms_topk_train,
        )  # fmt: skip
        rois = jax.vmap(partial(
            sample_rois, rois_per_image=self.rois_per_image, fg_fraction=self.roi_fg_fraction,
            fg_thresh=self.roi_fg_thresh, box_weights=self.box_weights, box_offset=self.box_offset,
        ))(roi_keys, proposals, targets)  # fmt: skip
        class_logits, box_deltas = self.box_head(self._pool(pyramid, rois.boxes, 7))
        # Foreground rows come first, so the mask head sees them all in a slice of static size.
        masked = jax.tree.map(lambda x: x[:, : self._max_foreground], rois)
        mask_logits = self.mask_head(self._pool(pyramid, masked.boxes, 14), masked.classes)
        return TrainOutputs(
            rpn_logits=logits,
            rpn_deltas=deltas,
            anchor_labels=labels,
            sampled_labels=sampled,
            anchor_deltas=anchor_deltas,
            rois=rois,
            class_logits=class_logits,
            box_deltas=box_deltas,
            mask_logits=mask_logits,
            mask_targets=jax.vmap(mask_targets)(
                targets.masks, targets.boxes, masked.boxes, masked.matched_idxs
            ),
        )

    def predict(
        self,
        images: jax.Array,
        image_sizes: jax.Array,
        *,
        score_threshold: float,
        nms_thresh: float,
        pre_nms_topk: int,
        detections_per_image: int,
    ) -> Detections:
        """[B, H, W, 3] uint8 and [B, 2] to `Detections` in network pixels."""
        pyramid = self.pyramid(images, image_sizes, train=False)
        logits, deltas = self.rpn_head(pyramid)
        anchors = self.anchors(images.shape[1:3])
        proposals = self._proposals(
            logits, deltas, anchors, image_sizes, self.pre_nms_topk_test, self.post_nms_topk_test
        )
        class_logits, box_deltas = self.box_head(self._pool(pyramid, proposals.boxes, 7))
        selected = select_detections(
            class_logits, box_deltas, proposals, image_sizes,
            box_weights=self.box_weights, box_offset=self.box_offset,
            score_threshold=score_threshold, nms_thresh=nms_thresh, pre_nms_topk=pre_nms_topk,
            detections_per_image=detections_per_image,
        )  # fmt: skip
        boxes, _, classes, _ = selected
        return to_detections(selected, self.mask_head(self._pool(pyramid, boxes, 14), classes))

    def pyramid(self, images: jax.Array, image_sizes: jax.Array, train: bool) -> list[jax.Array]:
        """P2..P6 of uint8 images; whatever lies beyond `image_sizes` counts as the mean colour."""
        x = (images.astype(jnp.float32) - jnp.asarray(self.pixel_mean)[None, None, None]) / (
            jnp.asarray(self.pixel_std)[None, None, None]
        )
        height, width = images.shape[1:3]
        inside = (jnp.arange(height)[None, :, None] < image_sizes[:, 0, None, None]) & (
            jnp.arange(width)[None, None, :] < image_sizes[:, 1, None, None]
        )
        return self.fpn(self.backbone(jnp.where(inside[..., None], x, 0.0), train))

    def anchors(self, canvas: tuple[int, int]) -> list[np.ndarray]:
        """Anchors per level, [A_l, 4], for images of that height and width."""
        return anchor_grid(
            canvas, strides=STRIDES, sizes=self.anchor_sizes, shapes=self.anchor_shapes
        )

    @property
    def _max_foreground(self) -> int:
        return round(self.rois_per_image * self.roi_fg_fraction)

    def _label_anchors(self, anchors: jax.Array, targets: Targets, key: jax.Array):
        """Labels before and after sampling, and regression targets, of one image's anchors."""
        matched_idxs, labels = matching.match_anchors(
            box_ops.pairwise_iou(anchors, targets.boxes),
            targets.valid,
            fg_thresh=self.rpn_fg_thresh,
            bg_thresh=self.rpn_bg_thresh,
            low_quality=self.rpn_low_quality,
        )
        sampled = matching.sample_mask(
            key, labels, num=self.rpn_anchors_per_image, fg_fraction=self.rpn_fg_fraction
        )
        # NVIDIA's TensorFlow code encodes anchors without the +1 that its decoder assumes.
        deltas = box_ops.encode(
            targets.boxes[matched_idxs], anchors, weights=(1.0, 1.0, 1.0, 1.0), offset=0.0
        )
        deltas = jnp.where((labels == 1)[:, None], deltas, 0.0)
        return labels, jnp.where(sampled, labels, -1), deltas

    def _proposals(
        self, logits, deltas, anchors, image_sizes, pre_nms_topk: int, post_nms_topk: int
    ) -> Proposals:
        """Proposals without a path for gradients (paper section 3)."""
        return lax.stop_gradient(
            select_proposals(
                logits, deltas, anchors, image_sizes,
                pre_nms_topk=pre_nms_topk, post_nms_topk=post_nms_topk,
                nms_thresh=self.rpn_nms_thresh, box_offset=self.box_offset,
            )
        )  # fmt: skip

    def _pool(self, pyramid: list[jax.Array], boxes: jax.Array, size: int) -> jax.Array:
        return roi_align(
            pyramid, boxes, output_size=size, strides=STRIDES[: len(pyramid)],
            sampling=self.roi_sampling, half_pixel=self.roi_half_pixel,
        )  # fmt: skip


def build_model(config: Mapping[str, Any], precision: str = "float32") -> MaskRCNN:
    """The model of a recipe's `model` section, its trunk and heads computing in `precision`.

    Raises ValueError if `num_classes` is still 0 (the commands set it from the json's categories)
    and for an unknown precision.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"train.precision is {precision!r}, expected one of {list(PRECISIONS)}")
    fields = {name: _hashable(value) for name, value in dict(config).items()}
    fields.pop("init_from", None)
    if fields["num_classes"] < 1:
        raise ValueError(f"model.num_classes is {fields['num_classes']}, expected at least 1")
    return MaskRCNN(**fields, dtype=PRECISIONS[precision])


def predict_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `MaskRCNN.predict` out of a recipe's `eval` section."""
    names = ("score_threshold", "nms_thresh", "pre_nms_topk", "detections_per_image")
    return {name: config[name] for name in names}


def _hashable(value):
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value
