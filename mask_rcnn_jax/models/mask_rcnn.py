"""Mask R-CNN (He et al., 2017) on a feature pyramid: the whole forward story."""

from functools import partial, wraps

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax import lax
from jax.typing import DTypeLike

from mask_rcnn_jax.models.fpn import FPN
from mask_rcnn_jax.models.frame import STRIDES, Frame, make_frame
from mask_rcnn_jax.models.resnet import ResNet
from mask_rcnn_jax.models.roi_heads import (
    BoxHead,
    MaskHead,
    SampledRois,
    mask_targets,
    sample_rois,
    select_detections,
    to_detections,
)
from mask_rcnn_jax.models.rpn import RPNHead, label_anchors, select_proposals
from mask_rcnn_jax.ops.roi_align import roi_align
from mask_rcnn_jax.structures import Batch, Detections, Proposals, Targets


def _in_precision(method):
    """A method of the model with its matrix products as `matmul_precision` says, gradients too."""

    @wraps(method)
    def wrapped(self, *args, **kwargs):
        if self.matmul_precision is None:
            return method(self, *args, **kwargs)
        with jax.default_matmul_precision(self.matmul_precision):
            return method(self, *args, **kwargs)

    return wrapped


@struct.dataclass
class TrainOutputs:
    """Raw outputs of both stages beside what they should have been. A lists all anchors."""

    rpn_logits: list[jax.Array]  # per level [B, A_l]
    rpn_deltas: list[jax.Array]  # per level [B, A_l, 4]
    anchor_labels: jax.Array  # [B, A] 1 / 0 / -1, matched
    sampled_labels: jax.Array  # [B, A] 1 / 0 / -1, sampled for the objectness loss
    anchor_deltas: jax.Array  # [B, A, 4] regression targets
    proposals: Proposals  # with a B axis; no loss reads them
    rois: SampledRois  # with a B axis
    class_logits: jax.Array  # [B, R, K + 1]
    box_deltas: jax.Array  # [B, R, K + 1, 4]
    mask_logits: jax.Array  # [B, F, 28, 28] of the true class, for the first F = foreground RoIs
    mask_targets: jax.Array  # [B, F, 28, 28] 0..1


class MaskRCNN(nn.Module):
    """Mask R-CNN. The fields are the recipe's model section; configs/ say what each value is from.

    `model.apply(variables, batch, keys, method="forward_train")` gives raw outputs and targets,
    `model.apply(variables, images, image_sizes, method="predict", ...)` gives `Detections`.
    """

    num_classes: int  # K, without background
    depth: int
    norm: str
    norm_eps: float
    stride_in: str
    padding: str
    pool_padding: str
    frozen_stages: int
    channel_order: str  # "rgb" or "bgr": what the first convolution sees
    pixel_mean: tuple[float, ...]  # of R, G, B in 0..255
    pixel_std: tuple[float, ...]
    # 0: feature maps fill the canvas. 32: they end at the largest image of the device's batch,
    # rounded up to 32 pixels, as where batches are padded to their largest (torchvision, ...).
    pad_multiple: int
    fpn_channels: int
    fpn_init: str
    anchor_sizes: tuple[float, ...]  # pixels, one per level P2..P6
    anchor_shapes: tuple[tuple[float, float], ...]  # (width, height) multiples of the size
    anchor_centre: float
    anchor_rounding: str
    anchor_offset: float
    anchor_stride: str  # "level": 4..64; "map": padded image size // map size (torchvision)
    rpn_channels: int
    rpn_fg_thresh: float
    rpn_bg_thresh: float
    rpn_low_quality: str
    rpn_straddle: float  # pixels an anchor may reach over the image to be trained on; -1: any
    rpn_anchors_per_image: int
    rpn_fg_fraction: float
    rpn_encode_offset: float  # as box_offset, in the regression targets of anchors
    rpn_nms_thresh: float
    pre_nms_topk_train: int  # per level
    pre_nms_topk_test: int
    post_nms_topk_train: int  # per image, or per device batch
    post_nms_topk_test: int  # per image
    post_nms_scope: str  # of post_nms_topk_train: "image" or "batch"
    proposal_min_size: float
    box_offset: float  # 1.0: inclusive pixels (width = x2 - x1 + 1) when boxes are decoded
    iou_offset: float  # the same in IoU and in the area that chooses a level
    rois_per_image: int
    roi_fg_fraction: float
    roi_fg_thresh: float
    roi_fg_strict: bool
    roi_bg_thresh: tuple[float, float]
    roi_max_level: int  # RoIAlign reads P2 up to this level
    roi_sampling: int  # RoIAlign points per bin and axis; 0 adapts to the bin's size
    roi_max_sampling: int  # the most when it adapts
    roi_half_pixel: bool
    roi_border: str
    roi_min_size: float
    box_weights: tuple[float, ...]
    box_channels: int
    fc_init: str
    predictor_init: str
    mask_channels: int
    mask_targets: str
    mask_half_pixel: bool  # of mask_targets "crops", see ops.masks
    mask_predictor_init: str
    dtype: DTypeLike = jnp.float32
    matmul_precision: str | None = None  # of float32 products, as jax.default_matmul_precision
    remat: tuple[str, ...] = ()  # of "backbone" and "heads": computed again, see build_model
    implementation: str | None = None  # of RoIAlign, NMS and polygon targets, see ops.dispatch

    def setup(self):
        again = nn.remat if "heads" in self.remat else lambda head: head
        self.backbone = ResNet(
            depth=self.depth, norm=self.norm, norm_eps=self.norm_eps, stride_in=self.stride_in,
            padding=self.padding, pool_padding=self.pool_padding,
            frozen_stages=self.frozen_stages, dtype=self.dtype, remat="backbone" in self.remat,
        )  # fmt: skip
        self.fpn = FPN(self.fpn_channels, self.fpn_init, self.dtype)
        self.rpn_head = again(RPNHead)(len(self.anchor_shapes), self.rpn_channels, self.dtype)
        self.box_head = again(BoxHead)(
            self.num_classes, self.box_channels, self.fc_init, self.predictor_init, self.dtype
        )
        self.mask_head = again(MaskHead)(
            self.num_classes, self.mask_channels, self.mask_predictor_init, self.dtype
        )

    def init_all(self, images: jax.Array, image_sizes: jax.Array) -> None:
        """Touch every parameter once; for `model.init(key, images, image_sizes, method=...)`."""
        pyramid, frame = self.pyramid(images, image_sizes, train=False)
        self.rpn_head(pyramid)
        boxes = jnp.zeros((len(images), 1, 4))
        self.box_head(self.pool(pyramid, boxes, 7, frame))
        classes = jnp.zeros((len(images), 1), jnp.int32)
        self.mask_head(self.pool(pyramid, boxes, 14, frame), classes)

    @_in_precision
    def forward_train(self, batch: Batch, keys: jax.Array | None, *, train: bool) -> TrainOutputs:
        """Both stages with sampling. `train`: for batch norm.

        `keys` [B]: one PRNG key an image. Without keys the lowest rows are sampled.
        """
        rpn_keys = roi_keys = None
        if keys is not None:
            rpn_keys, roi_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
        pyramid, frame = self.pyramid(batch.images, batch.image_sizes, train)
        rpn_logits, rpn_deltas = self.rpn_head(pyramid)
        labels, sampled, anchor_deltas = self.rpn_targets(frame, batch, rpn_keys)
        proposals = self.proposals(rpn_logits, rpn_deltas, frame, batch.image_sizes, train=True)
        rois = self.sample(proposals, batch.targets, roi_keys)
        class_logits, box_deltas = self.box_head(self.pool(pyramid, rois.boxes, 7, frame))
        # Foreground rows come first, so the mask head sees them all in a slice of static size.
        masked = jax.tree.map(lambda x: x[:, : self.max_foreground], rois)
        pooled = self.pool(pyramid, masked.boxes, 14, frame)
        return TrainOutputs(
            rpn_logits=rpn_logits,
            rpn_deltas=rpn_deltas,
            anchor_labels=labels,
            sampled_labels=sampled,
            anchor_deltas=anchor_deltas,
            proposals=proposals,
            rois=rois,
            class_logits=class_logits,
            box_deltas=box_deltas,
            mask_logits=self.mask_head(pooled, masked.classes),
            mask_targets=self.mask_targets_of(masked, batch),
        )

    @_in_precision
    def predict(
        self,
        images: jax.Array,
        image_sizes: jax.Array,
        *,
        score_threshold: float,
        min_box_size: float,
        nms_thresh: float,
        pre_nms_topk: int,
        detections_per_image: int,
    ) -> Detections:
        """[B, H, W, 3] in 0..255 (uint8 or float) and [B, 2] to `Detections` in network pixels."""
        pyramid, frame = self.pyramid(images, image_sizes, train=False)
        proposals = self.proposals(*self.rpn_head(pyramid), frame, image_sizes, train=False)
        class_logits, box_deltas = self.box_head(self.pool(pyramid, proposals.boxes, 7, frame))
        selected = select_detections(
            class_logits, box_deltas, proposals, image_sizes,
            box_weights=self.box_weights, box_offset=self.box_offset, iou_offset=self.iou_offset,
            score_threshold=score_threshold, min_box_size=min_box_size, nms_thresh=nms_thresh,
            pre_nms_topk=pre_nms_topk, detections_per_image=detections_per_image,
            implementation=self.implementation,
        )  # fmt: skip
        boxes, _, classes, _ = selected
        mask_logits = self.mask_head(self.pool(pyramid, boxes, 14, frame), classes)
        return to_detections(selected, mask_logits)

    def pyramid(
        self, images: jax.Array, image_sizes: jax.Array, train: bool
    ) -> tuple[list[jax.Array], Frame]:
        """P2..P6 of images in 0..255, and how far they reach.

        Whatever lies beyond `image_sizes` counts as the mean colour.
        """
        x = (images.astype(jnp.float32) - jnp.asarray(self.pixel_mean)[None, None, None]) / (
            jnp.asarray(self.pixel_std)[None, None, None]
        )
        if self.channel_order not in ("rgb", "bgr"):
            raise ValueError(
                f"model.channel_order is {self.channel_order!r}, expected 'rgb' or 'bgr'"
            )
        if self.channel_order == "bgr":
            x = x[..., ::-1]
        height, width = images.shape[1:3]
        inside = (jnp.arange(height)[None, :, None] < image_sizes[:, 0, None, None]) & (
            jnp.arange(width)[None, None, :] < image_sizes[:, 1, None, None]
        )
        frame = make_frame((height, width), image_sizes, self.pad_multiple)
        x = jnp.where(inside[..., None], x, 0.0)
        return self.fpn(self.backbone(x, train, frame), frame), frame

    def anchors(self, frame: Frame) -> list[jax.Array]:
        """Anchors per level, [A_l, 4], of the whole canvas."""
        return frame.anchors(
            self.anchor_sizes, self.anchor_shapes, centre=self.anchor_centre,
            rounding=self.anchor_rounding, offset=self.anchor_offset, stride=self.anchor_stride,
        )  # fmt: skip

    def rpn_targets(
        self, frame: Frame, batch: Batch, keys: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Labels of the A anchors [B, A], those sampled [B, A], and deltas [B, A, 4]."""
        anchors, exists = self.anchors(frame), frame.existing_anchors(len(self.anchor_shapes))
        return jax.vmap(partial(
            label_anchors, jnp.concatenate(anchors), exists,
            fg_thresh=self.rpn_fg_thresh, bg_thresh=self.rpn_bg_thresh,
            low_quality=self.rpn_low_quality, straddle=self.rpn_straddle,
            anchors_per_image=self.rpn_anchors_per_image, fg_fraction=self.rpn_fg_fraction,
            encode_offset=self.rpn_encode_offset, iou_offset=self.iou_offset,
        ))(batch.targets, batch.image_sizes, keys)  # fmt: skip

    def proposals(
        self,
        logits: list[jax.Array],
        deltas: list[jax.Array],
        frame: Frame,
        image_sizes: jax.Array,
        *,
        train: bool,
    ) -> Proposals:
        """Proposals out of the RPN head's outputs, without a path for gradients (paper 3)."""
        anchors, exists = self.anchors(frame), frame.existing_anchors(len(self.anchor_shapes))
        select = partial(
            select_proposals, logits, deltas, anchors, exists, image_sizes,
            nms_thresh=self.rpn_nms_thresh, min_size=self.proposal_min_size,
            box_offset=self.box_offset, iou_offset=self.iou_offset,
            implementation=self.implementation,
        )  # fmt: skip
        if train:
            selected = select(
                pre_nms_topk=self.pre_nms_topk_train, post_nms_topk=self.post_nms_topk_train,
                scope=self.post_nms_scope,
            )  # fmt: skip
        else:
            selected = select(
                pre_nms_topk=self.pre_nms_topk_test, post_nms_topk=self.post_nms_topk_test,
                scope="image",
            )  # fmt: skip
        return lax.stop_gradient(selected)

    @property
    def max_foreground(self) -> int:
        """Foreground RoIs an image at most; they come first in `SampledRois`."""
        return round(self.rois_per_image * self.roi_fg_fraction)

    def sample(self, proposals: Proposals, targets: Targets, keys: jax.Array | None) -> SampledRois:
        """The RoIs [B, R] that the box head is trained on."""
        return jax.vmap(partial(
            sample_rois, rois_per_image=self.rois_per_image, fg_fraction=self.roi_fg_fraction,
            fg_thresh=self.roi_fg_thresh, fg_strict=self.roi_fg_strict,
            bg_thresh=self.roi_bg_thresh, box_weights=self.box_weights, box_offset=self.box_offset,
            iou_offset=self.iou_offset,
        ))(keys, proposals, targets)  # fmt: skip

    def mask_targets_of(self, rois: SampledRois, batch: Batch) -> jax.Array:
        """[B, R, 28, 28] in 0..1, of the objects that RoIs were matched to."""
        targets_of = partial(
            mask_targets, kind=self.mask_targets, half_pixel=self.mask_half_pixel,
            min_side=max(0.1, self.roi_min_size), implementation=self.implementation,
        )  # fmt: skip
        return jax.vmap(targets_of)(batch.targets, rois.boxes, rois.matched_idxs, batch.image_sizes)

    def pool(
        self, pyramid: list[jax.Array], boxes: jax.Array, size: int, frame: Frame
    ) -> jax.Array:
        """[B, R, size, size, C] under boxes [B, R, 4], each from the level of its size."""
        if self.roi_max_level not in range(2, 7):
            raise ValueError(f"model.roi_max_level is {self.roi_max_level}, expected 2 to 6")
        maps = pyramid[: self.roi_max_level - 1]
        return roi_align(
            maps, boxes, output_size=size, strides=STRIDES[: len(maps)],
            sampling=self.roi_sampling, max_sampling=self.roi_max_sampling,
            half_pixel=self.roi_half_pixel, border=self.roi_border,
            min_size=self.roi_min_size or None, level_offset=self.iou_offset, extent=frame.extent,
            implementation=self.implementation,
        )  # fmt: skip
