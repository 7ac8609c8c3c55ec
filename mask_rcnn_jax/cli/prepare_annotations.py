"""Actions of `prepare` that write annotations from others: convert, merge and split."""

from dataclasses import replace
from pathlib import Path

from absl import flags

from mask_rcnn_jax.annotations.checks import category_problems
from mask_rcnn_jax.annotations.mask_parts import parts_notice
from mask_rcnn_jax.annotations.reader import raise_first
from mask_rcnn_jax.cli.prepare import images_of
from mask_rcnn_jax.data.checking import summarize
from mask_rcnn_jax.data.coco import read_coco
from mask_rcnn_jax.formats.coco_build import build_coco, write_json
from mask_rcnn_jax.formats.convert import (
    READERS,
    convert,
    files_passed_over,
    read_classes,
    with_classes,
    write_converted,
)
from mask_rcnn_jax.formats.merge_json import merge_jsons, read_map
from mask_rcnn_jax.formats.reading import Options
from mask_rcnn_jax.formats.split import fold_coco, split_coco
from mask_rcnn_jax.formats.split_parts import specks_notice
from mask_rcnn_jax.terminal.progress import bytes_progress

FLAGS = flags.FLAGS


def convert_any() -> None:
    """Write the COCO json --output from annotations in the format --from."""
    if not (FLAGS["from"].value and FLAGS.input and FLAGS.output):
        raise ValueError("prepare convert needs --from, --input and --output")
    if FLAGS.min_area and not FLAGS.split_parts:
        raise ValueError("--min_area is of the parts that --split_parts makes")
    found = convert(FLAGS["from"].value, *convert_arguments(), other_classes=FLAGS.other_classes)
    write_converted(Path(FLAGS.output), *found)
    if others := files_passed_over(Path(FLAGS.input), found[1]):
        print(f"{FLAGS.input}: these files are not read: {others}")
    if FLAGS.split_parts:
        notice = specks_notice(found[0])
    elif notice := parts_notice(found[0]):
        notice += " --split_parts makes each part an object"
    if notice:
        print(f"{FLAGS.output}: {notice}")


def convert_tool(tool: str) -> None:
    """Write the COCO json --output from annotations of labelme or VIA."""
    if not (FLAGS.input and FLAGS.output):
        raise ValueError(f"prepare {tool} needs --input and --output")
    found = READERS[tool](*convert_arguments())
    content = build_coco(found.images, found.image_dir)
    for line in found.left_out:
        print(f"left out: {line}")
    write_json(Path(FLAGS.output), content)
    if found.image_dir not in (Path(FLAGS.input), Path(only("images") or FLAGS.input)):
        print(f"{FLAGS.output}: the images are in {found.image_dir}")


def convert_arguments() -> tuple[Path, Path | None, Options]:
    classes, image_dir = read_classes(FLAGS.classes), only("images")
    split = FLAGS.split if FLAGS["split"].present and FLAGS.split != "both" else None
    if split and FLAGS["from"].value != "yolo":
        raise ValueError("--split is for prepare convert --from yolo, whose data.yaml names it")
    options = Options(Path(FLAGS.output), FLAGS.boxes, classes, FLAGS.class_name, FLAGS.attribute)
    parts = dict(split_parts=FLAGS.split_parts, min_area=FLAGS.min_area)
    options = replace(options, split=split, **parts)
    return Path(FLAGS.input), Path(image_dir) if image_dir else None, options


def convert_tfrecords() -> None:
    """Write the annotations in the record files --input to the COCO json --output."""
    from mask_rcnn_jax.formats.tfrecord_coco import read_tfrecords

    if not (FLAGS.input and FLAGS.output):
        raise ValueError("prepare tfrecord needs --input, a pattern of record files, and --output")
    json_path = only("json")
    categories = read_coco(json_path)["categories"] if json_path else None
    content, left_out = read_tfrecords(FLAGS.input, categories, bytes_progress)
    for line in left_out:
        print(f"data.bad_annotations=skip is needed: {line}")
    write_json(Path(FLAGS.output), content)
    print(f"--config.data.source=tfrecord reads it with the images in {FLAGS.input}")


def merge() -> None:
    """Write the COCO json --output from all in --json."""
    if not (FLAGS.json and FLAGS.output):
        raise ValueError("prepare merge needs --json for each set, and --output")
    content, folder = merge_jsons(FLAGS.json, FLAGS.images or [], read_map(FLAGS.map or []))
    classes, left_out = read_classes(FLAGS.classes), []
    if classes:
        source = ", ".join(FLAGS.json)
        content, left_out = with_classes(content, classes, FLAGS.other_classes, source)
    write_converted(Path(FLAGS.output), content, folder, left_out)


def split_set() -> None:
    """Write train.json and val.json into --output, or a folder with both for each fold."""
    json_path, folds = only("json"), FLAGS.folds
    either = bool(folds) != bool(FLAGS["val"].present)
    if not (json_path and FLAGS.output and either):
        raise ValueError("prepare split needs --json, --val and --output, or --folds for --val")
    content, output = read_coco(json_path), Path(FLAGS.output)
    raise_first(json_path, category_problems(content))
    if folds:
        pairs, missing = fold_coco(content, folds, FLAGS.seed, FLAGS.group_by)
        parts = {f"fold{n}/{k}": part for n, p in enumerate(pairs, 1) for k, part in p.items()}
    else:
        val = images_of("val", FLAGS.val, len(content["images"]))
        parts, missing = split_coco(content, val, FLAGS.seed, FLAGS.group_by)
        left = len(parts["train"]["images"])
        if left < len(parts["val"]["images"]):
            print(f"train.json has {left} images, fewer than val.json; --val 0.2 takes a fifth")
    for name, part in parts.items():
        write_json(output / f"{name}.json", part)
    for line in summarize(missing):
        print(line)


def only(name: str) -> str | None:
    """Return the value of a flag that `merge` takes several times."""
    values = FLAGS[name].value or [None]
    if len(values) > 1:
        raise ValueError(f"--{name} is given {len(values)} times, expected once")
    return values[0]
