"""Mask R-CNN (He et al., 2017) on a feature pyramid."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from mask_rcnn_jax.models.cascade import Cascade
from mask_rcnn_jax.models.detect import Detect
from mask_rcnn_jax.models.image_input import ImageInput
from mask_rcnn_jax.models.keypoints import KeypointTask
from mask_rcnn_jax.models.mask_targets import MaskTargets
from mask_rcnn_jax.models.masks import MaskTask
from mask_rcnn_jax.models.outputs import StageOutputs, TrainOutputs
from mask_rcnn_jax.models.precision import Precision, in_precision
from mask_rcnn_jax.models.protocols import (
    PROTOCOLS,
    BoxHeadLike,
    KeypointHeadLike,
    PartLike,
    ability,
    taken,
)
from mask_rcnn_jax.models.rpn import RPN
from mask_rcnn_jax.models.sampling import MaskRoIs, RoISampling, SampledRoIs
from mask_rcnn_jax.models.task_heads import results, train_tasks
from mask_rcnn_jax.models.tasks import Task
from mask_rcnn_jax.ops.anchors import AnchorGrid, Anchors
from mask_rcnn_jax.ops.boxes import BoxCoder
from mask_rcnn_jax.ops.classifier import SOFTMAX, Classifier
from mask_rcnn_jax.ops.extent import ValidExtent
from mask_rcnn_jax.ops.roi_align import RoIAlign, roi_align
from mask_rcnn_jax.structures import Batch, Detections, Proposals


class MaskRCNN(nn.Module):
    """Mask R-CNN composed from parts; see `models.build.build_model` and `models.protocols`.

    `model.apply(variables, batch, keys, train=True, method="forward_train")` returns raw outputs
    and targets, `model.apply(variables, images, image_sizes, detect, method="predict")` returns
    `Detections`.
    """

    input: ImageInput
    backbone: nn.Module
    fpn: nn.Module
    anchors: AnchorGrid
    box_coder: BoxCoder
    rpn_head: nn.Module  # maps and their valid cells to logits and deltas per level
    rpn: RPN
    sampling: RoISampling
    roi_align: RoIAlign
    box_head: nn.Module
    cascade: Cascade
    mask_head: nn.Module | None  # None: no masks
    mask_targets: MaskTargets
    keypoint_head: nn.Module | None = None  # None: no keypoints
    classifier: Classifier = SOFTMAX
    precision: Precision = Precision()
    implementation: str | None = None  # for RoIAlign, NMS, polygon targets; see ops.dispatch

    @in_precision
    def init_all(self, images: jax.Array, image_sizes: jax.Array) -> None:
        """Use every parameter once, for `model.init(key, images, image_sizes, method=...)`."""
        pyramid, extent = self.pyramid(images, image_sizes, train=False)
        self.rpn_outputs(pyramid, extent)
        boxes = jnp.zeros((len(images), 1, 4))
        proposals = Proposals(boxes=boxes, scores=boxes[..., 0], valid=boxes[..., 0] > 0)
        self.box_outputs(pyramid, proposals, image_sizes, extent)
        for task in self.tasks:
            classes = jnp.zeros((len(images), 1), jnp.int32)
            results(self, task.name, pyramid, boxes, classes, extent)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What is learned about each object, see `models.tasks`; () is boxes alone."""
        sampling = self.sampling
        foreground = sampling.batch_size_per_image * sampling.positive_fraction
        score = ability(self.keypoint_head, KeypointHeadLike, "score")
        every = (
            MaskTask(self.mask_targets, self.roi_align.min_size, self.implementation),
            KeypointTask(score, foreground),
        )
        return tuple(task for task in every if self.head(task.name) is not None)

    def head(self, task: str) -> Any:
        """The head of a task by its name; None: the model does not have the task."""
        return getattr(self, f"{task}_head")

    def roi_size(self, task: str) -> int:
        """Side of the RoI features of a task's head."""
        return ability(self.head(task), PROTOCOLS[f"{task}_head"], "roi_size")

    @property
    def trains_batch_stats(self) -> bool:
        """Whether training updates `batch_stats`."""
        heads = [self.head(task.name) for task in self.tasks]
        parts = (self.backbone, self.fpn, self.box_head, self.cascade, *heads)
        return self.precision.quantization.int8 or any(
            ability(part, PartLike, "trains_batch_stats") for part in parts
        )

    @property
    def box_roi_size(self) -> int:
        """Side of the box heads' RoI features."""
        return ability(self.box_head, BoxHeadLike, "roi_size")

    @in_precision
    def forward_train(self, batch: Batch, keys: jax.Array | None, *, train: bool) -> TrainOutputs:
        """Run both stages with sampling.

        keys: [B] PRNG keys, one per image; None samples the lowest rows, and no backbone draws.
        train: batch norm mode, and whether `sampling.mask_rois_per_image` limits the tasks' RoIs.
        """
        rpn_keys = roi_keys = None
        if keys is not None:
            rpn_keys, roi_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
        pyramid, extent = self.pyramid(batch.images, batch.image_sizes, keys, train=train)
        rpn_logits, rpn_deltas = self.rpn_outputs(pyramid, extent)
        labels, sampled, anchor_deltas = self.anchor_targets(batch, rpn_keys, extent)
        proposals = self.propose(rpn_logits, rpn_deltas, batch.image_sizes, extent, train=True)
        rois = self.sample(proposals, batch, roi_keys)

        def run(head: nn.Module, boxes: jax.Array, valid: jax.Array) -> Any:
            pooled = self.pool(pyramid, boxes, self.box_roi_size, extent)
            pooled = self.cascade.scale_gradient(pooled)
            return head(pooled, **taken(head, valid=valid, train=train))

        first = StageOutputs(rois, *run(self.box_head, rois.boxes, rois.valid))
        stages = self.cascade.train_stages(
            first, batch.targets, batch.image_sizes, run, self.box_coder
        )
        num_classes = first.class_logits.shape[-1] - 1
        drawn = [
            self.classifier.draw(keys, stage.rois.classes, stage.rois.valid, num_classes, i)
            for i, stage in enumerate([first, *stages])
        ]
        task_rois = dropped = None
        if self.tasks:
            task_rois, dropped = self.sampling.mask_rois(rois, limit=train)
        return TrainOutputs(
            rpn_logits=rpn_logits,
            rpn_deltas=rpn_deltas,
            anchor_labels=labels,
            sampled_labels=sampled,
            anchor_deltas=anchor_deltas,
            proposals=proposals,
            rois=rois,
            class_logits=first.class_logits,
            box_deltas=first.box_deltas,
            task_rois=task_rois,
            tasks=train_tasks(self, pyramid, task_rois, batch, extent, keys, train=train),
            dropped_masks=dropped,
            stages=stages,
            drawn_classes=tuple(drawn),
            pyramid=pyramid,
            classifier=self.classifier,
        )

    @in_precision
    def predict(self, images: jax.Array, image_sizes: jax.Array, detect: Detect) -> Detections:
        """Detect objects; results are in network pixels.

        images: [B, H, W, 3] in 0..255, uint8 or float. image_sizes: [B, 2] (height, width).
        """
        pyramid, extent = self.pyramid(images, image_sizes, train=False)
        rpn_logits, rpn_deltas = self.rpn_outputs(pyramid, extent)
        proposals = self.propose(rpn_logits, rpn_deltas, image_sizes, extent, train=False)
        logits, deltas, proposals, coder = self.box_outputs(pyramid, proposals, image_sizes, extent)
        options: dict[str, Any] = dict(coder=coder, implementation=self.implementation)
        options["classifier"] = self.classifier
        selected = detect(logits, deltas, proposals, image_sizes, **options)
        boxes, scores, classes, valid = selected
        found: dict[str, Any] = {"masks": None}
        for task in self.tasks:
            each = results(self, task.name, pyramid, boxes, classes, extent)
            rows = jnp.expand_dims(valid, range(2, each.ndim))
            found[task.result] = jnp.where(rows, each, 0.0)
        return Detections(boxes=boxes, scores=scores, classes=classes, valid=valid, **found)

    @in_precision
    def predict_masks(
        self, images: jax.Array, image_sizes: jax.Array, boxes: jax.Array, classes: jax.Array
    ) -> jax.Array:
        """Compute the masks [B, D, M, M], in 0..1, of given boxes [B, D, 4] and classes [B, D]."""
        pyramid, extent = self.pyramid(images, image_sizes, train=False)
        return results(self, "mask", pyramid, boxes, classes, extent)

    def pyramid(
        self,
        images: jax.Array,
        image_sizes: jax.Array,
        keys: jax.Array | None = None,
        *,
        train: bool,
    ) -> tuple[list[jax.Array], ValidExtent]:
        """Compute a map for each size of the anchors, P2 and so on, from images in 0..255, and
        their valid extent. Levels that `fpn` lacks subsample the one before by 2.

        keys: [B], for backbones that draw random numbers in training.
        """
        x, extent = self.input(images, image_sizes)
        # Custom backbones may ignore the extent: the FPN masks their maps.
        options = taken(self.backbone, extent=extent, keys=keys)
        maps = self.backbone(x.astype(self.precision.dtype), train=train, **options)
        pyramid = list(self.fpn(maps, extent, train=train))
        levels = len(self.anchors.sizes)
        while len(pyramid) < levels:
            pyramid.append(pyramid[-1][:, ::2, ::2])
        return pyramid[:levels], extent

    def rpn_outputs(
        self, pyramid: list[jax.Array], extent: ValidExtent
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return objectness logits [B, A_l] and box deltas [B, A_l, 4] per level."""
        levels = zip(pyramid, self.anchors.strides, strict=True)
        return self.rpn_head(pyramid, [extent.inside(x.shape[1:3], n) for x, n in levels])

    def anchor_grid(self, extent: ValidExtent) -> Anchors:
        """Return the anchors of the whole canvas."""
        return self.anchors(extent, offset=self.box_coder.iou_offset)

    def anchor_targets(
        self, batch: Batch, keys: jax.Array | None, extent: ValidExtent
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return anchor labels [B, A], sampled labels [B, A] and deltas [B, A, 4]."""
        anchors = self.anchor_grid(extent)
        targets = partial(self.rpn.targets, anchors=anchors, coder=self.box_coder)
        rows = jnp.arange(1, batch.targets.valid.shape[1] + 1, dtype=jnp.int32)
        used = jnp.max(jnp.where(batch.targets.valid, rows[None], 0), initial=0)
        images = keys, batch.targets, batch.image_sizes
        return jax.vmap(targets, in_axes=(0, 0, 0, None))(*images, used)

    def propose(
        self, logits, deltas, image_sizes: jax.Array, extent: ValidExtent, *, train: bool
    ) -> Proposals:
        """Select proposals from the RPN head's outputs."""
        options: dict[str, Any] = dict(
            coder=self.box_coder, train=train, implementation=self.implementation
        )
        anchors = self.anchor_grid(extent)
        return self.rpn.proposals(logits, deltas, image_sizes, anchors=anchors, **options)

    def sample(self, proposals: Proposals, batch: Batch, keys: jax.Array | None) -> SampledRoIs:
        """Sample RoIs [B, R] for training."""
        sample = partial(self.sampling, coder=self.box_coder)
        return jax.vmap(sample)(keys, proposals, batch.targets)

    def box_outputs(
        self,
        pyramid: list[jax.Array],
        proposals: Proposals,
        image_sizes: jax.Array,
        extent: ValidExtent,
    ) -> tuple[jax.Array, jax.Array, Proposals, BoxCoder]:
        """Return class logits and deltas, and the boxes and coder that the deltas are for."""

        def run(head: nn.Module, boxes: jax.Array) -> Any:
            return head(self.pool(pyramid, boxes, self.box_roi_size, extent))

        logits, deltas = run(self.box_head, proposals.boxes)
        return self.cascade.predict_stages(
            logits, deltas, proposals, image_sizes, run, self.box_coder, self.classifier
        )

    def pool_rois(
        self, pyramid: list[jax.Array], rois: MaskRoIs, extent: ValidExtent, size: int
    ) -> jax.Array:
        """Pool the tasks' N RoIs in training to [1, N, size, size, C], zero in padding rows."""
        of_rows = rois.images[None], rois.foreground[None]
        return self.pool(pyramid, rois.boxes[None], size, extent, of_rows)

    def pool(
        self,
        pyramid: list[jax.Array],
        boxes: jax.Array,
        size: int,
        extent: ValidExtent,
        of_rows: tuple[jax.Array, jax.Array] | None = None,
    ) -> jax.Array:
        """Pool boxes [B, R, 4], each from the level matching its size, to [B, R, size, size, C].

        of_rows: see `ops.roi_align`.
        """
        if self.is_initializing():  # parameters' shapes alone matter
            return jnp.zeros((*boxes.shape[:2], size, size, pyramid[0].shape[-1]), pyramid[0].dtype)
        return roi_align(
            pyramid,
            boxes,
            self.roi_align,
            output_size=size,
            level_offset=self.box_coder.iou_offset,
            extent=extent.size,
            of_rows=of_rows,
            implementation=self.implementation,
        )
