"""Losses between a student's outputs and its teacher's.

All are float32, 0 where both are equal, and at least 0 but for rounding. None needs layers between
the two, such as a projection from the student's channels to the teacher's.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mask_rcnn_jax.ops.losses import masked_mean

VARIANCE_FLOOR = 1e-6  # a channel that is the same everywhere becomes 0


def pearson_loss(
    student: Float[Array, "B h w C"], teacher: Float[Array, "B h w C"], inside: Bool[Array, "B h w"]
) -> Float[Array, ""]:
    """Average 1 - r over images and channels, r the correlation between two maps over their cells.

    Half the squared difference between maps normalized to mean 0 and variance 1 (Cao et al.,
    "PKD", 2022), so that neither a map's scale nor its channels with the largest values matter.
    The paper normalizes over a batch; here, each image stands alone, so that the batch's division
    over devices makes no difference.

    inside: the cells that count; an image without any counts as 0.
    """
    difference = _normalized(student, inside) - _normalized(teacher, inside)
    cells = jnp.maximum(jnp.sum(inside, axis=(1, 2)), 1)[:, None]
    return 0.5 * jnp.mean(jnp.sum(difference * difference, axis=(1, 2)) / cells)


def attention_loss(
    student: Float[Array, "B h w C"],
    teacher: Float[Array, "B h w C2"],
    inside: Bool[Array, "B h w"],
) -> Float[Array, ""]:
    """Average 1 - cosine between two attention maps over images, for any numbers of channels.

    Attention sums squares over the channels (Zagoruyko and Komodakis, "Paying more attention to
    attention", 2017, section 3.1); the loss is half the squared difference between maps with norm
    1. inside: as in `pearson_loss`.
    """
    difference = _attention(student, inside) - _attention(teacher, inside)
    return 0.5 * jnp.mean(jnp.sum(difference * difference, axis=(1, 2)))


def softmax_divergence(
    logits: Float[Array, "*dims K1"], teacher: Float[Array, "*dims K1"], temperature: float
) -> Float[Array, "*dims"]:
    """Return the Kullback-Leibler divergence from a teacher's softmax scores, times temperature^2.

    Logits are divided by the temperature; the square keeps the gradients' size (Hinton et al.,
    "Distilling the knowledge in a neural network", 2015, section 2).
    """
    ours, theirs = (
        jax.nn.log_softmax(x.astype(jnp.float32) / temperature) for x in (logits, teacher)
    )
    return temperature**2 * jnp.sum(jnp.exp(theirs) * (theirs - ours), axis=-1)


def binary_divergence(
    logits: Float[Array, "*dims"], teacher: Float[Array, "*dims"], temperature: float = 1.0
) -> Float[Array, "*dims"]:
    """Return the elementwise divergence between sigmoid scores, like `softmax_divergence`."""
    ours, theirs = (x.astype(jnp.float32) / temperature for x in (logits, teacher))
    # With softplus, whose differences cancel where both are equal; see `sigmoid_cross_entropy`.
    gain = jax.nn.softplus(ours) - jax.nn.softplus(theirs)
    return temperature**2 * (gain - jax.nn.sigmoid(theirs) * (ours - theirs))


def mask_divergence(
    logits: Float[Array, "N S S"], teacher: Float[Array, "N S2 S2"], fg: Bool[Array, "N"]
) -> Float[Array, ""]:
    """Average `binary_divergence` over foreground RoIs' mask cells.

    A teacher with another resolution is resampled; both lie on the same boxes.
    """
    if teacher.shape != logits.shape:
        teacher = jax.image.resize(teacher, logits.shape, "linear")
    divergence = binary_divergence(logits, teacher)
    return masked_mean(divergence, jnp.broadcast_to(fg[:, None, None], divergence.shape))


def _normalized(x: Float[Array, "B h w C"], inside: Bool[Array, "B h w"]) -> jax.Array:
    """Give each image's channels mean 0 and variance 1 over its cells, and 0 elsewhere."""
    weight = inside[..., None]
    cells = jnp.maximum(jnp.sum(weight, axis=(1, 2), keepdims=True), 1)
    x = jnp.where(weight, x.astype(jnp.float32), 0.0)
    mean = jnp.sum(x, axis=(1, 2), keepdims=True) / cells
    centered = jnp.where(weight, x - mean, 0.0)
    variance = jnp.sum(centered * centered, axis=(1, 2), keepdims=True) / cells
    return centered / jnp.sqrt(variance + VARIANCE_FLOOR)


def _attention(x: Float[Array, "B h w C"], inside: Bool[Array, "B h w"]) -> jax.Array:
    """Return attention [B, h, w] with norm 1 over each image's cells, 0 elsewhere."""
    squares = jnp.square(jnp.where(inside[..., None], x.astype(jnp.float32), 0.0))
    energy = jnp.mean(squares, axis=-1)
    square = jnp.sum(energy * energy, axis=(1, 2), keepdims=True)
    return energy / jnp.sqrt(jnp.where(square > 0, square, 1.0))
