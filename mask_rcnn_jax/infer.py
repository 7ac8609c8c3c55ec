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
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from absl import flags, logging
from ml_collections import ConfigDict

from mask_rcnn_jax import cli
from mask_rcnn_jax.deploy import annotate
from mask_rcnn_jax.deploy.inputs import find_inputs, output_files
from mask_rcnn_jax.deploy.loading import set_score_threshold
from mask_rcnn_jax.deploy.predictor import Predictor
from mask_rcnn_jax.deploy.video import UnreadableVideo, Video, import_av
from mask_rcnn_jax.progress import Progress
from mask_rcnn_jax.weights.restore import restore

# One image keeps a CPU busy; a batch would only use more memory.
BATCH_SIZES = {"cpu": 1}
BATCH_SIZE = 8
Skip = Callable[[ValueError], None]  # logs and counts an input that cannot be read


def infer(
    config: ConfigDict | None,
    weights: str,
    inputs: Sequence[str],
    output: str,
    score_threshold: float,
    batch_size: int,
    stride: int,
    max_frames: int,
) -> None:
    """Detect objects in images and videos and write the results; arguments as the flags.

    Unreadable inputs are logged, counted and skipped; ValueError if no input can be read.
    """
    images, sources = find_inputs(inputs)
    folder = Path(output)
    image_files, video_files = output_files(images, sources, folder)
    if sources:
        import_av()
    config, variables, categories, _ = restore(config, weights)
    set_score_threshold(config, score_threshold)
    skipped: list[str] = []

    def skip(error: ValueError) -> None:
        skipped.append(str(error))
        logging.warning("skipped %s", error)

    videos = []
    for source, video_file in zip(sources, video_files, strict=True):
        try:
            videos.append((Video(source), video_file))
        except UnreadableVideo as error:
            skip(error)
    if not images and not videos:
        raise ValueError(f"no input could be read: {skipped[0]}")

    batch_size = batch_size or BATCH_SIZES.get(jax.default_backend(), BATCH_SIZE)
    if not videos:
        batch_size = min(batch_size, -(-len(images) // jax.local_device_count()))
    predictor = Predictor(config, variables, batch_size, categories)
    folder.mkdir(parents=True, exist_ok=True)
    if images:
        files = list(zip(images, image_files, strict=True))
        _infer_images(predictor, files, folder, skip)
    if videos:
        _infer_videos(predictor, videos, skip, stride, max_frames)
    num_inputs = len(images) + len(sources)
    if len(skipped) == num_inputs:
        raise ValueError(f"no input could be read: {skipped[0]}")
    if skipped:
        logging.warning("%d of %d inputs skipped", len(skipped), num_inputs)
    logging.info("results: %s", folder)


def _infer_images(predictor: Predictor, files, folder: Path, skip: Skip) -> None:
    progress = Progress("images", len(files))
    done = count = 0

    def on_error(error) -> None:
        skip(error)
        progress.advance(1)

    found = annotate.annotate_images(predictor, files, on_error)
    path = folder / "detections.json"
    with contextlib.closing(found), open(path, "w", encoding="utf-8") as file:
        file.write("[")
        try:
            for entries in found:
                for entry in entries:
                    file.write((",\n" if count else "") + json.dumps(entry))
                    count += 1
                done += 1
                progress.advance(1)
        finally:
            file.write("]\n")  # the file is valid json on any exit
    logging.info("%d detections in %d images", count, done)


def _infer_videos(predictor: Predictor, videos, skip: Skip, stride: int, max_frames: int) -> None:
    expected = [video.expected_frames(stride, max_frames) for video, _ in videos]
    progress = Progress("frames", None if None in expected else sum(expected))
    frames, objects = Counter(), Counter()
    found = annotate.annotate_videos(predictor, videos, skip, stride=stride, max_frames=max_frames)
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
        # A frame count derived from the duration may be off by one.
        if wanted and 0 < frames[video] < min(wanted - 1, 0.98 * wanted):
            logging.warning("%s ends after %d frames of %d", video.source, frames[video], wanted)


def _define_flags() -> None:
    cli.define_config(required=False)
    flags.DEFINE_string("workdir", None, "Run folder; its latest checkpoint is used.")
    flags.DEFINE_string("weights", None, "Run folder, one of its checkpoints/<step>, or a file.")
    input_help = "Image, video, folder, glob or URL; repeatable."
    flags.DEFINE_multi_string("input", None, input_help, required=True)
    flags.DEFINE_string("output", None, "Output folder.", required=True)
    flags.DEFINE_float("score_threshold", 0.5, "Drop detections with lower scores.", 0.0, 1.0)
    flags.DEFINE_integer(
        "batch_size", 0, "Images or frames at a time on each device; 0: 1 on CPU, 8 on GPU.", 0
    )
    flags.DEFINE_integer("stride", 1, "Take every n-th frame of a video.", 1)
    flags.DEFINE_integer("max_frames", 0, "Maximum number of frames per video; 0: all.", 0)


def main(_: Sequence[str]) -> None:
    FLAGS = flags.FLAGS
    if (FLAGS.workdir is None) == (FLAGS.weights is None):
        raise ValueError("infer needs exactly one of --workdir and --weights")
    weights, inputs, output = FLAGS.workdir or FLAGS.weights, FLAGS.input, FLAGS.output
    options = {name: getattr(FLAGS, name) for name in ("batch_size", "stride", "max_frames")}
    # SIGTERM acts like Ctrl-C, which closes the files: a video without index is unplayable.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        infer(FLAGS.config, weights, inputs, output, FLAGS.score_threshold, **options)
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    cli.run(main, _define_flags)
