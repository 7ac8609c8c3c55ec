"""Detect objects in images and videos; write annotated copies and json results.

    python -m mask_rcnn_jax.infer --workdir runs/quickstart --input photo.jpg --output out
    python -m mask_rcnn_jax.infer --workdir runs/quickstart --input 'photos/*.png' --input more/ \\
        --output out --score_threshold 0.7
    python -m mask_rcnn_jax.infer --workdir runs/quickstart --input clip.mov --input other.mkv \\
        --output out --stride 2 --max_frames 300
    python -m mask_rcnn_jax.infer --config configs/coco_torchvision.py:coco_v1 \\
        --weights maskrcnn_resnet50_fpn_coco-bf2d0c1e.pth --input photo.jpg --output out

Output for images: annotated images and detections.json (COCO results with `file_name`). For each
video: an annotated mp4 (H.264, without sound) and a .jsonl with one line per frame.
"""

import contextlib
import json
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from absl import flags, logging
from ml_collections import ConfigDict

from mask_rcnn_jax import cli
from mask_rcnn_jax.data.options import has_inclusive_boxes
from mask_rcnn_jax.deploy import annotate
from mask_rcnn_jax.deploy.inputs import find_inputs, output_files
from mask_rcnn_jax.deploy.predictor import Predictor
from mask_rcnn_jax.deploy.video import UnreadableVideo, Video, import_av
from mask_rcnn_jax.progress import Progress
from mask_rcnn_jax.weights.restore import restore

# One image keeps a CPU busy; a batch would only use more memory.
BATCH_SIZES = {"cpu": 1}
BATCH_SIZE = 8


def infer(
    config: ConfigDict | None,
    weights: str,
    inputs: Sequence[str],
    output: str,
    score_threshold: float,
    *,
    batch_size: int = 0,
    stride: int = 1,
    max_frames: int = 0,
) -> None:
    """Detect objects in images and videos and write the results.

    Unreadable inputs are logged, counted and skipped.

    Args:
        config: recipe; None takes the run's, a weight file needs one.
        weights: a run, one of its checkpoints, or a weight file.
        inputs: files, folders, glob patterns or URLs.
        output: folder for the results.
        score_threshold: lowest score of a detection.
        batch_size: images or frames per batch; 0 chooses by device.
        stride: take every `stride`-th frame of a video.
        max_frames: maximum number of frames per video; 0: all.

    Raises:
        ValueError: if no input can be read.
    """
    images, sources = find_inputs(inputs)
    folder = Path(output)
    image_files, video_files = output_files(images, sources, folder)
    if sources:
        import_av()
    config, variables, categories, _ = restore(config, weights)
    config.eval.score_threshold = score_threshold
    skipped: list[str] = []
    videos = _open_videos(zip(sources, video_files, strict=True), skipped)
    if not images and not videos:
        raise ValueError(f"no input could be read: {skipped[0]}")

    batch_size = batch_size or BATCH_SIZES.get(jax.default_backend(), BATCH_SIZE)
    batch_size = batch_size if videos else min(batch_size, len(images))
    predictor = Predictor(config, variables, batch_size)
    names, ids = ([category[key] for category in categories] for key in ("name", "id"))
    rules = config.eval.paste, has_inclusive_boxes(config)
    annotator = annotate.Annotator(names, ids, score_threshold, *rules)
    folder.mkdir(parents=True, exist_ok=True)
    if images:
        files = list(zip(images, image_files, strict=True))
        _infer_images(predictor, files, annotator, folder, skipped)
    if videos:
        _infer_videos(predictor, videos, annotator, skipped, stride, max_frames)
    num_inputs = len(images) + len(sources)
    if len(skipped) == num_inputs:
        raise ValueError(f"no input could be read: {skipped[0]}")
    if skipped:
        logging.warning("%d of %d inputs skipped", len(skipped), num_inputs)
    logging.info("results: %s", folder)


def _open_videos(files, skipped: list[str]) -> list[tuple[Video, Path]]:
    videos = []
    for source, target in files:
        try:
            videos.append((Video(source), target))
        except UnreadableVideo as error:
            _skip(error, skipped)
    return videos


def _skip(error: ValueError, skipped: list[str]) -> None:
    skipped.append(str(error))
    logging.warning("skipped %s", error)


def _infer_images(predictor: Predictor, files, annotator, folder: Path, skipped: list[str]) -> None:
    progress = Progress("images", len(files))
    done = count = 0

    def on_error(error) -> None:
        _skip(error, skipped)
        progress.advance(1)

    found = annotate.annotate_images(predictor, files, annotator, on_error)
    with _json_list(folder / "detections.json") as write, contextlib.closing(found):
        for entries in found:
            for entry in entries:
                write(entry)
            done, count = done + 1, count + len(entries)
            progress.advance(1)
    logging.info("%d detections in %d images", count, done)


@contextlib.contextmanager
def _json_list(path: Path) -> Iterator:
    """Yield a function that appends an entry to a json list; the file is valid json on any exit."""
    with open(path, "w", encoding="utf-8") as file:
        separator = ""

        def write(entry: dict) -> None:
            nonlocal separator
            file.write(separator + json.dumps(entry))
            separator = ",\n"

        file.write("[")
        try:
            yield write
        finally:
            file.write("]\n")


def _infer_videos(
    predictor: Predictor, videos, annotator, skipped: list[str], stride: int, max_frames: int
) -> None:
    expected = [video.expected_frames(stride, max_frames) for video, _ in videos]
    progress = Progress("frames", None if None in expected else sum(expected))
    frames, objects = Counter(), Counter()

    def on_error(error) -> None:
        _skip(error, skipped)

    found = annotate.annotate_videos(
        predictor, videos, annotator, on_error, stride=stride, max_frames=max_frames
    )
    try:
        with contextlib.closing(found):
            for video, count in found:
                frames[video] += 1
                objects[video] += count
                progress.advance(1)
    finally:
        for video, target in videos:
            if frames[video]:
                logging.info(
                    "%d detections in %d frames: %s", objects[video], frames[video], target
                )
    for (video, _), wanted in zip(videos, expected, strict=True):
        if video.damaged:
            logging.warning("%s: %d damaged packets", video.source, video.damaged)
        # A frame count derived from the duration may be off by one.
        if wanted and 0 < frames[video] < min(wanted - 1, 0.98 * wanted):
            logging.warning("%s ends after %d frames of %d", video.source, frames[video], wanted)


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, which closes the files: a video without index is unplayable."""

    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _define_flags() -> None:
    cli.define_config(required=False)
    flags.DEFINE_string("workdir", None, "Run folder; its latest checkpoint is used.")
    flags.DEFINE_string("weights", None, "Run folder, one of its checkpoints/<step>, or a file.")
    flags.DEFINE_multi_string(
        "input", None, "Image, video, folder, glob or URL; repeatable.", required=True
    )
    flags.DEFINE_string("output", None, "Output folder.", required=True)
    flags.DEFINE_float("score_threshold", 0.5, "Drop detections with lower scores.", 0.0, 1.0)
    flags.DEFINE_integer("batch_size", 0, "Images or frames per batch; 0: 1 on CPU, 8 on GPU.", 0)
    flags.DEFINE_integer("stride", 1, "Take every n-th frame of a video.", 1)
    flags.DEFINE_integer("max_frames", 0, "Maximum number of frames per video; 0: all.", 0)


def main(_: Sequence[str]) -> None:
    FLAGS = flags.FLAGS
    if (FLAGS.workdir is None) == (FLAGS.weights is None):
        raise ValueError("infer needs exactly one of --workdir and --weights")
    weights, threshold = FLAGS.workdir or FLAGS.weights, FLAGS.score_threshold
    with _sigterm_as_interrupt():
        infer(
            FLAGS.config,
            weights,
            FLAGS.input,
            FLAGS.output,
            threshold,
            batch_size=FLAGS.batch_size,
            stride=FLAGS.stride,
            max_frames=FLAGS.max_frames,
        )


if __name__ == "__main__":
    cli.run(main, _define_flags)
