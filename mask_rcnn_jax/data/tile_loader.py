"""Batches of tiles, for the evaluation with large images."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from mask_rcnn_jax.data.dataset import Dataset
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.overview import image_size
from mask_rcnn_jax.data.resize import resize_image, resize_plan
from mask_rcnn_jax.data.tiles import Tiles, view_windows
from mask_rcnn_jax.data.transforms import empty_batch, read_example
from mask_rcnn_jax.rle import Window
from mask_rcnn_jax.structures import Batch


class TileLoader:
    """The views of all images, image after image; may be iterated repeatedly.

    Views on the same canvas share a batch, in which `image_index` is the place of the view in
    `views`. Batches have no objects; missing rows in the last ones have the index -1.

    Attributes:
        views: (index of the image, window) for each view; see `tiles.view_windows`.
        num_images: images of the dataset that are looked at.
    """

    def __init__(
        self,
        dataset: Dataset,
        options: ExampleOptions,
        tiles: Tiles,
        *,
        batch_size: int,
        max_images: int = 0,
    ):
        self._dataset, self._options, self._batch_size = dataset, options, batch_size
        indices = range(len(dataset.images))[: max_images or None]
        self.num_images = len(indices)
        self.views: list[tuple[int, Window]] = [
            (index, window)
            for index in indices
            for window in view_windows(*image_size(dataset.images, index), tiles)
        ]

    def __iter__(self) -> Iterator[Batch]:
        waiting: dict[tuple[int, int], tuple[Batch, int]] = {}  # canvas -> batch, rows taken
        decoded = self._decoded()
        shown, image = -1, np.zeros((0, 0, 3), np.uint8)
        for number, (index, (x0, y0, x1, y1)) in enumerate(self.views):
            if index != shown:
                shown, image = index, next(decoded)
            view = image[y0:y1, x0:x1]
            plan = resize_plan(view.shape[0], view.shape[1], self._options)
            if plan.canvas not in waiting:
                waiting[plan.canvas] = empty_batch(self._batch_size, plan.canvas, self._options), 0
            batch, row = waiting.pop(plan.canvas)
            resize_image(view, plan, self._options, out=batch.images[row])
            batch.image_sizes[row], batch.scales[row] = plan.size, plan.scale
            batch.image_index[row] = number
            if row + 1 == self._batch_size:
                yield batch
            else:
                waiting[plan.canvas] = batch, row + 1
        for batch, _ in waiting.values():
            yield batch

    def _decoded(self) -> Iterator[np.ndarray]:
        """The images, of which one is decoded while the one before is cut."""
        ahead: deque[Future[np.ndarray]] = deque()
        with ThreadPoolExecutor(1) as reader:
            for index in range(self.num_images):
                ahead.append(reader.submit(self._decode, index))
                if index > 0:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def _decode(self, index: int) -> np.ndarray:
        return read_example(self._dataset, index).image
