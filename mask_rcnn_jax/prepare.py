"""Put data and public weights on disk, check what is there, or bring it into COCO's format.

    python -m mask_rcnn_jax.prepare shapes --data_dir DIR
    python -m mask_rcnn_jax.prepare cells --data_dir DIR --bits 8
    python -m mask_rcnn_jax.prepare check --data_dir DIR
    python -m mask_rcnn_jax.prepare check --json FILE --images DIR
    python -m mask_rcnn_jax.prepare check --json FILE --images DIR --by_name --output FILE
    python -m mask_rcnn_jax.prepare repair --json FILE --images DIR --output FILE
    python -m mask_rcnn_jax.prepare convert --from yolo --input DIR --output FILE
    python -m mask_rcnn_jax.prepare labelme --input DIR --output FILE
    python -m mask_rcnn_jax.prepare via --input FILE --images DIR --output FILE
    python -m mask_rcnn_jax.prepare merge --json FILE --json FILE --output FILE
    python -m mask_rcnn_jax.prepare split --json FILE --val 0.2 --output DIR
    python -m mask_rcnn_jax.prepare stats --json FILE --images DIR --output FILE.html
    python -m mask_rcnn_jax.prepare preview --config finetune --output FILE.jpg
    python -m mask_rcnn_jax.prepare weights
    python -m mask_rcnn_jax.prepare weights resnet50 --data_dir DIR
    python -m mask_rcnn_jax.prepare coco2017 --data_dir DIR
    python -m mask_rcnn_jax.prepare tfds --data_dir DIR
    python -m mask_rcnn_jax.prepare tfrecord --input 'DIR/train*.tfrecord' --output FILE
    python -m mask_rcnn_jax.prepare tao_spec SPEC.txt --gpus 8 --output recipe.py
    python -m mask_rcnn_jax.prepare mmdet_config CONFIG.py --gpus 8 --output recipe.py
    python -m mask_rcnn_jax.prepare d2_config CONFIG.yaml --output recipe.py

`prepare ACTION --help` describes the flags of one action.
"""

from mask_rcnn_jax.terminal import interrupts

if __name__ == "__main__":
    interrupts.begin()  # imports take seconds

import difflib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from absl import flags

from mask_rcnn_jax import cli
from mask_rcnn_jax.cli.prepare import (
    ACTIONS,
    SPLITS,
    define_flags,
    few_to_many,
    images_of,
    not_taken,
    sides,
    usage,
)
from mask_rcnn_jax.cli.prepare_annotations import (
    convert_any,
    convert_tfrecords,
    convert_tool,
    merge,
    only,
    split_set,
)
from mask_rcnn_jax.cli.recipes import weights_lines
from mask_rcnn_jax.config import load_config, load_own, recipe_names
from mask_rcnn_jax.formats import coco2017
from mask_rcnn_jax.formats.cells import write_cells
from mask_rcnn_jax.formats.convert import READERS
from mask_rcnn_jax.formats.repair import repair_json
from mask_rcnn_jax.formats.sets_on_disk import (
    Files,
    find_sets,
    find_split,
    print_findings,
    repair_names,
)
from mask_rcnn_jax.formats.shapes import write_shapes
from mask_rcnn_jax.terminal.progress import Progress, bytes_progress
from mask_rcnn_jax.weights import published

FLAGS = flags.FLAGS
STATS_RECIPE = "finetune"  # of `stats` and `check` without --config
NAMED = {
    "weights": "one name, or none to list all",
    "tao_spec": "the path of one spec",
    "mmdet_config": "the path of one config or checkpoint",
    "d2_config": "the path of one config in YAML",
}


def main(positional: Sequence[str]) -> None:
    action, *names = positional or [""]
    if action in READERS and action not in COMMANDS:
        raise ValueError(f"{action} is a format: prepare convert --from {action}")
    if action not in COMMANDS:
        close = difflib.get_close_matches(action, COMMANDS, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(COMMANDS)}"
        what = f"has no action {action!r}" if action else "needs an action"
        raise ValueError(f"prepare {what}, {hint}")
    if flag := not_taken(action):
        takes = f"{NAMED[action]}, " if action in NAMED else ""
        raise ValueError(f"prepare {action} takes no --{flag}, expected {takes}{usage(action)}")
    if action == "weights" and not names:
        print("\n".join(weights_lines()))
        return
    if action in NAMED and len(names) != 1:
        raise ValueError(f"prepare {action} needs {NAMED[action]}")
    if names and action not in NAMED:
        given = f"prepare {action} got {' '.join(names)!r} without a flag"
        raise ValueError(f"{given}, expected {usage(action)}")
    if action in ("shapes", "cells", "weights", "coco2017", "tfds") and not FLAGS.data_dir:
        raise ValueError(f"prepare {action} needs --data_dir")
    COMMANDS[action](*names)


def generate(
    write: Callable[..., dict[str, Path]], train: int, val: int, side: int, **options: Any
) -> None:
    """Write generated images into --data_dir, as many and of the side as given if unset."""
    held_out = images_of("val", FLAGS.val) if FLAGS.val else val
    counts = {"train": FLAGS.train or train, "val": held_out}
    size = sides("size", FLAGS.size) if FLAGS.size else (side, side)
    paths = write(FLAGS.data_dir, **counts, seed=FLAGS.seed, size=size, **options)
    for split, path in paths.items():
        print(f"{path}: {counts[split]} images in {Path(FLAGS.data_dir) / split}")


def generate_cells() -> None:
    channels = FLAGS.channels or (2 if FLAGS.bits == 16 else 3)
    options = {"objects": few_to_many("objects", FLAGS.objects), "bits": FLAGS.bits}
    generate(write_cells, 40, 10, 1024, **options, channels=channels)


def prepare_weights(name: str) -> None:
    """Download public weights by name into --data_dir, unless they are there, or copy some."""
    print(published.put(name, FLAGS.data_dir))


def prepare_coco2017() -> None:
    """Download and unpack COCO 2017 into --data_dir, but for what is there."""
    release, splits = coco2017.COCO2017, SPLITS[FLAGS.split]
    release = coco2017.with_keypoints(release) if FLAGS.keypoints else release
    zips = coco2017.prepare_release(
        release, FLAGS.data_dir, splits, delete_zips=FLAGS.delete_zips, make_progress=bytes_progress
    )
    for name in splits:
        split, folder = release.splits[name], Path(FLAGS.data_dir)
        print(f"{folder / split.json}: {split.num_images} images in {folder / split.images}")
    if zips:
        print(f"no longer needed: {', '.join(map(str, zips))}")


def prepare_records() -> None:
    """Write a COCO set as records for `data.source=tfds`, unless they are there."""
    from mask_rcnn_jax.formats.tfds_coco_instances import prepare_tfds

    folder = Path(FLAGS.tfds_dir or Path(FLAGS.data_dir) / "tfds")
    sources = {split: split_files(split) for split in SPLITS[FLAGS.split]}
    directory = prepare_tfds(folder, sources, lambda total: Progress("images", total).advance)
    print(f"{directory}: --config.data.source=tfds --config.data.tfds_dir={folder}")


def split_files(split: str) -> Files:
    """The files of a split of the set in --data_dir, or as the flags name them."""
    files = FLAGS[f"{split}_json"].value, FLAGS[f"{split}_images"].value
    return find_split(split, FLAGS.data_dir, *files)


def check() -> None:
    """Print every problem of the sets that the flags name; ValueError if there is one.

    Warnings are printed, too, and raise nothing.
    """
    sets = sets_to_check()
    if FLAGS.by_name:
        if not FLAGS.output or len(sets) != 1:
            raise ValueError("prepare check --by_name needs --json, --images and --output")
        sets = [repair_names(sets[0], Path(FLAGS.output))]
    are_pair = bool(FLAGS.train_json and FLAGS.val_json and not FLAGS.json)
    recipe = cli.given_recipe() or load_own(STATS_RECIPE)
    total = print_findings(
        sets,
        are_pair=are_pair,
        boxes_only=FLAGS.boxes_only,
        bands=recipe.data.bands,
        upright=recipe.data.apply_exif == "always",
        keypoints=recipe.data.keypoints,
    )
    if total:
        raise ValueError(f"{total} problems found, see the lines above")


def sets_to_check() -> list[Files]:
    """The files in --json and --images, both splits' files, or those in --data_dir."""
    json_path, image_dir = only("json"), only("images")
    if json_path and image_dir:
        return [(Path(json_path), Path(image_dir))]
    if FLAGS.train_json and FLAGS.val_json:
        return [split_files(split) for split in SPLITS["both"]]
    if json_path or image_dir or not FLAGS.data_dir:
        raise ValueError(
            "prepare check needs --data_dir, or --json together with --images, or --train_json "
            "with --val_json"
        )
    return find_sets(FLAGS.data_dir)


def repair() -> None:
    """Write the json --output from that in --json, repaired where nothing is in doubt."""
    json_path, image_dir = only("json"), only("images")
    if not (json_path and FLAGS.output):
        raise ValueError("prepare repair needs --json, --output, and --images for names and sizes")
    repair_json(Path(json_path), Path(image_dir) if image_dir else None, Path(FLAGS.output))


def prepare_recipe(action: str, config: str) -> None:
    """Write the recipe --output for another system's config, and print a line for each field that
    it leaves out."""
    from mask_rcnn_jax.formats import d2_recipe, mmdet_recipe, tao_recipe

    if not FLAGS.output or not FLAGS.output.endswith(".py"):
        raise ValueError(f"prepare {action} needs --output, the recipe to write, such as recipe.py")
    if action == "tao_spec":
        notes = tao_recipe.write_recipe(config, FLAGS.output, FLAGS.gpus)
    elif action == "d2_config":
        notes = d2_recipe.write_recipe(config, FLAGS.output)
    else:
        text = config_in(config) if config.endswith((".pth", ".pt")) else None
        notes = mmdet_recipe.write_recipe(config, FLAGS.output, FLAGS.gpus, text)
    for note in notes:
        print(f"without counterpart: {note}")
    if action != "d2_config" and not FLAGS["gpus"].present:
        print("batch sizes are taken for those of one GPU: --gpus says how many there were")
    print(f"{FLAGS.output}: train with --config {FLAGS.output}")


def config_in(checkpoint: str) -> str:
    """The text of the config that mmdetection's training stores beside the weights."""
    from mask_rcnn_jax.weights.files import read_weights

    if text := read_weights(checkpoint).config:
        return text
    raise ValueError(f"{checkpoint} holds no config of mmdetection, give the config itself")


def stats() -> None:
    """Write a page about the set in --json and --images, or a recipe for it, by the ending of
    --output, and print suggestions for --config."""
    from mask_rcnn_jax.report.set_page import write_set_page

    jsons, folders, output = FLAGS.json or [], FLAGS.images or [], FLAGS.output or "stats.html"
    is_recipe = output.endswith(".py")
    if not (0 < len(jsons) == len(folders) <= 1 + is_recipe):
        raise ValueError("prepare stats needs --json and --images; a .py, of both sets or of one")
    if not (is_recipe or output.lower().endswith(".html")):
        raise ValueError(f"--output is {output}, expected an .html or a .py to write")
    measure_input()
    if is_recipe:
        return suggest_recipe(jsons, folders, output)
    recipe = cli.given_recipe() or load_own(STATS_RECIPE)
    advice = write_set_page(output, jsons[0], folders[0], recipe, boxes_only=FLAGS.boxes_only)
    for line in advice.lines:
        print(line)
    print(f"{output}: statistics, examples and these suggestions")


def suggest_recipe(jsons: list[str], folders: list[str], output: str) -> None:
    """Write a recipe for a set to train on, and perhaps one to evaluate."""
    from mask_rcnn_jax.disk import whole_file
    from mask_rcnn_jax.report.set_page import read_set
    from mask_rcnn_jax.report.suggested_recipe import recipe_text, start_for

    if FLAGS.config is not None and cli.given_name().partition(":")[0] not in recipe_names():
        raise ValueError(f"--config is {cli.given_name()}, expected the name of a recipe")
    base, given = cli.given_name(), cli.given_recipe()

    def choose(counts: Any) -> Any:
        nonlocal base
        base = base if given else start_for(counts)
        return given or load_own(base)

    studied = read_set(jsons[0], folders[0], choose, boxes_only=FLAGS.boxes_only)
    suggestions = studied.advice.suggestions
    entries = {one.entry: one.value for one in suggestions if one.is_change}
    recipe = load_config(base, entries).with_classes(len(studied.dataset.class_names))
    suggestions = [*suggestions, *fitting_memory(recipe)]
    places = {"train_json": jsons[0], "train_images": folders[0], "val_json": "", "val_images": ""}
    places |= dict(zip(("val_json", "val_images"), (*jsons[1:], *folders[1:]), strict=False))
    with whole_file(output) as draft:
        draft.write_text(recipe_text(Path(output).name, base, places, suggestions))
        load_config(draft)  # or it is not written
    for one in suggestions:
        if one.is_change:
            print(f"{one.entry}: {one.value}. {one.reason}")
    print(f"{output}: {base} with these entries, for `train --config {output}`")


def fitting_memory(recipe: Any) -> list[Any]:
    """Suggest what lets a training step fit into the memory that is free here."""
    import jax

    from mask_rcnn_jax.benchmarking.inputs import abstract_step
    from mask_rcnn_jax.memory import available_bytes
    from mask_rcnn_jax.report.suggestion import Suggestion
    from mask_rcnn_jax.report.suggestions import side_suggestions
    from mask_rcnn_jax.training.planned_memory import step_bytes, what_fits

    data, rows, (device, *_) = recipe.data, recipe.train.batch_size, jax.local_devices()
    fixed, peak = step_bytes(*abstract_step(recipe, jax.sharding.Mesh([device], ("data",)), rows))
    free = available_bytes(device)
    if free is None or peak <= free:
        return []
    reason = f"A step of {rows} takes about {peak / 1e9:.1f} GB, {free / 1e9:.1f} are free here."
    found = what_fits(data.image_size, rows, fixed, peak, free)
    if "fixed_size_crop" in data.augment:
        found.pop("data.image_size", None)  # which is not that of a step
    if not found:
        print(f"{reason} No smaller batch or size would fit: take more memory or a smaller model.")
    now = {"data.image_size": data.image_size, "train.images_per_device": 0}
    fitting = [Suggestion(name, now[name], value, reason) for name, value in found.items()]
    if size := found.get("data.image_size"):
        scale = min(size) / min(data.image_size)
        sides = tuple(max(int(side * scale), 1) for side in data.short_sides)
        fitting += side_suggestions(data.short_sides, sides)
    return fitting


def measure_input() -> None:
    """Let --config have other bands than values of model.input, which `stats` is to suggest."""
    names = FLAGS.config.data.bands.names if FLAGS.config is not None else ()
    values = FLAGS.config.model.input if names else {}
    for name in ("mean", "std") if names else ():
        if len(values[name]) != len(names):
            values[name] = (128.0,) * len(names)


def preview() -> None:
    """Write a sheet of augmented training images of --config, with their objects, to --output."""
    from mask_rcnn_jax.data.dataset import dataset_name
    from mask_rcnn_jax.data.source import load_train
    from mask_rcnn_jax.data.unused import unused_of
    from mask_rcnn_jax.evaluation.visualize import write_image
    from mask_rcnn_jax.report.preview import preview_sheet

    recipe, output = cli.given_recipe(), FLAGS.output
    if recipe is None or not output or not output.lower().endswith((".jpg", ".jpeg", ".png")):
        raise ValueError("prepare preview needs --config and --output, a .jpg or .png to write")
    data, train = recipe.data, recipe.train
    dataset = load_train(data, boxes_only=recipe.learns_boxes_only)
    for line in unused_of(dataset):
        print(f"{dataset_name(dataset)}: {line}")
    given = data, dataset, FLAGS.count
    sheet = preview_sheet(*given, seed=train.seed, left_out=train.skip_images)
    write_image(Path(output), sheet)
    kinds = ", ".join(data.augment) or "no augmentation"
    print(f"{output}: {FLAGS.count} training images with {kinds}")


COMMANDS: dict[str, Callable[..., None]] = {
    "shapes": partial(generate, write_shapes, 400, 60, 128),
    "cells": generate_cells,
    "check": check,
    "repair": repair,
    "convert": convert_any,
    "labelme": partial(convert_tool, "labelme"),
    "via": partial(convert_tool, "via"),
    "merge": merge,
    "split": split_set,
    "stats": stats,
    "preview": preview,
    "weights": prepare_weights,
    "coco2017": prepare_coco2017,
    "tfds": prepare_records,
    "tfrecord": convert_tfrecords,
    "tao_spec": partial(prepare_recipe, "tao_spec"),
    "mmdet_config": partial(prepare_recipe, "mmdet_config"),
    "d2_config": partial(prepare_recipe, "d2_config"),
}


if __name__ == "__main__":
    cli.run(main, define_flags, ACTIONS, positional=True)
