"""Valid extent of padded feature maps.

Other frameworks pad a batch to its largest image, where their maps end; ours lie on a fixed-size
canvas. Recipes following such a framework mask the rest: convolutions see zeros there, anchors are
invalid, and RoIAlign stops at the last valid cell.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from mask_rcnn_jax.ops.whole import quotient

STRIDES = (4, 8, 16, 32, 64, 128)  # pixels per cell of P2..P7


@dataclass(frozen=True)
class ValidExtent:
    """Canvas size and valid size, anchored at the upper left."""

    canvas: tuple[int, int]  # array (H, W), pixels
    size: jax.Array | None  # [2] int32 valid (height, width), pixels; None: the canvas

    def cells(self, stride: int) -> jax.Array:
        """[2] valid (rows, columns) on a map with that stride; requires `size`."""
        assert self.size is not None
        return quotient(self.size + (stride - 1), stride)

    def mask(self, x: jax.Array) -> jax.Array:
        """Zero a map [B, h, w, C] outside the valid extent."""
        inside = self.inside(x.shape[1:3])
        return x if inside is None else jnp.where(inside, x, 0)

    def inside(self, shape: tuple[int, ...], stride: int = 0) -> jax.Array | None:
        """[1, h, w, 1] bool, whether a map's cells are valid; None if all are.

        shape: (h, w). stride: 0 is that of a map whose cells fill the canvas.
        """
        if self.size is None:
            return None
        stride = stride or -(-self.canvas[0] // shape[0])
        y = lax.broadcasted_iota(jnp.int32, (1, shape[0], 1, 1), 1)
        x = lax.broadcasted_iota(jnp.int32, (1, 1, shape[1], 1), 2)
        return (y * stride < self.size[0]) & (x * stride < self.size[1])


def valid_extent(canvas: tuple[int, int], image_sizes: jax.Array, pad_multiple: int) -> ValidExtent:
    """Return the extent of the largest image, rounded up to `pad_multiple`; 0 for the whole canvas.

    image_sizes: [B, 2] (height, width).
    """
    if not pad_multiple:
        return ValidExtent(canvas, None)
    largest = jnp.max(image_sizes, axis=0)
    parts = quotient(largest + (pad_multiple - 1), pad_multiple)
    return ValidExtent(canvas, parts * pad_multiple)
