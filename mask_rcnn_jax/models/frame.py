"""How far the feature maps of a batch reach.

Other frameworks pad a batch to its largest image, and their maps end there. Ours lie on a canvas of
fixed size. Where a recipe wants the others' numbers, what lies beyond the largest image counts as
not there: convolutions see zeros, anchors do not exist, RoIAlign stops at the last cell.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mask_rcnn_jax.ops.anchors import anchor_sides, boxes_between

STRIDES = (4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Frame:
    """The arrays' size and the part of it that counts."""

    canvas: tuple[int, int]  # (H, W) of the arrays, in pixels
    extent: jax.Array | None  # [2] int32 (height, width) that counts; None for all of the canvas

    def cells(self, stride: int) -> jax.Array:
        """[2] (rows, columns) of a map of that stride inside the extent."""
        return -(-self.extent // stride)

    def keep_inside(self, x: jax.Array) -> jax.Array:
        """Zeros in the cells of a map [B, h, w, C] that do not count."""
        if self.extent is None:
            return x
        rows, columns = self.cells(-(-self.canvas[0] // x.shape[1]))
        inside = (jnp.arange(x.shape[1]) < rows)[:, None] & (jnp.arange(x.shape[2]) < columns)[None]
        return jnp.where(inside[None, :, :, None], x, 0)

    def existing_anchors(self, anchors_per_cell: int) -> list[jax.Array] | None:
        """Which anchors of each level are on a cell that counts, [A_l]; None for all."""
        if self.extent is None:
            return None
        exists = []
        for stride in STRIDES:
            whole = [-(-side // stride) for side in self.canvas]
            row, column = (
                jnp.arange(count) < inside
                for count, inside in zip(whole, self.cells(stride), strict=True)
            )
            cells = row[:, None] & column[None]
            exists.append(jnp.repeat(cells.reshape(-1), anchors_per_cell))
        return exists

    def anchors(
        self,
        sizes: Sequence[float],
        shapes: Sequence[tuple[float, float]],
        *,
        centre: float,
        rounding: str,
        offset: float,
        stride: str,
    ) -> list[jax.Array]:
        """Anchors per level, [A_l, 4], of the whole canvas, as `ops.anchors.anchor_grid` has them.

        stride: "level" sets them 4, 8, .. 64 pixels apart; "map" divides the pixels that count by
        the cells that do, as torchvision does, which differs on the last level.
        """
        if stride not in ("level", "map"):
            raise ValueError(f"model.anchor_stride is {stride!r}, expected 'level' or 'map'")
        sides = anchor_sides(
            self.canvas, strides=STRIDES, sizes=sizes, shapes=shapes, centre=centre,
            rounding=rounding, offset=offset,
        )  # fmt: skip
        if stride == "map" and self.extent is not None:
            for level, (x, y) in enumerate(sides):
                extra = self.extent // self.cells(STRIDES[level]) - STRIDES[level]  # [2] (y, x)
                sides[level] = _spread(x, extra[1], centre), _spread(y, extra[0], centre)
        # XLA is to make them once, and not anew for every ground-truth box that they are held to.
        return lax.optimization_barrier([boxes_between(x, y) for x, y in sides])


def _spread(sides: np.ndarray, extra: jax.Array, centre: float) -> jax.Array:
    """The sides [cells, shapes, 2] of anchors whose cells are `extra` pixels larger."""
    moved = (np.arange(len(sides), dtype=np.float32) + centre) * extra.astype(jnp.float32)
    return sides + moved[:, None, None]


def make_frame(canvas: tuple[int, int], image_sizes: jax.Array, pad_multiple: int) -> Frame:
    """The frame of a batch with these image sizes [B, 2]; `pad_multiple` 0 is the whole canvas."""
    if not pad_multiple:
        return Frame(canvas, None)
    largest = jnp.max(image_sizes, axis=0)
    return Frame(canvas, -(-largest // pad_multiple) * pad_multiple)
