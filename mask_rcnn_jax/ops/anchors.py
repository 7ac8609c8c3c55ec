"""Anchor grid.

Anchor x- and y-coordinates are computed per column and row on the host (kilobytes) and broadcast to
boxes on the device, which avoids constants of several megabytes in the program.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from mask_rcnn_jax.ops.extent import STRIDES, ValidExtent
from mask_rcnn_jax.ranges import Fraction, Positives, Range, Ranged


class Anchors(NamedTuple):
    """Anchors per pyramid level, in (row, column, shape) order."""

    boxes: Sequence[Float[Array, "A_l 4"]]  # canvas pixels
    valid: Sequence[Bool[Array, "A_l"]] | None  # whether the cell is valid; None: all are


Shapes = Annotated[
    tuple[tuple[float, float], ...],
    Range("numbers above 0", lambda pairs: pairs and all(min(pair) > 0 for pair in pairs)),
]


@dataclass(frozen=True)
class AnchorGrid(Ranged):
    """Anchors on every level of the pyramid (Ren et al., "Faster R-CNN", 2015).

    Attributes:
        sizes: base square side per level, pixels; as many are the levels: 5 are P2..P6, 4 end at
            P5, and 6 at P7.
        aspect_ratios: (width, height) factors for the base square, one anchor each.
        center: anchor center within a cell, in strides: 0.5 is the middle (NVIDIA), 0 the corner
            (torchvision, Detectron2).
        rounding: "none"; "half_sides" rounds half the width and height to whole pixels
            (torchvision); "base_window" rounds a shape's sides at cell size, before scaling it to
            the level's size (Caffe, maskrcnn-benchmark).
        stride: "level" places anchors 4, 8, 16, .. pixels apart; "map" divides the valid pixels by
            the valid cells, which differs on the last level (torchvision).
    """

    sizes: Positives = (32.0, 64.0, 128.0, 256.0, 512.0)
    aspect_ratios: Shapes = (
        (2**0.5, 0.5**0.5),
        (1.0, 1.0),
        (0.5**0.5, 2**0.5),
    )
    center: Fraction = 0.0
    rounding: Literal["none", "half_sides", "base_window"] = "none"
    stride: Literal["level", "map"] = "level"

    def __post_init__(self):
        super().__post_init__()
        if not 4 <= len(self.sizes) <= len(STRIDES):
            expected = f"expected 5, one per level, or 4 to {len(STRIDES)}, which end at P5 to P7"
            raise ValueError(f"sizes is {self.sizes}, {expected}")

    @property
    def strides(self) -> tuple[int, ...]:
        """Pixels per cell of each level."""
        return STRIDES[: len(self.sizes)]

    @property
    def per_cell(self) -> int:
        """Anchors per map cell."""
        return len(self.aspect_ratios)

    def __call__(self, extent: ValidExtent, *, offset: float = 0.0) -> Anchors:
        """Return the anchors of the whole canvas; anchors beyond its edge are not clipped.

        offset: 1 for inclusive pixels, x2 = x1 + width - 1.
        """
        levels = []
        for stride, size in zip(self.strides, self.sizes, strict=True):
            x, y = self.sides(extent.canvas, stride, size, offset)
            if self.stride == "map" and extent.size is not None:
                extra = extent.size // extent.cells(stride) - stride  # [2] (y, x)
                levels.append(_boxes_between(self._spread(x, extra[1]), self._spread(y, extra[0])))
            else:
                levels.append(_boxes_between(x, y))
        # Barrier: otherwise XLA recomputes the anchors for every ground-truth box.
        boxes = lax.optimization_barrier(levels)
        return Anchors(boxes, None if extent.size is None else self._valid(extent))

    def sides(
        self, canvas: tuple[int, int], stride: int, size: float, offset: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Start and end of a level's anchors along x and y.

        float32 [columns, shapes, 2] and [rows, shapes, 2]; a level has ceil(side / stride) cells.
        """
        half = self._half_sides(stride, size)
        ends = np.stack([-half, half - offset], axis=-1)  # [shapes, (x, y), (start, end)]
        along = []
        for axis, side in enumerate(reversed(canvas)):
            centers = np.arange(-(-side // stride)) * stride + self.center * stride
            along.append((centers[:, None, None] + ends[None, :, axis]).astype(np.float32))
        return along[0], along[1]

    def _half_sides(self, stride: int, size: float) -> np.ndarray:
        """Half (width, height) per shape at one level, [shapes, 2]."""
        shapes = np.asarray(self.aspect_ratios, np.float64)
        if self.rounding == "base_window":
            # np.round rounds half to even, as the original NumPy code did.
            width = np.round(shapes[:, 0] * stride)
            height = np.round(width * shapes[:, 1] / shapes[:, 0])
            return np.stack([width, height], axis=-1) * size / stride / 2
        half = shapes * size / 2
        return np.round(half) if self.rounding == "half_sides" else half

    def _spread(self, sides: np.ndarray, extra: jax.Array) -> jax.Array:
        """Shift anchor sides [cells, shapes, 2] for cells `extra` pixels larger."""
        shift = (np.arange(len(sides), dtype=np.float32) + self.center) * extra.astype(jnp.float32)
        return sides + shift[:, None, None]

    def _valid(self, extent: ValidExtent) -> list[jax.Array]:
        valid = []
        for stride in self.strides:
            row, column = (
                jnp.arange(-(-side // stride)) < count
                for side, count in zip(extent.canvas, extent.cells(stride), strict=True)
            )
            cells = row[:, None] & column[None]
            valid.append(jnp.repeat(cells.reshape(-1), self.per_cell))
        return valid


def _boxes_between(
    x: Float[Array | np.ndarray, "columns shapes 2"], y: Float[Array | np.ndarray, "rows shapes 2"]
) -> Float[Array, "A_l 4"]:
    """Combine one level's x and y sides into boxes."""
    grid = (len(y), *x.shape[:2])
    x, y = x[None], y[:, None]
    sides = [jnp.broadcast_to(along[..., end], grid) for end in (0, 1) for along in (x, y)]
    return jnp.stack(sides, axis=-1).reshape(-1, 4)
