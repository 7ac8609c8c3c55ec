"""Batches of tiles, for the evaluation with large images."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import groupby
from operator import itemgetter

import numpy as np

from mask_rcnn_jax.data.dataset import Dataset
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.overview import image_size
from mask_rcnn_jax.data.resize import resize_image, resize_plan
from mask_rcnn_jax.data.tiles import Tiles, view_windows
from mask_rcnn_jax.data.transforms import empty_batch, read_example
from mask_rcnn_jax.data.window_examples import decode_window, has_windows
from mask_rcnn_jax.images.parts import is_large, reduced
from mask_rcnn_jax.rle import Window
from mask_rcnn_jax.structures import Batch

Canvas = tuple[int, int]
View = tuple[int, Window]  # index of the image, and what is seen of it


class TileLoader:
    """The views of all images, image after image; may be iterated repeatedly.

    Views on the same canvas share a batch, in which `image_index` is the place of the view in
    `views`. Batches have no objects; missing rows have the index -1. Every process has images of
    its own, and the same number of batches with the same shapes.

    Attributes:
        views: (index of the image, window) for each view of this process; see
            `tiles.view_windows`.
        num_images: images of the dataset that all processes look at.
    """

    def __init__(
        self,
        dataset: Dataset,
        options: ExampleOptions,
        tiles: Tiles,
        *,
        batch_size: int,
        max_images: int = 0,
        process_index: int = 0,
        process_count: int = 1,
    ):
        self._dataset, self._options, self._batch_size = dataset, options, batch_size
        indices = range(len(dataset.images))[: max_images or None]
        self.num_images = len(indices)
        plans = []
        for process in range(process_count):
            views = [
                (index, window)
                for index in indices[process::process_count]
                for window in view_windows(*image_size(dataset.images, index), tiles)
            ]
            plans.append(_plan(views, options, batch_size))
            if process == process_index:
                self.views: list[View] = views
        self._batches = plans[process_index]
        self._canvases = _common_order([[canvas for canvas, _ in plan] for plan in plans])

    def __iter__(self) -> Iterator[Batch]:
        own, canvases = self._filled(), deque(canvas for canvas, _ in self._batches)
        for canvas in self._canvases:
            if canvases and canvases[0] == canvas:
                canvases.popleft()
                yield next(own)
            else:
                yield self._empty(canvas)

    def _filled(self) -> Iterator[Batch]:
        """The batches of this process, each as soon as its last view is there."""
        places = {
            number: (place, row)
            for place, (_, numbers) in enumerate(self._batches)
            for row, number in enumerate(numbers)
        }
        waiting: dict[int, Batch] = {}
        shown = zip(self.views, self._shown(), strict=True)
        for number, ((_, (x0, y0, x1, y1)), view) in enumerate(shown):
            plan = resize_plan(y1 - y0, x1 - x0, self._options)
            place, row = places[number]
            if place not in waiting:
                waiting[place] = self._empty(plan.canvas)
            batch = waiting[place]
            resize_image(view, plan, self._options, out=batch.images[row])
            batch.image_sizes[row], batch.scales[row] = plan.size, plan.scale
            batch.image_index[row] = number
            if number == self._batches[place][1][-1]:
                yield waiting.pop(place)

    def _empty(self, canvas: Canvas) -> Batch:
        return empty_batch(self._batch_size, canvas, self._options)

    def _shown(self) -> Iterator[np.ndarray]:
        """The pixels of every view; an image, or a view of a large one, is decoded ahead."""
        ahead: deque[Future[list[np.ndarray]]] = deque()
        with ThreadPoolExecutor(1) as reader:
            for read in self._reads():
                ahead.append(reader.submit(read))
                if len(ahead) > 1:
                    yield from ahead.popleft().result()
            while ahead:
                yield from ahead.popleft().result()

    def _reads(self) -> Iterator[Callable[[], list[np.ndarray]]]:
        """What reads all views of an image, or each view of one that is too large for that."""
        dataset = self._dataset
        for index, views in groupby(self.views, key=itemgetter(0)):
            windows, size = [window for _, window in views], image_size(dataset.images, index)
            several = len(windows) > 1 and is_large(size, self._options.bands)
            if not several or not has_windows(dataset, index):
                yield partial(self._views_of, index, windows)
                continue
            # It is seen whole, without that it is ever there.
            plan = resize_plan(*size, self._options)
            read = partial(decode_window, dataset, index, options=self._options)
            given = read, size, plan.size, self._options.bands
            yield partial(lambda *given: [reduced(*given)], *given)
            for window in windows[1:]:
                yield partial(lambda read, window: [read(window)], read, window)

    def _views_of(self, index: int, windows: Sequence[Window]) -> list[np.ndarray]:
        image = read_example(self._dataset, index, self._options).image
        return [image[y0:y1, x0:x1] for x0, y0, x1, y1 in windows]


def _plan(
    views: Sequence[View], options: ExampleOptions, batch_size: int
) -> list[tuple[Canvas, list[int]]]:
    """Canvas and numbers of the views of each batch, in the order in which they are complete."""
    buckets: dict[Canvas, list[int]] = {}
    for number, (_, (x0, y0, x1, y1)) in enumerate(views):
        buckets.setdefault(resize_plan(y1 - y0, x1 - x0, options).canvas, []).append(number)
    plan = [
        (canvas, numbers[start : start + batch_size])
        for canvas, numbers in buckets.items()
        for start in range(0, len(numbers), batch_size)
    ]
    return sorted(plan, key=lambda batch: batch[1][-1])


def _common_order(plans: Sequence[Sequence[Canvas]]) -> list[Canvas]:
    """An order of canvases that holds that of every process."""
    queues, order = [deque(plan) for plan in plans], []
    while any(queues):
        canvas = max(queues, key=len)[0]
        order.append(canvas)
        for queue in queues:
            if queue and queue[0] == canvas:
                queue.popleft()
    return order
