"""The RPN head's gradient on a GPU, in time proportional to the cells that have one.

The losses read a few hundred anchors of an image, in as many cells of its maps, out of a hundred
thousand. The dense gradient of the 3x3 convolution alone takes two thirds of the head's work. Here
the cells with a gradient are found, the nine pixels that each one reads are gathered, and the head
is differentiated on them. In batches with more such cells than expected, the gradient is dense.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mask_rcnn_jax.cpu_kernels.convolution import conv
from mask_rcnn_jax.models.conv import add_conv_bias, products
from mask_rcnn_jax.models.relu import relu
from mask_rcnn_jax.ops.roi_align import gather_sum, gather_sum_transpose
from mask_rcnn_jax.ops.whole import quotient, remainder

Weights = tuple[jax.Array, jax.Array]  # kernel [kh, kw, in, out] and bias [out], float32
Levels = Sequence[jax.Array]  # [B, H_l, W_l, channels] each
SIDE = 3  # of the convolution


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def with_gradient_of_few_cells(
    cells_per_image: int,
    implementation: str | None,
    outputs: Sequence[Levels],
    maps: Levels,
    first: Weights,
    last: Sequence[Weights],
) -> Sequence[Levels]:
    """Return `outputs`, with the gradient of the head that computed them from `maps`.

    Args:
        cells_per_image: beyond this number, on average over the images, the gradient is dense.
        implementation: see `ops.dispatch.choose`.
        outputs: an array [B, H_l, W_l, K] for each of `last`, for each level, in the maps' dtype.
            No gradient flows to them.
        maps: in any floating dtype.
        first: the 3x3 convolution, followed by ReLU.
        last: the 1x1 convolutions that follow.
    """
    return outputs


def _forward(cells_per_image, implementation, outputs, maps, first, last):
    return outputs, (maps, first, last)


def _backward(cells_per_image, implementation, saved, grads):
    maps = saved[0]
    has_gradient = jnp.concatenate(
        [_any([jnp.any(grad != 0, axis=-1) for grad in level]).reshape(-1) for level in grads]
    )
    size = cells_per_image * len(maps[0])
    sparse = partial(_sparse, size, implementation, has_gradient)
    if len(has_gradient) <= size:
        table, *weights = _dense(saved, grads)
    else:
        count = jnp.sum(has_gradient)
        table, *weights = lax.cond(count <= size, sparse, _dense, saved, grads)
    ends = [x.size // x.shape[-1] for x in maps]
    # Taken apart here: each map would be copied out of a branch.
    of_maps = [part.reshape(x.shape) for part, x in zip(lax.split(table, ends), maps, strict=True)]
    return None, of_maps, *weights


with_gradient_of_few_cells.defvjp(_forward, _backward)


def _any(flags: Sequence[jax.Array]) -> jax.Array:
    return jnp.any(jnp.stack(flags), axis=0)


def _dense(saved, grads) -> tuple[jax.Array, Weights, Sequence[Weights]]:
    """Return the gradients of all maps, one table [pixels, C], and of the weights."""

    def head(maps, first, last):
        return [products(_hidden(_convolve(x, first[0]), first[1]), last) for x in maps]

    def _convolve(x, kernel):
        return conv(x, kernel.astype(x.dtype), None, 1, ((1, 1), (1, 1)))

    maps, *weights = jax.vjp(head, *saved)[1](grads)
    return jnp.concatenate([x.reshape(-1, x.shape[-1]) for x in maps]), *weights


def _sparse(
    size: int, implementation: str | None, has_gradient: jax.Array, saved, grads
) -> tuple[jax.Array, Weights, Sequence[Weights]]:
    """`_dense` from the first `size` cells with a gradient, of all levels' [pixels]."""
    maps, first, last = saved
    (cells,) = jnp.nonzero(has_gradient, size=size, fill_value=len(has_gradient))
    valid, cells = cells < len(has_gradient), jnp.minimum(cells, len(has_gradient) - 1)
    taps = _taps(maps, cells.astype(jnp.int32), valid)
    tables = [x.reshape(-1, x.shape[-1]) for x in maps]
    patches = gather_sum(implementation, tables, *taps)

    def head(patches, first, last):
        kernel, bias = first
        flat = kernel.astype(patches.dtype).reshape(-1, kernel.shape[-1])
        hidden = _hidden(patches.reshape(size, -1) @ flat, bias)
        return products(hidden[None, None], last)

    at_cells = [_at(cells, valid, part) for part in zip(*grads, strict=True)]
    patch_grads, *weights = jax.vjp(head, patches, first, last)[1](at_cells)
    return gather_sum_transpose(implementation, patch_grads, len(has_gradient), *taps), *weights


def _hidden(sums: jax.Array, bias: jax.Array) -> jax.Array:
    return relu(add_conv_bias(sums, bias))


def _taps(maps: Levels, cells: jax.Array, valid: jax.Array) -> tuple[jax.Array, ...]:
    """Return the pixels under the convolution at each cell [R], as `gather_sum` takes them.

    Pixels outside of the maps, and all of a cell that is not `valid`, have no weight.
    """
    rows = np.array([x.shape[:3] for x in maps], np.int32)
    starts = np.concatenate([[0], np.cumsum(rows.prod(axis=1))[:-1]]).astype(np.int32)
    level = jnp.sum(cells[:, None] >= jnp.asarray(starts[1:])[None], axis=1)
    start, height, width = (jnp.asarray(x)[level] for x in (starts, rows[:, 1], rows[:, 2]))
    line = quotient(cells - start, width)  # of all the images
    row, column = remainder(line, height), remainder(cells - start, width)
    offsets = jnp.arange(SIDE, dtype=jnp.int32)[None] - SIDE // 2

    def along(place, side):
        places = place[:, None] + offsets
        inside = (places >= 0) & (places < side[:, None]) & valid[:, None]
        kept = jnp.clip(places, 0, side[:, None] - 1)
        return kept[..., None], inside.astype(jnp.float32)[..., None]

    (y, y_weights), (x, x_weights) = along(row, height), along(column, width)
    first_row = start + (line - row) * width  # of the image
    return first_row[:, None, None] + y * width[:, None, None], x, y_weights, x_weights


def _at(cells: jax.Array, valid: jax.Array, levels: Levels) -> jax.Array:
    """Return the values [1, 1, R, K] of a map per level at the valid cells, 0 for the others."""
    found: Any = 0
    start = 0
    for level in levels:
        flat = level.reshape(-1, level.shape[-1])
        inside = valid & (cells >= start) & (cells < start + len(flat))
        place = jnp.clip(cells - start, 0, len(flat) - 1)
        found = jnp.where(inside[:, None], flat.at[place].get(mode="promise_in_bounds"), found)
        start += len(flat)
    return found[None, None]
