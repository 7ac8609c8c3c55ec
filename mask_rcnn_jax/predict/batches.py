"""Run images in batches of those that may share one, in order."""

import math
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from mask_rcnn_jax.data.resize import ResizePlan
from mask_rcnn_jax.structures import Detections

# A partial batch starts rather than that more than this waits.
MAX_WAITING_BYTES = 256 << 20  # for each device, whose share of a batch does not shrink
MAX_WAITING_BATCHES = 4


class PreparedImage(NamedTuple):
    """An image and its network input."""

    image: np.ndarray  # uint8 [H, W, 3]
    canvas: np.ndarray  # [canvas height, canvas width, C]
    plan: ResizePlan
    pixels: np.ndarray | None = None  # [H, W, C] as in the file; None where `image` is that


class Batching(NamedTuple):
    """How many images run at a time."""

    rows: int  # of a full batch, over all devices
    devices: int
    splits: bool  # a batch that is not full into batches of one image on each device


# Images of a bucket that wait: (position, key, image), oldest first.
_Waiting = dict[Hashable, list[tuple[int, Any, PreparedImage]]]


def in_batches(
    images: Iterable[tuple[Any, PreparedImage]],
    run: Callable[[list[PreparedImage]], Detections],
    bucket_of: Callable[[PreparedImage], Hashable],
    batching: Batching,
) -> Generator[tuple[Any, Detections]]:
    """Yield (key, detections in image pixels) for (key, image) pairs, in order.

    The device runs a batch while the next is gathered and the caller processes the previous
    results. MAX_WAITING_BATCHES and MAX_WAITING_BYTES limit how long an image waits for others.

    Args:
        run: dispatches images of one bucket without waiting.
        bucket_of: equal for images that may share a batch.
    """
    waiting: _Waiting = {}
    started: deque = deque()
    done: dict[int, tuple[Any, Detections]] = {}
    position = -1

    def start(bucket: Hashable) -> None:
        rows = waiting.pop(bucket)
        is_split = batching.splits and len(rows) < batching.rows
        step = batching.devices if is_split else batching.rows
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            started.append((part, run([image for _, _, image in part])))

    def finish() -> None:
        rows, batch = started.popleft()
        found = _detections([image for _, _, image in rows], batch)
        for (at, key, _), one in zip(rows, found, strict=True):
            done[at] = key, one

    following = 0
    for position, (key, image) in enumerate(images):
        bucket = bucket_of(image)
        waiting.setdefault(bucket, []).append((position, key, image))
        if len(waiting[bucket]) == batching.rows:
            start(bucket)
        elif _waits_too_long(waiting, batching):
            start(min(waiting, key=lambda bucket: waiting[bucket][0][0]))
        while len(started) > 1:
            finish()
        while following in done:
            yield done.pop(following)
            following += 1
    for bucket in list(waiting):
        start(bucket)
        while len(started) > 1:
            finish()
    while started:
        finish()
    for at in range(following, position + 1):
        yield done.pop(at)


def _waits_too_long(waiting: _Waiting, batching: Batching) -> bool:
    images = [image for rows in waiting.values() for _, _, image in rows]
    arrays = [a for image in images for a in (image.image, image.pixels, image.canvas)]
    held = sum(_bytes(array) for array in arrays if array is not None)
    positions = [row[0] for rows in waiting.values() for row in rows]
    age = max(positions) - min(positions)
    too_large = held > MAX_WAITING_BYTES * batching.devices
    return too_large or age >= MAX_WAITING_BATCHES * batching.rows


def _bytes(array: np.ndarray) -> int:
    """Memory of an array; `np.broadcast_to` repeats values without any, in steps of 0 bytes."""
    steps = zip(array.shape, array.strides, strict=True)
    return array.itemsize * math.prod(size for size, step in steps if step)


def _detections(images: list[PreparedImage], batch: Detections) -> list[Detections]:
    """Wait for a batch and return each image's detections in image pixels."""
    batch = jax.device_get(batch)
    found = []
    for row, image in enumerate(images):
        one = jax.tree.map(lambda leaf, row=row: np.array(leaf[row]), batch)
        height, width = image.image.shape[:2]
        scale_y, scale_x = image.plan.scale
        boxes = one.boxes / np.array([scale_x, scale_y, scale_x, scale_y], np.float32)
        limits = np.array([width, height, width, height], np.float32)
        one = one.replace(boxes=np.clip(boxes, 0, limits))
        if one.keypoints is not None:
            scale = np.array([scale_x, scale_y, 1], np.float32)
            one = one.replace(keypoints=one.keypoints / scale)
        found.append(one)
    return found
