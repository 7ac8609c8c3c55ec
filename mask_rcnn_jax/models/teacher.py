"""Run a second model beside the one that is trained, on the same images and RoIs."""

from collections.abc import Collection
from typing import Any, no_type_check

import jax
from flax import struct
from jax import lax

from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.models.outputs import TrainOutputs
from mask_rcnn_jax.models.precision import in_precision
from mask_rcnn_jax.models.task_heads import run_head
from mask_rcnn_jax.models.tasks import TASKS
from mask_rcnn_jax.structures import Batch


@no_type_check  # `jax.tree.map` may put anything into its fields
@struct.dataclass
class TeacherOutputs:
    """A teacher's raw outputs, matching those in the student's `TrainOutputs`."""

    pyramid: list[jax.Array]  # P2, P3, .. [B, h, w, C]
    rpn_logits: list[jax.Array]  # per level [B, A_l]; [] if not asked for
    # Of the student's RoIs in each stage that both have: logits [B, R, K + 1] and deltas
    # [B, R, K + 1, 4], the latter for the teacher's box coder
    stages: list[tuple[jax.Array, jax.Array]]
    tasks: dict[str, Any]  # logits of the student's RoIs for each task that both have, N rows


@in_precision
def teach(
    model: MaskRCNN,
    batch: Batch,
    student: TrainOutputs,
    *,
    rpn: bool = True,
    tasks: Collection[str] = TASKS,
) -> TeacherOutputs:
    """Run a teacher as in prediction on a student's images and RoIs; no gradient flows through it.

    For `model.apply(variables, batch, student, method=teach)`. The teacher normalizes the images
    by its own `input`. rpn: whether to run its head. tasks: those whose heads to run.
    """
    pyramid, extent = model.pyramid(batch.images, batch.image_sizes, train=False)
    rpn_logits = model.rpn_outputs(pyramid, extent)[0] if rpn else []
    heads = (model.box_head, *model.cascade.heads)
    stages = [
        head(model.pool(pyramid, stage.rois.boxes, model.box_roi_size, extent))
        for stage, head in zip(student.box_stages, heads, strict=False)
    ]
    logits, rois = {}, student.task_rois
    for name in student.tasks:
        if name in tasks and model.head(name) is not None and rois is not None:
            pooled = model.pool_rois(pyramid, rois, extent, model.roi_size(name))
            rows = pyramid, rois.boxes[None], rois.images[None]
            logits[name] = run_head(model, name, pooled, rois.classes[None], *rows)[0]
    return lax.stop_gradient(TeacherOutputs(pyramid, rpn_logits, stages, logits))
