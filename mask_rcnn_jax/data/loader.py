"""Batches for training, without end, and for evaluation, each image once.

The order of training is a pure function of (seed, step): the batches of one step over all
processes hold the same images however many processes there are, and a run may start at any step.
So a checkpoint stores the step and nothing else of the loader. Each canvas shape is a bucket with
its own shuffled order; the buckets take turns in proportion to their size, and every batch has the
shape of one bucket.
"""

import os
from collections.abc import Iterator
from typing import Any

import cv2
import grain
import jax
import numpy as np
from absl import flags, logging

from mask_rcnn_jax.data.coco import CocoDataset, UndecodableImage
from mask_rcnn_jax.data.transforms import load_example, padding_example, resize_plan
from mask_rcnn_jax.structures import Batch

# Batches are made in parallel already. Worker processes import this module too.
cv2.setNumThreads(1)

# grain cannot slice a dataset that repeats without end; nobody trains for ten million epochs.
EPOCHS = 10**7
THREADS_WITHOUT_WORKERS = 4


class TrainLoader:
    """An endless iterator of one process's `Batch`es of numpy arrays, from `start_step` on.

    `batch_size` is per process. `skipped` holds the file names that could not be decoded so far;
    in their place came the next image of the same canvas. `overflowed` counts the objects of the
    dataset that are left out because their image holds more than `max_instances`.
    """

    def __init__(
        self,
        dataset: CocoDataset,
        *,
        seed: int,
        start_step: int,
        batch_size: int,
        process_index: int = 0,
        process_count: int = 1,
        image_size: tuple[int, int],
        resize: str,
        max_instances: int,
        num_workers: int,
        mask_size: int = 112,
        keep_empty: bool = True,
    ):
        self._dataset = dataset
        self.skipped: set[str] = set()
        self.overflowed = _count_overflow(dataset, max_instances)
        indices = [i for i in range(len(dataset.images)) if keep_empty or _has_objects(dataset, i)]
        if not indices:
            raise ValueError(f"{dataset.json_path}: no image to train on")
        options = {
            "image_size": image_size,
            "resize": resize,
            "max_instances": max_instances,
            "mask_size": mask_size,
        }
        first, stride = process_index, process_count
        buckets = canvas_buckets(dataset, indices, image_size, resize)
        self.canvases = tuple(buckets)
        batches = [
            grain.MapDataset.source(_TrainExamples(dataset, bucket, options))
            .seed(seed)
            .shuffle()
            .repeat(EPOCHS)[first::stride]
            .batch(batch_size, batch_fn=_stack)
            for bucket in buckets.values()
        ]
        sizes = [len(bucket) for bucket in buckets.values()]
        order = grain.MapDataset.mix(batches, weights=sizes)
        self._iterator = _start(order[start_step:], num_workers)

    def __iter__(self) -> "TrainLoader":
        return self

    def __next__(self) -> Batch:
        batch, wanted = next(self._iterator)
        for index in wanted[wanted != batch.image_index]:
            self._note_skipped(self._dataset.images[index].file_name)
        return batch

    def _note_skipped(self, file_name: str) -> None:
        if file_name not in self.skipped:
            self.skipped.add(file_name)
            logging.warning("skipped %s: truncated, damaged or not an image", file_name)

    def close(self) -> None:
        """Stop the threads and worker processes."""
        self._iterator.close()


class EvalLoader:
    """The batches of one pass over the images, grouped by canvas; may be iterated repeatedly.

    Every image comes exactly once over all processes. Every process gets the same number of
    batches of the same shapes; missing rows hold padding images, whose `image_index` is -1.
    """

    def __init__(
        self,
        dataset: CocoDataset,
        *,
        batch_size: int,
        image_size: tuple[int, int],
        resize: str,
        max_instances: int,
        num_workers: int,
        max_images: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
        mask_size: int = 112,
    ):
        indices = range(len(dataset.images))[: max_images or None]
        self.num_images = len(indices)
        self._num_workers = num_workers
        options = {
            "image_size": image_size,
            "resize": resize,
            "max_instances": max_instances,
            "mask_size": mask_size,
        }
        plan = []
        for canvas, bucket in canvas_buckets(dataset, indices, image_size, resize).items():
            for start in range(0, len(bucket), batch_size * process_count):
                together = bucket[start : start + batch_size * process_count]
                rows = together[process_index::process_count]
                plan.append((canvas, rows + [-1] * (batch_size - len(rows))))
        self._batches = _EvalBatches(dataset, plan, options)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        iterator = _start(grain.MapDataset.source(self._batches), self._num_workers)
        try:
            yield from iterator
        finally:
            iterator.close()


def canvas_buckets(
    dataset: CocoDataset, indices: Any, image_size: tuple[int, int], resize: str
) -> dict[tuple[int, int], list[int]]:
    """Canvas (H, W) -> indices of the images that go on it."""
    buckets: dict[tuple[int, int], list[int]] = {}
    for index in indices:
        record = dataset.images[index]
        canvas = resize_plan(record.height, record.width, image_size, resize).canvas
        buckets.setdefault(canvas, []).append(index)
    return buckets


class _TrainExamples:
    """Random access to the examples of one bucket, for grain."""

    def __init__(self, dataset: CocoDataset, indices: list[int], options: dict[str, Any]):
        self._dataset = dataset
        self._indices = indices
        self._options = options

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, position: int) -> tuple[Batch, np.int32]:
        """The example and the index that was asked for; they differ if that did not decode."""
        wanted = self._indices[position]
        for offset in range(len(self)):
            index = self._indices[(position + offset) % len(self)]
            try:
                return load_example(self._dataset, index, **self._options), np.int32(wanted)
            except UndecodableImage:
                continue
        raise ValueError(f"{self._dataset.image_dir}: no image of {len(self)} can be decoded")


class _EvalBatches:
    """Random access to the planned batches of (canvas, image indices), for grain."""

    def __init__(self, dataset: CocoDataset, plan: list, options: dict[str, Any]):
        self._dataset = dataset
        self._plan = plan
        self._options = options

    def __len__(self) -> int:
        return len(self._plan)

    def __getitem__(self, step: int) -> Batch:
        canvas, rows = self._plan[step]
        return _stack([self._example(canvas, index) for index in rows])

    def _example(self, canvas: tuple[int, int], index: int) -> Batch:
        if index >= 0:
            return load_example(self._dataset, index, **self._options)
        return padding_example(canvas, self._options["max_instances"], self._options["mask_size"])


def _stack(rows: list) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def _start(batches: grain.MapDataset, num_workers: int) -> grain.DatasetIterator:
    """Begin to read: threads of this process if `num_workers` is 0, else that many processes."""
    if num_workers == 0:
        threads = min(THREADS_WITHOUT_WORKERS, os.cpu_count() or 1)
        return iter(batches.to_iter_dataset(grain.ReadOptions(threads, 2 * threads)))
    if not flags.FLAGS.is_parsed():  # grain reads a flag when it starts workers
        flags.FLAGS.mark_as_parsed()
    options = grain.MultiprocessingOptions(num_workers, per_worker_buffer_size=2)
    return iter(batches.to_iter_dataset(grain.ReadOptions(1, 2)).mp_prefetch(options))


def _has_objects(dataset: CocoDataset, index: int) -> bool:
    return any(not annotation.iscrowd for annotation in dataset.images[index].annotations)


def _count_overflow(dataset: CocoDataset, max_instances: int) -> int:
    """Objects beyond `max_instances` per image, over the dataset; named in one warning."""
    counts = [sum(not a.iscrowd for a in image.annotations) for image in dataset.images]
    over = [count - max_instances for count in counts if count > max_instances]
    if over:
        logging.warning(
            "%s: %d images hold more than data.max_instances=%d objects; the %d smallest of %d "
            "objects are left out",
            dataset.json_path,
            len(over),
            max_instances,
            sum(over),
            sum(counts),
        )
    return sum(over)
