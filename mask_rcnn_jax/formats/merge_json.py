"""Join COCO jsons, with classes merged by name."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mask_rcnn_jax.annotations.absent import absent_images
from mask_rcnn_jax.annotations.checks import category_problems
from mask_rcnn_jax.annotations.lvis import IMAGE_KEYS
from mask_rcnn_jax.annotations.reader import raise_first
from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.data.coco import read_coco

Content = dict[str, Any]


def merge_jsons(
    paths: Sequence[str], image_dirs: Sequence[str], class_map: Mapping[str, str]
) -> tuple[Content, Path]:
    """Join jsons, each with its image folder.

    Classes with equal names are one, also within a json. The first json's classes come first. All
    ids are numbered from 1; file names are relative to the folder that holds all images.

    Args:
        paths: the jsons, each once.
        image_dirs: one for each; none for their own folders.
        class_map: names that are replaced.

    Returns:
        The joined content and its image folder.

    Raises:
        OSError, ValueError: a json cannot be used, a name in the map is in no json, or an image is
            there twice or not at all.
    """
    image_dirs = image_dirs or [os.path.dirname(path) or "." for path in paths]
    if len(set(map(os.path.realpath, paths))) < len(paths) or len(image_dirs) != len(paths):
        counts = f"{len(paths)} --json and {len(image_dirs)} --images"
        raise ValueError(f"{counts}, expected different jsons and a folder for each")
    contents = {path: read_coco(path, same_annotations=True) for path in paths}
    for path, content in contents.items():
        raise_first(path, category_problems(content))
    folder = Path(os.path.commonpath([os.path.abspath(place) for place in image_dirs]))
    known = {entry["name"] for content in contents.values() for entry in content["categories"]}
    if unknown := sorted(class_map.keys() - known):
        raise ValueError(f"--map has {show(unknown[0])}, expected one of {sorted(known)[:20]}")
    categories: dict[str, dict] = {}
    layouts: dict[str, list] = {}  # names of keypoints, [] for those that are not named
    images: list[dict] = []
    annotations: list[dict] = []
    for (path, content), image_dir in zip(contents.items(), image_dirs, strict=True):
        new_classes = {}
        with_points = {e["category_id"] for e in content["annotations"] if e.get("keypoints")}
        for entry in content["categories"]:
            name = class_map.get(entry["name"], entry["name"])
            numbered = entry | {"id": len(categories) + 1, "name": name}
            points = entry.get("keypoints") or []
            if points or entry["id"] in with_points:
                _check_points(layouts.setdefault(name, points), points, f"{path}: {show(name)}")
            same = categories.setdefault(name, numbered)
            if points and not same.get("keypoints"):
                same.update({key: entry[key] for key in ("keypoints", "skeleton") if key in entry})
            new_classes[entry["id"]] = same["id"]
        new_images = {}
        prefix = os.path.relpath(os.path.abspath(image_dir), folder)
        for entry in content["images"]:
            new_images[entry["id"]] = len(images) + 1
            place = os.path.normpath(os.path.join(prefix, entry["file_name"]))
            lists = {
                key: [new_classes[i] for i in entry[key]] for key in IMAGE_KEYS if key in entry
            }
            numbered = {"id": len(images) + 1, "file_name": place.replace(os.sep, "/")}
            images.append(entry | lists | numbered)
        for entry in content["annotations"]:
            numbers = {
                "id": len(annotations) + 1,
                "image_id": new_images[entry["image_id"]],
                "category_id": new_classes[entry["category_id"]],
            }
            annotations.append(entry | numbers)
    _check_images(contents, [entry["file_name"] for entry in images], folder)
    joined = {"images": images, "categories": [*categories.values()], "annotations": annotations}
    return joined, folder


def _check_points(known: list, own: list, where: str) -> None:
    if known != own:
        advice = "data.more_train reads jsons whose points have other orders"
        raise ValueError(f"{where} has other keypoints than before; {advice}")


def _check_images(contents: Mapping[str, Content], names: list[str], folder: Path) -> None:
    source = ", ".join(contents)
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{source}: image {show(twice[0])} in {folder} is there twice")
    raise_first(source, absent_images(names, os.fspath(folder)))


def read_map(pairs: Sequence[str]) -> dict[str, str]:
    """Read `old=new`; ValueError for anything else, and for a name with two others."""
    found: dict[str, str] = {}
    for pair in pairs:
        old, separator, new = (part.strip() for part in pair.partition("="))
        if not (old and separator and new):
            raise ValueError(f"--map is {pair!r}, expected old=new")
        if found.setdefault(old, new) != new:
            raise ValueError(f"--map has {old!r} twice")
    return found
