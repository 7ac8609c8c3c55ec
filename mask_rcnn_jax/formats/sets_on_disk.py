"""Find the jsons and image folders of COCO sets, and repair the names in a json."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mask_rcnn_jax.annotations.checks import TRAINING_KEYS, id_problems, structure_problems
from mask_rcnn_jax.annotations.reader import normalized, raise_first, read_annotation_file
from mask_rcnn_jax.data import checking
from mask_rcnn_jax.disk import write_whole
from mask_rcnn_jax.formats.repair import repair_advice
from mask_rcnn_jax.formats.repair_images import with_sizes
from mask_rcnn_jax.images.bands import RGB_FILES, Bands
from mask_rcnn_jax.images.file_names import with_names_found, without_bad_sizes

JSON_NAMES = ("instances_{}2017.json", "instances_{}.json")  # COCO's, and those of `shapes`
Files = tuple[Path, Path]  # a json and the folder of its images


def find_split(
    split: str, data_dir: str | os.PathLike, json_path: str | None, images: str | None
) -> Files:
    """Return the files of a split of the set in `data_dir`, where they are not given.

    Raises ValueError if there are none.
    """
    if json_path is None:
        candidates = [Path(data_dir) / "annotations" / name.format(split) for name in JSON_NAMES]
        found = next((path for path in candidates if path.is_file()), None)
        if found is None:
            missing = " or ".join(map(str, candidates))
            advice = f"name one with --{split}_json, or choose another --split"
            raise ValueError(f"no {missing}, {advice}")
    else:
        found = Path(json_path)
    return found, Path(images) if images else image_folder(found)


def find_sets(data_dir: str | os.PathLike) -> list[Files]:
    """Return the files of all sets in a folder; ValueError if there are none."""
    folder = Path(data_dir) / "annotations"
    # COCO keeps captions and keypoints beside the instances.
    paths = sorted(folder.glob("instances_*.json")) or sorted(folder.glob("*.json"))
    if not paths:
        raise ValueError(f"no json in {folder}, name one with --json and --images")
    return [(path, image_folder(path)) for path in paths]


def image_folder(json_path: Path) -> Path:
    """Return the folder that belongs to DIR/annotations/instances_NAME.json: DIR/NAME, or without
    the last parts of NAME (instances_train_rle.json belongs to DIR/train)."""
    name = json_path.stem.removeprefix("instances_")
    while name:
        folder = json_path.parent.parent / name
        if folder.is_dir():
            return folder
        name = name.rpartition("_")[0]
    advice = "name it: check has --images, tfds --train_images and --val_images"
    raise ValueError(f"no image folder found for {json_path}, {advice}")


def split_pairs(paths: Sequence[Path]) -> list[tuple[int, int]]:
    """Return the places of jsons whose names differ in "train" and "val"."""
    places = {path.name: place for place, path in enumerate(paths)}
    names = [(name, name.replace("train", "val")) for name in places if "train" in name]
    return [(places[name], places[other]) for name, other in names if other in places]


def repair_names(files: Files, output: Path) -> Files:
    """Write the json of a set with file names that are there, and with sizes where it has none;
    print a line and return the new set."""
    json_path, image_dir = files
    content = without_bad_sizes(normalized(read_annotation_file(json_path)))
    keys = TRAINING_KEYS | {"images": ("id", "file_name")}
    raise_first(json_path, structure_problems(content, keys))
    raise_first(json_path, id_problems(content))
    content, count = with_names_found(content, str(image_dir))
    done: Counter[str] = Counter()
    content = with_sizes(content, str(image_dir), done)
    write_whole(output, json.dumps(content))
    sizes = f", {done.total()} sizes filled in" if done else ""
    found = f"{count} of {len(content['images'])} images found by name{sizes}"
    print(f"{output}: {json_path} with {found}")
    return output, image_dir


def print_findings(
    sets: Sequence[Files],
    *,
    are_pair: bool,
    boxes_only: bool,
    bands: Bands = RGB_FILES,
    upright: bool = False,
    keypoints: tuple[str, ...] = (),
) -> int:
    """Print every problem and warning; return the number of problems.

    Args:
        sets: to check.
        are_pair: the first is for training and the second for validation, whatever their names.
        boxes_only: as for `inspect_coco`.
        bands: the same.
        upright: the same.
        keypoints: the same.
    """
    given: dict[str, Any] = {"boxes_only": boxes_only, "bands": bands, "upright": upright}
    given["keypoints"] = keypoints
    findings = [checking.inspect_coco(*files, **given) for files in sets]
    paths = [json_path for json_path, _ in sets]
    for files, found in zip(sets, findings, strict=True):
        json_path, _ = files
        for problem in checking.summarize(found.problems):
            print(f"{json_path}: {problem}")
        for warning in checking.summarize(found.warnings):
            print(f"{json_path}: warning: {warning}")
        if not found.problems:
            counts = f"{found.images} images, {sum(found.objects.values())} annotations"
            print(f"{json_path}: no problem in {counts}, {found.classes} classes")
        if (found.problems or found.warnings) and (advice := repair_advice(*files)):
            print(f"{json_path}: {advice}")
    for train, val in [(0, 1)] if are_pair else split_pairs(paths):
        for warning in checking.compare_sets(findings[train], findings[val]):
            print(f"{paths[train]} (train), {paths[val]} (val): warning: {warning}")
    return sum(len(found.problems) for found in findings)
