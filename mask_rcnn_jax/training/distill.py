"""Distillation: a teacher beside the model in training, and the losses between the two."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mask_rcnn_jax import parts
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.models.outputs import TrainOutputs
from mask_rcnn_jax.models.teacher import TeacherOutputs, teach
from mask_rcnn_jax.ops import distill_losses
from mask_rcnn_jax.ops.boxes import BoxCoder
from mask_rcnn_jax.ops.extent import STRIDES
from mask_rcnn_jax.ops.losses import masked_mean, smooth_l1
from mask_rcnn_jax.structures import Batch

FEATURE_LOSSES = {
    "pearson": distill_losses.pearson_loss,
    "attention": distill_losses.attention_loss,
}


@dataclass(frozen=True)
class DistillOptions:
    """A teacher, and how much the losses between it and the trained model count.

    Attributes:
        teacher: a run's workdir, one of its checkpoints or a weights file, with the training
            set's classes; '': no teacher.
        recipe: name or path for the teacher's model; '': its run's config. A weights file needs
            one.
        inherit: whether pyramid and heads start with the teacher's weights where they are alike
            (Kang et al., "Instance-Conditional Knowledge Distillation", 2021), unless
            `model.init_from` has them. Needs equal anchors, box coder and kind of classifier.
        checksum: the teacher's; '': training fills it in, and a resumed run compares it.
        feature_weight: factor for the feature loss, summed over the pyramid's levels.
        feature_loss: "pearson": 1 - correlation, channel by channel (Cao et al., "PKD", 2022);
            teacher and student need equal `model.fpn` channels. "attention": 1 - cosine between
            attention maps (Zagoruyko and Komodakis, 2017), for any channels.
        cls_weight: factor for the divergence between class scores at the sampled RoIs.
        temperature: divides both logits in it.
        box_weight: factor for the smooth L1 loss between boxes at foreground RoIs.
        mask_weight: factor for the divergence between masks at foreground RoIs.
        rpn_weight: factor for the divergence between objectness at the sampled anchors; teacher
            and student need equal anchors.
        warmup_until: all weights grow in a straight line up to this fraction of `train.steps`.
        decay_from: they fall to 0 from this fraction to the last step; 1: they do not.
    """

    teacher: str = ""
    recipe: str = ""
    inherit: bool = False
    checksum: str = ""
    feature_weight: float = 1.0
    feature_loss: Literal["pearson", "attention"] = "pearson"
    cls_weight: float = 1.0
    temperature: float = 1.0
    box_weight: float = 0.0
    mask_weight: float = 1.0
    rpn_weight: float = 0.0
    warmup_until: float = 0.0
    decay_from: float = 1.0

    def __post_init__(self):
        names = ("feature_weight", "cls_weight", "box_weight", "mask_weight", "rpn_weight")
        parts.check_at_least(self, **dict.fromkeys(names, 0.0))
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}, expected above 0")
        for name in ("warmup_until", "decay_from"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ValueError(f"{name} is {value}, expected from 0 to 1")
        if self.inherit and not self.teacher:
            raise ValueError("inherit is True, but teacher is '': it names whose weights")
        if self.teacher and not any(getattr(self, name) for name in names):
            raise ValueError(f"teacher is {self.teacher!r}, but all weights of its losses are 0")

    def factor(self, step: jax.Array, steps: int) -> jax.Array:
        """Return the factor for all weights in a step, from 0, when a run has `steps`."""
        warm, cold = self.warmup_until * steps, (1 - self.decay_from) * steps
        factor = jnp.float32(1.0)
        if warm > 0:
            factor = jnp.minimum(factor, (step + 1) / warm)
        if cold > 0:
            factor = jnp.minimum(factor, (steps - step) / cold)
        return factor.astype(jnp.float32)


def distill_options(config: Mapping[str, Any]) -> DistillOptions:
    """Build a config's options. Raises ValueError, naming the entry, for a wrong value."""
    return parts.build(DistillOptions, config.get("distill", {}), "distill")


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
        heads: Any = {"rpn": self.options.rpn_weight > 0, "masks": self.options.mask_weight > 0}
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
        if options.mask_weight and outputs.mask_rois is not None:
            ours, theirs = outputs.mask_logits, teacher.mask_logits
            assert ours is not None and theirs is not None  # `training.teacher.check_fit`
            foreground = outputs.mask_rois.foreground
            mask = distill_losses.mask_divergence(ours, theirs, foreground)
            losses["mask"] = options.mask_weight, mask
        if options.rpn_weight:
            logits, taught = (jnp.concatenate(x.rpn_logits, axis=1) for x in (outputs, teacher))
            each = distill_losses.binary_divergence(logits, taught)
            losses["rpn"] = options.rpn_weight, masked_mean(each, outputs.sampled_labels >= 0)
        return losses

    def _features(self, batch: Batch, outputs: TrainOutputs, teacher: TeacherOutputs) -> jax.Array:
        loss, total = FEATURE_LOSSES[self.options.feature_loss], jnp.float32(0.0)
        for ours, theirs, stride in zip(outputs.pyramid, teacher.pyramid, STRIDES, strict=True):
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
