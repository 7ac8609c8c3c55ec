"""A COCO json and its folder of images: read, checked, ready for the loaders.

Two kinds of problem are told apart. What makes the file unusable as a whole (a missing key,
duplicate ids, an absent image) always stops. What spoils single annotations (a box without area, a
polygon of two points) stops too, or leaves those annotations out if the user says so.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from absl import logging

from mask_rcnn_jax.data import coco_checks
from mask_rcnn_jax.data.dataset import Annotation, ImageRecord, UndecodableImage
from mask_rcnn_jax.data.records import Records
from mask_rcnn_jax.data.segmentation import (
    clipped_box,
    compact,
    segmentation_area,
    segmentation_box,
)

CHECK_HINT = "`python -m mask_rcnn_jax.prepare check` lists all"
# Each class costs the model a row of weights, so an id that is no count of classes is refused.
MAX_RAW_ID = 10_000


@dataclass(frozen=True)
class CocoDataset:
    """A checked COCO json. Implements the protocol `Dataset`."""

    json_path: str
    image_dir: str
    class_names: tuple[str, ...]
    category_ids: tuple[int | str, ...]  # rising; the json's, or 1..K with raw class ids
    images: tuple[ImageRecord, ...]
    records: Records | None = None  # where the images are, if not files in `image_dir`

    def image_path(self, index: int) -> str:
        return os.path.join(self.image_dir, self.images[index].file_name)

    def decode(self, index: int) -> np.ndarray:
        """[H, W, 3] uint8 RGB of an image, as `decode_image` gives it."""
        path = self.image_path(index)
        if self.records is None:
            return decode_image(path)
        return decode_bytes(self.records.read(index, self.images[index].id), path)


def load_coco(
    json_path: str | os.PathLike,
    image_dir: str | os.PathLike,
    *,
    bad_annotations: str = "error",
    require_annotations: bool = True,
    class_ids: str = "contiguous",
    records: Records | None = None,
) -> CocoDataset:
    """Read and check a COCO json.

    Args:
        bad_annotations: "error", or "skip" (left out and counted).
        require_annotations: a json without any annotation is an error.
        class_ids: "contiguous" numbers the categories 1..K by rising id. "raw" makes the id the
            class, as torchvision and NVIDIA's TensorFlow code do: K is the highest id, and a class
            without a category is named "unused 12".
        records: hold the images, in the order of the json; no file is looked for in `image_dir`,
            which only names the images in messages.

    Raises ValueError for a json that cannot be used, FileNotFoundError if it is not there.
    """
    if bad_annotations not in ("error", "skip"):
        raise ValueError(f"data.bad_annotations is {bad_annotations!r}, expected 'error' or 'skip'")
    if class_ids not in ("contiguous", "raw"):
        raise ValueError(f"data.class_ids is {class_ids!r}, expected 'contiguous' or 'raw'")
    json_path, image_dir = os.fspath(json_path), os.fspath(image_dir)
    content = read_coco(json_path)
    folder = image_dir if records is None else None
    problems = coco_checks.reference_problems(content, folder, require_annotations)
    _raise_first(json_path, problems)
    faults = coco_checks.annotation_faults(content)
    if faults:
        first, count = next(iter(faults.values())), len(faults)
        if bad_annotations == "error":
            more = f", the first of {count} faulty annotations" if count > 1 else ""
            raise ValueError(
                f"{json_path}: {first}{more}; "
                f"data.bad_annotations=skip leaves them out, {CHECK_HINT}"
            )
        numbers = count, len(content["annotations"])
        logging.warning("%s: left out %d of %d annotations, first: %s", json_path, *numbers, first)
    classes = _classes(json_path, content["categories"], class_ids)
    images = _image_records(content, faults, tuple(classes))
    names = tuple(classes.values())
    return CocoDataset(json_path, image_dir, names, tuple(classes), images, records)


def load_categories(json_path: str | os.PathLike, *, class_ids: str = "contiguous") -> list[dict]:
    """`[{"id", "name"}, ...]` of a COCO json, class 1 first; `class_ids` as for `load_coco`."""
    classes = _classes(os.fspath(json_path), read_coco(json_path)["categories"], class_ids)
    return [{"id": category_id, "name": name} for category_id, name in classes.items()]


def read_coco(json_path: str | os.PathLike) -> dict[str, Any]:
    """The content of a COCO json whose sections and ids can be looked up; ValueError if not."""
    content = _read_json(json_path)
    _raise_first(json_path, coco_checks.structure_problems(content))
    return content


def check_coco(json_path: str | os.PathLike, image_dir: str | os.PathLike) -> list[str]:
    """Every problem of a COCO json and its images, one line each; decodes every image."""
    image_dir, content = os.fspath(image_dir), _read_json(json_path)
    problems = list(coco_checks.structure_problems(content))
    if problems:
        return problems  # nothing else can be looked up
    problems += coco_checks.reference_problems(content, image_dir, require_annotations=True)
    problems += coco_checks.annotation_faults(content).values()
    problems += _image_problems(content["images"], image_dir)
    return problems


def decode_image(path: str | os.PathLike, *, upright: bool = False) -> np.ndarray:
    """[H, W, 3] uint8 RGB of a gray, color, CMYK, RGBA or 16-bit file, as stored: the EXIF
    rotation is not applied, since annotations are made on the stored pixels. `upright` applies it.
    """
    with open(path, "rb") as file:
        return decode_bytes(file.read(), os.fspath(path), upright=upright)


def decode_bytes(content: bytes, path: str, *, upright: bool = False) -> np.ndarray:
    """`decode_image` of what the file `path` holds."""
    data = np.frombuffer(content, np.uint8)
    # imdecode refuses truncated data; imread would return it with the rest of the image gray.
    flags = cv2.IMREAD_COLOR_RGB | (0 if upright else cv2.IMREAD_IGNORE_ORIENTATION)
    try:
        image = cv2.imdecode(data, flags) if data.size else None
    except cv2.error as error:  # more pixels than it allows
        raise UndecodableImage(f"{path}: {error.err or error}") from error
    if image is None:
        raise UndecodableImage(f"{path}: truncated, damaged or not an image")
    return image


def check_image_size(image: np.ndarray, record_size: tuple[int, int], path: str) -> None:
    """Raise ValueError if a decoded image does not have the json's (height, width)."""
    if image.shape[:2] != record_size:
        found, stated = (f"{height} x {width}" for height, width in (image.shape[:2], record_size))
        raise ValueError(f"{path}: the file is {found} (height x width), the json says {stated}")


def _how_to_make(path: Path) -> str:
    """The command that makes a missing json, if it has the place that `prepare` would give it."""
    action, folder = "", path.parent.parent
    if re.fullmatch(r"instances_(train|val)2017\.json", path.name):
        action = "coco2017"
    elif re.fullmatch(r"instances_(train|val)\.json", path.name) and folder.name == "shapes":
        action = "shapes"
    if not action or path.parent.name != "annotations":
        return ""
    return f"; `python -m mask_rcnn_jax prepare {action} --data_dir {folder}` makes it"


def _read_json(path: str | os.PathLike) -> Any:
    if not os.path.isfile(path):
        expected = f"expected a COCO json{_how_to_make(Path(path))}"
        raise FileNotFoundError(f"no annotation file {os.fspath(path)!r}, {expected}")
    return read_json(path)


def read_json(path: str | os.PathLike) -> Any:
    """The content of a JSON file; ValueError if it is not one."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from error


def _raise_first(json_path: str | os.PathLike, problems: Iterable[str]) -> None:
    problems = list(problems)
    if problems:
        more = f" (and {len(problems) - 1} more problems; {CHECK_HINT})" if problems[1:] else ""
        raise ValueError(f"{json_path}: {problems[0]}{more}")


def _image_problems(images: list[dict], image_dir: str) -> Iterator[str]:
    for entry in images:
        path = os.path.join(image_dir, entry["file_name"])
        if not os.path.isfile(path):
            continue  # reported by _absent_images
        try:
            check_image_size(decode_image(path), (entry["height"], entry["width"]), path)
        except (OSError, ValueError) as error:
            yield str(error)


def _classes(json_path: str, categories: list[dict], class_ids: str) -> dict[int | str, str]:
    """Category id -> name of the classes 1..K, in their order."""
    names = {entry["id"]: str(entry["name"]) for entry in categories}
    if class_ids == "contiguous":
        order = sorted(names, key=lambda i: (isinstance(i, str), i))  # numbers before strings
        return {category_id: names[category_id] for category_id in order}
    for category_id in names:
        whole = isinstance(category_id, int) and not isinstance(category_id, bool)
        if not whole or not 1 <= category_id <= MAX_RAW_ID:
            expected = f"data.class_ids='raw' expects whole numbers from 1 to {MAX_RAW_ID}"
            raise ValueError(
                f"{json_path}: category id {category_id!r} cannot be a class, {expected}"
            )
    return {k: names.get(k, f"unused {k}") for k in range(1, max(names, default=0) + 1)}


def _image_records(
    content: dict, faults: dict[int, str], category_ids: tuple[int | str, ...]
) -> tuple[ImageRecord, ...]:
    """The images of a sound json, without the faulty annotations."""
    class_of = {category_id: k for k, category_id in enumerate(category_ids, start=1)}
    sizes = coco_checks.image_sizes(content)
    annotations: dict[int | str, list[Annotation]] = {image_id: [] for image_id in sizes}
    for position, entry in enumerate(content["annotations"]):
        if position not in faults:
            image_id = entry["image_id"]
            class_index = class_of[entry["category_id"]]
            annotations[image_id].append(_annotation(entry, class_index, *sizes[image_id]))
    names = {entry["id"]: entry["file_name"] for entry in content["images"]}
    return tuple(ImageRecord(i, names[i], *sizes[i], tuple(annotations[i])) for i in names)


def _annotation(entry: dict, class_index: int, height: int, width: int) -> Annotation:
    """A sound annotation; what the json leaves out is made from the segmentation."""
    segmentation = compact(entry["segmentation"], height, width)
    box = entry.get("bbox") or segmentation_box(segmentation, height, width)
    box, area = clipped_box(box, height, width), entry.get("area")
    area = float(segmentation_area(segmentation, height, width) if area is None else area)
    return Annotation(box, class_index, segmentation, area, bool(entry.get("iscrowd", 0)))
