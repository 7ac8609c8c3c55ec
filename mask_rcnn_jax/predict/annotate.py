"""Annotate images and videos with the detections of a `Predictor`.

Reading, inference, drawing and encoding run concurrently, each on different images.
"""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mask_rcnn_jax import stores
from mask_rcnn_jax.data.unused import Unused
from mask_rcnn_jax.images.decode import UndecodableImage
from mask_rcnn_jax.predict.engines import UnfitImage
from mask_rcnn_jax.predict.inputs import Input, read_image
from mask_rcnn_jax.predict.large import check_kinds
from mask_rcnn_jax.predict.pipeline import BackgroundWriter, map_in_order, prefetch, round_robin
from mask_rcnn_jax.predict.predictor import Predictor, Prepared
from mask_rcnn_jax.predict.result import Result
from mask_rcnn_jax.predict.saving import ResultFiles
from mask_rcnn_jax.video.reader import UnreadableVideo, Video, VideoFrame
from mask_rcnn_jax.video.tracks import Tracker
from mask_rcnn_jax.video.writer import VideoWriter

# Drawing and decoding mostly release the GIL, but more threads hold more images in memory.
THREADS = min(4, os.cpu_count() or 1)
# Frames per video, beyond its share of a batch, that a reader may be ahead and an encoder behind.
FRAMES_AHEAD = 4
# Videos that are read at a time, whatever the number of devices: each holds a decoder and an
# encoder with some tens of frames of their own, and a few feed a device as well as many.
MAX_OPEN_VIDEOS = 8
# Images that cannot be had in a row, from which on, until there is one, each is tried once.
MOST_AWAY = 20
T = TypeVar("T")


class Unavailable(ValueError):
    """Not an image is at fault but what it lies on: a disk, a store or a network."""


def annotate_images(
    predictor: Predictor,
    images: Iterable[Input],
    folder: Path,
    files: ResultFiles,
    drawing: Mapping[str, Any] | None,
    on_error: Callable[[ValueError], None],
    unused: Unused | None = None,
) -> Generator[list[dict[str, Any]]]:
    """Write an annotated copy of each image into a folder, and what `files` writes.

    `drawing` are options of `Result.plot`, None draws nothing. Yields what the lists of `files` are
    to hold, in order; `image_id` is the 1-based position in `images`. Errors and `unused` are those
    of `detect_images`.
    """

    def write(result: Result, image: Input, number: int) -> list[dict[str, Any]]:
        if drawing is not None:
            result.save(folder / image.target, **drawing)
        return files.write(result, image, number)

    def skip(number: int, image: Input, error: ValueError) -> None:
        on_error(error)

    numbered = enumerate(images, start=1)
    return detect_images(predictor, numbered, write, skip, files.kinds, unused)


def detect_images(
    predictor: Predictor,
    images: Iterable[tuple[int, Input]],
    use: Callable[[Result, Input, int], T],
    on_error: Callable[[int, Input, ValueError], None],
    kinds: Sequence[str] = (),
    unused: Unused | None = None,
) -> Generator[T]:
    """Yield what `use`, in threads, makes of each image's result, in order.

    Args:
        predictor: detects.
        images: each with its number.
        use: of the result, the image and its number.
        on_error: is given an image that cannot be read, or lacks bands, and is skipped; before
            anything that follows it is yielded. Of what may pass, `Unavailable` after some tries.
        kinds: of `infer --save`, some of which need all pixels of an image at once.
        unused: learns of what files hold beyond the pixels that are used, where `data.bands` does
            not say what is.

    Raises OSError where not the image but the machine is at fault, such as a full disk.
    """
    unused, away = unused or Unused(), 0  # images in a row

    def prepared(one: Input) -> Prepared:
        source = one.source
        if large := predictor.prepare_large(source):
            check_kinds(source, kinds)
            if not predictor.bands.names:
                unused.add(str(one.name), source, None)
            return large
        image = read_image(source, one.public_only, predictor.bands, predictor.upright)
        if "://" not in source and not predictor.bands.names:
            unused.add(str(one.name), source, image)
        return predictor.prepare(image)

    def read(item: tuple[int, Input]) -> tuple[tuple[int, Input], Prepared | ValueError]:
        nonlocal away
        source, pauses = item[1].source, away < MOST_AWAY
        try:
            found = stores.retried(partial(prepared, item[1]), pauses=pauses)
            away = 0
            return item, found
        except UnfitImage as error:
            return item, UnfitImage(f"{source}: {error}")
        except ValueError as error:  # also UndecodableImage; Python's own name no file
            is_named = source in str(error)
            return item, error if is_named else UndecodableImage(f"{source}: {error}")
        except OSError as error:
            if error.errno in stores.OF_MACHINE:
                raise
            reason = error.strerror or str(error)
            is_away = stores.may_pass(error) or isinstance(error, PermissionError)
            away = away + 1 if is_away else 0
            kind = Unavailable if is_away else UndecodableImage
            return item, kind(reason if source in reason else f"{source}: {reason}")

    def decodable(pool) -> Iterator[tuple[tuple, Prepared]]:
        with closing(map_in_order(pool, read, images, THREADS + 1)) as prepared:
            for item, image in prepared:
                if isinstance(image, ValueError):
                    number, skipped = item
                    on_error(number, skipped, image)
                else:
                    yield item, image

    def used(item: tuple[Any, Prepared, Any]) -> T:
        (number, image), prepared, detections = item
        return use(predictor.result(prepared, detections, image.source), image, number)

    with ThreadPoolExecutor(THREADS) as pool, ThreadPoolExecutor(THREADS) as readers:
        with closing(predictor.stream(decodable(readers))) as detected:
            yield from map_in_order(pool, used, detected, THREADS + 1)


def annotate_videos(
    predictor: Predictor,
    files: Sequence[tuple[Video, Path]],
    drawing: Mapping[str, Any],
    on_error: Callable[[UnreadableVideo], None],
    *,
    stride: int,
    max_frames: int,
    track: bool = False,
) -> Generator[tuple[Video, int]]:
    """Write an annotated mp4 and a .jsonl with one line per frame for each (source, target).

    Up to `images_at_once` videos, at most MAX_OPEN_VIDEOS, are read concurrently and share the
    predictor's batches. A video without frames is passed to `on_error`. On any exit, including
    errors, all frames handed to the encoders are written and the files are closed. With `track`,
    objects are followed through the frames, see `tracks`.

    Yields:
        The video and its object count, for each frame handed to an encoder.
    """
    outputs: dict[Video, _VideoOutput] = {}
    targets = dict(files)
    names = {category["id"]: category["name"] for category in predictor.categories}
    batch = predictor.images_at_once
    num_open = min(len(files), batch, MAX_OPEN_VIDEOS)

    def frames(video: Video) -> Iterator[tuple[tuple[Video, VideoFrame], Prepared]]:
        try:
            for frame in video.frames(stride, max_frames):
                yield (video, frame), predictor.prepare(frame.image)
        except UnreadableVideo as error:
            on_error(error)
        except UnfitImage as error:
            on_error(UnreadableVideo(f"{video.source}: {error}"))

    def draw(item: tuple[Video, VideoFrame, Result]) -> tuple[Video, VideoFrame, list[dict]]:
        video, frame, result = item
        drawn = result.plot(**drawing)
        return video, frame._replace(image=drawn), result.to_coco(0)

    followed = partial(_followed, predictor, track=track)
    share = -(-batch // max(1, num_open))
    readers = (prefetch(frames(video), FRAMES_AHEAD + share) for video, _ in files)
    with (
        ExitStack() as opened,
        ThreadPoolExecutor(THREADS) as pool,
        closing(round_robin(readers, num_open)) as prepared,
        closing(predictor.stream(prepared)) as detected,
        closing(map_in_order(pool, draw, followed(detected), FRAMES_AHEAD + batch)) as drawn,
    ):
        for video, frame, results in drawn:
            if video not in outputs:
                output = _VideoOutput(video, targets[video], frame, names, stride)
                outputs[video] = opened.enter_context(closing(output))
            outputs[video].put(frame, results)
            yield video, len(results)
            for output in outputs.values():
                output.end_if_complete()


def _followed(
    predictor: Predictor, detected: Iterable, *, track: bool
) -> Iterator[tuple[Video, VideoFrame, Result]]:
    """Yield each frame's result; with `track`, objects have a number in all frames of a video."""
    trackers: dict[Video, Tracker] = defaultdict(Tracker)
    for (video, frame), image, detections in detected:
        result = predictor.result(image, detections)
        if track:
            found = result.boxes, result.classes, float(frame.time)
            result = replace(result, track_ids=trackers[video].update(*found))
        yield video, frame, result


class _VideoOutput:
    """Output files of one video, written by a background thread."""

    def __init__(
        self, video: Video, target: Path, first: VideoFrame, names: dict[Any, str], stride: int
    ):
        height, width = first.image.shape[:2]
        self._video = video
        self._names = names  # by category id
        self._writer = VideoWriter(target, height, width, video.rate / stride, video.pixel_aspect)
        # Line-buffered, so that other programs can follow the growing file.
        self._lines = open(target.with_suffix(".jsonl"), "w", 1, encoding="utf-8")
        self._background = BackgroundWriter(self._write, self._finish, FRAMES_AHEAD)
        self._count, self._ended = 0, False

    def put(self, frame: VideoFrame, results: list[dict]) -> None:
        self._count += 1
        self._background.put((frame, results))

    def _write(self, item: tuple[VideoFrame, list[dict]]) -> None:
        frame, results = item
        self._writer.write(frame.image, frame.time)
        record = {
            "file_name": self._video.name,
            "frame": frame.number,
            "time": round(float(frame.time), 6),
            "detections": [
                {"category": self._names[result["category_id"]]}
                | {key: value for key, value in result.items() if key != "image_id"}
                for result in results
            ],
        }
        self._lines.write(json.dumps(record) + "\n")

    def _finish(self) -> None:
        try:
            self._writer.close()
        finally:
            self._lines.close()
            self._writer = None  # type: ignore[assignment]  # an encoder holds many frames

    def end_if_complete(self) -> None:
        """Let the thread finish the files once all frames read have arrived."""
        if not self._ended and self._count == self._video.frames_read:
            self._ended = True
            self._background.end()

    def close(self) -> None:
        self._background.close()
