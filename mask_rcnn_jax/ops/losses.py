"""The five losses, with the normalisers of NVIDIA's TensorFlow 2 recipe.

All sums are float32, whatever the dtype of the network. Every mean divides by max(count, 1): a
batch without foreground gives 0 and gradients of 0.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

RPN_HUBER_DELTA = 1.0 / 9.0


def huber(x: Float[Array, "*dims"], delta: float) -> Float[Array, "*dims"]:
    """x^2 / 2 up to |x| = delta, then a line of slope delta; = delta * smooth_l1(beta=delta)."""
    magnitude = jnp.abs(x)
    inside = jnp.minimum(magnitude, delta)
    return 0.5 * inside * inside + delta * (magnitude - inside)


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
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Objectness and box loss of the region proposal network.

    Args:
        logits, deltas: one array per level, the levels in the order of the anchor axis.
        labels: after sampling, 1 / 0 / -1; the objectness loss takes those >= 0.
        matched_labels: before sampling; the box loss takes every anchor that is foreground there.
        target_deltas: read where `matched_labels` is 1.
        batch_per_image: anchors sampled per image, the objectness normaliser even if fewer were.

    The box loss is, level by level, the mean over target coordinates that are not exactly 0, and
    the sum of those means: this is how NVIDIA's code tells padding from targets, and it also drops
    a true target of 0.
    """
    objectness, box, start = 0.0, 0.0, 0
    for level_logits, level_deltas in zip(logits, deltas, strict=True):
        end = start + level_logits.shape[1]
        objectness += _objectness_sum(level_logits, labels[:, start:end])
        targets = target_deltas[:, start:end]
        wanted = (matched_labels[:, start:end, None] == 1) & (targets != 0.0)
        error = huber(level_deltas.astype(jnp.float32) - targets, RPN_HUBER_DELTA)
        box += _mean(error, wanted)
        start = end
    return objectness / (labels.shape[0] * batch_per_image), box


def box_losses(
    class_logits: Float[Array, "B R K1"],
    box_deltas: Float[Array, "B R K1 4"],
    classes: Int[Array, "B R"],
    target_deltas: Float[Array, "B R 4"],
    valid: Bool[Array, "B R"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Classification and box loss of the box head; K1 is K + 1, with background at 0.

    Softmax cross-entropy, mean over the valid regions; Huber (delta 1) of the deltas of the true
    class, mean over the coordinates of the foreground regions.
    """
    log_probs = jax.nn.log_softmax(class_logits.astype(jnp.float32))
    is_class = jnp.arange(class_logits.shape[-1])[None, None, :] == classes[..., None]
    class_loss = _mean(-jnp.sum(jnp.where(is_class, log_probs, 0.0), axis=-1), valid)

    chosen = jnp.where(is_class[..., None], box_deltas.astype(jnp.float32), 0.0).sum(axis=2)
    fg = valid & (classes > 0)
    error = huber(chosen - target_deltas, 1.0)
    return class_loss, _mean(error, jnp.broadcast_to(fg[..., None], error.shape))


def mask_loss(
    mask_logits: Float[Array, "B F S S"],
    targets: Float[Array, "B F S S"],
    fg: Bool[Array, "B F"],
) -> Float[Array, ""]:
    """Binary cross-entropy of the true class's mask, mean over the pixels of foreground regions."""
    error = sigmoid_cross_entropy(mask_logits.astype(jnp.float32), targets)
    return _mean(error, jnp.broadcast_to(fg[..., None, None], error.shape))


def _objectness_sum(logits: Float[Array, "B A"], labels: Int[Array, "B A"]) -> Float[Array, ""]:
    error = sigmoid_cross_entropy(logits.astype(jnp.float32), (labels == 1).astype(jnp.float32))
    return jnp.sum(jnp.where(labels >= 0, error, 0.0))


def _mean(x: Float[Array, "*dims"], wanted: Bool[Array, "*dims"]) -> Float[Array, ""]:
    """Mean of `x` where `wanted`, 0 where nothing is; other values get no gradient."""
    return jnp.sum(jnp.where(wanted, x, 0.0)) / jnp.maximum(jnp.sum(wanted), 1)
