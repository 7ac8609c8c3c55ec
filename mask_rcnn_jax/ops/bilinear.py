"""Evenly spaced bilinear samples along one axis of a map, as many as the box asks for."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def adaptive_samples(
    start: Float[Array, "R"], length: Float[Array, "R"], bins: int
) -> tuple[Float[Array, "R bins 1"], Float[Array, "R 1 1"], Float[Array, "R 1 1"]]:
    """Samples of `bins` equal parts of [start, start + length]: at most one cell apart.

    Returns:
        The place of each bin's first sample, their distance, and their number in a bin (a float):
        ceil(length / bins), or 0 for a length of 0 or less.
    """
    # Without the rounding of a division: compilers multiply by 1 / bins instead, and a length of 21
    # cells in 7 bins must give 3 and not 4, and samples where they belong: one at the very end of
    # the map counts and one beyond does not.
    count = jnp.ceil(length / bins)
    count -= (length <= (count - 1.0) * bins).astype(jnp.float32)
    count += (length > count * bins).astype(jnp.float32)
    count = jnp.maximum(count, 0.0)[:, None, None]
    step = length[:, None, None] / (jnp.maximum(count, 1.0) * bins)
    bin_index = jnp.arange(bins, dtype=jnp.float32)[None, :, None]
    return start[:, None, None] + (bin_index * count + 0.5) * step, step, count


def mean_hats(
    cell: Float[Array, "#R #P #T"],
    first: Float[Array, "#R #P #T"],
    step: Float[Array, "#R #P #T"],
    count: Float[Array, "#R #P #T"],
    side: Int[Array, "#R #P #T"] | None = None,
    *,
    border: str = "zero",
) -> Float[Array, "R P T"]:
    """Bilinear weight of a cell, mean over the samples at first + i * step, 0 <= i < count.

    Samples are evenly spaced, so those below the cell, where the weight rises with their place,
    and those above it, where it falls, sum up as two arithmetic series whatever their number.

    Args:
        side: number of cells, for the `border` rules of `roi_align`. None: beyond the last cell
            the values fall to zero within one cell.
    """
    step, last = jnp.maximum(step, 1e-12), count - 1.0  # the step of a single sample is not used
    begin = jnp.clip(jnp.ceil((cell - 1.0 - first) / step), 0.0, count)
    middle = jnp.clip(jnp.floor((cell - first) / step), -1.0, last)
    end = jnp.clip(jnp.floor((cell + 1.0 - first) / step), -1.0, last)
    if side is not None and border == "clamp":
        begin = jnp.where(cell == 0.0, 0.0, begin)
        end = jnp.where(cell == side - 1, last, end)
    num_below = jnp.maximum(middle - begin + 1.0, 0.0)
    num_above = jnp.maximum(end - middle, 0.0)
    # A series is its length times its middle term.
    below = num_below * (first + step * (begin + middle) / 2.0 - cell + 1.0)
    above = num_above * (cell + 1.0 - first - step * (middle + 1.0 + end) / 2.0)
    if side is not None:
        below = jnp.where(cell == 0.0, num_below, below)
        above = jnp.where(cell == side - 1, num_above, above)
    total = (below + above) / jnp.maximum(count, 1.0)
    return total if side is None else jnp.where(cell < side, total, 0.0)
