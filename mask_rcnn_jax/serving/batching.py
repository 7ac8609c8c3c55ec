"""Share a predictor's batches between images that arrive one at a time."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from mask_rcnn_jax.predict.batches import PreparedImage
from mask_rcnn_jax.predict.predictor import Predictor
from mask_rcnn_jax.structures import Detections

_CLOSED = "the batcher is closed"


class _Waiting(NamedTuple):
    image: PreparedImage
    arrived: float  # time.monotonic()
    found: Future[Detections]
    is_dropped: Callable[[], bool]


class Batcher:
    """Collect images from many threads into batches of a predictor, oldest first.

    A batch starts when it is full, or when its first image has waited `max_delay` seconds and the
    device is free; images that arrive while a batch runs wait for the next. Its thread ends with
    `close`.
    """

    def __init__(self, predictor: Predictor, max_delay: float):
        self._predictor = predictor
        self._max_delay = max_delay
        self._waiting: dict[Any, deque[_Waiting]] = {}  # by bucket
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    def detect(
        self,
        image: PreparedImage,
        timeout: float,
        is_dropped: Callable[[], bool] = lambda: False,
    ) -> Detections:
        """Wait for the detections of one image, in pixels of the image.

        is_dropped: whether no one wants them any more, which is asked before they are computed.

        Raises:
            ConnectionError: no one wants them.
            TimeoutError: there are none after `timeout` seconds; the image is dropped.
            RuntimeError: the batcher is closed.
        """
        waiting = _Waiting(image, time.monotonic(), Future(), is_dropped)
        with self._changed:
            if self._closed:
                raise RuntimeError(_CLOSED)
            self._waiting.setdefault(self._predictor.bucket(image), deque()).append(waiting)
            self._changed.notify()
        try:
            return waiting.found.result(timeout)
        except TimeoutError:
            waiting.found.cancel()
            raise

    def close(self) -> None:
        """End the thread after the batch at work; images that wait get a RuntimeError."""
        with self._changed:
            self._closed = True
            for one in (one for rows in self._waiting.values() for one in rows):
                if one.found.set_running_or_notify_cancel():
                    one.found.set_exception(RuntimeError(_CLOSED))
            self._waiting.clear()
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._take():
            batch = [one for one in batch if _is_wanted(one)]
            try:
                results = self._predictor.stream((one.found, one.image) for one in batch)
                for found, _, detections in results:
                    found.set_result(detections)
            except Exception as error:  # it belongs to the callers; later batches may succeed
                for one in batch:
                    if not one.found.done():
                        one.found.set_exception(error)

    def _take(self) -> list[_Waiting]:
        """Wait for a batch that can start; an empty list means that there will be none."""
        with self._changed:
            while True:
                if bucket := self._ready():
                    rows = self._waiting[bucket]
                    size = min(len(rows), self._predictor.images_at_once)
                    batch = [rows.popleft() for _ in range(size)]
                    if not rows:
                        del self._waiting[bucket]
                    return batch
                if self._closed:
                    return []
                oldest = min((rows[0].arrived for rows in self._waiting.values()), default=None)
                left = None if oldest is None else oldest + self._max_delay - time.monotonic()
                self._changed.wait(left)

    def _ready(self) -> Any:
        """Return the bucket whose first image is the oldest of those that need not wait longer."""
        latest = time.monotonic() - self._max_delay
        ready = [
            bucket
            for bucket, rows in self._waiting.items()
            if len(rows) >= self._predictor.images_at_once or rows[0].arrived <= latest
        ]
        return min(ready, key=lambda bucket: self._waiting[bucket][0].arrived, default=None)


def _is_wanted(one: _Waiting) -> bool:
    """Whether the caller has not given up, nor those for whom it asks."""
    if not one.found.set_running_or_notify_cancel():
        return False
    if one.is_dropped():
        one.found.set_exception(ConnectionError("no one waits for the image"))
        return False
    return True
