"""Stochastic depth (Huang et al., 2016): branches left out for single images in training."""

import jax
import jax.numpy as jnp


def drop_path(x: jax.Array, rate: float, keys: jax.Array | None, number: int) -> jax.Array:
    """Zero x [B, ..] for images drawn with their keys [B], and divide the others by 1 - rate.

    keys: None leaves nothing out. number: of the branch, which draws for itself.
    """
    if keys is None or rate == 0:
        return x
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate))(fold_in(keys, number))
    return jnp.where(jnp.expand_dims(kept, range(1, x.ndim)), x / (1 - rate), 0).astype(x.dtype)


def fold_in(keys: jax.Array, number: int) -> jax.Array:
    """Derive other keys [B] from keys [B]."""
    return jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)
