"""COCO annotation validation, one message per problem.

Run `structure_problems` first; the other checks rely on the keys it checks.
"""

import math
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

from mask_rcnn_jax.data.segmentation import clipped_box, segmentation_box, segmentation_fault

ENTRY_KEYS = {
    "images": ("id", "file_name", "height", "width"),
    "categories": ("id", "name"),
    "annotations": ("image_id", "category_id"),
}


def structure_problems(content: Any) -> Iterator[str]:
    """Find missing keys and entries of the wrong type."""
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


def reference_problems(
    content: dict, image_dir: str | None, require_annotations: bool
) -> Iterator[str]:
    """Find duplicate and dangling ids, empty sections, and files missing from `image_dir`."""
    images, annotations = content["images"], content["annotations"]
    for section in ENTRY_KEYS:
        ids = Counter(entry["id"] for entry in content[section] if "id" in entry)
        yield from (f"{section}: id {i!r} occurs {n} times" for i, n in ids.items() if n > 1)
    names = Counter(entry["name"] for entry in content["categories"])
    yield from (f"categories: name {i!r} occurs {n} times" for i, n in names.items() if n > 1)
    if not images:
        yield "'images' is empty"
    if image_dir is not None:
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
    """List each folder once: a stat per file takes minutes on a network disk."""
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


def _name(entry: dict, position: int) -> str:
    return f"annotation {entry['id']}" if "id" in entry else f"annotations[{position}] (no id)"


def image_sizes(content: dict) -> dict[int | str, tuple[int, int]]:
    """(height, width) per image id."""
    images = content["images"]
    return {entry["id"]: (int(entry["height"]), int(entry["width"])) for entry in images}


def annotation_faults(content: dict) -> dict[int, str]:
    """Map indices into 'annotations' to a message for each faulty annotation."""
    sizes, faults = image_sizes(content), {}
    for position, entry in enumerate(content["annotations"]):
        if entry["image_id"] not in sizes:
            continue  # reported by reference_problems
        if fault := _annotation_fault(entry, *sizes[entry["image_id"]]):
            where = f"{_name(entry, position)} of image {entry['image_id']}"
            faults[position] = f"{where}: {fault}"
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
    x1, y1, x2, y2 = clipped_box(box, height, width)
    if x1 >= x2 or y1 >= y2:
        return f"box {box} has no area in single precision inside the image"
    return None
