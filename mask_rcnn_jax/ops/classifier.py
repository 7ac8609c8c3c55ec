"""Class scores of RoIs and their loss: softmax, or a sigmoid per class for many classes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from mask_rcnn_jax import parts
from mask_rcnn_jax.ops import distill_losses, losses
from mask_rcnn_jax.ranges import NotNegative, Ranged


@dataclass(frozen=True)
class Classifier(Ranged):
    """Turn class logits into scores, and learn them.

    Attributes:
        kind: "softmax" over the classes and background, or "sigmoid" for each class by itself; the
            logit for background is unused then.
        federated_classes: classes in an image's sigmoid loss (federated loss, Zhou et al.,
            "Probabilistic two-stage detection", 2021): those of its sampled RoIs, background
            counts as one of them, and random others up to this number. 0: all classes.
        frequency_power: random classes are drawn with probabilities proportional to their numbers
            of training images to this power.
        image_counts: training images with each class, class 1 first; (): all the same.
    """

    kind: Literal["softmax", "sigmoid"] = "softmax"
    federated_classes: int = 0
    frequency_power: NotNegative = 0.5
    image_counts: tuple[int, ...] = field(default=(), metadata=parts.NO_ENTRY)

    def __post_init__(self):
        super().__post_init__()
        count = self.federated_classes
        if count < 0 or (count and self.kind != "sigmoid"):
            expected = "0 or more" if self.kind == "sigmoid" else "0 unless kind is 'sigmoid'"
            raise ValueError(f"federated_classes is {count}, expected {expected}")

    def scores(self, logits: Float[Array, "*dims K1"]) -> Float[Array, "*dims K"]:
        """Return the scores for the classes without background."""
        if self.kind == "sigmoid":
            return jax.nn.sigmoid(logits[..., 1:])
        return jax.nn.softmax(logits)[..., 1:]

    def mean_logits(self, logits: Sequence[Float[Array, "*dims K1"]]) -> Float[Array, "*dims K1"]:
        """Return logits whose scores are the mean of the scores of these."""
        if len(logits) == 1:
            return logits[0]
        each = jnp.stack(logits)
        if self.kind == "softmax":
            return jax.nn.logsumexp(jax.nn.log_softmax(each), axis=0)
        yes, no = (jax.nn.logsumexp(jax.nn.log_sigmoid(x), axis=0) for x in (each, -each))
        return yes - no

    def draw(
        self,
        keys: Key[Array, "B"] | None,
        classes: Int[Array, "B R"],
        valid: Bool[Array, "B R"],
        num_classes: int,
        stage: int = 0,
    ) -> Bool[Array, "B K"] | None:
        """Draw the classes in each image's loss; None for all of them.

        A function of the image's key and RoIs alone, so the number of devices changes nothing.

        keys: None takes the most frequent of the other classes. classes: 0 for background. stage:
            of a cascade; each has a draw of its own.
        """
        if not self.federated_classes:
            return None
        counts = np.asarray(self.image_counts or (1,) * num_classes, np.float64)
        with np.errstate(divide="ignore"):  # a class without images is never drawn
            log_weights = np.log(counts**self.frequency_power).astype(np.float32)
        noise = jnp.zeros((len(classes), num_classes))
        if keys is not None:
            # The samplers split the same key, which makes those of 0 and 1.
            own = jax.vmap(partial(jax.random.fold_in, data=2 + stage))(keys)
            noise = jax.vmap(partial(jax.random.gumbel, shape=(num_classes,)))(own)
        draw = partial(_federated_classes, num=self.federated_classes)
        scores = jnp.asarray(log_weights)[None] + noise
        return jax.vmap(draw)(scores, classes, valid)

    def loss(
        self,
        logits: Float[Array, "B R K1"],
        classes: Int[Array, "B R"],
        valid: Bool[Array, "B R"],
        drawn: Bool[Array, "B K"] | None = None,
    ) -> Float[Array, ""]:
        """Return the cross-entropy, averaged over valid RoIs.

        drawn: of "sigmoid", whose loss is the sum over the drawn classes; None for all.
        """
        if self.kind == "sigmoid":
            return losses.sigmoid_class_loss(logits, classes, valid, drawn)
        return losses.softmax_class_loss(logits, classes, valid)

    def divergence(
        self,
        logits: Float[Array, "B R K1"],
        teacher: Float[Array, "B R K1"],
        valid: Bool[Array, "B R"],
        temperature: float,
    ) -> Float[Array, ""]:
        """Return the divergence from a teacher's scores, averaged over valid RoIs.

        temperature: see `ops.distill_losses.softmax_divergence`.
        """
        if self.kind == "sigmoid":
            each = distill_losses.binary_divergence(logits[..., 1:], teacher[..., 1:], temperature)
            divergence = jnp.sum(each, axis=-1)
        else:
            divergence = distill_losses.softmax_divergence(logits, teacher, temperature)
        return losses.masked_mean(divergence, valid)


SOFTMAX = Classifier()


def _federated_classes(
    scores: Float[Array, "K"], classes: Int[Array, "R"], valid: Bool[Array, "R"], num: int
) -> Bool[Array, "K"]:
    """Return the classes of valid RoIs, and those of the highest scores until there are `num`.

    Scores are the logarithms of weights plus Gumbel noise, so the highest ones are a draw without
    replacement by weight. Background counts as a class if a RoI has it.
    """
    is_class = classes[:, None] == jnp.arange(len(scores) + 1)[None]
    present = jnp.any(is_class & valid[:, None], axis=0)
    scores = jnp.where(present[1:], -jnp.inf, scores)
    rank = jnp.argsort(jnp.argsort(-scores))
    others = (rank < num - jnp.sum(present)) & (scores > -jnp.inf)
    return present[1:] | others
