"""A trained model as a function from pictures to their detections."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from mask_rcnn_jax.data.options import example_options
from mask_rcnn_jax.data.resize import ResizePlan, resize_image, resize_plan
from mask_rcnn_jax.models.build import build_model
from mask_rcnn_jax.models.detect import detect_options
from mask_rcnn_jax.structures import Detections

# `stream` starts a batch that is not full yet rather than keep more than this waiting.
MAX_WAITING_BYTES = 256 << 20
MAX_WAITING_BATCHES = 4


class Prepared(NamedTuple):
    """A picture and what the network gets of it."""

    image: np.ndarray  # uint8 [H, W, 3]
    canvas: np.ndarray  # [canvas height, canvas width, 3]
    plan: ResizePlan


class Predictor:
    """Detections of pictures of any size, in their own pixels. May be used by several threads.

    Compiles once for each canvas of the recipe (one, or one for landscape and one for portrait),
    for batches of `batch_size` rows, of which those without a picture are wasted work. A picture's
    detections do not depend on what else is in its batch.
    """

    def __init__(self, config: ConfigDict, variables: dict, batch_size: int = 1):
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, expected at least 1")
        self.batch_size = batch_size
        self._options = example_options(config)
        self._variables = jax.device_put(variables)
        # The weights know what a recipe leaves to the annotations.
        num_classes = variables["params"]["box_head"]["cls_score"]["bias"].shape[0] - 1
        model = build_model(
            {**config.model, "num_classes": num_classes},
            precision=config.train.precision,
            implementation=config.train.implementation,
        )
        self._pad_multiple = config.model.input.pad_multiple
        self._predict = jax.jit(
            partial(model.apply, method="predict", detect=detect_options(config))
        )
        self._compiled: dict[tuple[int, int], jax.stages.Compiled] = {}
        self._lock = threading.Lock()

    def __call__(self, images: np.ndarray | Sequence[np.ndarray]) -> Detections | list[Detections]:
        """One picture, uint8 [H, W, 3] RGB, to its `Detections`; several, of any sizes, to a list.

        The leaves are numpy arrays, boxes in pixels of the picture, clipped to it. Masks are
        probabilities on a 28 x 28 grid over the box; `evaluation.paste.paste_mask` puts one into
        the picture. Raises ValueError for another shape or dtype.
        """
        if isinstance(images, np.ndarray) and images.ndim != 4:
            return _detections(self._start([self.prepare(images)]))[0]
        pictures = ((None, self.prepare(image)) for image in images)
        return [found for _, _, found in self.stream(pictures)]

    def prepare(self, image: np.ndarray) -> Prepared:
        """Lays a picture on its canvas; that is all the work of the host before the network."""
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or not image.size:
            raise ValueError(f"image is {image.dtype} {image.shape}, expected uint8 [H, W, 3] RGB")
        plan = resize_plan(*image.shape[:2], self._options)
        return Prepared(image, resize_image(image, plan, self._options), plan)

    def stream(
        self, pictures: Iterable[tuple[Any, Prepared]]
    ) -> Iterator[tuple[Any, Prepared, Detections]]:
        """Detections of (key, picture) pairs, in their order, as (key, picture, detections).

        Pictures of one canvas share a batch. The device works on one batch while the next is
        gathered and the caller has the results of the last. A picture waits for others only while
        few are waiting: MAX_WAITING_BATCHES, MAX_WAITING_BYTES.
        """
        waiting: dict[Any, list] = {}  # bucket -> [(position, key, picture)], the oldest first
        started: deque = deque()
        done: dict[int, tuple] = {}
        position = -1

        def start(bucket) -> None:
            rows = waiting.pop(bucket)
            started.append((rows, self._start([picture for _, _, picture in rows])))

        def finish() -> None:
            rows, result = started.popleft()
            for (at, key, picture), found in zip(rows, _detections(result), strict=True):
                done[at] = key, picture, found

        following = 0
        for position, (key, picture) in enumerate(pictures):
            bucket = self._bucket(picture.plan)
            waiting.setdefault(bucket, []).append((position, key, picture))
            if len(waiting[bucket]) == self.batch_size:
                start(bucket)
            elif self._waits_too_long(waiting):
                start(min(waiting, key=lambda bucket: waiting[bucket][0][0]))
            while len(started) > 1:
                finish()
            while following in done:
                yield done.pop(following)
                following += 1
        for bucket in list(waiting):
            start(bucket)
            if len(started) > 1:
                finish()
        while started:
            finish()
        for at in range(following, position + 1):
            yield done.pop(at)

    def _waits_too_long(self, waiting: dict[Any, list]) -> bool:
        pictures = [picture for rows in waiting.values() for _, _, picture in rows]
        held = sum(picture.image.nbytes + picture.canvas.nbytes for picture in pictures)
        oldest, newest = (
            pick(row[0] for rows in waiting.values() for row in rows) for pick in (min, max)
        )
        return held > MAX_WAITING_BYTES or newest - oldest >= MAX_WAITING_BATCHES * self.batch_size

    def _bucket(self, plan: ResizePlan) -> tuple:
        """Pictures of one bucket may share a batch: one canvas, and maps that end at one place."""
        if not self._pad_multiple:
            return (plan.canvas,)
        return plan.canvas, *(-(-side // self._pad_multiple) for side in plan.size)

    def _start(self, pictures: list[Prepared]) -> tuple[list[Prepared], Detections]:
        """Begins one batch, up to `batch_size` pictures of one bucket; does not wait for it."""
        canvas = pictures[0].canvas
        images = np.zeros((self.batch_size, *canvas.shape), canvas.dtype)
        sizes = np.ones((self.batch_size, 2), np.int32)
        for row, picture in enumerate(pictures):
            images[row], sizes[row] = picture.canvas, picture.plan.size
        return pictures, self._executable(images, sizes)(self._variables, images, sizes)

    def _executable(self, images: np.ndarray, sizes: np.ndarray) -> jax.stages.Compiled:
        """Compiled for this canvas, by whichever thread needs it first."""
        with self._lock:
            key = images.shape[1:3]
            if key not in self._compiled:
                lowered = self._predict.lower(self._variables, images, sizes)
                self._compiled[key] = lowered.compile()
            return self._compiled[key]


def _detections(started: tuple[list[Prepared], Detections]) -> list[Detections]:
    """Waits for a batch; each picture's detections in its own pixels."""
    pictures, batch = started[0], jax.device_get(started[1])
    found = []
    for row, picture in enumerate(pictures):
        one = jax.tree.map(lambda leaf, row=row: np.array(leaf[row]), batch)
        height, width = picture.image.shape[:2]
        scale_y, scale_x = picture.plan.scale
        boxes = one.boxes / np.array([scale_x, scale_y, scale_x, scale_y], np.float32)
        limits = np.array([width, height, width, height], np.float32)
        found.append(one.replace(boxes=np.clip(boxes, 0, limits)))
    return found
