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

from mask_rcnn_jax.ops.anchors import anchor_grid, cell_index

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
            row, column = cell_index(self.canvas, stride, anchors_per_cell)
            rows, columns = self.cells(stride)
            exists.append((row < rows) & (column < columns))
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
    ) -> list[jax.Array | np.ndarray]:
        """Anchors per level, [A_l, 4], of the whole canvas, as `ops.anchors.anchor_grid` has them.

        stride: "level" sets them 4, 8, .. 64 pixels apart; "map" divides the pixels that count by
        the cells that do, as torchvision does, which differs on the last level.
        """
        if stride not in ("level", "map"):
            raise ValueError(f"model.anchor_stride is {stride!r}, expected 'level' or 'map'")
        grid = anchor_grid(
            self.canvas, strides=STRIDES, sizes=sizes, shapes=shapes, centre=centre,
            rounding=rounding, offset=offset,
        )  # fmt: skip
        if stride == "level" or self.extent is None:
            return grid
        moved = []
        for level_stride, boxes in zip(STRIDES, grid, strict=True):
            extra = self.extent // self.cells(level_stride) - level_stride  # [2] (y, x)
            row, column = cell_index(self.canvas, level_stride, len(shapes))
            y, x = (row + centre) * extra[0], (column + centre) * extra[1]
            moved.append(boxes + jnp.stack([x, y, x, y], axis=-1).astype(jnp.float32))
        return moved


def make_frame(canvas: tuple[int, int], image_sizes: jax.Array, pad_multiple: int) -> Frame:
    """The frame of a batch with these image sizes [B, 2]; `pad_multiple` 0 is the whole canvas."""
    if not pad_multiple:
        return Frame(canvas, None)
    largest = jnp.max(image_sizes, axis=0)
    return Frame(canvas, -(-largest // pad_multiple) * pad_multiple)
