"""Select final detections from the box head's outputs."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from mask_rcnn_jax.ops.boxes import BoxCoder
from mask_rcnn_jax.ops.classifier import SOFTMAX, Classifier
from mask_rcnn_jax.ops.nms import nms
from mask_rcnn_jax.ops.soft_nms import gaussian, linear, soft_nms
from mask_rcnn_jax.ops.top_k import top_k
from mask_rcnn_jax.ops.whole import quotient, remainder
from mask_rcnn_jax.ranges import Count, Fraction, Positive, Range, Ranged
from mask_rcnn_jax.structures import Proposals


@dataclass(frozen=True)
class Detect(Ranged):
    """Detection thresholds and limits.

    Attributes:
        score_threshold: keep detections with a score above this.
        min_box_size: keep detections with width and height above this, network pixels; -1 keeps
            all.
        nms: what overlaps do to the lower-scored of two same-class detections: "hard" drops it;
            "linear" and "gaussian" lower its score (soft-NMS), not in ONNX models.
        nms_thresh: IoU above which "hard" and "linear" act.
        soft_sigma: of "gaussian", which multiplies the score by exp(-IoU^2 / sigma).
        soft_min_score: "linear" and "gaussian" drop detections whose score is not above this.
        pre_nms_topk: candidates per image before NMS, the best over all classes.
        detections_per_image: rows in the result.
    """

    score_threshold: Annotated[float, Range("up to 1", lambda score: score <= 1)] = 0.05
    min_box_size: float = -1.0
    nms: Literal["hard", "linear", "gaussian"] = "hard"
    nms_thresh: Fraction = 0.5
    soft_sigma: Positive = 0.5
    soft_min_score: Fraction = 1e-3
    pre_nms_topk: Count = 4096
    detections_per_image: Count = 100

    def __call__(
        self,
        class_logits: jax.Array,
        box_deltas: jax.Array,
        proposals: Proposals,
        image_sizes: jax.Array,
        *,
        coder: BoxCoder,
        classifier: Classifier = SOFTMAX,
        implementation: str | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Apply per-class NMS to the best candidates over all classes.

        A single greedy pass by descending score, suppressing within a class, keeps the same boxes
        as NMS per class followed by top-k, and can stop early.

        Args:
            class_logits: [B, N, K + 1].
            box_deltas: [B, N, K + 1, 4].
            proposals: with a B axis.
            image_sizes: [B, 2] (height, width).

        Returns:
            boxes [B, D, 4], scores [B, D], classes [B, D] and valid [B, D].
        """
        batch, rows, classes = class_logits.shape
        scores = classifier.scores(class_logits)
        usable = proposals.valid[..., None] & (scores > self.score_threshold)
        scores = jnp.where(usable, scores, -1.0).reshape(batch, -1)
        top, index = top_k(scores, min(self.pre_nms_topk, scores.shape[1]))
        roi, class_index = quotient(index, classes - 1), remainder(index, classes - 1) + 1
        flat_deltas = box_deltas.reshape(batch, rows * classes, 4)
        flat_index = roi * classes + class_index
        deltas = jnp.take_along_axis(flat_deltas, flat_index[..., None], axis=1)
        rois = jnp.take_along_axis(proposals.boxes, roi[..., None], axis=1)
        boxes = jax.vmap(coder.clip)(coder.decode_rois(deltas, rois), image_sizes)
        candidate = (top >= 0) & jnp.all(coder.sides(boxes) > self.min_box_size, axis=-1)
        top = jnp.where(candidate, top, -1.0)
        return self.select(boxes, top, class_index, coder.iou_offset, implementation)

    def select(
        self,
        boxes: jax.Array,
        scores: jax.Array,
        class_index: jax.Array,
        iou_offset: float,
        implementation: str | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Apply NMS to candidates [B, N], sorted by descending score, -1 for none.

        iou_offset: `BoxCoder.iou_offset`.

        Returns:
            As `__call__`.
        """
        count = min(self.detections_per_image, scores.shape[1])
        if self.nms == "hard":
            keep = nms(
                boxes,
                scores >= 0,
                groups=class_index,
                iou_thresh=self.nms_thresh,
                max_out=self.detections_per_image,
                offset=iou_offset,
                implementation=implementation,
            )
            top, order = top_k(jnp.where(keep, scores, -1.0), count)
        else:
            factor = partial(linear, iou_thresh=self.nms_thresh)
            if self.nms == "gaussian":
                factor = partial(gaussian, sigma=self.soft_sigma)
            soft = partial(
                soft_nms,
                factor=factor,
                min_score=self.soft_min_score,
                max_out=count,
                offset=iou_offset,
            )
            order, top = jax.vmap(soft)(boxes, scores, class_index)
        valid = top >= 0
        boxes = jnp.take_along_axis(boxes, order[..., None], axis=1)
        class_index = jnp.take_along_axis(class_index, order, axis=1)
        pad = ((0, 0), (0, self.detections_per_image - count))
        return (
            jnp.pad(jnp.where(valid[..., None], boxes, 0.0), (*pad, (0, 0))),
            jnp.pad(jnp.where(valid, top, 0.0), pad),
            jnp.pad(jnp.where(valid, class_index, 0), pad),
            jnp.pad(valid, pad),
        )
