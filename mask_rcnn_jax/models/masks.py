"""The task of masks; its head is `roi_heads.MaskHead`, the rules of its targets `mask_targets`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
from flax import linen as nn

from mask_rcnn_jax.models.mask_targets import MaskTargets
from mask_rcnn_jax.models.sampling import MaskRoIs
from mask_rcnn_jax.ops import distill_losses, losses
from mask_rcnn_jax.ops.losses import LossOptions
from mask_rcnn_jax.structures import Batch

if TYPE_CHECKING:
    from mask_rcnn_jax.models.outputs import TrainOutputs


@dataclass(frozen=True)
class MaskTask:
    """A `tasks.Task`: an object's mask inside its box.

    The head's logits are [N, M, M] of each RoI's class, with M twice the side of its features.
    """

    rule: MaskTargets
    min_size: float  # `roi_align.min_size`
    implementation: str | None = None  # of polygons' targets, see `ops.dispatch`

    name = "mask"
    result = "masks"

    def targets(self, batch: Batch, rois: MaskRoIs, *, roi_size: int) -> jax.Array:
        """Return masks [N, M, M] in 0..1."""
        return self.rule(
            batch.targets,
            rois,
            batch.image_sizes,
            min_size=max(0.1, self.min_size),
            size=2 * roi_size,
            implementation=self.implementation,
        )

    def loss(self, outputs: "TrainOutputs", options: LossOptions) -> jax.Array:
        """Return the mean binary cross-entropy over foreground RoIs' cells."""
        own, rois = outputs.tasks[self.name], outputs.task_rois
        assert rois is not None
        return losses.mask_loss(own.logits, own.targets, rois.foreground)

    def divergence(self, logits: jax.Array, teacher: jax.Array, rois: MaskRoIs) -> jax.Array:
        """Return the mean divergence between the foreground RoIs' masks."""
        return distill_losses.mask_divergence(logits, teacher, rois.foreground)

    def found(self, logits: jax.Array, boxes: jax.Array, *, longest: int) -> jax.Array:
        """Return probabilities [B, D, M, M] inside the boxes."""
        return nn.sigmoid(logits)
