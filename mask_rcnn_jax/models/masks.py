"""The task of masks; its head is `roi_heads.MaskHead`, the rules of its targets `mask_targets`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from flax import linen as nn

from mask_rcnn_jax.models.mask_targets import MaskTargets
from mask_rcnn_jax.models.sampling import MaskRoIs
from mask_rcnn_jax.ops import distill_losses, losses
from mask_rcnn_jax.ops.losses import LossOptions
from mask_rcnn_jax.ops.points import in_image
from mask_rcnn_jax.structures import Batch

if TYPE_CHECKING:
    from mask_rcnn_jax.models.outputs import TrainOutputs


@dataclass(frozen=True)
class MaskTask:
    """A `tasks.Task`: an object's mask inside its box.

    The head's logits are [N, M, M] of each RoI's class or, from a head that also learns at points,
    a pair of them and of `outputs.PointOutputs`.
    """

    rule: MaskTargets
    min_size: float  # `roi_align.min_size`
    implementation: str | None = None  # of polygons' targets, see `ops.dispatch`

    name = "mask"
    result = "masks"

    def targets(self, batch: Batch, rois: MaskRoIs, logits: Any) -> Any:
        """Return masks [N, M, M] in 0..1 or, with points, a pair of them and of values [N, P]."""
        at_cells, points = cells_and_points(logits)
        masks = self.rule(
            batch.targets,
            rois,
            batch.image_sizes,
            min_size=max(0.1, self.min_size),
            size=at_cells.shape[-1],
            implementation=self.implementation,
        )
        if points is None:
            return masks
        return masks, self.rule.at(batch.targets, rois, in_image(points.points, rois.boxes))

    def losses(self, outputs: "TrainOutputs", options: LossOptions) -> dict[str, jax.Array]:
        """Return the mean binary cross-entropy over foreground RoIs' cells, and over points."""
        own, rois = outputs.tasks[self.name], outputs.task_rois
        assert rois is not None
        (logits, points), (masks, values) = map(cells_and_points, (own.logits, own.targets))
        terms = {self.name: losses.mask_loss(logits, masks, rois.foreground)}
        if points is not None:
            terms["mask_point"] = losses.point_loss(points.logits, values, rois.foreground)
        return terms

    def divergence(self, logits: Any, teacher: jax.Array, rois: MaskRoIs) -> jax.Array:
        """Return the mean divergence between the foreground RoIs' masks."""
        logits, _ = cells_and_points(logits)
        if logits.shape != teacher.shape:
            theirs, ours = (" x ".join(map(str, x.shape[1:])) for x in (teacher, logits))
            raise ValueError(
                f"distill.teacher finds masks of {theirs} cells, the model learns {ours}: expected "
                "distill.mask_weight=0"
            )
        return distill_losses.mask_divergence(logits, teacher, rois.foreground)

    def found(self, logits: jax.Array, boxes: jax.Array, *, longest: int) -> jax.Array:
        """Return probabilities [B, D, M, M] inside the boxes."""
        return nn.sigmoid(logits)


def cells_and_points(found: Any) -> tuple[Any, Any]:
    """Return the two parts of a mask head's outputs or targets; None for points without them."""
    return found if isinstance(found, tuple) else (found, None)
