"""Valid extent of the feature maps of a padded batch.

Other frameworks pad a batch to its largest image, and their maps end there. Ours lie on a canvas of
fixed size. A recipe that follows such a framework masks the rest: convolutions see zeros there,
anchors are not valid, and RoIAlign stops at the last valid cell.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

STRIDES = (4, 8, 16, 32, 64)  # pixels per cell of P2..P6


@dataclass(frozen=True)
class ValidExtent:
    """The size of a batch's arrays and the upper left part of them that is valid."""

    canvas: tuple[int, int]  # (H, W) of the arrays, pixels
    size: jax.Array | None  # [2] int32 (height, width) that is valid, pixels; None: the canvas

    def cells(self, stride: int) -> jax.Array:
        """[2] (rows, columns) of the valid cells of a map with that stride; `size` is not None."""
        return -(-self.size // stride)

    def mask(self, x: jax.Array) -> jax.Array:
        """Set the cells of a map [B, h, w, C] outside the valid extent to zero."""
        if self.size is None:
            return x
        rows, columns = self.cells(-(-self.canvas[0] // x.shape[1]))
        inside = (jnp.arange(x.shape[1]) < rows)[:, None] & (jnp.arange(x.shape[2]) < columns)[None]
        return jnp.where(inside[None, :, :, None], x, 0)


def valid_extent(canvas: tuple[int, int], image_sizes: jax.Array, pad_multiple: int) -> ValidExtent:
    """The extent of a batch whose images have sizes [B, 2] (height, width).

    It ends at the largest image, rounded up to `pad_multiple`; 0 takes the whole canvas.
    """
    if not pad_multiple:
        return ValidExtent(canvas, None)
    largest = jnp.max(image_sizes, axis=0)
    return ValidExtent(canvas, -(-largest // pad_multiple) * pad_multiple)
