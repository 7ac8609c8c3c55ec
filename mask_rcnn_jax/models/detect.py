"""Select final detections from the box head's outputs."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from mask_rcnn_jax import parts
from mask_rcnn_jax.ops.boxes import BoxCoder
from mask_rcnn_jax.ops.nms import nms
from mask_rcnn_jax.structures import Proposals


@dataclass(frozen=True)
class Detect:
    """Detection thresholds and limits.

    Attributes:
        score_threshold: keep detections with a score above this.
        min_box_size: keep detections with width and height above this, network pixels; -1 keeps
            all.
        nms_thresh: IoU above which the lower-scored of two same-class detections is dropped.
        pre_nms_topk: candidates per image before NMS, the best over all classes.
        detections_per_image: rows in the result.
    """

    score_threshold: float = 0.05
    min_box_size: float = -1.0
    nms_thresh: float = 0.5
    pre_nms_topk: int = 4096
    detections_per_image: int = 100

    def __call__(
        self,
        class_logits: jax.Array,
        box_deltas: jax.Array,
        proposals: Proposals,
        image_sizes: jax.Array,
        *,
        coder: BoxCoder,
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
        scores = jax.nn.softmax(class_logits)[..., 1:]
        usable = proposals.valid[..., None] & (scores > self.score_threshold)
        scores = jnp.where(usable, scores, -1.0).reshape(batch, -1)
        top, index = lax.top_k(scores, min(self.pre_nms_topk, scores.shape[1]))
        roi, class_index = index // (classes - 1), index % (classes - 1) + 1
        flat_deltas = box_deltas.reshape(batch, rows * classes, 4)
        flat_index = roi * classes + class_index
        deltas = jnp.take_along_axis(flat_deltas, flat_index[..., None], axis=1)
        rois = jnp.take_along_axis(proposals.boxes, roi[..., None], axis=1)
        boxes = jax.vmap(coder.clip)(coder.decode_rois(deltas, rois), image_sizes)
        candidate = (top >= 0) & jnp.all(coder.sides(boxes) > self.min_box_size, axis=-1)
        keep = nms(
            boxes,
            candidate,
            groups=class_index,
            iou_thresh=self.nms_thresh,
            max_out=self.detections_per_image,
            offset=coder.iou_offset,
            implementation=implementation,
        )
        count = min(self.detections_per_image, keep.shape[1])
        top, order = lax.top_k(jnp.where(keep, top, -1.0), count)
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


def detect_options(config: parts.Section) -> Detect:
    """Build `Detect` from a config; an invalid value raises ValueError naming its entry."""
    return parts.pick(Detect, config["eval"], "eval")
