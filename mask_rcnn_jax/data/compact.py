"""Batches on their way from a worker process, without the slots that hold no object.

An image has a few objects and a hundred slots, so nearly all bytes of masks and polygons are
padding.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mask_rcnn_jax.structures import Batch


def compact(batch: Batch, zeros: Callable[..., np.ndarray]) -> Batch:
    """Return a batch whose masks [N, ..] and polygons [N, V, 3] are those of its N objects.

    `zeros(shape, dtype)` makes their arrays, unless they are empty.
    """
    targets = batch.targets

    def of_objects(array: np.ndarray) -> np.ndarray:
        found = array[targets.valid]
        if not found.size:
            return found
        made = zeros(found.shape, found.dtype)
        made[...] = found
        return made

    masks, polygons = of_objects(targets.masks), of_objects(targets.polygons)
    return replace(batch, targets=replace(targets, masks=masks, polygons=polygons))


def expand(batch: Batch) -> Batch:
    """Undo `compact`."""
    targets = batch.targets
    masks, polygons = (
        np.zeros((*targets.valid.shape, *array.shape[1:]), array.dtype)
        for array in (targets.masks, targets.polygons)
    )
    polygons[..., 2] = -1
    masks[targets.valid], polygons[targets.valid] = targets.masks, targets.polygons
    return replace(batch, targets=replace(targets, masks=masks, polygons=polygons))
