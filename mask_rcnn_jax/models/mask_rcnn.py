"""Mask R-CNN (He et al., 2017) on a feature pyramid: the whole forward pass."""

import inspect
from functools import partial, wraps

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax.typing import DTypeLike

from mask_rcnn_jax.models.detect import Detect
from mask_rcnn_jax.models.image_input import ImageInput
from mask_rcnn_jax.models.mask_targets import MaskTargets
from mask_rcnn_jax.models.rpn import RPN
from mask_rcnn_jax.models.sampling import RoISampling, SampledRoIs
from mask_rcnn_jax.ops.anchors import AnchorGrid, Anchors
from mask_rcnn_jax.ops.boxes import BoxCoder
from mask_rcnn_jax.ops.extent import ValidExtent
from mask_rcnn_jax.ops.roi_align import RoIAlign, roi_align
from mask_rcnn_jax.structures import Batch, Detections, Proposals

BOX_SIZE, MASK_SIZE = 7, 14  # cells a side that RoIAlign gives the box and the mask head


def _in_precision(method):
    """Run a method of the model with its `matmul_precision`, gradients included."""

    @wraps(method)
    def wrapped(self, *args, **kwargs):
        if self.matmul_precision is None:
            return method(self, *args, **kwargs)
        with jax.default_matmul_precision(self.matmul_precision):
            return method(self, *args, **kwargs)

    return wrapped


@struct.dataclass
class TrainOutputs:
    """Raw outputs of both stages and their targets. A counts the anchors of all levels."""

    rpn_logits: list[jax.Array]  # per level [B, A_l]
    rpn_deltas: list[jax.Array]  # per level [B, A_l, 4]
    anchor_labels: jax.Array  # [B, A] 1 / 0 / -1, matched
    sampled_labels: jax.Array  # [B, A] 1 / 0 / -1, sampled for the objectness loss
    anchor_deltas: jax.Array  # [B, A, 4] regression targets
    proposals: Proposals  # with a B axis; no loss reads them
    rois: SampledRoIs  # with a B axis
    class_logits: jax.Array  # [B, R, K + 1]
    box_deltas: jax.Array  # [B, R, K + 1, 4]
    mask_logits: jax.Array  # [B, F, 28, 28] of the true class, for the first F = foreground RoIs
    mask_targets: jax.Array  # [B, F, 28, 28] 0..1


class MaskRCNN(nn.Module):
    """Mask R-CNN, composed of parts; `models.build.build_model` makes one from a config.

    `model.apply(variables, batch, keys, train=True, method="forward_train")` returns raw outputs
    and targets, `model.apply(variables, images, image_sizes, detect, method="predict")` returns
    `Detections`.
    """

    input: ImageInput
    backbone: nn.Module  # (x, *, train) to maps of strides 4, 8, 16, 32
    fpn: nn.Module  # (maps, extent) to maps of strides 4..64
    anchors: AnchorGrid
    box_coder: BoxCoder
    rpn_head: nn.Module  # maps to logits and deltas per level
    rpn: RPN
    sampling: RoISampling
    roi_align: RoIAlign
    box_head: nn.Module  # [B, R, 7, 7, C] to class logits and deltas
    mask_head: nn.Module  # [B, R, 14, 14, C] and classes [B, R] to mask logits [B, R, 28, 28]
    mask_targets: MaskTargets
    dtype: DTypeLike = jnp.float32  # of the layers; parameters are float32
    matmul_precision: str | None = None  # of float32 products, see jax.default_matmul_precision
    implementation: str | None = None  # of RoIAlign, NMS and polygon targets, see ops.dispatch

    def init_all(self, images: jax.Array, image_sizes: jax.Array) -> None:
        """Use every parameter once; for `model.init(key, images, image_sizes, method=...)`."""
        pyramid, extent = self.pyramid(images, image_sizes, train=False)
        self.rpn_head(pyramid)
        boxes = jnp.zeros((len(images), 1, 4))
        self.box_head(self.pool(pyramid, boxes, BOX_SIZE, extent))
        classes = jnp.zeros((len(images), 1), jnp.int32)
        self.mask_head(self.pool(pyramid, boxes, MASK_SIZE, extent), classes)

    @_in_precision
    def forward_train(self, batch: Batch, keys: jax.Array | None, *, train: bool) -> TrainOutputs:
        """Both stages with sampling.

        keys: [B] PRNG keys, one per image; None samples the lowest rows. train: for batch norm.
        """
        rpn_keys = roi_keys = None
        if keys is not None:
            rpn_keys, roi_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
        pyramid, extent = self.pyramid(batch.images, batch.image_sizes, train=train)
        rpn_logits, rpn_deltas = self.rpn_head(pyramid)
        labels, sampled, anchor_deltas = self.anchor_targets(batch, rpn_keys, extent)
        proposals = self.propose(rpn_logits, rpn_deltas, batch.image_sizes, extent, train=True)
        rois = self.sample(proposals, batch, roi_keys)
        class_logits, box_deltas = self.box_head(self.pool(pyramid, rois.boxes, BOX_SIZE, extent))
        # Foreground rows come first, so the mask head sees them all in a slice of static size.
        masked = jax.tree.map(lambda x: x[:, : self.sampling.max_foreground], rois)
        pooled = self.pool(pyramid, masked.boxes, MASK_SIZE, extent)
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
            mask_targets=self.masks_of(masked, batch),
        )

    @_in_precision
    def predict(self, images: jax.Array, image_sizes: jax.Array, detect: Detect) -> Detections:
        """[B, H, W, 3] in 0..255 (uint8 or float) and [B, 2] to `Detections` in network pixels."""
        pyramid, extent = self.pyramid(images, image_sizes, train=False)
        proposals = self.propose(*self.rpn_head(pyramid), image_sizes, extent, train=False)
        head = self.box_head(self.pool(pyramid, proposals.boxes, BOX_SIZE, extent))
        boxes, scores, classes, valid = detect(
            *head,
            proposals,
            image_sizes,
            coder=self.box_coder,
            implementation=self.implementation,
        )
        logits = self.mask_head(self.pool(pyramid, boxes, MASK_SIZE, extent), classes)
        masks = jnp.where(valid[..., None, None], nn.sigmoid(logits), 0.0)
        return Detections(boxes=boxes, scores=scores, classes=classes, masks=masks, valid=valid)

    def pyramid(
        self, images: jax.Array, image_sizes: jax.Array, *, train: bool
    ) -> tuple[list[jax.Array], ValidExtent]:
        """P2..P6 of images in 0..255, and their valid extent."""
        x, extent = self.input(images, image_sizes)
        # A backbone of the user's need not know about the extent; the pyramid masks its maps.
        known = "extent" in inspect.signature(type(self.backbone).__call__).parameters
        options = {"extent": extent} if known else {}
        maps = self.backbone(x.astype(self.dtype), train=train, **options)
        return self.fpn(maps, extent), extent

    def anchor_grid(self, extent: ValidExtent) -> Anchors:
        """Anchors of the whole canvas."""
        return self.anchors(extent, offset=self.box_coder.iou_offset)

    def anchor_targets(
        self, batch: Batch, keys: jax.Array | None, extent: ValidExtent
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Labels [B, A] of the anchors, those that are sampled [B, A], and deltas [B, A, 4]."""
        anchors = self.anchor_grid(extent)
        targets = partial(self.rpn.targets, anchors=anchors, coder=self.box_coder)
        return jax.vmap(targets)(keys, batch.targets, batch.image_sizes)

    def propose(
        self, logits, deltas, image_sizes: jax.Array, extent: ValidExtent, *, train: bool
    ) -> Proposals:
        """Proposals from the outputs of the RPN head."""
        return self.rpn.proposals(
            logits,
            deltas,
            image_sizes,
            anchors=self.anchor_grid(extent),
            coder=self.box_coder,
            train=train,
            implementation=self.implementation,
        )

    def sample(self, proposals: Proposals, batch: Batch, keys: jax.Array | None) -> SampledRoIs:
        """The RoIs [B, R] that the box head is trained on."""
        sample = partial(self.sampling, coder=self.box_coder)
        return jax.vmap(sample)(keys, proposals, batch.targets)

    def masks_of(self, rois: SampledRoIs, batch: Batch) -> jax.Array:
        """Mask targets [B, R, 28, 28] in 0..1 of RoIs."""
        targets = partial(
            self.mask_targets,
            min_size=max(0.1, self.roi_align.min_size),
            implementation=self.implementation,
        )
        return jax.vmap(targets)(batch.targets, rois.boxes, rois.matched_idxs, batch.image_sizes)

    def pool(
        self, pyramid: list[jax.Array], boxes: jax.Array, size: int, extent: ValidExtent
    ) -> jax.Array:
        """[B, R, size, size, C] under boxes [B, R, 4], each from the level of its size."""
        return roi_align(
            pyramid,
            boxes,
            self.roi_align,
            output_size=size,
            level_offset=self.box_coder.iou_offset,
            extent=extent.size,
            implementation=self.implementation,
        )
