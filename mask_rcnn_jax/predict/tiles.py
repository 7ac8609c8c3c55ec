"""Large images and the detections in their tiles."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mask_rcnn_jax.data.bands import Limits
from mask_rcnn_jax.evaluation.encode import ImageDetections
from mask_rcnn_jax.evaluation.merge import merge_views
from mask_rcnn_jax.rle import Window
from mask_rcnn_jax.structures import Detections


class TiledImage(NamedTuple):
    """An image and the windows to look at, which become network inputs one after the other."""

    image: np.ndarray  # uint8 [H, W, 3]
    windows: list[Window]  # see `data.tiles.view_windows`
    pixels: np.ndarray | None = None  # [H, W, C] as in the file; None where `image` is that
    limits: Limits | None = None  # by which `pixels` become 0 to 255


def merge_tiles(image: TiledImage, found: Sequence[Detections], paste: str) -> dict[str, Any]:
    """Merge the detections of each window, in its pixels, into fields of a `Result`."""
    views = []
    for (x0, y0, x1, y1), one in zip(image.windows, found, strict=True):
        rows = np.flatnonzero(one.valid)
        masks = None if one.masks is None else one.masks[rows]
        arrays = one.boxes[rows], one.scores[rows], one.classes[rows].tolist()
        views.append(ImageDetections(0, y1 - y0, x1 - x0, *arrays, masks))
    merged = merge_views(views, image.windows, paste)
    return dict(
        boxes=merged.boxes.astype(np.float32),
        scores=merged.scores,
        classes=np.array(merged.category_ids, np.int32),
        mask_grids=None,
        window_masks=merged.masks,
    )
