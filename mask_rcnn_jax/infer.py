"""Find objects in pictures and videos; write them annotated, and what was found as json.

    python -m mask_rcnn_jax.infer --workdir runs/quickstart --input photo.jpg --output out
    python -m mask_rcnn_jax.infer --workdir runs/quickstart --input 'photos/*.png' --input more/ \\
        --output out --score_threshold 0.7
    python -m mask_rcnn_jax.infer --workdir runs/quickstart --input clip.mov --input other.mkv \\
        --output out --stride 2 --max_frames 300
    python -m mask_rcnn_jax.infer --config configs/coco_torchvision.py:coco_v1 \\
        --weights maskrcnn_resnet50_fpn_coco-bf2d0c1e.pth --input photo.jpg --output out

Pictures: an annotated one for each, and detections.json (COCO results with `file_name`). Videos: an
annotated mp4 (H.264, without sound) and a .jsonl with one line per frame for each.
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

# On a CPU, which one picture keeps busy, a batch only takes memory.
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
    """Detect in every picture and video of `inputs` and write what was found below `output`.

    weights: a run, one of its checkpoints, or a file of weights, which needs a config; without one
    that of the run is taken. An input that cannot be read is named, counted and left out, unless
    there is no other. batch_size: pictures or frames at once, 0 leaves it to the device. stride,
    max_frames: of each video take every `stride`-th frame, at most `max_frames` (0: all).
    """
    pictures, sources = find_inputs(inputs)
    folder = Path(output)
    picture_files, video_files = output_files(pictures, sources, folder)
    if sources:
        import_av()
    config, variables, categories, _ = restore(config, weights)
    classes = annotate.Classes([c["name"] for c in categories], [c["id"] for c in categories])
    config.eval.score_threshold = score_threshold
    left_out: list[str] = []
    videos = _open_videos(zip(sources, video_files, strict=True), left_out)
    if not pictures and not videos:
        raise ValueError(f"no input could be read: {left_out[0]}")

    batch_size = batch_size or BATCH_SIZES.get(jax.default_backend(), BATCH_SIZE)
    batch_size = batch_size if videos else min(batch_size, len(pictures))
    predictor = Predictor(config, variables, batch_size)
    rules = annotate.Rules(score_threshold, config.eval.paste, has_inclusive_boxes(config))
    folder.mkdir(parents=True, exist_ok=True)
    if pictures:
        files = list(zip(pictures, picture_files, strict=True))
        _infer_pictures(predictor, files, classes, rules, folder, left_out)
    if videos:
        _infer_videos(predictor, videos, classes, rules, left_out, stride, max_frames)
    if len(left_out) == len(pictures) + len(sources):
        raise ValueError(f"no input could be read: {left_out[0]}")
    if left_out:
        logging.warning("%d of %d inputs left out", len(left_out), len(pictures) + len(sources))
    logging.info("results: %s", folder)


def _open_videos(files, left_out: list[str]) -> list[tuple[Video, Path]]:
    videos = []
    for source, target in files:
        try:
            videos.append((Video(source), target))
        except UnreadableVideo as error:
            _leave_out(error, left_out)
    return videos


def _leave_out(error: ValueError, left_out: list[str]) -> None:
    left_out.append(str(error))
    logging.warning("left out %s", error)


def _infer_pictures(
    predictor: Predictor, files, classes, rules, folder: Path, left_out: list[str]
) -> None:
    progress = Progress("pictures", len(files))
    done = count = 0

    def leave_out(error) -> None:
        _leave_out(error, left_out)
        progress.advance(1)

    found = annotate.annotate_pictures(predictor, files, classes, rules, leave_out)
    with _json_list(folder / "detections.json") as write, contextlib.closing(found):
        for entries in found:
            for entry in entries:
                write(entry)
            done, count = done + 1, count + len(entries)
            progress.advance(1)
    logging.info("%d detections in %d pictures", count, done)


@contextlib.contextmanager
def _json_list(path: Path) -> Iterator:
    """`write(entry)` appends to a json list in a file, which is whole however the block ends."""
    with open(path, "w", encoding="utf-8") as file:
        before = ""

        def write(entry: dict) -> None:
            nonlocal before
            file.write(before + json.dumps(entry))
            before = ",\n"

        file.write("[")
        try:
            yield write
        finally:
            file.write("]\n")


def _infer_videos(
    predictor: Predictor, videos, classes, rules, left_out: list[str], stride: int, max_frames: int
) -> None:
    expected = [video.expected_frames(stride, max_frames) for video, _ in videos]
    progress = Progress("frames", None if None in expected else sum(expected))
    frames, objects = Counter(), Counter()
    found = annotate.annotate_videos(
        predictor, videos, classes, rules, lambda error: _leave_out(error, left_out),
        stride=stride, max_frames=max_frames,
    )  # fmt: skip
    try:
        with contextlib.closing(found):
            for video, count in found:
                frames[video] += 1
                objects[video] += count
                progress.advance(1)
    finally:
        for video, target in videos:
            if frames[video]:
                count = objects[video], frames[video]
                logging.info("%d detections in %d frames: %s", *count, target)
    for (video, _), wanted in zip(videos, expected, strict=True):
        if video.damaged:
            logging.warning("%s: %d packets are damaged", video.source, video.damaged)
        # A number that comes from the duration may be off by one.
        if wanted and 0 < frames[video] < min(wanted - 1, 0.98 * wanted):
            logging.warning("%s ends after %d frames of %d", video.source, frames[video], wanted)


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM closes the files as Ctrl-C does: a video without its index cannot be played."""

    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _define_flags() -> None:
    cli.define_config(required=False)
    flags.DEFINE_string("workdir", None, "Folder of a run; its latest checkpoint is taken.")
    flags.DEFINE_string("weights", None, "A workdir, one of its checkpoints/<step>, or a file.")
    flags.DEFINE_multi_string(
        "input", None, "Picture, video, folder, glob or address; repeatable.", required=True
    )
    flags.DEFINE_string("output", None, "Folder for what is written.", required=True)
    flags.DEFINE_float("score_threshold", 0.5, "Leave out detections below it.", 0.0, 1.0)
    flags.DEFINE_integer("batch_size", 0, "At once; 0: 1 on a CPU, 8 on a GPU.", 0)
    flags.DEFINE_integer("stride", 1, "Of a video take every n-th frame.", 1)
    flags.DEFINE_integer("max_frames", 0, "Of a video take at most so many frames; 0: all.", 0)


def main(_: Sequence[str]) -> None:
    FLAGS = flags.FLAGS
    if (FLAGS.workdir is None) == (FLAGS.weights is None):
        raise ValueError("infer needs exactly one of --workdir and --weights")
    with _terminated_like_interrupted():
        infer(
            FLAGS.config, FLAGS.workdir or FLAGS.weights, FLAGS.input, FLAGS.output,
            FLAGS.score_threshold, batch_size=FLAGS.batch_size, stride=FLAGS.stride,
            max_frames=FLAGS.max_frames,
        )  # fmt: skip


if __name__ == "__main__":
    cli.run(main, _define_flags)
