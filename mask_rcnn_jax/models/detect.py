"""Final detections from the box head's outputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mask_rcnn_jax import parts
from mask_rcnn_jax.ops.boxes import BoxCoder
from mask_rcnn_jax.ops.nms import nms
from mask_rcnn_jax.structures import Proposals


@dataclass(frozen=True)
class Detect:
    """Selection of detections.

    Attributes:
        score_threshold: detections need a score above it.
        min_box_size: detections need a width and height above it, pixels of the network input; -1
            keeps all.
        nms_thresh: IoU above which the lower of two detections of one class is dropped.
        pre_nms_topk: candidates per image that NMS considers, the best of all classes.
        detections_per_image: rows of the result.
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
        """Per-class NMS over the best candidates of all classes.

        class_logits [B, N, K + 1], box_deltas [B, N, K + 1, 4], proposals and image_sizes with a B
        axis. One greedy pass over all classes by falling score, suppressing within a class, keeps
        the same boxes as an NMS per class followed by a top-k, and can stop early.
        Returns boxes [B, D, 4], scores [B, D], classes [B, D] and valid [B, D].
        """
        batch, rows, classes = class_logits.shape
        scores = jax.nn.softmax(class_logits)[..., 1:]
        usable = proposals.valid[..., None] & (scores > self.score_threshold)
        scores = jnp.where(usable, scores, -1.0).reshape(batch, -1)
        top, index = lax.top_k(scores, min(self.pre_nms_topk, scores.shape[1]))
        roi, class_index = index // (classes - 1), index % (classes - 1) + 1
        deltas = jnp.take_along_axis(
            box_deltas.reshape(batch, rows * classes, 4),
            (roi * classes + class_index)[..., None],
            axis=1,
        )
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


def detect_options(config: Mapping[str, Any]) -> Detect:
    """`Detect` of a config. Raises ValueError, naming the entry, for a wrong value."""
    return parts.pick(Detect, config["eval"], "eval")
