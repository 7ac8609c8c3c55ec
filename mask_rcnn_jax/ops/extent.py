"""Valid extent of padded feature maps.

Other frameworks pad a batch to its largest image, where their maps end; ours lie on a fixed-size
canvas. Recipes following such a framework mask the rest: convolutions see zeros there, anchors are
invalid, and RoIAlign stops at the last valid cell.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

STRIDES = (4, 8, 16, 32, 64)  # pixels per cell of P2..P6


@dataclass(frozen=True)
class ValidExtent:
    """Canvas size and valid size, anchored at the upper left."""

    canvas: tuple[int, int]  # array (H, W), pixels
    size: jax.Array | None  # [2] int32 valid (height, width), pixels; None: the canvas

    def cells(self, stride: int) -> jax.Array:
        """[2] valid (rows, columns) on a map with that stride; requires `size`."""
        return -(-self.size // stride)  # type: ignore[operator]

    def mask(self, x: jax.Array) -> jax.Array:
        """Zero a map [B, h, w, C] outside the valid extent."""
        if self.size is None:
            return x
        rows, columns = self.cells(-(-self.canvas[0] // x.shape[1]))
        inside = (jnp.arange(x.shape[1]) < rows)[:, None] & (jnp.arange(x.shape[2]) < columns)[None]
        return jnp.where(inside[None, :, :, None], x, 0)


def valid_extent(canvas: tuple[int, int], image_sizes: jax.Array, pad_multiple: int) -> ValidExtent:
    """Return the extent of the largest image, rounded up to `pad_multiple`; 0 for the whole canvas.

    image_sizes: [B, 2] (height, width).
    """
    if not pad_multiple:
        return ValidExtent(canvas, None)
    largest = jnp.max(image_sizes, axis=0)
    return ValidExtent(canvas, -(-largest // pad_multiple) * pad_multiple)
