"""The grid of anchor boxes, which depends on the canvas alone.

All anchors of a row or a column of cells have two sides in common. Those are worked out on the
host, a few kilobytes; the boxes are put together from them in the program, which would otherwise
carry megabytes of constants.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

ROUNDINGS = ("none", "half_sides", "base_window")


def anchor_grid(
    image_size: tuple[int, int],
    *,
    strides: Sequence[int],
    sizes: Sequence[float],
    shapes: Sequence[tuple[float, float]],
    centre: float = 0.5,
    rounding: str = "none",
    offset: float = 0.0,
) -> list[Float[Array, "A_l 4"]]:
    """Anchors of every pyramid level, `[x1, y1, x2, y2]` in pixels of the canvas.

    Args:
        image_size: (height, width) of the canvas. A level has ceil(side / stride) cells a side.
        strides: pixels per cell, one per level.
        sizes: side of the base square in pixels, one per level.
        shapes: (width, height) multipliers of the base square, one anchor each.
        centre: where in its cell an anchor is centred, in strides: 0.5 is the middle of the cell
            (NVIDIA), 0 its corner (torchvision, Detectron2).
        rounding: "none"; "half_sides" rounds half the width and height to whole pixels
            (torchvision); "base_window" rounds the sides of a shape as large as one cell before it
            is scaled to the level's size (Caffe, and with it NVIDIA's PyTorch recipe).
        offset: 1 for the inclusive-pixel convention, x2 = x1 + width - 1.

    Returns:
        One float32 [A_l, 4] per level, ordered by (row, column, shape). Anchors that reach over
        the edge of the canvas are kept as they are.
    """
    sides = anchor_sides(
        image_size, strides=strides, sizes=sizes, shapes=shapes, centre=centre, rounding=rounding,
        offset=offset,
    )  # fmt: skip
    return [boxes_between(x, y) for x, y in sides]


def anchor_sides(
    image_size: tuple[int, int],
    *,
    strides: Sequence[int],
    sizes: Sequence[float],
    shapes: Sequence[tuple[float, float]],
    centre: float,
    rounding: str,
    offset: float,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Where the anchors of `anchor_grid` begin and end, per level along x and along y.

    float32 [columns, shapes, 2] and [rows, shapes, 2].
    """
    if len(strides) != len(sizes):
        raise ValueError(
            f"{len(strides)} anchor strides but {len(sizes)} sizes, expected one per level"
        )
    if rounding not in ROUNDINGS:
        raise ValueError(f"model.anchor_rounding is {rounding!r}, expected one of {ROUNDINGS}")
    height, width = image_size
    levels = []
    for stride, size in zip(strides, sizes, strict=True):
        half = _half_sides(np.asarray(shapes, np.float64), stride, size, rounding)
        ends = np.stack([-half, half - offset], axis=-1)  # [shapes, (x, y), (begin, end)]
        along = []
        for axis, side in enumerate((width, height)):
            centres = np.arange(-(-side // stride)) * stride + centre * stride
            along.append((centres[:, None, None] + ends[None, :, axis]).astype(np.float32))
        levels.append(tuple(along))
    return levels


def boxes_between(
    x: Float[Array | np.ndarray, "columns shapes 2"], y: Float[Array | np.ndarray, "rows shapes 2"]
) -> Float[Array, "A_l 4"]:
    """The boxes of one level from their sides."""
    grid = (len(y), *x.shape[:2])
    x, y = x[None], y[:, None]
    sides = [jnp.broadcast_to(along[..., end], grid) for end in (0, 1) for along in (x, y)]
    return jnp.stack(sides, axis=-1).reshape(-1, 4)


def cell_index(
    image_size: tuple[int, int], stride: int, anchors_per_cell: int
) -> tuple[np.ndarray, np.ndarray]:
    """The row and the column of the cell of every anchor of one level, [A_l] each."""
    rows, columns = (-(-side // stride) for side in image_size)
    row, column = np.divmod(np.arange(rows * columns), columns)
    return np.repeat(row, anchors_per_cell), np.repeat(column, anchors_per_cell)


def _half_sides(shapes: np.ndarray, stride: int, size: float, rounding: str) -> np.ndarray:
    """Half the (width, height) of every shape at one level, [shapes, 2]."""
    if rounding == "base_window":
        # np.round goes to the even neighbour, as the numpy code of that time did.
        width = np.round(shapes[:, 0] * stride)
        height = np.round(width * shapes[:, 1] / shapes[:, 0])
        return np.stack([width, height], axis=-1) * size / stride / 2
    half = shapes * size / 2
    return np.round(half) if rounding == "half_sides" else half
