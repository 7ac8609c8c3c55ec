"""Large images and the detections in their tiles."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mask_rcnn_jax.evaluation.encode import ImageDetections
from mask_rcnn_jax.evaluation.merge import merge_views, with_window_masks
from mask_rcnn_jax.images.bands import Bands, Limits
from mask_rcnn_jax.predict.large import LargeImage
from mask_rcnn_jax.rle import Window
from mask_rcnn_jax.structures import Detections


class TiledImage(NamedTuple):
    """An image and the windows to look at, which become network inputs one after the other."""

    image: np.ndarray  # uint8 [H, W, 3]
    windows: list[Window]  # see `data.tiles.view_windows`
    pixels: np.ndarray | None = None  # [H, W, C] as in the file; None where `image` is that
    limits: Limits | None = None  # by which `pixels` become 0 to 255
    large: LargeImage | None = None  # where the pixels are, if `image` is black

    def view(self, number: int, at_least: tuple[int, int], bands: Bands) -> np.ndarray:
        """[h, w, C] in 0..255 of a window; of the whole of a large image, `at_least` so many pixels
        or more."""
        window = x0, y0, x1, y1 = self.windows[number]
        if self.large is None:
            pixels = self.image if self.pixels is None else self.pixels
            return bands.scaled(pixels[y0:y1, x0:x1], self.limits)
        return self.large.overview(at_least) if number == 0 else self.large.read(window)


def as_view(found: Detections, window: Window, paste: str) -> ImageDetections:
    """What is found in a window, in its pixels, in memory that grows with the objects alone."""
    x0, y0, x1, y1 = window
    rows = np.flatnonzero(found.valid)
    masks = None if found.masks is None else found.masks[rows]
    arrays = found.boxes[rows], found.scores[rows], found.classes[rows].tolist()
    points = None if found.keypoints is None else found.keypoints[rows].astype(np.float64)
    view = ImageDetections(0, y1 - y0, x1 - x0, *arrays, masks, points)
    return with_window_masks(view, paste)


def merge_tiles(
    windows: Sequence[Window], views: Sequence[ImageDetections], paste: str
) -> dict[str, Any]:
    """Merge the detections of each window, in its pixels, into fields of a `Result`."""
    merged = merge_views(views, windows, paste)
    return dict(
        boxes=merged.boxes.astype(np.float32),
        scores=merged.scores,
        classes=np.array(merged.category_ids, np.int32),
        mask_grids=None,
        window_masks=merged.masks,
        keypoints=None if merged.keypoints is None else merged.keypoints.astype(np.float32),
    )
