"""Evaluation of large images in tiles."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from mask_rcnn_jax.data.dataset import Dataset, category_ids
from mask_rcnn_jax.data.overview import image_id
from mask_rcnn_jax.data.tile_loader import TileLoader
from mask_rcnn_jax.evaluation.encode import ImageDetections, split_images
from mask_rcnn_jax.evaluation.merge import merge_views, with_window_masks
from mask_rcnn_jax.rle import Window
from mask_rcnn_jax.structures import Batch, Detections
from mask_rcnn_jax.terminal.progress import Progress
from mask_rcnn_jax.training import processes
from mask_rcnn_jax.training.encoding import Found, Rules, encode
from mask_rcnn_jax.training.step import shard_batch


def detect_in_tiles(
    predict_step: Callable[[dict, Any], Detections],
    variables: dict,
    batches: TileLoader,
    dataset: Dataset,
    mesh: Mesh,
    rules: Rules,
) -> Found:
    """Detect like `evaluator.detect`, and merge the detections in the tiles of each image."""
    progress = Progress("tiles", len(batches.views))

    def detected() -> Iterator[tuple[int, ImageDetections]]:
        """The number of each view, in the order of the batches, and its detections."""
        started: deque[tuple[Batch, Detections]] = deque()
        for batch in batches:
            started.append((batch, predict_step(variables, shard_batch(batch, mesh))))
            if len(started) > 1:
                yield from _views(started.popleft(), batches.views, dataset, rules)
            progress.advance(int(np.sum(batch.image_index >= 0)))
        for last in started:
            yield from _views(last, batches.views, dataset, rules)

    def merged() -> Iterator[ImageDetections]:
        counts = Counter(index for index, _ in batches.views)
        waiting: dict[int, dict[int, ImageDetections]] = {}
        for number, view in detected():
            index = batches.views[number][0]
            seen = waiting.setdefault(index, {})
            # Of a large image, the grids of all detections would take gigabytes.
            seen[number] = with_window_masks(view, rules.paste) if counts[index] > 1 else view
            if len(seen) < counts[index]:
                continue
            numbers = sorted(waiting.pop(index))
            windows = [batches.views[n][1] for n in numbers]
            one = merge_views([seen[n] for n in numbers], windows, rules.paste)
            yield one._replace(image_id=image_id(dataset.images, index))

    return encode(merged(), batches.num_images, dataset, rules)


def _views(
    found: tuple[Batch, Detections],
    views: Sequence[tuple[int, Window]],
    dataset: Dataset,
    rules: Rules,
) -> Iterator[tuple[int, ImageDetections]]:
    """Each view in a batch: its number and its detections, in its own pixels."""
    batch, detections = found
    numbers = [number if number >= 0 else None for number in batch.image_index.tolist()]
    windows = [(0, 0, 0, 0) if number is None else views[number][1] for number in numbers]
    sizes = [(y1 - y0, x1 - x0) for x0, y0, x1, y1 in windows]
    rows, classes = processes.local_rows(detections), category_ids(dataset)
    given = rows, batch.scales, numbers, sizes, classes
    for view in split_images(*given, rules.keypoint_offset):
        yield int(view.image_id), view
