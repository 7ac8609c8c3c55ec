"""The five losses, with the normalisers of the systems that recipes come from.

All sums are float32, whatever the dtype of the network. Every mean divides by max(count, 1): a
batch without foreground gives 0 and gradients of 0.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def huber(x: Float[Array, "*dims"], delta: float) -> Float[Array, "*dims"]:
    """x^2 / 2 up to |x| = delta, then a line of slope delta; = delta * smooth_l1(beta=delta)."""
    magnitude = jnp.abs(x)
    inside = jnp.minimum(magnitude, delta)
    return 0.5 * inside * inside + delta * (magnitude - inside)


def smooth_l1(x: Float[Array, "*dims"], beta: float) -> Float[Array, "*dims"]:
    """x^2 / (2 beta) up to |x| = beta, then a line of slope 1; beta 0 is the absolute value."""
    return huber(x, beta) / beta if beta > 0 else jnp.abs(x)


def sigmoid_cross_entropy(
    logits: Float[Array, "*dims"], labels: Float[Array, "*dims"]
) -> Float[Array, "*dims"]:
    """Binary cross-entropy of sigmoid(logits) elementwise, in a form that cannot overflow.

    With softplus, not max and abs: theirs is a wrong gradient at a logit of exactly 0, and an
    untrained head has those wherever its input is 0.
    """
    return jax.nn.softplus(logits) - logits * labels


def rpn_losses(
    logits: Sequence[Float[Array, "B _A"]],
    deltas: Sequence[Float[Array, "B _A 4"]],
    labels: Int[Array, "B A"],
    matched_labels: Int[Array, "B A"],
    target_deltas: Float[Array, "B A 4"],
    *,
    batch_per_image: int,
    cls_average: str,
    box_loss: str,
    box_beta: float,
    box_average: str,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Objectness and box loss of the region proposal network.

    Args:
        logits, deltas: one array per level, the levels in the order of the anchor axis.
        labels: after sampling, 1 / 0 / -1; the objectness loss takes those >= 0.
        matched_labels: before sampling.
        target_deltas: read where `matched_labels` is 1.
        batch_per_image: anchors that are to be sampled per image.
        cls_average: what the objectness sum is divided by. "budget": `batch_per_image` times
            images, even if fewer were sampled (NVIDIA TF, Detectron2); "sampled": the anchors that
            were (torchvision, maskrcnn-benchmark).
        box_loss, box_beta: "huber" with delta = beta or "smooth_l1" with beta, 0 for L1.
        box_average: "sampled" and "budget" sum over the sampled foreground and divide as above.
            "matched_per_level" takes every anchor that is foreground in `matched_labels`: level by
            level the mean over target coordinates that are not exactly 0, and the sum of those
            means (NVIDIA TF; its code tells padding from targets so, and drops true zeros too).
    """
    sampled = labels >= 0
    counts = {
        "budget": labels.shape[0] * batch_per_image,
        "sampled": jnp.maximum(jnp.sum(sampled), 1),
    }
    if cls_average not in counts:
        raise ValueError(f"loss.rpn_cls_average is {cls_average!r}, expected one of {list(counts)}")
    if box_average not in (*counts, "matched_per_level"):
        known = [*counts, "matched_per_level"]
        raise ValueError(f"loss.rpn_box_average is {box_average!r}, expected one of {known}")
    error_of = _box_error(box_loss, box_beta)
    objectness, box, start = 0.0, 0.0, 0
    for level_logits, level_deltas in zip(logits, deltas, strict=True):
        here = slice(start, start + level_logits.shape[1])
        start = here.stop
        objectness += _objectness_sum(level_logits, labels[:, here])
        targets = target_deltas[:, here]
        error = error_of(level_deltas.astype(jnp.float32) - targets)
        if box_average == "matched_per_level":
            box += _mean(error, (matched_labels[:, here, None] == 1) & (targets != 0.0))
        else:
            foreground = labels[:, here, None] == 1
            box += jnp.sum(jnp.where(foreground, error, 0.0)) / counts[box_average]
    return objectness / counts[cls_average], box


def box_losses(
    class_logits: Float[Array, "B R K1"],
    box_deltas: Float[Array, "B R K1 4"],
    classes: Int[Array, "B R"],
    target_deltas: Float[Array, "B R 4"],
    valid: Bool[Array, "B R"],
    *,
    box_beta: float,
    box_average: str,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Classification and box loss of the box head; K1 is K + 1, with background at 0.

    Softmax cross-entropy, mean over the valid regions; smooth L1 of the deltas of the true class,
    summed over the foreground regions and divided by the number of their coordinates (box_average
    "foreground", NVIDIA TF) or of all valid regions ("rois", the others).
    """
    log_probs = jax.nn.log_softmax(class_logits.astype(jnp.float32))
    is_class = jnp.arange(class_logits.shape[-1])[None, None, :] == classes[..., None]
    class_loss = _mean(-jnp.sum(jnp.where(is_class, log_probs, 0.0), axis=-1), valid)

    chosen = jnp.where(is_class[..., None], box_deltas.astype(jnp.float32), 0.0).sum(axis=2)
    foreground = valid & (classes > 0)
    error = smooth_l1(chosen - target_deltas, box_beta)
    counts = {"foreground": 4 * jnp.sum(foreground), "rois": jnp.sum(valid)}
    if box_average not in counts:
        raise ValueError(f"loss.box_average is {box_average!r}, expected one of {list(counts)}")
    total = jnp.sum(jnp.where(foreground[..., None], error, 0.0))
    return class_loss, total / jnp.maximum(counts[box_average], 1)


def mask_loss(
    mask_logits: Float[Array, "B F S S"],
    targets: Float[Array, "B F S S"],
    fg: Bool[Array, "B F"],
) -> Float[Array, ""]:
    """Binary cross-entropy of the true class's mask, mean over the pixels of foreground regions."""
    error = sigmoid_cross_entropy(mask_logits.astype(jnp.float32), targets)
    return _mean(error, jnp.broadcast_to(fg[..., None, None], error.shape))


def _box_error(name: str, beta: float):
    if name == "huber":
        return lambda x: huber(x, beta)
    if name == "smooth_l1":
        return lambda x: smooth_l1(x, beta)
    raise ValueError(f"loss.rpn_box_loss is {name!r}, expected 'huber' or 'smooth_l1'")


def _objectness_sum(logits: Float[Array, "B A"], labels: Int[Array, "B A"]) -> Float[Array, ""]:
    error = sigmoid_cross_entropy(logits.astype(jnp.float32), (labels == 1).astype(jnp.float32))
    return jnp.sum(jnp.where(labels >= 0, error, 0.0))


def _mean(x: Float[Array, "*dims"], wanted: Bool[Array, "*dims"]) -> Float[Array, ""]:
    """Mean of `x` where `wanted`, 0 where nothing is; other values get no gradient."""
    return jnp.sum(jnp.where(wanted, x, 0.0)) / jnp.maximum(jnp.sum(wanted), 1)
