"""Write what is found in images and videos, and log how far it is."""

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from mask_rcnn_jax.data.unused import Unused
from mask_rcnn_jax.predict import annotate
from mask_rcnn_jax.predict.predictor import Predictor
from mask_rcnn_jax.predict.saving import WITHOUT_KEYPOINTS, ResultFiles
from mask_rcnn_jax.terminal.progress import Progress
from mask_rcnn_jax.video.reader import Video

Skip = Callable[[ValueError], None]  # logs and counts an input that cannot be read


def write_images(
    predictor: Predictor,
    images: Any,
    folder: Path,
    kinds: Sequence[str],
    drawing: Mapping[str, Any] | None,
    skip: Skip,
) -> None:
    """Write detections.json, files of the `kinds` and, unless `drawing` is None, drawings.

    images: inputs, with a length, that can be looped over.
    """
    progress = Progress("images", len(images))
    done, unused = 0, Unused()

    def on_error(error) -> None:
        skip(error)
        progress.advance(1)

    names = predictor.keypoint_names
    if names and (without := [kind for kind in kinds if kind in WITHOUT_KEYPOINTS]):
        text = "--save %s: without keypoints, which detections.json and --save csv have"
        logging.warning(text, ",".join(without))
    with ResultFiles(folder, kinds, names) as files:
        given = images, folder, files, drawing
        found = annotate.annotate_images(predictor, *given, on_error, unused)
        with contextlib.closing(found):
            for records in found:
                files.add(records)
                done += 1
                progress.advance(1)
    logging.info("%d detections in %d images", files.count, done)
    for line in unused.lines(infers=True):
        logging.warning("%s", line)


def write_videos(
    predictor: Predictor,
    videos: Sequence[tuple[Video, Path]],
    drawing: Mapping[str, Any],
    skip: Skip,
    reading: dict[str, Any],
    *,
    track: bool,
) -> None:
    """Write an annotated copy and a .jsonl of each (video, target).

    reading: `stride` and `max_frames`.
    """
    for _, target in videos:
        target.parent.mkdir(parents=True, exist_ok=True)
    # A class, or a track, has the same color in all frames, which keep their size.
    color = "instance" if track else "class"
    drawing = {"color_by": color} | dict(drawing) | {"min_side": 0}
    expected = [video.expected_frames(**reading) for video, _ in videos]
    known = [count for count in expected if count is not None]
    progress = Progress("frames", sum(known) if len(known) == len(expected) else None)
    frames, objects = Counter[Video](), Counter[Video]()
    given = predictor, videos, drawing, skip
    found = annotate.annotate_videos(*given, **reading, track=track)
    try:
        with contextlib.closing(found):
            for video, count in found:
                frames[video] += 1
                objects[video] += count
                progress.advance(1)
    finally:
        for video, target in videos:
            if count := frames[video]:
                logging.info("%d detections in %d frames: %s", objects[video], count, target)
    for (video, _), wanted in zip(videos, expected, strict=True):
        if video.damaged:
            logging.warning("%s: %d damaged packets", video.source, video.damaged)
        if wanted and frames[video] and video.is_short(frames[video], wanted):
            logging.warning("%s ends after %d frames of %d", video.source, frames[video], wanted)
