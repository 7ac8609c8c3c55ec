"""What a task is: what is learned about each object that the detector finds.

Boxes are what the detector finds; masks and keypoints are tasks. A task called "mask" has
  - a head, the model's part and the recipe's section `mask_head`: RoI features to logits;
  - targets for the foreground RoIs of training, and losses between the two: `loss/mask` in the log,
    times `loss.mask_weight`;
  - a divergence from a teacher's logits: `loss/distill_mask`, times `distill.mask_weight`;
  - a result for each detected object, a field of `structures.Detections`.
`MaskRCNN.tasks` lists those of a model; the model, the training step and distillation go over them.
"""

from typing import TYPE_CHECKING, Any, Protocol, no_type_check, runtime_checkable

import jax
from flax import struct

from mask_rcnn_jax.models.sampling import MaskRoIs
from mask_rcnn_jax.ops.losses import LossOptions
from mask_rcnn_jax.structures import Batch

if TYPE_CHECKING:
    from mask_rcnn_jax.models.outputs import TrainOutputs

TASKS = ("mask", "keypoint")  # all that there are, in the order of their losses


@runtime_checkable
class Task(Protocol):
    """A task without its head; hashable, since it is part of a program's outputs.

    N counts the foreground RoIs of all images on a device, packed as `sampling.MaskRoIs` are.
    """

    @property
    def name(self) -> str:
        """One of `TASKS`."""
        ...

    @property
    def result(self) -> str:
        """The field of `Detections` that is the task's."""
        ...

    def targets(self, batch: Batch, rois: MaskRoIs, logits: Any) -> Any:
        """Return what the head should find for each RoI, N rows; those of padding are unspecified.

        logits: the head's outputs, N rows; targets have their size, or are at their points.
        """
        ...

    def losses(self, outputs: "TrainOutputs", options: LossOptions) -> dict[str, jax.Array]:
        """Return the losses [] between the task's logits and targets, without its weight.

        The first has the task's name, others names that begin with it.
        """
        ...

    def divergence(self, logits: Any, teacher: Any, rois: MaskRoIs) -> jax.Array:
        """Return the divergence [] of logits from a teacher's, N rows each."""
        ...

    def found(self, logits: Any, boxes: jax.Array, *, longest: int) -> jax.Array:
        """Return the results [B, D, ..] of the head's outputs for boxes [B, D, 4].

        longest: no box is longer, network pixels.
        """
        ...


@no_type_check  # `jax.tree.map` may put anything into its fields
@struct.dataclass
class TaskOutputs:
    """A task's raw outputs in training, N rows, and what they should have been."""

    logits: Any  # unspecified in padding rows
    targets: Any  # likewise
    task: Any = struct.field(pytree_node=False)  # a `Task`
