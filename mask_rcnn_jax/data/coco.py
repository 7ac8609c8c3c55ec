"""A COCO json and its folder of images: read, checked, ready for the loaders.

Two kinds of problem are told apart. What makes the file unusable as a whole (a missing key,
duplicate ids, an absent image) always stops. What spoils single annotations (a box without area, a
polygon of two points) stops too, or leaves those annotations out if the user says so.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from absl import logging

from mask_rcnn_jax.data.segmentation import (
    Segmentation,
    compact,
    segmentation_area,
    segmentation_box,
    segmentation_fault,
)

CHECK_HINT = "`python -m mask_rcnn_jax.prepare check` lists all"
ENTRY_KEYS = {
    "images": ("id", "file_name", "height", "width"),
    "categories": ("id", "name"),
    "annotations": ("image_id", "category_id"),
}


class UndecodableImage(ValueError):
    """A file that is there but does not hold a whole image."""


@dataclass(frozen=True, slots=True)
class Annotation:
    """One object of an image."""

    box: np.ndarray  # [4] float32 (x1, y1, x2, y2), original pixels, clipped to the image
    class_index: int  # 1..K
    segmentation: Segmentation  # compact form
    area: float  # pixels covered
    iscrowd: bool


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """One image and its objects."""

    id: int | str  # as in the json
    file_name: str
    height: int
    width: int
    annotations: tuple[Annotation, ...]


@dataclass(frozen=True)
class CocoDataset:
    """A checked COCO json. Class k (1..K) is `class_names[k - 1]`, `category_ids[k - 1]`."""

    json_path: str
    image_dir: str
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]  # as in the json, rising
    images: tuple[ImageRecord, ...]

    def image_path(self, index: int) -> str:
        return os.path.join(self.image_dir, self.images[index].file_name)


def load_coco(
    json_path: str | os.PathLike,
    image_dir: str | os.PathLike,
    *,
    bad_annotations: str = "error",
    require_annotations: bool = True,
) -> CocoDataset:
    """Read and check a COCO json. `bad_annotations` is "error" or "skip" (left out and counted)."""
    if bad_annotations not in ("error", "skip"):
        raise ValueError(f"data.bad_annotations is {bad_annotations!r}, expected 'error' or 'skip'")
    json_path, image_dir = os.fspath(json_path), os.fspath(image_dir)
    content = _read_json(json_path)
    _raise_first(json_path, _structure_problems(content))
    _raise_first(json_path, _reference_problems(content, image_dir, require_annotations))
    faults = _annotation_faults(content)
    if faults and bad_annotations == "error":
        more = f", the first of {len(faults)} faulty annotations" if len(faults) > 1 else ""
        raise ValueError(
            f"{json_path}: {next(iter(faults.values()))}{more}; "
            f"data.bad_annotations=skip leaves them out, {CHECK_HINT}"
        )
    if faults:
        logging.warning(
            "%s: left out %d of %d annotations, first: %s",
            json_path,
            len(faults),
            len(content["annotations"]),
            next(iter(faults.values())),
        )
    return _build(json_path, image_dir, content, faults)


def check_coco(json_path: str | os.PathLike, image_dir: str | os.PathLike) -> list[str]:
    """Every problem of a COCO json and its images, one line each; decodes every image."""
    json_path, image_dir = os.fspath(json_path), os.fspath(image_dir)
    content = _read_json(json_path)
    problems = list(_structure_problems(content))
    if problems:
        return problems  # nothing else can be looked up
    problems += _reference_problems(content, image_dir, require_annotations=True)
    problems += _annotation_faults(content).values()
    problems += _image_problems(content["images"], image_dir)
    return problems


def decode_image(path: str | os.PathLike) -> np.ndarray:
    """[H, W, 3] uint8 RGB of a grey, colour, CMYK, RGBA or 16-bit file, as stored: the EXIF
    rotation is not applied, since annotations are made on the stored pixels."""
    with open(path, "rb") as file:
        data = np.frombuffer(file.read(), np.uint8)
    # imdecode refuses truncated data; imread would return it with the rest of the picture grey.
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    image = cv2.imdecode(data, flags) if data.size else None
    if image is None:
        raise UndecodableImage(f"{os.fspath(path)}: truncated, damaged or not an image")
    return image


def check_image_size(image: np.ndarray, record_size: tuple[int, int], path: str) -> None:
    """Raise if the decoded picture is not of the (height, width) that the json says."""
    if image.shape[:2] != record_size:
        (height, width), (json_height, json_width) = image.shape[:2], record_size
        raise ValueError(
            f"{path}: the file is {height} x {width} (height x width), "
            f"the json says {json_height} x {json_width}"
        )


def _read_json(path: str) -> Any:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no annotation file {path!r}, expected a COCO json")
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from error


def _raise_first(json_path: str, problems: Iterable[str]) -> None:
    problems = list(problems)
    if problems:
        more = f" (and {len(problems) - 1} more problems; {CHECK_HINT})" if problems[1:] else ""
        raise ValueError(f"{json_path}: {problems[0]}{more}")


def _structure_problems(content: Any) -> Iterator[str]:
    """Missing keys and entries of the wrong type, without which no id can be looked up."""
    if not isinstance(content, dict):
        kind = "a list (detection results?)" if isinstance(content, list) else "not an object"
        yield f"not a COCO json: {kind}, expected an object with {', '.join(ENTRY_KEYS)}"
        return
    for section, keys in ENTRY_KEYS.items():
        entries = content.get(section)
        if not isinstance(entries, list):
            yield f"not a COCO json: key {section!r} is missing or not a list"
            continue
        for position, entry in enumerate(entries):
            where = f"{section}[{position}]"
            if not isinstance(entry, dict):
                yield f"{where} is not an object"
                continue
            missing = [key for key in keys if key not in entry]
            if missing:
                yield f"{where} lacks {', '.join(map(repr, missing))}"
            elif not all(isinstance(entry[k], int | str) for k in keys if k.endswith("id")):
                yield f"{where} has an id that is neither a number nor a string"
            elif section == "images" and not all(_is_size(entry[k]) for k in ("height", "width")):
                yield f"{where} has height or width that is not a positive whole number"


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0 and value == int(value)


def _reference_problems(content: dict, image_dir: str, require_annotations: bool) -> Iterator[str]:
    """Duplicate ids, ids that point nowhere, absent files, nothing to learn from."""
    images, annotations = content["images"], content["annotations"]
    for section in ENTRY_KEYS:
        ids = Counter(entry["id"] for entry in content[section] if "id" in entry)
        yield from (f"{section}: id {i!r} occurs {n} times" for i, n in ids.items() if n > 1)
    names = Counter(entry["name"] for entry in content["categories"])
    yield from (f"categories: name {i!r} occurs {n} times" for i, n in names.items() if n > 1)
    if not images:
        yield "'images' is empty"
    yield from _absent_images([entry["file_name"] for entry in images], image_dir)

    image_ids = {entry["id"] for entry in images}
    category_ids = {entry["id"] for entry in content["categories"]}
    for position, entry in enumerate(annotations):
        name = _name(entry, position)
        if entry["image_id"] not in image_ids:
            yield f"{name}: image_id {entry['image_id']!r} is not in 'images'"
        if entry["category_id"] not in category_ids:
            yield f"{name}: category_id {entry['category_id']!r} is not in 'categories'"
    if require_annotations and not annotations:
        yield "'annotations' is empty, expected at least one object"


def _absent_images(file_names: list[str], image_dir: str) -> Iterator[str]:
    """One listing per folder: a stat per file takes minutes on a network disk."""
    if not os.path.isdir(image_dir):
        yield f"no image folder {image_dir!r}"
        return
    listings: dict[str, set[str]] = {}
    for file_name in file_names:
        folder, base = os.path.split(file_name)
        if folder not in listings:
            path = os.path.join(image_dir, folder)
            listings[folder] = set(os.listdir(path)) if os.path.isdir(path) else set()
        if base not in listings[folder]:
            yield f"image {file_name!r} is listed but not in {image_dir}"


def _image_problems(images: list[dict], image_dir: str) -> Iterator[str]:
    for entry in images:
        path = os.path.join(image_dir, entry["file_name"])
        if not os.path.isfile(path):
            continue  # reported by _absent_images
        try:
            check_image_size(decode_image(path), (entry["height"], entry["width"]), path)
        except (OSError, ValueError) as error:
            yield str(error)


def _name(entry: dict, position: int) -> str:
    return f"annotation {entry['id']}" if "id" in entry else f"annotations[{position}] (no id)"


def _annotation_faults(content: dict) -> dict[int, str]:
    """Position in 'annotations' -> what is wrong with it."""
    sizes = {
        entry["id"]: (int(entry["height"]), int(entry["width"])) for entry in content["images"]
    }
    faults = {}
    for position, entry in enumerate(content["annotations"]):
        if entry["image_id"] not in sizes:
            continue  # a problem of the whole file
        fault = _annotation_fault(entry, *sizes[entry["image_id"]])
        if fault:
            name = f"{_name(entry, position)} of image {entry['image_id']}"
            faults[position] = f"{name}: {fault}"
    return faults


def _annotation_fault(entry: dict, height: int, width: int) -> str | None:
    if "segmentation" not in entry:
        return "lacks 'segmentation'"
    segmentation, box = entry["segmentation"], entry.get("bbox")
    if box is not None and (fault := _box_fault(box, height, width)):
        return fault
    if fault := segmentation_fault(segmentation, height, width):
        return fault
    if box is None:
        return _box_fault(segmentation_box(segmentation, height, width), height, width)
    return None


def _box_fault(box: Any, height: int, width: int) -> str | None:
    if not isinstance(box, list) or len(box) != 4:
        return f"box {box!r}, expected [x, y, width, height]"
    if not all(isinstance(v, int | float) and math.isfinite(v) for v in box):
        return f"box {box} has a value that is not a finite number"
    x, y, box_width, box_height = box
    if box_width <= 0 or box_height <= 0:
        return f"box {box} has no area, expected [x, y, width, height]"
    if x >= width or y >= height or x + box_width <= 0 or y + box_height <= 0:
        return f"box {box} lies outside the image of {height} x {width} (height x width)"
    x1, y1, x2, y2 = _clipped_box(x, y, box_width, box_height, height, width)
    if x1 >= x2 or y1 >= y2:
        return f"box {box} has no area in single precision inside the image"
    return None


def _clipped_box(
    x: float, y: float, box_width: float, box_height: float, height: int, width: int
) -> np.ndarray:
    """[x1, y1, x2, y2] float32, the part inside the image."""
    box = np.array([x, y, x + box_width, y + box_height], np.float32)
    return np.clip(box, 0, np.array([width, height, width, height], np.float32))


def _build(json_path: str, image_dir: str, content: dict, faults: dict[int, str]) -> CocoDataset:
    categories = sorted(content["categories"], key=lambda entry: entry["id"])
    class_of = {entry["id"]: k for k, entry in enumerate(categories, start=1)}
    sizes = {
        entry["id"]: (int(entry["height"]), int(entry["width"])) for entry in content["images"]
    }
    annotations: dict[int | str, list[Annotation]] = {image_id: [] for image_id in sizes}
    for position, entry in enumerate(content["annotations"]):
        if position not in faults:
            image_id = entry["image_id"]
            class_index = class_of[entry["category_id"]]
            annotations[image_id].append(_annotation(entry, class_index, *sizes[image_id]))
    return CocoDataset(
        json_path=json_path,
        image_dir=image_dir,
        class_names=tuple(str(entry["name"]) for entry in categories),
        category_ids=tuple(entry["id"] for entry in categories),
        images=tuple(
            ImageRecord(
                entry["id"],
                entry["file_name"],
                *sizes[entry["id"]],
                tuple(annotations[entry["id"]]),
            )
            for entry in content["images"]
        ),
    )


def _annotation(entry: dict, class_index: int, height: int, width: int) -> Annotation:
    """A sound annotation; what the json leaves out is made from the segmentation."""
    segmentation = compact(entry["segmentation"], height, width)
    box = entry.get("bbox") or segmentation_box(segmentation, height, width)
    area = entry.get("area")
    return Annotation(
        box=_clipped_box(*box, height, width),
        class_index=class_index,
        segmentation=segmentation,
        area=float(segmentation_area(segmentation, height, width) if area is None else area),
        iscrowd=bool(entry.get("iscrowd", 0)),
    )
