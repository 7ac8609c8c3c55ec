"""Box heads in a row, each for the boxes of the one before (Cai and Vasconcelos, "Cascade R-CNN",
2018)."""

from collections.abc import Callable
from dataclasses import field, replace
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from mask_rcnn_jax import parts
from mask_rcnn_jax.models.channels import Channels, Widths
from mask_rcnn_jax.models.outputs import StageOutputs
from mask_rcnn_jax.models.protocols import BoxHeadLike, PartLike, ability
from mask_rcnn_jax.models.sampling import SampledRoIs
from mask_rcnn_jax.ops import matching
from mask_rcnn_jax.ops.boxes import BoxCoder
from mask_rcnn_jax.ops.classifier import Classifier
from mask_rcnn_jax.ranges import check, numbers
from mask_rcnn_jax.structures import Proposals, Targets

Ious = Annotated[tuple[float, ...], numbers("between 0 and 1", lambda iou: 0 < iou < 1)]
Factors = Annotated[tuple[float, ...], numbers("above 0", lambda factor: factor > 0)]
# Head, boxes [B, R, 4] and, in training, the valid ones among them [B, R], to logits and deltas.
RunHead = Callable[..., tuple[jax.Array, jax.Array]]


class Cascade(nn.Module):
    """Stages behind the box head, each with a head like it; without any, it is an ordinary R-CNN.

    RoIs are sampled once. Each stage matches the boxes of the one before, without empty ones, to
    the ground truth. The gradient of each stage in the features is divided by the number of stages.
    Detections have the boxes of the last stage and the mean of the stages' scores. If classes have
    boxes of their own, the next stage gets that of the RoI's class in training, of background that
    of the most probable class, as in prediction.

    Attributes:
        fg_iou_thresh: for each of these stages, the IoU of foreground RoIs; others are background.
            (0.6, 0.7) in the paper; (): no stage.
        weight_factors: for each of them, what multiplies `model.box_coder.weights`.
        box_weights: for each of them, the weights of its `model.box_coder`; (): by factors.
        mean_of: "scores", or "logits" for scores of the mean logits (mmdetection).
        widths: channels where `prune` left fewer, by name, such as (("heads_0/fc1", 512),); (): as
            many as the box head without pruning.
    """

    heads: tuple[nn.Module, ...] = field(default=(), metadata=parts.NO_ENTRY)
    fg_iou_thresh: Ious = ()
    weight_factors: Factors = (2.0, 3.0)
    box_weights: tuple[tuple[float, float, float, float], ...] = ()
    mean_of: Literal["scores", "logits"] = "scores"
    widths: Widths = ()

    def __post_init__(self):
        check(self)
        count = len(self.fg_iou_thresh)
        if count and len(self.weight_factors) != count:
            raise ValueError(
                f"weight_factors is {self.weight_factors}, expected one for each of "
                f"model.cascade.fg_iou_thresh {self.fg_iou_thresh}"
            )
        if len(self.box_weights) not in (0, count) or not all(
            len(weights) == 4 and min(weights) > 0 for weights in self.box_weights
        ):
            expected = f"four numbers above 0 for each of {count} stages"
            raise ValueError(f"box_weights is {self.box_weights}, expected {expected}")
        names = [f"heads_{i}" for i in range(count)]
        if unknown := [n for n, _ in self.widths if n.partition("/")[0] not in names]:
            raise ValueError(f"widths names {unknown[0]!r}, expected layers of {names}")
        super().__post_init__()

    @property
    def prunable(self) -> dict[str, Channels]:
        """Each head's channels."""
        return {
            f"heads_{i}/{name}": channels
            for i, head in enumerate(self.heads)
            for name, channels in ability(head, PartLike, "prunable").items()
        }

    def head_widths(self, i: int) -> Widths:
        """Return a head's widths under its own names."""
        start = f"heads_{i}/"
        return tuple((n.removeprefix(start), w) for n, w in self.widths if n.startswith(start))

    @property
    def trains_batch_stats(self) -> bool:
        """Whether training updates `batch_stats`."""
        return any(ability(head, PartLike, "trains_batch_stats") for head in self.heads)

    def coders(self, coder: BoxCoder) -> list[BoxCoder]:
        """Return the coder of each stage, the box head's first."""
        factors = (1.0, *self.weight_factors[: len(self.heads)])
        weights: list[Any] = [tuple(weight * f for weight in coder.weights) for f in factors]
        weights[1:] = self.box_weights or weights[1:]
        return [replace(coder, weights=each) for each in weights]

    def scale_gradient(self, features: jax.Array) -> jax.Array:
        """Return the features of a stage's RoIs, with its share of their gradient."""
        if not self.heads:
            return features
        fixed = lax.stop_gradient(features)
        return fixed + (features - fixed) / (1 + len(self.heads))

    def train_stages(
        self,
        first: StageOutputs,
        targets: Targets,
        image_sizes: jax.Array,
        run: RunHead,
        coder: BoxCoder,
    ) -> tuple[StageOutputs, ...]:
        """Run the stages behind the first one. targets: with a B axis; image_sizes: [B, 2]."""
        stages, coders = [first], self.coders(coder)
        for i, head in enumerate(self.heads):
            last = stages[-1]
            deltas = self.shared_deltas(last.class_logits, last.box_deltas, last.rois.classes)
            boxes = refine(last.rois.boxes, deltas, image_sizes, coders[i])
            valid = last.rois.valid & jnp.all(coder.sides(boxes) > 0, axis=-1)
            boxes = jnp.where(valid[..., None], boxes, 0.0)

            def label(boxes, valid, targets, i=i):
                return label_rois(boxes, valid, targets, self.fg_iou_thresh[i], coders[i + 1])

            rois = jax.vmap(label)(boxes, valid, targets)
            stages.append(StageOutputs(rois, *run(head, boxes, valid)))
        return tuple(stages[1:])

    def predict_stages(
        self,
        logits: jax.Array,
        deltas: jax.Array,
        proposals: Proposals,
        image_sizes: jax.Array,
        run: RunHead,
        coder: BoxCoder,
        classifier: Classifier,
    ) -> tuple[jax.Array, jax.Array, Proposals, BoxCoder]:
        """Return logits of the mean scores, and deltas, boxes and coder of the last stage.

        logits, deltas: of the box head, for `proposals`.
        """
        coders, all_logits = self.coders(coder), [logits]
        for i, head in enumerate(self.heads):
            deltas = self.shared_deltas(logits, deltas)
            boxes = refine(proposals.boxes, deltas, image_sizes, coders[i])
            proposals = replace(proposals, boxes=boxes)
            logits, deltas = run(head, boxes)
            all_logits.append(logits)
        if self.mean_of == "logits":
            mean = sum(all_logits[1:], all_logits[0]) / len(all_logits)
        else:
            mean = classifier.mean_logits(all_logits)
        return mean, deltas, proposals, coders[-1]

    def shared_deltas(
        self, logits: jax.Array, deltas: jax.Array, classes: jax.Array | None = None
    ) -> jax.Array:
        """Return the deltas [B, R, .., 4] that move each RoI, of [B, R, K + 1, 4] by class.

        classes: [B, R] of the RoIs, 0 for background, which takes its most probable class; None:
            all do.
        """
        if ability(self.heads[0], BoxHeadLike, "class_agnostic"):
            return deltas
        chosen = 1 + jnp.argmax(logits[..., 1:], axis=-1)
        if classes is not None:
            chosen = jnp.where(classes > 0, classes, chosen)
        is_chosen = nn.one_hot(chosen, logits.shape[-1])[..., None]
        return jnp.sum(jnp.where(is_chosen > 0, deltas, 0.0), axis=2, keepdims=True)


def refine(
    boxes: jax.Array, deltas: jax.Array, image_sizes: jax.Array, coder: BoxCoder
) -> jax.Array:
    """Move boxes [B, R, 4] by deltas [B, R, K + 1, 4] that all classes share, inside the image.

    No gradient flows through them.
    """
    moved = coder.decode_rois(deltas[:, :, -1], boxes)
    return lax.stop_gradient(jax.vmap(coder.clip)(moved, image_sizes))


def label_rois(
    boxes: jax.Array, valid: jax.Array, targets: Targets, fg_iou_thresh: float, coder: BoxCoder
) -> SampledRoIs:
    """Match one image's boxes [R, 4] to its ground truth; the others are background."""
    iou = coder.iou(boxes, targets.boxes)
    matched_idxs, labels = matching.match_rois(
        iou, targets.valid, valid, fg_thresh=fg_iou_thresh, bg_thresh=fg_iou_thresh
    )
    foreground = labels == 1
    deltas = coder.encode_rois(targets.boxes[matched_idxs], boxes)
    return SampledRoIs(
        boxes=boxes,
        classes=jnp.where(foreground, targets.classes[matched_idxs], 0),
        deltas=jnp.where(foreground[:, None], deltas, 0.0),
        matched_idxs=matched_idxs,
        foreground=foreground,
        valid=valid,
    )
