"""1-D bilinear sampling with an adaptive number of samples per bin."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def adaptive_samples(
    start: Float[Array, "R"], length: Float[Array, "R"], bins: int
) -> tuple[Float[Array, "R bins 1"], Float[Array, "R 1 1"], Float[Array, "R 1 1"]]:
    """Sample `bins` equal parts of [start, start + length] at most one cell apart.

    Returns:
        Each bin's first sample position, the sample spacing, and the samples per bin (a float):
        ceil(length / bins), or 0 if length <= 0.
    """
    # Undo division rounding: compilers multiply by 1 / bins instead, but 21 cells in 7 bins must
    # give 3 samples, not 4, at exact positions: samples at the very end of the map count, those
    # beyond do not.
    count = jnp.ceil(length / bins)
    count -= (length <= (count - 1.0) * bins).astype(jnp.float32)
    count += (length > count * bins).astype(jnp.float32)
    count = jnp.maximum(count, 0.0)[:, None, None]
    step = length[:, None, None] / (jnp.maximum(count, 1.0) * bins)
    bin_index = jnp.arange(bins, dtype=jnp.float32)[None, :, None]
    return start[:, None, None] + (bin_index * count + 0.5) * step, step, count


def mean_bilinear_weights(
    cell: Float[Array, "#R #P #T"],
    first: Float[Array, "#R #P #T"],
    step: Float[Array, "#R #P #T"],
    count: Float[Array, "#R #P #T"],
    side: Int[Array, "#R #P #T"] | None = None,
    *,
    border: str = "zero",
) -> Float[Array, "R P T"]:
    """Average a cell's bilinear weight over samples at first + i * step, 0 <= i < count.

    Samples are evenly spaced: weights rise below the cell and fall above it, so they sum in closed
    form as two arithmetic series.

    Args:
        side: cell count, for the `border` rules in `roi_align`. None: values fall to zero within
            one cell beyond the last.
    """
    step, last = jnp.maximum(step, 1e-12), count - 1.0  # a single sample does not use its step
    begin = jnp.clip(jnp.ceil((cell - 1.0 - first) / step), 0.0, count)
    middle = jnp.clip(jnp.floor((cell - first) / step), -1.0, last)
    end = jnp.clip(jnp.floor((cell + 1.0 - first) / step), -1.0, last)
    if side is not None and border == "clamp":
        begin = jnp.where(cell == 0.0, 0.0, begin)
        end = jnp.where(cell == side - 1, last, end)
    num_below = jnp.maximum(middle - begin + 1.0, 0.0)
    num_above = jnp.maximum(end - middle, 0.0)
    # A series sums to its length times its middle term.
    below = num_below * (first + step * (begin + middle) / 2.0 - cell + 1.0)
    above = num_above * (cell + 1.0 - first - step * (middle + 1.0 + end) / 2.0)
    if side is not None:
        below = jnp.where(cell == 0.0, num_below, below)
        above = jnp.where(cell == side - 1, num_above, above)
    total = (below + above) / jnp.maximum(count, 1.0)
    return total if side is None else jnp.where(cell < side, total, 0.0)
