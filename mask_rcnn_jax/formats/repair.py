"""Write a COCO json again with whatever can be repaired without doubt.

docs/annotations.md has the rules. All else stays as it is: other keys, their order, and values that
may mean two things, which are named.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mask_rcnn_jax.annotations import checks
from mask_rcnn_jax.annotations.reader import GroundTruth, normalized, read_annotation_file
from mask_rcnn_jax.data.box_forms import boxes_of, misfits
from mask_rcnn_jax.data.checking import summarize
from mask_rcnn_jax.disk import write_whole
from mask_rcnn_jax.formats.repair_ids import (
    Content,
    with_annotation_ids,
    with_ids,
    with_lists,
    without_copies,
)
from mask_rcnn_jax.formats.repair_images import with_names, with_sizes
from mask_rcnn_jax.formats.repair_shapes import with_shapes
from mask_rcnn_jax.tars.patterns import are_tars


def repair_json(json_path: Path, image_dir: Path | None, output: Path) -> None:
    """Write the json --output, and print a line for each kind of repair and for what is left alone.

    Raises:
        OSError, ValueError: the json cannot be read, or would be overwritten.
    """
    if output.exists() and output.samefile(json_path):
        raise ValueError(f"--output {output} is the json itself, expected another file")
    content = read_annotation_file(json_path)
    if not isinstance(content, dict):
        raise ValueError(f"{json_path}: {next(checks.structure_problems(content, {}))}")
    if image_dir is not None and not (image_dir.is_dir() or are_tars(image_dir)):
        raise ValueError(f"--images: no image folder {os.fspath(image_dir)!r}")
    content, done = repaired(content, image_dir)
    write_whole(output, json.dumps(content))
    for line in done:
        print(f"repaired: {line}")
    for line in summarize(_left_alone(content, image_dir)):
        print(f"left alone: {line}")
    if image_dir is None:
        print("not looked at without --images: names and sizes of image files")
    print(f"{output}: {json_path} with {'what is repaired' if done else 'nothing to repair'}")


def repaired(content: Content, image_dir: Path | None) -> tuple[Content, list[str]]:
    """Return the content with its repairs, and a line for each kind of them.

    Args:
        content: that of a json, with anything in it; it does not change.
        image_dir: image folder; None leaves names and sizes of images.
    """
    done: Counter[str] = Counter()
    content = with_ids(with_lists(content, done), done)
    if image_dir is not None:
        content = with_names(content, os.fspath(image_dir), done)
        content = with_sizes(content, os.fspath(image_dir), done)
    content = with_annotation_ids(without_copies(content, done), done)
    content = with_shapes(content, done)
    return content, [f"{count} {what}" for what, count in done.items() if count]


def repair_advice(json_path: Path, image_dir: Path) -> str | None:
    """What `prepare repair` would do to a json with problems; None if that is nothing."""
    content = read_annotation_file(json_path)
    if not isinstance(content, dict):
        return None
    _, done = repaired(content, image_dir if image_dir.is_dir() or are_tars(image_dir) else None)
    flags = f"--json {json_path} --images {image_dir} --output FILE"
    return f"`prepare repair {flags}` mends {'; '.join(done)}" if done else None


def _left_alone(content: Content, image_dir: Path | None) -> Iterator[str]:
    """What `check` finds without decoding images."""
    content = normalized(content)
    problems = list(checks.structure_problems(content, checks.TRAINING_KEYS))
    yield from problems
    if problems:
        return
    yield from checks.id_problems(content)
    folder = None if image_dir is None else os.fspath(image_dir)
    yield from checks.training_problems(content, folder, require_annotations=True)
    known = {entry["id"] for entry in content["images"]}
    entries: list[Any] = [e for e in content["annotations"] if e["image_id"] in known]
    truth = GroundTruth("", content | {"annotations": entries})
    yield from truth.faults()
    yield from truth.dropped()
    if found := misfits(boxes_of(truth)):
        text, position = found
        yield f"{text}; first: {checks.annotation_name(entries[position], position)}"
