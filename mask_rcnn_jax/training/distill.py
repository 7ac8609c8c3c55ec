"""Distillation: a teacher beside the model in training, and the losses between the two."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.models.outputs import TrainOutputs
from mask_rcnn_jax.models.tasks import TASKS
from mask_rcnn_jax.models.teacher import TeacherOutputs, teach
from mask_rcnn_jax.ops import distill_losses
from mask_rcnn_jax.ops.boxes import BoxCoder
from mask_rcnn_jax.ops.extent import STRIDES
from mask_rcnn_jax.ops.losses import masked_mean, smooth_l1
from mask_rcnn_jax.recipe.distillation import DistillOptions
from mask_rcnn_jax.structures import Batch

FEATURE_LOSSES = {
    "pearson": distill_losses.pearson_loss,
    "attention": distill_losses.attention_loss,
}


@dataclass(frozen=True)
class Distillation:
    """The losses between a student and a teacher, whose variables come with each step."""

    options: DistillOptions
    teacher: MaskRCNN
    student: MaskRCNN
    steps: int  # of the run

    def teach(
        self, teacher_variables: Mapping[str, Any], batch: Batch, outputs: TrainOutputs
    ) -> TeacherOutputs:
        """Run the teacher's parts that the losses read."""
        tasks = tuple(name for name in TASKS if self.options.weight(name) > 0)
        heads: Any = {"rpn": self.options.rpn_weight > 0, "tasks": tasks}
        found: Any = self.teacher.apply(teacher_variables, batch, outputs, method=teach, **heads)
        return found

    def add(
        self,
        terms: Mapping[str, jax.Array],
        teacher_variables: Mapping[str, Any],
        batch: Batch,
        outputs: TrainOutputs,
        step: jax.Array,
    ) -> dict[str, jax.Array]:
        """Return the student's losses with those that have a weight, also in `loss/total`.

        batch: as the student saw it, that is, flipped. step: that is taken, from 0.
        """
        found = self.teach(teacher_variables, batch, outputs)
        factor = self.options.factor(step, self.steps)
        more = {
            f"loss/distill_{name}": factor * weight * loss
            for name, (weight, loss) in self._losses(batch, outputs, found).items()
        }
        return {**terms, "loss/total": terms["loss/total"] + sum(more.values()), **more}

    def _losses(
        self, batch: Batch, outputs: TrainOutputs, teacher: TeacherOutputs
    ) -> dict[str, tuple[float, jax.Array]]:
        """Return weight and value for each loss with a weight."""
        options, losses = self.options, {}
        if options.feature_weight:
            losses["features"] = options.feature_weight, self._features(batch, outputs, teacher)
        pairs = list(zip(outputs.box_stages, teacher.stages, strict=False))
        if options.cls_weight:
            divergence: Any = sum(
                self.student.classifier.divergence(
                    stage.class_logits, logits, stage.rois.valid, options.temperature
                )
                for stage, (logits, _) in pairs
            )
            losses["cls"] = options.cls_weight, divergence
        if options.box_weight:
            losses["box"] = options.box_weight, self._boxes(pairs)
        for name, own in outputs.tasks.items():
            if weight := options.weight(name):
                theirs = teacher.tasks[name]  # it is there: `training.teacher.check_fit`
                losses[name] = weight, own.task.divergence(own.logits, theirs, outputs.task_rois)
        if options.rpn_weight:
            logits, taught = (jnp.concatenate(x.rpn_logits, axis=1) for x in (outputs, teacher))
            each = distill_losses.binary_divergence(logits, taught)
            losses["rpn"] = options.rpn_weight, masked_mean(each, outputs.sampled_labels >= 0)
        return losses

    def _features(self, batch: Batch, outputs: TrainOutputs, teacher: TeacherOutputs) -> jax.Array:
        loss, total = FEATURE_LOSSES[self.options.feature_loss], jnp.float32(0.0)
        maps = zip(outputs.pyramid, teacher.pyramid, strict=True)
        for stride, (ours, theirs) in zip(STRIDES, maps, strict=False):
            inside = cells_inside(batch.image_sizes, stride, ours.shape[1:3])
            total += loss(ours, theirs, inside)
        return total

    def _boxes(self, pairs) -> jax.Array:
        """Sum the box loss over stages, the teacher's boxes in the student's coordinates."""
        coders, theirs = (m.cascade.coders(m.box_coder) for m in (self.student, self.teacher))
        total: Any = 0.0
        for (stage, (_, deltas)), coder, other in zip(pairs, coders, theirs, strict=False):
            is_class = jnp.arange(deltas.shape[2])[None, None] == stage.rois.classes[..., None]
            ours, taught = (
                jnp.sum(jnp.where(is_class[..., None], x, 0.0), axis=2)
                for x in (stage.box_deltas, deltas)
            )
            taught = translate(taught, stage.rois.boxes, other, coder)
            foreground = (stage.rois.valid & (stage.rois.classes > 0))[..., None]
            error = smooth_l1(ours - taught, 1.0)
            total += masked_mean(error, jnp.broadcast_to(foreground, error.shape))
        return total


def cells_inside(image_sizes: jax.Array, stride: int, shape: tuple[int, ...]) -> jax.Array:
    """Mark a map's cells that begin inside their image, [B, h, w] bool.

    image_sizes: [B, 2] (height, width). shape: the map's (h, w).
    """
    rows, columns = (
        (stride * jnp.arange(cells))[None] < image_sizes[:, axis, None]
        for axis, cells in enumerate(shape)
    )
    return rows[:, :, None] & columns[:, None, :]


def translate(deltas: jax.Array, boxes: jax.Array, source: BoxCoder, target: BoxCoder) -> jax.Array:
    """Convert deltas [.., 4] for one box coder into those for another."""
    if source == target:
        return deltas
    return target.encode_rois(source.decode_rois(deltas, boxes), boxes)
