"""Sample RoIs for second-stage training."""

from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct

from mask_rcnn_jax.ops import matching
from mask_rcnn_jax.ops.boxes import BoxCoder
from mask_rcnn_jax.structures import Proposals, Targets


@no_type_check  # `jax.tree.map` may put anything into its fields
@struct.dataclass
class SampledRoIs:
    """RoIs sampled from one image for training; foreground rows come first."""

    boxes: jax.Array  # [R, 4]
    classes: jax.Array  # [R] int32, 0 for background
    deltas: jax.Array  # [R, 4] regression targets; zero unless foreground
    matched_idxs: jax.Array  # [R] int32 ground-truth row
    foreground: jax.Array  # [R] bool
    valid: jax.Array  # [R] bool


@dataclass(frozen=True)
class RoISampling:
    """RoI sampling (Girshick, "Fast R-CNN", 2015, section 2.3).

    Attributes:
        batch_size_per_image: RoIs sampled per image.
        positive_fraction: largest foreground share among them.
        fg_iou_thresh: RoIs with at least this IoU are foreground.
        fg_strict: foreground needs an IoU above `fg_iou_thresh` (NVIDIA's TensorFlow examples).
        bg_iou_range: background IoU, from the first value to below the second.
    """

    batch_size_per_image: int = 512
    positive_fraction: float = 0.25
    fg_iou_thresh: float = 0.5
    fg_strict: bool = False
    bg_iou_range: tuple[float, float] = (0.0, 0.5)

    @property
    def max_foreground(self) -> int:
        """Maximum foreground RoIs per image; they come first in `SampledRoIs`."""
        return round(self.batch_size_per_image * self.positive_fraction)

    def __call__(
        self, key: jax.Array | None, proposals: Proposals, targets: Targets, *, coder: BoxCoder
    ) -> SampledRoIs:
        """Sample one image's RoIs from its proposals and ground-truth boxes.

        key: None samples the lowest rows.
        """
        candidates = jnp.concatenate([proposals.boxes, targets.boxes])
        matched_idxs, labels = matching.match_rois(
            coder.iou(candidates, targets.boxes),
            targets.valid,
            jnp.concatenate([proposals.valid, targets.valid]),
            fg_thresh=self.fg_iou_thresh,
            bg_thresh=self.bg_iou_range[1],
            bg_thresh_low=self.bg_iou_range[0],
            strict=self.fg_strict,
        )
        idxs, labels, valid = matching.sample(
            key, labels, num=self.batch_size_per_image, fg_fraction=self.positive_fraction
        )
        foreground = valid & (labels == 1)
        boxes = jnp.where(valid[:, None], candidates[idxs], 0.0)
        matched_idxs = matched_idxs[idxs]
        deltas = coder.encode_rois(targets.boxes[matched_idxs], boxes)
        return SampledRoIs(
            boxes=boxes,
            classes=jnp.where(foreground, targets.classes[matched_idxs], 0),
            deltas=jnp.where(foreground[:, None], deltas, 0.0),
            matched_idxs=matched_idxs,
            foreground=foreground,
            valid=valid,
        )
