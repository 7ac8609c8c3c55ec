"""Exponential moving average of the weights."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mask_rcnn_jax.models.quantization import RANGE
from mask_rcnn_jax.ranges import ProperFraction, Ranged


@dataclass(frozen=True)
class WeightAverage(Ranged):
    """An average of parameters and batch statistics over the steps.

    Attributes:
        ema_decay: how much of the average of the weights a step keeps, such as 0.999; 0: no
            average. Evaluations, and commands that take the run, use the average.
        ema_warmup: keep (1 + t) / (10 + t) after t steps where that is less, so that the first
            weights are soon forgotten.
    """

    ema_decay: ProperFraction = 0.0
    ema_warmup: bool = True

    def start(self, variables: dict) -> dict:
        """The average at step 0: a copy, since a step donates both; {} without an average."""
        return jax.tree.map(jnp.copy, variables) if self.ema_decay else {}

    def update(self, average: dict, variables: dict, updates_done: jax.Array) -> dict:
        """The average with the variables after a step.

        updates_done: steps averaged before.
        """
        if not self.ema_decay:
            return average
        decay = jnp.float32(self.ema_decay)
        if self.ema_warmup:
            decay = jnp.minimum(decay, (1 + updates_done) / (10 + updates_done))

        def mean(path: tuple, old: jax.Array, new: jax.Array) -> jax.Array:
            if not jnp.issubdtype(new.dtype, jnp.inexact):
                return new  # a counter
            if path[-1].key == RANGE:
                return new  # starts at 0, which is no range, and is an average itself
            # In this form what does not change, as frozen weights, stays to the last bit.
            return old + ((1 - decay) * (new - old)).astype(new.dtype)

        return jax.tree_util.tree_map_with_path(mean, average, variables)


NO_AVERAGE = WeightAverage()
