"""Batches for evaluation, each image once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import grain

from mask_rcnn_jax.data import workers
from mask_rcnn_jax.data.canvases import canvas_buckets
from mask_rcnn_jax.data.coco import for_workers
from mask_rcnn_jax.data.compact import compact, expand
from mask_rcnn_jax.data.dataset import Dataset
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.overview import image_size
from mask_rcnn_jax.data.resize import ResizePlan, resize_plan
from mask_rcnn_jax.data.transforms import empty_batch, load_row, shared_bytes
from mask_rcnn_jax.structures import Batch

IMAGES_PER_WORKER = 100  # of an evaluation; fewer are read in threads before a worker has started


class EvalLoader:
    """The batches of one pass over the images, grouped by canvas; may be iterated repeatedly.

    Every image comes exactly once over all processes. Every process gets the same number of
    batches of the same shapes; missing rows hold padding images, whose `image_index` is -1.
    `is_full` says of each batch whether no row is missing on any process.
    """

    def __init__(
        self,
        dataset: Dataset,
        options: ExampleOptions,
        *,
        batch_size: int,
        num_workers: int,
        max_images: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
        accepts: Callable[[ResizePlan], bool] | None = None,
    ):
        """
        num_workers: worker processes, at most one for `IMAGES_PER_WORKER`; 0 reads in threads.
        accepts: whether to take an image, of the first `max_images`, that is resized so.
        """
        indices: Sequence[int] = range(len(dataset.images))[: max_images or None]
        if accepts is not None:
            plans = (resize_plan(*image_size(dataset.images, i), options) for i in indices)
            indices = [i for i, plan in zip(indices, plans, strict=True) if accepts(plan)]
        self.num_images = len(indices)
        self._dataset, self._options = for_workers(dataset), options
        self._num_workers = min(num_workers, len(indices) // (IMAGES_PER_WORKER * process_count))
        self._plan, self.is_full = [], []
        for canvas, bucket in canvas_buckets(dataset, indices, options).items():
            for start in range(0, len(bucket), batch_size * process_count):
                together = bucket[start : start + batch_size * process_count]
                rows = together[process_index * batch_size :][:batch_size]
                self._plan.append((canvas, rows + [-1] * (batch_size - len(rows))))
                self.is_full.append(len(together) == batch_size * process_count)

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[Batch]:
        # An iteration that ends removes its shared memory, and no other's.
        prefix = workers.shared_prefix(self._num_workers)
        batches = grain.MapDataset.source(self._batches(prefix))
        canvases = {canvas: len(rows) for canvas, rows in self._plan}
        size = max((shared_bytes(n, [c], self._options) for c, n in canvases.items()), default=0)
        reader = workers.Reader(batches, self._num_workers, prefix, size)
        try:
            for _ in range(len(self)):
                yield expand(next(reader))
        finally:
            reader.close()

    def _batches(self, prefix: str) -> "_EvalBatches":
        return _EvalBatches(self._dataset, self._options, workers.zeros(prefix), self._plan)


@dataclass(frozen=True, eq=False)
class _EvalBatches:
    """Random access to the planned batches, compact, for grain."""

    dataset: Dataset
    options: ExampleOptions
    zeros: workers.Zeros
    plan: list[tuple[tuple[int, int], list[int]]]  # canvas and image indices of each batch

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, step: int) -> Batch:
        canvas, indices = self.plan[step]
        batch = empty_batch(len(indices), canvas, self.options, self.zeros)
        for row, index in enumerate(indices):
            if index >= 0:
                load_row(batch, row, self.dataset, index, self.options)
        return compact(batch, self.zeros)
