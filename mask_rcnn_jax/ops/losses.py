"""The losses of boxes and masks, with each reference system's normalizers.

All sums are float32, whatever the network dtype. Every mean divides by max(count, 1): a batch
without foreground has zero loss and gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mask_rcnn_jax import parts
from mask_rcnn_jax.ranges import NotNegative, NotNegatives, Ranged

# Of logits [B, R, K + 1], classes [B, R] and valid [B, R].
ClassLoss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class AddedLoss(NamedTuple):
    """A loss of a user's own."""

    name: str
    function: Callable[..., Any]
    weight: float


@dataclass(frozen=True)
class LossOptions(Ranged):
    """Loss normalizers, shapes and weights.

    Attributes:
        rpn_cls_average: objectness divisor. "budget": `model.rpn.batch_size_per_image` times
            images, even if fewer were sampled (NVIDIA's TensorFlow examples, Detectron2);
            "sampled": the sampled anchors (torchvision, maskrcnn-benchmark).
        rpn_box_loss: "huber" with delta = beta, or "smooth_l1" with beta.
        rpn_box_beta: where the RPN box loss becomes linear; 0 is L1.
        rpn_box_average: "sampled" and "budget" sum over the sampled foreground and divide as above.
            "matched_per_level" uses every matched anchor: the sum over levels of the mean over
            target coordinates that are not exactly 0 (NVIDIA's TensorFlow examples; their code
            detects padding this way and drops true zeros too).
        box_beta: where the box head's smooth L1 loss becomes linear; 0 is L1.
        box_average: box head divisor: the coordinates of "foreground" RoIs (NVIDIA's TensorFlow
            examples) or the number of sampled "rois" (the others).
        rpn_box_weight: factor for the RPN box loss.
        box_reg_weight: factor for the box head's box loss.
        mask_weight: factor for the mask loss.
        keypoint_weight: factor for the keypoint loss.
        keypoint_average: its divisor: the labeled keypoints of foreground RoIs that lie inside
            ("visible"), or all that there could be ("budget"): `model.sampling`'s RoIs per image
            times its share of foreground, images and keypoints of an object. detectron2 has both,
            and recommends a weight of 4 for the second.
        own: losses of your own, functions of (outputs, targets, batch) as package.module:function;
            the log names them as the functions.
        own_weights: factors for these; () is 1 for all.
    """

    rpn_cls_average: Literal["budget", "sampled"] = "sampled"
    rpn_box_loss: Literal["huber", "smooth_l1"] = "smooth_l1"
    rpn_box_beta: NotNegative = 1 / 9
    rpn_box_average: Literal["sampled", "budget", "matched_per_level"] = "sampled"
    box_beta: NotNegative = 1.0
    box_average: Literal["foreground", "rois"] = "rois"
    rpn_box_weight: NotNegative = 1.0
    box_reg_weight: NotNegative = 1.0
    mask_weight: NotNegative = 1.0
    keypoint_weight: NotNegative = 1.0
    keypoint_average: Literal["visible", "budget"] = "visible"
    own: tuple[str, ...] = ()
    own_weights: NotNegatives = ()
    added: tuple[AddedLoss, ...] = field(default=(), metadata=parts.NO_ENTRY)  # those of `own`


def huber(x: Float[Array, "*dims"], delta: float) -> Float[Array, "*dims"]:
    """x^2 / 2 up to |x| = delta, then slope delta; equals delta * smooth_l1(x, delta)."""
    magnitude = jnp.abs(x)
    inside = jnp.minimum(magnitude, delta)
    return 0.5 * inside * inside + delta * (magnitude - inside)


def smooth_l1(x: Float[Array, "*dims"], beta: float) -> Float[Array, "*dims"]:
    """x^2 / (2 beta) up to |x| = beta, then slope 1; the absolute value if beta is 0."""
    return huber(x, beta) / beta if beta > 0 else jnp.abs(x)


def sigmoid_cross_entropy(
    logits: Float[Array, "*dims"], labels: Float[Array, "*dims"]
) -> Float[Array, "*dims"]:
    """Elementwise binary cross-entropy on sigmoid(logits), in a form that cannot overflow.

    Uses softplus: max/abs formulations have the wrong gradient at logit 0, which an untrained head
    outputs wherever its input is 0.
    """
    return jax.nn.softplus(logits) - logits * labels


def rpn_losses(
    logits: Sequence[Float[Array, "B _A"]],
    deltas: Sequence[Float[Array, "B _A 4"]],
    labels: Int[Array, "B A"],
    matched_labels: Int[Array, "B A"],
    target_deltas: Float[Array, "B A 4"],
    options: LossOptions,
    *,
    batch_per_image: int,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Objectness and box loss for the region proposal network.

    Args:
        logits: one array per level, in anchor-axis order.
        deltas: as `logits`.
        labels: after sampling, 1 / 0 / -1; the objectness loss uses labels >= 0.
        matched_labels: before sampling.
        target_deltas: read where `matched_labels` is 1.
        batch_per_image: anchors to sample per image.
    """
    sampled = labels >= 0
    counts: dict[str, Any] = {
        "budget": labels.shape[0] * batch_per_image,
        "sampled": jnp.maximum(jnp.sum(sampled), 1),
    }
    box_error = {"huber": huber, "smooth_l1": smooth_l1}[options.rpn_box_loss]
    objectness: Any = 0.0
    box: Any = 0.0
    start = 0
    for level_logits, level_deltas in zip(logits, deltas, strict=True):
        level = slice(start, start + level_logits.shape[1])
        start = level.stop
        is_object = (labels[:, level] == 1).astype(jnp.float32)
        error = sigmoid_cross_entropy(level_logits.astype(jnp.float32), is_object)
        objectness += jnp.sum(jnp.where(sampled[:, level], error, 0.0))
        targets = target_deltas[:, level]
        error = box_error(level_deltas.astype(jnp.float32) - targets, options.rpn_box_beta)
        if options.rpn_box_average == "matched_per_level":
            matched = matched_labels[:, level, None] == 1
            box += masked_mean(error, matched & (targets != 0.0))
        else:
            foreground = labels[:, level, None] == 1
            box += jnp.sum(jnp.where(foreground, error, 0.0)) / counts[options.rpn_box_average]
    return objectness / counts[options.rpn_cls_average], box


def softmax_class_loss(
    logits: Float[Array, "B R K1"], classes: Int[Array, "B R"], valid: Bool[Array, "B R"]
) -> Float[Array, ""]:
    """Softmax cross-entropy averaged over valid RoIs; K1 is K + 1, with background at 0."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    is_class = jnp.arange(logits.shape[-1])[None, None, :] == classes[..., None]
    return masked_mean(-jnp.sum(jnp.where(is_class, log_probs, 0.0), axis=-1), valid)


def sigmoid_class_loss(
    logits: Float[Array, "B R K1"],
    classes: Int[Array, "B R"],
    valid: Bool[Array, "B R"],
    drawn: Bool[Array, "B K"] | None = None,
) -> Float[Array, ""]:
    """Binary cross-entropy summed over the drawn classes, averaged over valid RoIs.

    The logit for background, at 0, is unused. drawn: None for all classes.
    """
    is_class = jnp.arange(1, logits.shape[-1])[None, None] == classes[..., None]
    error = sigmoid_cross_entropy(logits[..., 1:].astype(jnp.float32), is_class.astype(jnp.float32))
    if drawn is not None:
        error = jnp.where(drawn[:, None], error, 0.0)
    return masked_mean(jnp.sum(error, axis=-1), valid)


def box_losses(
    class_logits: Float[Array, "B R K1"],
    box_deltas: Float[Array, "B R K1 4"],
    classes: Int[Array, "B R"],
    target_deltas: Float[Array, "B R 4"],
    valid: Bool[Array, "B R"],
    options: LossOptions,
    class_loss: ClassLoss = softmax_class_loss,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Classification and box loss for the box head; K1 is K + 1, with background at 0.

    The box loss is smooth L1 on the true class's deltas, summed over foreground RoIs and divided by
    `options.box_average`.
    """
    is_class = jnp.arange(class_logits.shape[-1])[None, None, :] == classes[..., None]
    chosen = jnp.where(is_class[..., None], box_deltas.astype(jnp.float32), 0.0).sum(axis=2)
    foreground = valid & (classes > 0)
    error = smooth_l1(chosen - target_deltas, options.box_beta)
    counts = {"foreground": 4 * jnp.sum(foreground), "rois": jnp.sum(valid)}
    total = jnp.sum(jnp.where(foreground[..., None], error, 0.0))
    loss = class_loss(class_logits, classes, valid)
    return loss, total / jnp.maximum(counts[options.box_average], 1)


def mask_loss(
    mask_logits: Float[Array, "*N S S"], targets: Float[Array, "*N S S"], fg: Bool[Array, "*N"]
) -> Float[Array, ""]:
    """Binary cross-entropy on the true class's mask, averaged over foreground RoIs' pixels."""
    error = sigmoid_cross_entropy(mask_logits.astype(jnp.float32), targets)
    return masked_mean(error, jnp.broadcast_to(fg[..., None, None], error.shape))


def point_loss(
    logits: Float[Array, "*N P"], targets: Float[Array, "*N P"], fg: Bool[Array, "*N"]
) -> Float[Array, ""]:
    """Binary cross-entropy at points of masks, averaged over those of foreground RoIs."""
    error = sigmoid_cross_entropy(logits.astype(jnp.float32), targets)
    return masked_mean(error, jnp.broadcast_to(fg[..., None], error.shape))


def masked_mean(x: Float[Array, "*dims"], mask: Bool[Array, "*dims"]) -> Float[Array, ""]:
    """Mean over `mask`, 0 if it is empty; other values get no gradient."""
    return jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(jnp.sum(mask), 1)
