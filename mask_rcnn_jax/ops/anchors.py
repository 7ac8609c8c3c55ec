"""The grid of anchor boxes, made on the host: it depends on the canvas alone."""

from collections.abc import Sequence

import numpy as np


def anchor_grid(
    image_size: tuple[int, int],
    *,
    strides: Sequence[int],
    sizes: Sequence[float],
    shapes: Sequence[tuple[float, float]],
    centre: float = 0.5,
    rounded: bool = False,
) -> list[np.ndarray]:
    """Anchors of every pyramid level, `[x1, y1, x2, y2]` in pixels of the canvas.

    Args:
        image_size: (height, width) of the canvas. A level has ceil(side / stride) cells a side.
        strides: pixels per cell, one per level.
        sizes: side of the base square in pixels, one per level.
        shapes: (width, height) multipliers of the base square, one anchor each.
        centre: where in its cell an anchor is centred, in strides: 0.5 is the middle of the cell
            (NVIDIA's TensorFlow recipes), 0 its corner (torchvision, Detectron2).
        rounded: round half the width and height to whole pixels, as torchvision does.

    Returns:
        One float32 [A_l, 4] per level, ordered by (row, column, shape). Anchors that reach over
        the edge of the canvas are kept as they are.
    """
    if len(strides) != len(sizes):
        raise ValueError(
            f"{len(strides)} anchor strides but {len(sizes)} sizes, expected one per level"
        )
    levels = zip(strides, sizes, strict=True)
    return [_level(image_size, s, size, shapes, centre, rounded) for s, size in levels]


def _level(
    image_size: tuple[int, int],
    stride: int,
    size: float,
    shapes: Sequence[tuple[float, float]],
    centre: float,
    rounded: bool,
) -> np.ndarray:
    rows, columns = (-(-side // stride) for side in image_size)
    y = (np.arange(rows) + centre) * stride
    x = (np.arange(columns) + centre) * stride
    centres = np.stack([*np.meshgrid(x, y)] * 2, axis=-1)  # [rows, columns, (x, y, x, y)]
    half = np.asarray(shapes, np.float64) * size / 2
    if rounded:
        half = np.round(half)
    corners = np.concatenate([-half, half], axis=-1)  # [shapes, 4]
    boxes = centres[:, :, None, :] + corners[None, None]
    return boxes.reshape(-1, 4).astype(np.float32)
