"""A recipe's `distill` section."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from mask_rcnn_jax.ranges import Fraction, NotNegative, Positive, Ranged


@dataclass(frozen=True)
class DistillOptions(Ranged):
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
        keypoint_weight: factor for the divergence between heatmaps of keypoints at foreground RoIs.
        rpn_weight: factor for the divergence between objectness at the sampled anchors; teacher
            and student need equal anchors.
        warmup_until: all weights grow in a straight line up to this fraction of `train.steps`.
        decay_from: they fall to 0 from this fraction to the last step; 1: they do not.
    """

    teacher: str = ""
    recipe: str = ""
    inherit: bool = False
    checksum: str = ""
    feature_weight: NotNegative = 1.0
    feature_loss: Literal["pearson", "attention"] = "pearson"
    cls_weight: NotNegative = 1.0
    temperature: Positive = 1.0
    box_weight: NotNegative = 0.0
    mask_weight: NotNegative = 1.0
    keypoint_weight: NotNegative = 0.0
    rpn_weight: NotNegative = 0.0
    warmup_until: Fraction = 0.0
    decay_from: Fraction = 1.0

    def __post_init__(self):
        super().__post_init__()
        losses = "feature", "cls", "box", "mask", "keypoint", "rpn"
        if self.inherit and not self.teacher:
            raise ValueError("inherit is True, but teacher is '': it names whose weights")
        if self.teacher and not any(map(self.weight, losses)):
            raise ValueError(f"teacher is {self.teacher!r}, but all weights of its losses are 0")

    def weight(self, task: str) -> float:
        """Return the factor for a task's loss, such as "mask"."""
        return getattr(self, f"{task}_weight")

    def factor(self, step: jax.Array, steps: int) -> jax.Array:
        """Return the factor for all weights in a step, from 0, when a run has `steps`."""
        warm, cold = self.warmup_until * steps, (1 - self.decay_from) * steps
        factor = jnp.float32(1.0)
        if warm > 0:
            factor = jnp.minimum(factor, (step + 1) / warm)
        if cold > 0:
            factor = jnp.minimum(factor, (steps - step) / cold)
        return factor.astype(jnp.float32)
