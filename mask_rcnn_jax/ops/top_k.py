"""The k highest of many numbers, in forms that suit GPUs and TPUs.

On a GPU, XLA sorts all n numbers for its own top-k. Unless there is only one row, or dozens, it
does so in bitonic stages: 28 launches for 210,000 numbers and 36 for 280,000, most of which read
and write every number and its index. For a TPU, too, it sorts nearly always, and takes up to 13
seconds of a processor to compile one sort of many numbers.
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int

from mask_rcnn_jax.platforms import by_platform

CHUNK = 8  # neighbors represented by one of them
TILE = 4096  # XLA sorts as many pairs in one launch
MIN_REDUCTION = 3  # a smaller one is not worth the extra launches
LAST = np.iinfo(np.int32).max
LANES = 128  # of a TPU's vector
MAX_SORT = 2048  # numbers that a TPU sorts as they are


def top_k(x: Float32[Array, "*B n"], k: int) -> tuple[Float32[Array, "*B k"], Int[Array, "*B k"]]:
    """Return each row's `k` highest values, descending, and their indices, as `lax.top_k` does.

    Of equal values, the lower index comes first. -0 is below 0; NaN is above infinity or, with its
    sign bit set, below -infinity. No gradient flows through.

    On a CPU, x with more than two axes, those of `jax.vmap` included, is fully sorted.
    """
    x = lax.stop_gradient(x)
    count = x.shape[-1]

    def plain(x):
        return tuple(lax.top_k(x, k))

    by_sorting = partial(by_chunks, k=k) if _reducible(count, k) else plain
    if not 0 < 2 * k <= count or count <= MAX_SORT:
        return plain(x)
    return by_platform(x, cpu=plain, tpu=partial(by_threshold, k=k), default=by_sorting)


def by_chunks(x: Float32[Array, "*B n"], k: int) -> tuple[Array, Array]:
    """`top_k` from a few sorts of few elements: the form for GPUs."""
    keys, index = _lowest(_keys(x), k)
    return _values(keys), index


def by_threshold(x: Float32[Array, "*B n"], k: int) -> tuple[Array, Array]:
    """`top_k`, 0 < k <= n, from one sort of k elements, those up to the k-th: the form for TPUs."""
    keys = _keys(x)
    rows, pad = keys.shape[:-1], -keys.shape[-1] % LANES
    keys = jnp.pad(keys, [(0, 0)] * len(rows) + [(0, pad)], constant_values=LAST)
    index = lax.broadcasted_iota(jnp.int32, keys.shape, len(rows))

    def count(chosen):
        return jnp.sum(chosen, axis=-1, keepdims=True, dtype=jnp.int32)

    start = jnp.zeros((*rows, 1), jnp.int32)
    kth = _greatest(~LAST + start, 32, lambda key: count(keys < key) < k)
    ties = k - count(keys < kth)  # equal to the k-th and chosen; `last` is the last one's index
    bits = keys.shape[-1].bit_length()
    last = _greatest(start, bits, lambda end: count((keys == kth) & (index < end)) < ties)
    chosen = (keys < kth) | (keys == kth) & (index <= last)
    keys, index = _compact(keys, chosen, k)
    keys, index = lax.sort((keys, index), num_keys=2, is_stable=False)
    return _values(keys), index


def _greatest(lowest: Array, bits: int, holds: Callable[[Array], Array]) -> Array:
    """Return the greatest of the int32 numbers from `lowest` on that differ in `bits` bits.

    holds: whether a number is low enough; `lowest` is.
    """

    def step(i, found):
        candidate = found ^ (1 << (bits - 1 - i))
        return jnp.where(holds(candidate), candidate, found)

    return lax.fori_loop(0, bits, step, lowest)


def _compact(keys: Array, chosen: Array, k: int) -> tuple[Array, Array]:
    """Return each row's `k` chosen keys [.., n] and their indices; n is a multiple of LANES.

    A TPU gathers whole vectors much faster than as many numbers.
    """
    vectors = (*keys.shape[:-1], -1, LANES)
    keys, chosen = keys.reshape(vectors), chosen.reshape(vectors)
    counts = jnp.sum(chosen, axis=-1, dtype=jnp.int32)[..., None, :]
    slot = lax.broadcasted_iota(jnp.int32, (*keys.shape[:-2], k, 1), keys.ndim - 2)
    passed = jnp.cumsum(counts, axis=-1) <= slot  # [.., k, n / LANES]: vectors before a slot's
    vector = jnp.sum(passed, axis=-1, keepdims=True, dtype=jnp.int32)
    rank = slot - jnp.sum(jnp.where(passed, counts, 0), axis=-1, keepdims=True)
    place = jnp.where(chosen, jnp.cumsum(chosen, axis=-1, dtype=jnp.int32) - 1, -1)
    keys = jnp.take_along_axis(keys, vector, axis=-2)
    hit = jnp.take_along_axis(place, vector, axis=-2) == rank
    lane = lax.broadcasted_iota(jnp.int32, keys.shape, keys.ndim - 1)
    index = vector * LANES + lane
    keys, index = (jnp.sum(jnp.where(hit, each, 0), axis=-1) for each in (keys, index))
    return keys, index


def _keys(x: Array) -> Array:
    """Turn floats into int32 with the opposite order."""
    return ~_order(lax.bitcast_convert_type(x, jnp.int32))


def _values(keys: Array) -> Array:
    return lax.bitcast_convert_type(_order(~keys), jnp.float32)


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
        keys = jnp.pad(keys, pad, constant_values=LAST)
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
