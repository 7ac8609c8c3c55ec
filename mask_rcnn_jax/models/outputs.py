"""What the model computes in training, for the losses."""

from typing import Any, no_type_check

import jax
from flax import struct

from mask_rcnn_jax.models.sampling import MaskRoIs, SampledRoIs
from mask_rcnn_jax.models.tasks import TaskOutputs
from mask_rcnn_jax.ops.classifier import SOFTMAX, Classifier
from mask_rcnn_jax.structures import Proposals


@no_type_check  # `jax.tree.map` may put anything into its fields
@struct.dataclass
class StageOutputs:
    """A stage's RoIs in training, and its box head's outputs."""

    rois: SampledRoIs  # with a B axis
    class_logits: jax.Array  # [B, R, K + 1]
    box_deltas: jax.Array  # [B, R, K + 1, 4]


@no_type_check  # `jax.tree.map` may put anything into its fields
@struct.dataclass
class PointOutputs:
    """A mask head's logits at points of each RoI in training."""

    points: jax.Array  # [B, R, P, 2] (x, y) as fractions of the RoI's box
    logits: jax.Array  # [B, R, P] of the true class; unspecified in padding rows


@no_type_check  # `jax.tree.map` may put anything into its fields
@struct.dataclass
class TrainOutputs:
    """Raw outputs and targets from both stages; A counts anchors over all levels."""

    rpn_logits: list[jax.Array]  # per level [B, A_l]
    rpn_deltas: list[jax.Array]  # per level [B, A_l, 4]
    anchor_labels: jax.Array  # [B, A] 1 / 0 / -1, matched
    sampled_labels: jax.Array  # [B, A] 1 / 0 / -1, sampled for the objectness loss
    anchor_deltas: jax.Array  # [B, A, 4] regression targets
    proposals: Proposals  # with a B axis; no loss reads them
    rois: SampledRoIs  # with a B axis
    class_logits: jax.Array  # [B, R, K + 1]
    box_deltas: jax.Array  # [B, R, K + 1, 4]
    # What the tasks' heads were trained on, N RoIs from all images; None without a task.
    task_rois: MaskRoIs | None
    tasks: dict[str, TaskOutputs]  # by name, such as "mask"
    # [] foreground RoIs per image that no row was left for; None where all have one
    dropped_masks: jax.Array | None = None
    stages: tuple[StageOutputs, ...] = ()  # behind the box head
    # [B, K] bool of the box head and of each stage: the classes in its loss; None: all
    drawn_classes: tuple[jax.Array | None, ...] = (None,)
    pyramid: list[jax.Array] = struct.field(default_factory=list)  # P2, P3, ..
    classifier: Classifier = struct.field(pytree_node=False, default=SOFTMAX)

    @property
    def box_stages(self) -> tuple[StageOutputs, ...]:
        """The box head's outputs, and those of the stages behind it."""
        return (StageOutputs(self.rois, self.class_logits, self.box_deltas), *self.stages)

    @property
    def mask_rois(self) -> MaskRoIs | None:
        """What the mask head was trained on; None without a mask head."""
        return self.task_rois if "mask" in self.tasks else None

    @property
    def mask_logits(self) -> Any:
        """[N, M, M] of the true class, unspecified in padding rows; None without a mask head."""
        return self._of_masks("logits")[0]

    @property
    def mask_targets(self) -> Any:
        """[N, M, M] in 0..1, unspecified in padding rows; None without a mask head."""
        return self._of_masks("targets")[0]

    @property
    def point_logits(self) -> Any:
        """[N, P] of a mask head that learns at points, too; None without one."""
        points = self._of_masks("logits")[1]
        return None if points is None else points.logits

    @property
    def point_targets(self) -> Any:
        """[N, P] in 0..1, of the same points."""
        return self._of_masks("targets")[1]

    def _of_masks(self, name: str) -> tuple[Any, Any]:
        own = self.tasks.get("mask")
        found = None if own is None else getattr(own, name)
        return found if isinstance(found, tuple) else (found, None)
