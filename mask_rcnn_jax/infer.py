"""Detect objects in images and videos; write annotated copies and json results.

    python -m mask_rcnn_jax.infer --workdir runs/quickstart --input photo.jpg --output out
    python -m mask_rcnn_jax.infer --workdir runs/quickstart --input 'photos/*.png' --input more/ \\
        --output out --score_threshold 0.7
    python -m mask_rcnn_jax.infer --workdir runs/quickstart --input clip.mov --input other.mkv \\
        --output out --stride 2 --max_frames 300
    python -m mask_rcnn_jax.infer --weights maskrcnn_resnet50_fpn_coco --input photo.jpg \\
        --output out
    python -m mask_rcnn_jax.infer --workdir runs/quickstart --input @list.txt \\
        --shard 0/8 --output out
    python -m mask_rcnn_jax.infer --merge out
    python -m mask_rcnn_jax.infer --artifact out/onnx --engine openvino --input photos/ --output out

Output for images: annotated images and detections.json (COCO results with `file_name`). For each
video: an annotated mp4 (H.264, without sound) and a .jsonl with one line per frame.
"""

from mask_rcnn_jax.terminal import interrupts

if __name__ == "__main__":
    interrupts.begin()  # imports take seconds

import contextlib
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import jax
from absl import flags, logging

from mask_rcnn_jax import cli
from mask_rcnn_jax.data.canvases import evaluation_options
from mask_rcnn_jax.data.tiles import tiling
from mask_rcnn_jax.images.bands import Bands
from mask_rcnn_jax.predict import geo
from mask_rcnn_jax.predict.engines import Exported
from mask_rcnn_jax.predict.lists import KEY, find_images, read_shard
from mask_rcnn_jax.predict.loading import (
    default_batch_size,
    given_model,
    load_predictor,
)
from mask_rcnn_jax.predict.merging import merge_shards
from mask_rcnn_jax.predict.outputs import write_images, write_videos
from mask_rcnn_jax.predict.pixels import RGB_FILES, file_size
from mask_rcnn_jax.predict.predictor import Predictor
from mask_rcnn_jax.predict.saving import KINDS, check_replaced, per_image
from mask_rcnn_jax.predict.shards import settings_of, write_shard
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.store_folders import written_at
from mask_rcnn_jax.video.reader import UnreadableVideo, Video, import_av
from mask_rcnn_jax.weights.restore import restore, restore_recipe

MOST_HEADERS = 2000  # that are read to choose canvases
DRAWN = ("labels", "scores", "boxes", "masks", "keypoints")
OF_A_RUN = ("workdir", "weights", "artifact", "input", "shard", "max_skipped")


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
    input_key: str = KEY
    no_images: bool = False
    shard: str = ""
    max_skipped: float | None = None


def infer(
    recipe: Recipe | None,
    weights: str | Exported,
    inputs: Sequence[str],
    output: str,
    options: Options,
) -> str:
    """Detect objects in images and videos and write the results; arguments as the flags.

    weights: or an exported model.

    Unreadable inputs are logged, counted and skipped; ValueError if no input can be read. Returns
    what is wrong with their number, "" if that is within `max_skipped`.
    """
    tiling(options.tile, options.overlap)  # values without meaning are refused before the work
    geo.check_installed(options.save)
    if options.shard and options.save:
        raise ValueError("--save writes files beside one json, and not of --shard; see --merge")
    shard, folder = read_shard(options.shard) if options.shard else None, Path(output)
    bands = _bands(recipe, weights)
    has_targets = shard is None and bool(not options.no_images or per_image(options.save))
    given = inputs, folder, options.input_key, options.public_addresses_only, bands
    images, sources = find_images(*given, has_targets=has_targets)
    if shard and sources:
        raise ValueError(f"--input {sources[0].source} is a video, and shards are of images")
    names = (one.source for one in chain(images, sources))
    check_replaced(names, images, folder, options.save)
    if sources:
        import_av()
        if options.save:
            logging.warning("--save writes no files of videos, see their .jsonl")
    restored = (
        weights
        if isinstance(weights, Exported)
        else restore(recipe, weights, accept_mismatch=options.accept_mismatch)
    )
    if shard:
        predictor = _predictor(restored, recipe, options, images, [])
        settings = _settings(restored, recipe, options)
        record = write_shard(predictor, images, output, shard, settings)
        skipped, number = record["skipped"] + record["failed"], record["inputs"]
    else:
        number = len(images) + len(sources)
        skipped = _infer_all(restored, recipe, folder, options, images, sources)
    most = options.max_skipped
    if most is None or skipped <= (most * number if most < 1 else most):
        return ""
    return f"{skipped} of {number} inputs skipped, more than --max_skipped {most:g}"


def _infer_all(restored, recipe, folder: Path, options: Options, images, sources) -> int:
    """Returns the number of inputs that were skipped."""
    skipped: list[str] = []  # the first
    count, videos = 0, []

    def skip(error: ValueError) -> None:
        nonlocal count
        count += 1
        skipped[:] = skipped or [str(error)]
        logging.warning("skipped %s", error)

    for item in sources:
        try:
            video = Video(item.source, str(item.name), item.public_only)
            videos.append((video, folder / item.target))
        except UnreadableVideo as error:
            skip(error)
    if not len(images) and not videos:
        raise ValueError(f"no input could be read: {skipped[0]}")
    predictor = _predictor(restored, recipe, options, images, videos)
    folder.mkdir(parents=True, exist_ok=True)
    if len(images):
        drawing = None if options.no_images else options.drawing
        write_images(predictor, images, folder, options.save, drawing, skip)
    if videos:
        reading = {"stride": options.stride, "max_frames": options.max_frames}
        write_videos(predictor, videos, options.drawing, skip, reading, track=options.track)
    num_inputs = len(images) + len(sources)
    if count == num_inputs:
        raise ValueError(f"no input could be read: {skipped[0]}")
    if count:
        logging.warning("%d of %d inputs skipped", count, num_inputs)
    logging.info("results: %s", folder)
    return count


def _settings(restored, recipe: Recipe | None, options: Options) -> dict[str, Any]:
    is_exported = isinstance(restored, Exported)
    used = recipe if is_exported and recipe is not None else restored.recipe
    used = used.with_score_threshold(options.score_threshold)
    model = restored if is_exported else restored.variables
    return settings_of(used, model, options.tile, options.overlap)


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
    if len(images) and not tile:
        recipe = _with_canvases(recipe, images, batch_size)
    given = restored.variables, batch_size, restored.categories
    return Predictor(recipe, *given, tile, options.overlap)


def _with_canvases(recipe: Recipe, images, batch_size: int) -> Recipe:
    """Let canvases follow the images' sizes, where that saves more than compiling takes.

    All shards look at the same images out of all, so that they have the same canvases.
    """
    step = -(-len(images) // MOST_HEADERS)
    some = [one.source for one in islice(images, 0, None, step) if "://" not in one.source]
    bands, upright = recipe.data.bands, recipe.data.apply_exif != "never"
    sizes = list(filter(None, (file_size(path, bands, upright) for path in some)))
    limits = {"most": recipe.eval.canvases, "multiple": recipe.model.input.pad_multiple}
    rows = batch_size * jax.local_device_count()
    found = evaluation_options(recipe.data, sizes, rows=rows, share=1 / step, **limits)
    return replace(recipe, data=replace(recipe.data, canvases=found.canvases))


def _define_flags() -> None:
    cli.define_config(required=False)
    flags.DEFINE_string("workdir", None, "Run folder; its latest checkpoint is used.")
    flags.DEFINE_string("weights", None, cli.WEIGHTS_HELP)
    cli.define_accept_mismatch()
    cli.define_exported()
    is_run = not any(re.match("--?merge(=|$)", argument) for argument in sys.argv)
    input_help = "Image, video, folder, glob, URL, list (@FILE, -, .jsonl, .parquet); repeatable."
    flags.DEFINE_multi_string("input", None, input_help, required=is_run)
    key_help = "Where a .jsonl or .parquet has the paths of images."
    flags.DEFINE_string("input_key", KEY, key_help)
    public_help = "Read web addresses only from the public internet, and no other addresses."
    flags.DEFINE_bool("public_addresses_only", False, public_help)
    flags.DEFINE_string("output", None, "Output folder.", required=is_run)
    flags.DEFINE_bool("no_images", False, "Draw nothing: write json, and what --save says.")
    shard_help = "i/n: detect objects in share i, from 0, of n of the images, into one file."
    flags.DEFINE_string("shard", "", shard_help)
    skipped_help = "Exit code 1 if more inputs are skipped; below 1, a share of them."
    flags.DEFINE_float("max_skipped", None, skipped_help, 0.0)
    merge_help = (
        "Make one detections.json of the shards in this folder; takes --output, --save csv."
    )
    flags.DEFINE_string("merge", None, merge_help)
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
    sure_help = "Score below which a keypoint is not drawn; unset: 2, of probabilities 0.05."
    flags.DEFINE_float("keypoint_threshold", None, sure_help)
    flags.DEFINE_bool("track", False, "Number the objects of a video, each through all frames.")
    cli.define_tiles()
    flags.DEFINE_integer("max_frames", 0, "Maximum number of frames per video; 0: all.", 0)


def main(_: Sequence[str]) -> None:
    FLAGS = flags.FLAGS
    save = _split(FLAGS.save)
    if FLAGS.merge is not None:
        if others := [name for name in OF_A_RUN if FLAGS[name].present]:
            raise ValueError(f"--merge takes --output and --save csv alone, not --{others[0]}")
        _check_list("save", save, ["csv"])
        return merge_shards(FLAGS.merge, FLAGS.output or FLAGS.merge, save)
    weights, inputs, output = given_model("infer"), FLAGS.input, FLAGS.output
    _check_list("save", save, KINDS)
    drawing = _drawing(_split(FLAGS.draw or DRAWN), FLAGS.color_by, FLAGS.line_width)
    drawing |= {"keypoint_threshold": FLAGS.keypoint_threshold}
    names = [one.name for one in fields(Options) if one.name not in ("save", "drawing")]
    options = Options(save=save, drawing=drawing, **{n: getattr(FLAGS, n) for n in names})
    # SIGTERM acts like Ctrl-C, which closes the files: a video without index is unplayable. A shard
    # is whole or not there.
    stopped = partial(SystemExit, os.EX_TEMPFAIL) if options.shard else KeyboardInterrupt
    place = contextlib.nullcontext(output) if options.shard else written_at(output)
    try:
        with interrupts.raising(signal.SIGTERM, stopped), place as folder:
            wrong = infer(cli.given_recipe(), weights, inputs, str(folder), options)
    except SystemExit:
        logging.warning("stopped early: the same command starts the shard again")
        raise
    if wrong:
        cli.fail(wrong, 1)


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
