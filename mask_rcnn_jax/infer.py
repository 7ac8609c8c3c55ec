"""Detect objects in images and videos; write annotated copies and json results.

    python -m mask_rcnn_jax.infer --workdir runs/quickstart --input photo.jpg --output out
    python -m mask_rcnn_jax.infer --workdir runs/quickstart --input 'photos/*.png' --input more/ \\
        --output out --score_threshold 0.7
    python -m mask_rcnn_jax.infer --workdir runs/quickstart --input clip.mov --input other.mkv \\
        --output out --stride 2 --max_frames 300
    python -m mask_rcnn_jax.infer --weights maskrcnn_resnet50_fpn_coco --input photo.jpg \\
        --output out
    python -m mask_rcnn_jax.infer --artifact out/onnx --engine openvino --input photos/ --output out

Output for images: annotated images and detections.json (COCO results with `file_name`). For each
video: an annotated mp4 (H.264, without sound) and a .jsonl with one line per frame.
"""

import contextlib
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import jax
from absl import flags, logging

from mask_rcnn_jax import cli
from mask_rcnn_jax.data.canvases import evaluation_options
from mask_rcnn_jax.data.tiles import tiling
from mask_rcnn_jax.data.unused import Unused
from mask_rcnn_jax.images.bands import Bands
from mask_rcnn_jax.predict import annotate, geo
from mask_rcnn_jax.predict.engines import Exported
from mask_rcnn_jax.predict.inputs import find_inputs
from mask_rcnn_jax.predict.loading import (
    default_batch_size,
    given_model,
    load_predictor,
)
from mask_rcnn_jax.predict.pixels import RGB_FILES, file_size
from mask_rcnn_jax.predict.predictor import Predictor
from mask_rcnn_jax.predict.saving import KINDS, ResultFiles, check_replaced
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.store_folders import written_at
from mask_rcnn_jax.terminal import interrupts
from mask_rcnn_jax.terminal.progress import Progress
from mask_rcnn_jax.video.reader import UnreadableVideo, Video, import_av
from mask_rcnn_jax.weights.restore import restore, restore_recipe

MOST_HEADERS = 2000  # that are read to choose canvases
DRAWN = ("labels", "scores", "boxes", "masks")
Skip = Callable[[ValueError], None]  # logs and counts an input that cannot be read


@dataclass(frozen=True)
class Options:
    """Flags of `infer`; a field has the name of its flag, but `drawing`."""

    score_threshold: float = 0.5
    batch_size: int = 0
    stride: int = 1
    max_frames: int = 0
    save: Sequence[str] = ()
    drawing: Mapping[str, Any] = field(default_factory=dict)  # options of `Result.plot`
    tile: int = 0
    overlap: float = 0.2
    track: bool = False
    public_addresses_only: bool = False
    accept_mismatch: bool = False


def infer(
    recipe: Recipe | None,
    weights: str | Exported,
    inputs: Sequence[str],
    output: str,
    options: Options,
) -> None:
    """Detect objects in images and videos and write the results; arguments as the flags.

    weights: or an exported model.

    Unreadable inputs are logged, counted and skipped; ValueError if no input can be read.
    """
    tiling(options.tile, options.overlap)  # values without meaning are refused before the work
    geo.check_installed(options.save)
    folder = Path(output)
    bands = _bands(recipe, weights)
    images, sources = find_inputs(inputs, folder, options.public_addresses_only, bands)
    check_replaced([one.source for one in [*images, *sources]], images, folder, options.save)
    if sources:
        import_av()
        if options.save:
            logging.warning("--save writes no files of videos, see their .jsonl")
    restored = (
        weights
        if isinstance(weights, Exported)
        else restore(recipe, weights, accept_mismatch=options.accept_mismatch)
    )
    skipped: list[str] = []

    def skip(error: ValueError) -> None:
        skipped.append(str(error))
        logging.warning("skipped %s", error)

    videos = []
    for item in sources:
        try:
            video = Video(item.source, str(item.name), item.public_only)
            videos.append((video, folder / item.target))
        except UnreadableVideo as error:
            skip(error)
    if not images and not videos:
        raise ValueError(f"no input could be read: {skipped[0]}")
    predictor = _predictor(restored, recipe, options, images, videos)
    folder.mkdir(parents=True, exist_ok=True)
    if images:
        _infer_images(predictor, images, folder, options, skip)
    if videos:
        _infer_videos(predictor, videos, options, skip)
    num_inputs = len(images) + len(sources)
    if len(skipped) == num_inputs:
        raise ValueError(f"no input could be read: {skipped[0]}")
    if skipped:
        logging.warning("%d of %d inputs skipped", len(skipped), num_inputs)
    logging.info("results: %s", folder)


def _bands(recipe: Recipe | None, weights: str | Exported) -> Bands:
    """What the model sees, without its weights."""
    if recipe is None and isinstance(weights, Exported):
        recipe = weights.recipe
    elif recipe is None:
        try:
            recipe = restore_recipe(None, str(weights))[0]
        except (OSError, ValueError):  # `restore` says what is wrong
            return RGB_FILES
    return recipe.data.bands


def _predictor(restored, recipe: Recipe | None, options: Options, images, videos) -> Predictor:
    """Return a predictor with batches and canvases that suit the inputs."""
    score_threshold, tile = options.score_threshold, options.tile
    if isinstance(restored, Exported):
        size = options.batch_size or restored.batch or default_batch_size()
        return load_predictor(restored, score_threshold, size, tile, options.overlap, recipe)
    recipe = restored.recipe.with_score_threshold(score_threshold)
    batch_size = options.batch_size or default_batch_size()
    if not videos and not tile:
        batch_size = min(batch_size, -(-len(images) // jax.local_device_count()))
    if images and not tile:
        recipe = _with_canvases(recipe, [one.source for one in images], batch_size)
    given = restored.variables, batch_size, restored.categories
    return Predictor(recipe, *given, tile, options.overlap)


def _with_canvases(recipe: Recipe, sources: Sequence[str], batch_size: int) -> Recipe:
    """Let canvases follow the images' sizes, where that saves more than compiling takes."""
    step = -(-len(sources) // MOST_HEADERS)
    some = [path for path in sources[::step] if "://" not in path]
    bands, upright = recipe.data.bands, recipe.data.apply_exif != "never"
    sizes = list(filter(None, (file_size(path, bands, upright) for path in some)))
    limits = {"most": recipe.eval.canvases, "multiple": recipe.model.input.pad_multiple}
    rows = batch_size * jax.local_device_count()
    found = evaluation_options(recipe.data, sizes, rows=rows, share=1 / step, **limits)
    return replace(recipe, data=replace(recipe.data, canvases=found.canvases))


def _infer_images(predictor: Predictor, images, folder, options: Options, skip: Skip) -> None:
    progress = Progress("images", len(images))
    done, unused = 0, Unused()

    def on_error(error) -> None:
        skip(error)
        progress.advance(1)

    with ResultFiles(folder, options.save) as files:
        given = images, folder, files, options.drawing
        found = annotate.annotate_images(predictor, *given, on_error, unused)
        with contextlib.closing(found):
            for records in found:
                files.add(records)
                done += 1
                progress.advance(1)
    logging.info("%d detections in %d images", files.count, done)
    for line in unused.lines():
        logging.warning("%s", line)


def _infer_videos(predictor: Predictor, videos, options: Options, skip: Skip) -> None:
    for _, target in videos:
        target.parent.mkdir(parents=True, exist_ok=True)
    # A class, or a track, has the same color in all frames, which keep their size.
    color = "instance" if options.track else "class"
    drawing = {"color_by": color} | dict(options.drawing) | {"min_side": 0}
    reading: dict[str, Any] = dict(stride=options.stride, max_frames=options.max_frames)
    expected = [video.expected_frames(**reading) for video, _ in videos]
    progress = Progress("frames", None if None in expected else sum(expected))
    frames, objects = Counter(), Counter()
    given = predictor, videos, drawing, skip
    found = annotate.annotate_videos(*given, **reading, track=options.track)
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
    flags.DEFINE_string("weights", None, cli.WEIGHTS_HELP)
    cli.define_accept_mismatch()
    cli.define_exported()
    input_help = "Image, video, folder, glob or URL; repeatable."
    flags.DEFINE_multi_string("input", None, input_help, required=True)
    public_help = "Read web addresses only from the public internet, and no other addresses."
    flags.DEFINE_bool("public_addresses_only", False, public_help)
    flags.DEFINE_string("output", None, "Output folder.", required=True)
    flags.DEFINE_float("score_threshold", 0.5, "Drop detections with lower scores.", 0.0, 1.0)
    flags.DEFINE_integer(
        "batch_size", 0, "Images or frames at a time on each device; 0: 1 on CPU, else 8.", 0
    )
    flags.DEFINE_integer("stride", 1, "Take every n-th frame of a video.", 1)
    flags.DEFINE_multi_string("save", [], f"Other files of images, out of {', '.join(KINDS)}.")
    drawn_help = f"What is drawn, out of {', '.join(DRAWN)}, or none; all of it if unset."
    flags.DEFINE_multi_string("draw", None, drawn_help)
    colors = ("instance", "class")
    flags.DEFINE_enum("color_by", None, colors, "Colors; class in videos, unless set or --track.")
    flags.DEFINE_integer("line_width", 0, "Pixels; 0 grows with the image.", 0)
    flags.DEFINE_bool("track", False, "Number the objects of a video, each through all frames.")
    cli.define_tiles()
    flags.DEFINE_integer("max_frames", 0, "Maximum number of frames per video; 0: all.", 0)


def main(_: Sequence[str]) -> None:
    FLAGS = flags.FLAGS
    weights, inputs, output = given_model("infer"), FLAGS.input, FLAGS.output
    save = _split(FLAGS.save)
    _check_list("save", save, KINDS)
    drawing = _drawing(_split(FLAGS.draw or DRAWN), FLAGS.color_by, FLAGS.line_width)
    names = [one.name for one in fields(Options) if one.name not in ("save", "drawing")]
    options = Options(save=save, drawing=drawing, **{n: getattr(FLAGS, n) for n in names})
    # SIGTERM acts like Ctrl-C, which closes the files: a video without index is unplayable.
    with interrupts.raising(signal.SIGTERM, KeyboardInterrupt), written_at(output) as folder:
        infer(cli.given_recipe(), weights, inputs, str(folder), options)


def _drawing(drawn: Sequence[str], color_by: str | None, line_width: int) -> dict[str, Any]:
    """Return options of `Result.plot` for the flags."""
    if drawn != ["none"]:
        _check_list("draw", drawn, DRAWN)
    options: dict[str, Any] = {name: name in drawn for name in DRAWN}
    options["line_width"] = line_width
    return options | ({"color_by": color_by} if color_by else {})


def _split(values: Sequence[str]) -> list[str]:
    """Split the values of a flag that takes a list, and may be repeated."""
    parts = [part.strip() for value in values for part in value.split(",")]
    return [part for part in parts if part]


def _check_list(flag: str, values: Sequence[str], known: Sequence[str]) -> None:
    unknown = [value for value in values if value not in known]
    if unknown:
        raise ValueError(f"--{flag} has {unknown[0]!r}, expected some of {', '.join(known)}")


if __name__ == "__main__":
    cli.run(main, _define_flags, store_output=True)
