"""The k highest of many numbers, in a form that suits GPUs.

There, XLA sorts all n numbers for its own top-k. Unless there is only one row, or dozens, it does
so in bitonic stages: 28 launches for 210,000 numbers and 36 for 280,000, most of which read and
write every number and its index.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int

CHUNK = 8  # neighbors represented by one of them
TILE = 4096  # XLA sorts as many pairs in one launch
MIN_REDUCTION = 3  # a smaller one is not worth the extra launches


def top_k(x: Float32[Array, "*B n"], k: int) -> tuple[Float32[Array, "*B k"], Int[Array, "*B k"]]:
    """Return each row's `k` highest values, descending, and their indices, as `lax.top_k` does.

    Of equal values, the lower index comes first. -0 is below 0; NaN is above infinity or, with its
    sign bit set, below -infinity. No gradient flows through.

    On a CPU, x with more than two axes, those of `jax.vmap` included, is fully sorted.
    """
    x = lax.stop_gradient(x)
    if not _reducible(x.shape[-1], k):
        values, index = lax.top_k(x, k)
        return values, index
    return lax.platform_dependent(
        x, cpu=lambda x: tuple(lax.top_k(x, k)), default=lambda x: by_chunks(x, k)
    )


def by_chunks(x: Float32[Array, "*B n"], k: int) -> tuple[Array, Array]:
    """`top_k` from a few sorts of few elements: the form for GPUs."""
    # Integers with the order of the floats, reversed.
    keys, index = _lowest(~_order(lax.bitcast_convert_type(x, jnp.int32)), k)
    return lax.bitcast_convert_type(_order(~keys), jnp.float32), index


def _order(bits: Array) -> Array:
    """Turn the bits of floats into integers with the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _lowest(keys: Array, k: int) -> tuple[Array, Array]:
    """Return each row's `k` lowest int32 keys, ascending, and their indices.

    They are in the `k` chunks with the lowest minima, of equal ones those that come first: any
    element elsewhere is preceded by these `k` minima.
    """
    *rows, count = keys.shape
    index = lax.broadcasted_iota(jnp.int32, keys.shape, len(rows))
    if _reducible(count, k):
        pad = [(0, 0)] * len(rows) + [(0, -count % CHUNK)]
        keys = jnp.pad(keys, pad, constant_values=jnp.iinfo(jnp.int32).max)
        keys = keys.reshape(*rows, -1, CHUNK)
        _, best = _lowest(jnp.min(keys, axis=-1), k)
        keys = jnp.take_along_axis(keys, best[..., None], axis=-2)
        index = best[..., None] * CHUNK + lax.broadcasted_iota(jnp.int32, keys.shape, keys.ndim - 1)
        keys, index = keys.reshape(*rows, -1), index.reshape(*rows, -1)
    keys, index = lax.sort((keys, index), num_keys=2, is_stable=False)
    return keys[..., :k], index[..., :k]


def _reducible(count: int, k: int) -> bool:
    """Whether chunks leave few enough of `count` elements as candidates for the `k` best."""
    return k > 0 and count > max(TILE, MIN_REDUCTION * CHUNK * k)
