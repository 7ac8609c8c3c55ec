"""Batches for training, without end.

The order of training is a pure function of (seed, step): the batches of one step over all
processes, in their order, are the same batch for any number of processes, and a run may start at
any step. So a checkpoint stores nothing of the loader but the step. Each canvas shape is a bucket
with its own shuffled order; the buckets take turns in proportion to their size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import grain
import numpy as np
from absl import logging

from mask_rcnn_jax.data import workers
from mask_rcnn_jax.data.augment import Kind, as_kinds, augmented
from mask_rcnn_jax.data.canvases import canvas_buckets
from mask_rcnn_jax.data.coco import for_workers
from mask_rcnn_jax.data.compact import compact, expand
from mask_rcnn_jax.data.dataset import Dataset, UndecodableImage, dataset_name, keypoints
from mask_rcnn_jax.data.drawn import changes_counts, drawn_counts
from mask_rcnn_jax.data.example import Example
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.overview import (
    densest_windows,
    epoch_factors,
    training_boxes,
    training_counts,
    window_counts,
)
from mask_rcnn_jax.data.repeat import NO_REPEATS, RepeatedPlaces, Repeats
from mask_rcnn_jax.data.transforms import empty_batch, load_row, read_example, shared_bytes
from mask_rcnn_jax.data.window_examples import around_objects, read_window
from mask_rcnn_jax.structures import Batch

# grain cannot slice a dataset that repeats without end; nobody trains for ten million epochs.
EPOCHS = 10**7
# Draws of a window until one decodes and, unless empty ones are kept, has an object; from the
# second number on around one.
MAX_DRAWS, FEW_DRAWS = 1000, 20


@dataclass(frozen=True)
class TrainOrder:
    """What decides which images a process reads at which step."""

    seed: int
    batch_size: int  # of this process
    start_step: int = 0
    process_index: int = 0
    process_count: int = 1
    keep_empty: bool = True  # False leaves out images without an object to learn from
    skip: frozenset[int] = frozenset()  # images in whose place the next of their canvas comes
    repeats: Repeats = NO_REPEATS


class TrainLoader:
    """An endless iterator of one process's `Batch`es of numpy arrays, from `start_step` on.

    Attributes:
        canvases: canvas (height, width) -> share of the batches.
        skipped: file names of images that could not be decoded; the next of their canvas came.
        counts: objects of each image, of each window of a grid, or of a sample of examples as
            augmentation makes them.
        overflowed: of these, objects left out because there are more than `max_instances`.
        undrawn: objects without an outline of at most `max_vertices` vertices, if the options ask
            for polygons.
    """

    def __init__(
        self,
        dataset: Dataset,
        options: ExampleOptions,
        order: TrainOrder,
        *,
        num_workers: int,
        augment: Kind | Sequence[Kind] | None = None,
    ):
        """Start to read.

        Args:
            num_workers: worker processes; 0 reads in threads of this process.
            augment: change every example before it is resized, in this order.

        Raises:
            ValueError: no image is left to train on.
        """
        if keypoints(dataset).names != options.keypoints:
            found = f"the keypoints {keypoints(dataset).names}"
            raise ValueError(
                f"{dataset_name(dataset)} has {found}, data.keypoints is {options.keypoints}"
            )
        self._dataset, self._skip = dataset, order.skip
        self.skipped: set[str] = set()
        counts, vertices = training_counts(dataset, options)
        kinds, what = as_kinds(augment), "images"
        if options.windows.is_on:
            counts, what = densest_windows(dataset, options), "windows of a grid"
        elif changes_counts(kinds):
            counts = drawn_counts(training_boxes(dataset, options), kinds, order.seed)
            what = f"of {counts.size} images as augmentation draws them"
        self.counts = counts
        self.overflowed = _count_overflow(dataset, counts, options.max_instances, what)
        self.undrawn = _count_undrawn(dataset, vertices, options.max_vertices)
        factors = epoch_factors(dataset, options, order.repeats, keep_empty=order.keep_empty)
        indices = np.flatnonzero(factors).tolist()
        if not indices:
            reason = "no image has an object that is no crowd, and data.keep_empty is False"
            if options.min_keypoints:
                reason = f"none has data.min_keypoints={options.min_keypoints} labeled ones"
            raise ValueError(f"{dataset_name(dataset)}: no image to train on, since {reason}")
        buckets, shared = canvas_buckets(dataset, indices, options), for_workers(dataset)
        partners = np.array([index for index in indices if index not in order.skip], np.int32)
        prefix, batches, sizes = workers.shared_prefix(num_workers), [], []
        zeros = workers.zeros(prefix)
        windows = window_counts(dataset.images, options.windows)
        for canvas, bucket in buckets.items():
            # The random numbers of an example follow its place in the epochs, which is known before
            # the processes share the examples out.
            times = windows[bucket]
            places_of = np.repeat(np.array(bucket, np.int32), times)
            places = _places(np.repeat(factors[bucket] / times, times), order)
            draws = places.random_map(partial(_with_short_side, options.short_sides))
            given = shared, options, order, canvas, places_of, draws, kinds, partners
            source = _TrainBatches(*given, zeros)
            batches.append(grain.MapDataset.source(source))
            sizes.append(round(float(factors[bucket].sum())))
        self.canvases = dict(zip(buckets, (size / sum(sizes) for size in sizes), strict=True))
        mixed = grain.MapDataset.mix(batches, weights=sizes)
        rows, most = order.batch_size, np.minimum(counts, options.max_instances)
        objects = float(rows * most.mean() + 3 * rows**0.5 * most.std())  # of nearly all batches
        size = shared_bytes(rows, buckets, options, objects)
        self._reader = workers.Reader(mixed[order.start_step :], num_workers, prefix, size)

    def __iter__(self) -> "TrainLoader":
        return self

    def __next__(self) -> Batch:
        batch, wanted = next(self._reader)
        for index in wanted[wanted != batch.image_index]:
            file_name = self._dataset.images[index].file_name
            if index not in self._skip and file_name not in self.skipped:
                self.skipped.add(file_name)
                logging.warning("skipped %s: %s", file_name, self._why_undecodable(int(index)))
        return expand(batch)

    def _why_undecodable(self, index: int) -> str:
        """Return why an image was skipped, which the processes that read do not tell."""
        try:
            self._dataset.decode(index)
        except UndecodableImage as error:
            return str(error)
        return "it could not be read"

    def close(self) -> None:
        """Stop the threads and worker processes."""
        self._reader.close()

    def abandon(self) -> None:
        """Stop them in a process that then ends at once."""
        self._reader.abandon()


def _places(factors: np.ndarray, order: TrainOrder) -> grain.MapDataset:
    """The place in a bucket of example 0, 1, .., for images that come so often in an epoch."""
    if not order.repeats.repeat_threshold:
        return grain.MapDataset.range(len(factors)).seed(order.seed).shuffle().repeat(EPOCHS)
    repeated = RepeatedPlaces(factors, order.seed, EPOCHS)
    return grain.MapDataset.source(repeated).seed(order.seed)


def _with_short_side(
    short_sides: tuple[int, ...], place: int, rng: np.random.Generator
) -> tuple[int, int | None]:
    """Draw a short side for the example at a place of the epochs, for grain's `random_map`."""
    return place, int(rng.choice(short_sides)) if short_sides else None


@dataclass(frozen=True, eq=False)
class _TrainBatches:
    """One process's batches of one canvas by step, for grain: its rows of every global batch."""

    dataset: Dataset
    options: ExampleOptions
    order: TrainOrder
    canvas: tuple[int, int]
    # [n] int32, the images that go on the canvas, each as often as it has windows
    bucket: np.ndarray
    draws: grain.MapDataset  # place in the bucket and short side of example 0, 1, ..
    augment: tuple[Kind, ...]
    partners: np.ndarray  # [m] int32, the images to copy objects from
    zeros: workers.Zeros

    def __len__(self) -> int:
        return len(self.draws) // (self.order.batch_size * self.order.process_count)

    def __getitem__(self, step: int) -> tuple[Batch, np.ndarray]:
        """The batch, compact, and the indices that were asked for, which differ from the batch's
        where an image did not decode."""
        order = self.order
        first = (step * order.process_count + order.process_index) * order.batch_size
        wanted = np.empty(order.batch_size, np.int32)
        batch = empty_batch(order.batch_size, self.canvas, self.options, self.zeros)
        for row in range(order.batch_size):
            place, short_side = self.draws[first + row]
            load = self._load_window if self.options.windows.is_on else self._load
            wanted[row] = load(batch, row, place, short_side, self._count(first + row))
        return compact(batch, self.zeros), wanted

    def _count(self, example: int) -> int:
        """A number that no two examples of one image share: the epoch, if it comes once in it."""
        return example if self.order.repeats.repeat_threshold else example // len(self.bucket)

    def _load(self, batch: Batch, row: int, place: int, short_side: int | None, count: int) -> int:
        """Fill a row, and return the index of the image that was asked for."""
        dataset, images, why = self.dataset, len(self.bucket), ""
        for offset in range(images):
            index = int(self.bucket[(place + offset) % images])
            if index in self.order.skip:
                continue
            seed = (self.order.seed, count, index)  # new random numbers every time
            change = partial(augmented, self.augment, seed, dataset, index, partner=self._partner)
            augment = change if self.augment else None
            try:
                load_row(batch, row, dataset, index, self.options, short_side, augment)
            except UndecodableImage as error:
                why = f", the last: {error}"
                continue
            return int(self.bucket[place])
        skipped = " and is not in train.skip_images" if self.order.skip else ""
        found = f"no image of {images} can be decoded{skipped}{why}"
        raise ValueError(f"{dataset_name(dataset)}: {found}")

    def _load_window(
        self, batch: Batch, row: int, place: int, short_side: int | None, count: int
    ) -> int:
        """Fill a row with a window of the image at a place; with one at another place if it
        does not decode, or, unless `keep_empty`, has no object to learn from."""
        dataset, order, damaged, why = self.dataset, self.order, set[int](), ""
        others = np.random.default_rng((order.seed, count, place, 0, 0, 1))
        for attempt in range(MAX_DRAWS):
            index = int(self.bucket[place])
            number = place - int(np.searchsorted(self.bucket, index))
            seed = order.seed, count, index, number
            if index not in damaged and index not in order.skip:
                rng = np.random.default_rng((*seed, attempt))
                options = self.options if attempt < FEW_DRAWS else around_objects(self.options)
                given = dataset, index, options, number, rng
                try:
                    example = read_window(*given, keep_empty=order.keep_empty)
                except UndecodableImage as error:
                    why = f", the last: {error}"
                    damaged.add(index)
                    example = None
                if example is not None:
                    change = partial(augmented, self.augment, seed, dataset, index)
                    augment = partial(change, partner=self._partner) if self.augment else None
                    load_row(batch, row, dataset, index, self.options, short_side, augment, example)
                    return min(damaged, default=index)
            place = int(others.integers(len(self.bucket)))
        found = f"none of {MAX_DRAWS} windows can be decoded and has an object{why}"
        raise ValueError(f"{dataset_name(dataset)}: {found}")

    def _partner(self, rng: np.random.Generator) -> Example | None:
        index = int(rng.choice(self.partners))
        try:
            if self.options.windows.is_on:
                number = int(rng.integers(np.count_nonzero(self.bucket == index) or 1))
                return read_window(self.dataset, index, self.options, number, rng)
            return read_example(self.dataset, index, self.options)
        except UndecodableImage:
            return None


def _count_overflow(dataset: Dataset, counts: np.ndarray, max_instances: int, what: str) -> int:
    """Count objects beyond `max_instances` per image, or what it is; warn if there are any."""
    over = counts[counts > max_instances] - max_instances
    if over.size:
        text = (
            "%s: %d %s hold more than data.max_instances=%d objects, up to %d; the %d smallest of "
            "%d objects are left out (%.1f%%)"
        )
        share = 100 * over.sum() / counts.sum()
        numbers = over.size, what, max_instances, counts.max(), over.sum(), counts.sum(), share
        logging.warning(text, dataset_name(dataset), *numbers)
    return int(over.sum())


def _count_undrawn(dataset: Dataset, vertices: np.ndarray, max_vertices: int) -> int:
    """Count objects without polygons or with too many vertices; warn if there are any.
    0 if no polygons are asked for."""
    if not max_vertices:
        return 0
    encoded, large = int((vertices == 0).sum()), int((vertices > max_vertices).sum())
    if encoded + large:
        text = (
            "%s: %d of %d objects have no outline to draw a mask target from: %d are run-length "
            "codes, %d have more than data.max_vertices=%d vertices"
        )
        numbers = encoded + large, vertices.size, encoded, large, max_vertices
        logging.warning(text, dataset_name(dataset), *numbers)
    return encoded + large
