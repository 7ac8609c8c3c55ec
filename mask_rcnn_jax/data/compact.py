"""Batches on their way from a worker process, without the slots that hold no object.

An image has a few objects and a hundred slots, so nearly all bytes of masks and polygons are
padding.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mask_rcnn_jax.structures import Batch

OF_OBJECTS = ("masks", "polygons", "keypoints")


def compact(batch: Batch, zeros: Callable[..., np.ndarray]) -> Batch:
    """Return a batch whose masks [N, ..], polygons and keypoints are those of its N objects.

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

    arrays = {name: getattr(targets, name) for name in OF_OBJECTS}
    found = {name: of_objects(array) for name, array in arrays.items() if array is not None}
    return replace(batch, targets=replace(targets, **found))


def expand(batch: Batch) -> Batch:
    """Undo `compact`."""
    targets, slots = batch.targets, {}
    for name in OF_OBJECTS:
        array = getattr(targets, name)
        if array is None:
            continue
        slots[name] = np.zeros((*targets.valid.shape, *array.shape[1:]), array.dtype)
        if name == "polygons":
            slots[name][..., 2] = -1
        slots[name][targets.valid] = array
    return replace(batch, targets=replace(targets, **slots))
