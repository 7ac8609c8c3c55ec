"""Repair file names and sizes of a COCO json's images by the files that are there."""

import os
import posixpath
from collections import Counter, defaultdict
from pathlib import PurePosixPath
from typing import Any

from mask_rcnn_jax.annotations.checks import MAX_STATED_PIXELS, is_number, is_size
from mask_rcnn_jax.annotations.ids import whole_number
from mask_rcnn_jax.annotations.lvis import file_name_in
from mask_rcnn_jax.annotations.reader import read_regular
from mask_rcnn_jax.formats.repair_ids import Content, entries_of
from mask_rcnn_jax.images.decode import MAX_BYTES, header_size, orientation
from mask_rcnn_jax.images.file_names import files_below, find_absent
from mask_rcnn_jax.images.suffixes import is_image_name


def with_names(content: Content, image_dir: str, done: Counter[str]) -> Content:
    """File names are those of files below the folder, where one file alone can be meant.

    An absent name is looked for as `find_absent` does. A number is the name of a file without its
    ending, whatever zeros it begins with. No image gets a file of another size than it states.
    """
    entries = [entry for entry in entries_of(content, "images") if isinstance(entry, dict)]
    names = [entry.get("file_name") for entry in entries]
    texts = [name for name in names if isinstance(name, str)]
    found: dict[Any, str] = dict(find_absent(texts, image_dir))
    numbers = {name for name in names if is_number(name)}
    if numbers:
        found |= _by_number(numbers, {*texts, *found.values()}, image_dir)
    images = []
    for entry in entries_of(content, "images"):
        name = entry.get("file_name") if isinstance(entry, dict) else None
        is_name = isinstance(name, str) or is_number(name)
        if is_name and name in found and _may_be(entry, found[name], image_dir):
            kind = "file names" if isinstance(name, str) else "numbers for file names"
            done[f"{kind}, now those of files"] += 1
            entry = entry | {"file_name": found[name]}
        images.append(entry)
    return content | {"images": images} if images else content


def _may_be(entry: Content, path: str, image_dir: str) -> bool:
    """Whether neither an image's size nor the folder in its name speaks against a file."""
    folder = posixpath.dirname(str(entry["file_name"]).replace("\\", "/"))
    is_other = posixpath.normpath(folder) != posixpath.dirname(path)
    if folder and is_other and os.path.isdir(os.path.join(image_dir, folder)):
        return False  # its folder is there, without it
    stated = tuple(entry.get(side) for side in ("height", "width"))
    size, is_turned = _file_size(path, image_dir)
    if size is None or not all(map(is_size, stated)):
        return True
    return stated == size or is_turned and stated == size[::-1]


def _by_number(numbers: set[Any], taken: set[str], image_dir: str) -> dict[Any, str]:
    """The only file for each number, that no other image is."""
    by_number: defaultdict[int, list[str]] = defaultdict(list)
    for path in files_below(image_dir):
        stem = PurePosixPath(path).stem
        if is_image_name(posixpath.basename(path)) and stem.isdecimal() and len(stem) < 21:
            by_number[int(stem)].append(path)
    found = {}
    for number in numbers:
        paths = by_number.get(whole_number(number), [])
        if len(paths) == 1 and paths[0] not in taken:
            found[number] = paths[0]
    return found


def with_sizes(content: Content, image_dir: str, done: Counter[str]) -> Content:
    """Heights and widths that are missing, or no numbers, are those of the files.

    They stay as they are where a side that is there is not the file's, and where the image is
    turned by its EXIF entry, so that either size may be meant.
    """
    images = []
    for entry in entries_of(content, "images"):
        if isinstance(entry, dict) and (size := _missing_size(entry, image_dir)):
            entry = entry | size
            done["image sizes, read from the files"] += 1
        images.append(entry)
    return content | {"images": images} if images else content


def _missing_size(entry: Content, image_dir: str) -> dict[str, int] | None:
    stated = {side: entry.get(side) for side in ("height", "width")}
    name = entry.get("file_name") or file_name_in(entry.get("coco_url"))
    if all(map(is_size, stated.values())) or not isinstance(name, str):
        return None
    size, is_turned = _file_size(name, image_dir)
    if size is None or is_turned:
        return None
    found = dict(zip(("height", "width"), size, strict=True))
    fits = all(not is_size(value) or value == found[side] for side, value in stated.items())
    return found if fits else None


def _file_size(name: str, image_dir: str) -> tuple[tuple[int, int] | None, bool]:
    """(height, width) of a file, None if it cannot be read, and whether its EXIF entry turns it."""
    path = os.path.join(image_dir, name)
    try:
        head = read_regular(path, MAX_BYTES)
        return header_size(head, path, MAX_STATED_PIXELS), orientation(head) > 4
    except (OSError, ValueError):  # what is wrong with it, `check` says
        return None, False
