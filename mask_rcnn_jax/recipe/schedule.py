"""Learning rate over a run."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from mask_rcnn_jax.ranges import Count, Fraction, NotNegative, NotNegatives, Positive, Ranged


@dataclass(frozen=True)
class Schedule(Ranged):
    """Linear warm-up, then steps down, half a cosine or a polynomial.

    The peak rate follows the global batch (linear scaling rule, Goyal et al., 2017). Cosine and
    polynomial count from the first step; warm-up ends at their value there, as in fvcore.

    Attributes:
        learning_rate: peak at a global batch of `reference_batch`.
        reference_batch: the global batch that `learning_rate` is for.
        warmup_until: the fraction of `train.steps` at which the warm-up ends.
        warmup_factor: the first step's share of the peak.
        schedule: "steps": the peak, lower from each `decay_at` on; "cosine"; "polynomial".
        decay_at: ("steps") fractions of `train.steps` from which on the rate is lower.
        decay_levels: ("steps") the peak's factor from each `decay_at` on.
        end_factor: ("cosine", "polynomial") the peak's factor at the end.
        power: ("polynomial") exponent of the remaining fraction; 1 is a straight line.
    """

    learning_rate: NotNegative = 0.02
    reference_batch: Count = 16
    warmup_until: float = 1000 / 90_000
    warmup_factor: NotNegative = 1e-3
    schedule: Literal["steps", "cosine", "polynomial"] = "steps"
    decay_at: NotNegatives = (60 / 90, 80 / 90)
    decay_levels: NotNegatives = (0.1, 0.01)
    end_factor: Fraction = 0.0
    power: Positive = 1.0

    def __post_init__(self):
        super().__post_init__()
        last = min(self.decay_at, default=1.0) if self.schedule == "steps" else 1.0
        if not 0 <= self.warmup_until <= last:
            first = f"the first of optim.decay_at {self.decay_at}" if last < 1 else "1"
            raise ValueError(
                f"warmup_until is {self.warmup_until}, expected a fraction of the steps from 0 to "
                f"{first}"
            )
        rising = list(self.decay_at) == sorted(self.decay_at)
        if len(self.decay_at) != len(self.decay_levels) or not rising:
            raise ValueError(
                f"decay_at is {self.decay_at} and optim.decay_levels {self.decay_levels}, expected "
                "rising fractions of the steps and a level for each"
            )

    def rates(self, batch_size: int, steps: int) -> optax.Schedule:
        """Return the learning rate by step, for a global batch and a run's length."""
        peak = self.learning_rate * batch_size / self.reference_batch
        start, warmup_end = peak * self.warmup_factor, round(self.warmup_until * steps)
        if self.schedule == "steps":
            boundaries = [warmup_end, *(round(at * steps) for at in self.decay_at)]
            warmup = optax.linear_schedule(start, peak, max(warmup_end, 1))
            levels = [optax.constant_schedule(peak * level) for level in (1.0, *self.decay_levels)]
            return optax.join_schedules([warmup, *levels], boundaries)

        def curve(step: jax.typing.ArrayLike) -> jax.Array:
            left = jnp.clip((steps - jnp.asarray(step)) / steps, 0.0, 1.0)
            # sin(pi x / 2)^2 is (1 - cos(pi x)) / 2, without the digits that the difference loses.
            is_cosine = self.schedule == "cosine"
            share = jnp.sin(jnp.pi / 2 * left) ** 2 if is_cosine else left**self.power
            return peak * (self.end_factor + (1 - self.end_factor) * share)

        def rate(step: jax.typing.ArrayLike) -> jax.Array:
            done = jnp.asarray(step) / max(warmup_end, 1)
            warm = start + (curve(warmup_end) - start) * done
            return jnp.where(jnp.asarray(step) < warmup_end, warm, curve(step))

        return rate
