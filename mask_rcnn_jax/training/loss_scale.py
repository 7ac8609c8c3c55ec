"""Dynamic loss scaling for float16, as an optax transformation around an optimizer.

Small gradients vanish in float16. The step multiplies the loss by a scale, which scales the
gradients; they are divided by it here before they reach the optimizer. An overflow means the scale
is too large: that step changes nothing but the scale, which is halved. After enough steps without
an overflow the scale is doubled.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.tree import where


class LossScaleState(NamedTuple):
    """The scale, what it depends on, and the state of the optimizer inside."""

    scale: jax.Array  # float32 [], the factor of the next step's loss
    good_steps: jax.Array  # int32 [], steps since the scale changed or overflowed
    skipped: jax.Array  # int32 [], steps that changed nothing, since the start
    inner: optax.OptState


def dynamic_loss_scale(
    inner: optax.GradientTransformation, init_scale: float, growth_interval: int, floor: float
) -> optax.GradientTransformation:
    """`inner` for gradients of a loss that was multiplied by `state.scale`.

    Where the global norm of the gradients is not finite, the updates are zero and the state of
    `inner` stays. The caller leaves alone what else the step would have changed: `skipped` rises
    then. growth_interval: good steps after which the scale doubles. floor: the smallest scale; a
    skip that leaves it there means that no scale helps.
    """

    def init(params):
        # Two zeros: one buffer in two places could not be donated.
        good_steps, skipped = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        return LossScaleState(jnp.float32(init_scale), good_steps, skipped, inner.init(params))

    def update(grads, state, params=None):
        grads = jax.tree.map(lambda g: g / state.scale, grads)
        finite = jnp.isfinite(optax.tree.norm(grads))
        updates, inner_state = inner.update(grads, state.inner, params)
        good_steps = jnp.where(finite, state.good_steps + 1, 0)
        grows = (good_steps >= growth_interval) & jnp.isfinite(2 * state.scale)
        risen = jnp.where(grows, 2 * state.scale, state.scale)
        updates = where(finite, updates, optax.tree.zeros_like(updates))
        return updates, LossScaleState(
            scale=jnp.where(finite, risen, jnp.maximum(state.scale / 2, floor)),
            good_steps=jnp.where(grows, 0, good_steps),
            skipped=state.skipped + ~finite,
            inner=where(finite, inner_state, state.inner),
        )

    return optax.GradientTransformation(init, update)
