"""Pictures and videos through a `Predictor`: what is found in them, and drawn, in files.

Reading, the device, drawing and encoding work at the same time, each on other pictures.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mask_rcnn_jax.data.coco import UndecodableImage, decode_image
from mask_rcnn_jax.deploy.pipeline import Line, map_in_order, prefetch, take_turns
from mask_rcnn_jax.deploy.predictor import Predictor, Prepared
from mask_rcnn_jax.deploy.video import Frame, UnreadableVideo, Video, VideoWriter
from mask_rcnn_jax.evaluation import visualize
from mask_rcnn_jax.evaluation.coco import to_coco_results
from mask_rcnn_jax.structures import Detections

# Drawing and reading leave Python's lock for most of their time, but more threads hold more
# pictures.
THREADS = min(4, os.cpu_count() or 1)
# Frames that a reader is ahead and an encoder behind at most, for each video, beside a batch.
FRAMES_AHEAD = 4


class Classes(NamedTuple):
    """What class k is called, at k - 1."""

    names: Sequence[str]
    category_ids: Sequence[int | str]


class Rules(NamedTuple):
    """What counts as found, and how masks and boxes are written; see `to_coco_results`."""

    score_threshold: float
    paste: str
    inclusive_boxes: bool


def annotate_pictures(
    predictor: Predictor,
    files: Sequence[tuple[Path, Path]],
    classes: Classes,
    rules: Rules,
    leave_out: Callable[[UndecodableImage], None],
) -> Iterator[list[dict]]:
    """Writes an annotated picture for each (source, target); yields its COCO results, in order.

    The results are box and mask in one, with `file_name`; `image_id` is the place in `files`, from
    1. A source that cannot be decoded is handed to `leave_out`.
    """
    numbered = [(number, *pair) for number, pair in enumerate(files, start=1)]

    def read(file: tuple) -> tuple[tuple, Prepared | UndecodableImage]:
        try:
            return file, predictor.prepare(decode_image(file[1], upright=True))
        except UndecodableImage as error:
            return file, error

    def sound(pool) -> Iterator[tuple[tuple, Prepared]]:
        with closing(map_in_order(pool, read, numbered, THREADS + 1)) as pictures:
            for file, picture in pictures:
                if isinstance(picture, UndecodableImage):
                    leave_out(picture)
                else:
                    yield file, picture

    def write(found: tuple[tuple, Prepared, Detections]) -> list[dict]:
        (number, source, target), picture, detections = found
        visualize.write_image(target, _draw(picture.image, detections, classes, rules))
        results = _results(detections, picture.image.shape[:2], number, classes, rules)
        return [{"file_name": source.name, **result} for result in results]

    with ThreadPoolExecutor(THREADS) as pool, ThreadPoolExecutor(THREADS) as readers:
        with closing(predictor.stream(sound(readers))) as found:
            yield from map_in_order(pool, write, found, THREADS + 1)


def annotate_videos(
    predictor: Predictor,
    files: Sequence[tuple[Video, Path]],
    classes: Classes,
    rules: Rules,
    leave_out: Callable[[UnreadableVideo], None],
    *,
    stride: int,
    max_frames: int,
) -> Iterator[tuple[Video, int]]:
    """Writes an annotated mp4 for each (source, target), and beside it a .jsonl, a line per frame.

    Up to `batch_size` videos are read at the same time and share the predictor's batches. Yields
    the video and the number of its objects for each frame that was handed to its encoder. However
    it ends, what was handed over is written and the files are closed. A video without a frame goes
    to `leave_out`.
    """
    outputs: dict[Video, _Output] = {}
    targets = dict(files)
    ahead = FRAMES_AHEAD + predictor.batch_size

    def frames(video: Video) -> Iterator[tuple[tuple[Video, Frame], Prepared]]:
        try:
            for frame in video.frames(stride, max_frames):
                yield (video, frame), predictor.prepare(frame.image)
        except UnreadableVideo as error:
            leave_out(error)

    def draw(found: tuple[Any, Prepared, Detections]) -> tuple[Video, Frame, list[dict]]:
        (video, frame), _, detections = found
        results = _results(detections, frame.image.shape[:2], 0, classes, rules)
        picture = _draw(frame.image, detections, classes, rules, min_side=0, color_by="class")
        return video, frame._replace(image=picture), results

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            readers = (prefetch(frames(video), ahead) for video, _ in files)
            with (
                closing(take_turns(readers, predictor.batch_size)) as turns,
                closing(predictor.stream(turns)) as found,
                closing(map_in_order(pool, draw, found, ahead)) as drawn,
            ):
                for video, frame, results in drawn:
                    if video not in outputs:
                        outputs[video] = _Output(video, targets[video], frame, classes, stride)
                    outputs[video].put(frame, results)
                    yield video, len(results)
                    for output in outputs.values():
                        output.end_if_complete()
    finally:
        _close_all(outputs.values())


class _Output:
    """The files of one video, written by a thread of their own."""

    def __init__(self, video: Video, target: Path, first: Frame, classes: Classes, stride: int):
        height, width = first.image.shape[:2]
        self._video = video
        self._names = dict(zip(classes.category_ids, classes.names, strict=True))
        self._writer = VideoWriter(target, height, width, video.rate / stride, video.pixel_aspect)
        # A line at a time, so that others can follow while it grows.
        self._lines = open(target.with_suffix(".jsonl"), "w", 1, encoding="utf-8")
        self._line = Line(self._write, self._finish, FRAMES_AHEAD)
        self._count, self._ended = 0, False

    def put(self, frame: Frame, results: list[dict]) -> None:
        self._count += 1
        self._line.put((frame, results))

    def _write(self, item: tuple[Frame, list[dict]]) -> None:
        frame, results = item
        self._writer.write(frame.image, frame.time)
        record = {
            "file_name": Path(self._video.source).name,
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
            self._writer = None  # an encoder holds many frames

    def end_if_complete(self) -> None:
        """Lets the thread finish the files once every frame that was read is here."""
        if not self._ended and self._count == self._video.frames_read:
            self._ended = True
            self._line.end()

    def close(self) -> None:
        self._line.close()


def _close_all(outputs) -> None:
    """Closes every output, whatever happens to one; then raises the first error."""
    errors = []
    for output in outputs:
        try:
            output.close()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _draw(
    image: np.ndarray, found: Detections, classes: Classes, rules: Rules, **options
) -> np.ndarray:
    return visualize.draw_detections(
        image, found, classes.names, score_threshold=rules.score_threshold, **options
    )


def _results(
    found: Detections, size: tuple[int, int], image_id: int, classes: Classes, rules: Rules
) -> list[dict]:
    """COCO results of one picture, box and mask in one."""
    one = jax.tree.map(lambda leaf: leaf[None], found)
    boxes, masks = to_coco_results(
        one,
        [(1.0, 1.0)],
        [image_id],
        [size],
        classes.category_ids,
        paste=rules.paste,
        inclusive_boxes=rules.inclusive_boxes,
    )
    return [
        {**box, "segmentation": mask["segmentation"]}
        for box, mask in zip(boxes, masks, strict=True)
    ]
