"""Repair segmentations and boxes of a COCO json where only one thing can be meant.

All functions take the content of a json whose ids are repaired, see `repair_ids`.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from mask_rcnn_jax.annotations.checks import is_number, is_size
from mask_rcnn_jax.annotations.faults import box_fault
from mask_rcnn_jax.annotations.reader import GroundTruth
from mask_rcnn_jax.annotations.segmentation import (
    segmentation_area,
    segmentation_box,
    segmentation_fault,
)
from mask_rcnn_jax.data.box_forms import boxes_of, form_of_all
from mask_rcnn_jax.formats.repair_ids import Content, entries_of

MOST_PARTS = 1000  # that are compared with one another
Size = tuple[int, int] | None  # (height, width) of an image, None if the json does not say


def with_shapes(content: Content, done: Counter[str]) -> Content:
    """Repair segmentations, then boxes, then fill in what is missing."""
    sizes = _sizes(content)
    content = _changed(content, sizes, lambda entry, size: _with_polygons(entry, size, done))
    content = _changed(content, sizes, lambda entry, _: _with_iscrowd(entry, done))
    content = _with_boxes(content, sizes, done)
    return _changed(content, sizes, lambda entry, size: _filled(entry, size, done))


def _sizes(content: Content) -> dict[Any, Size]:
    """The sizes of images whose id occurs once."""
    images = [e for e in entries_of(content, "images") if isinstance(e, dict)]
    images = [entry for entry in images if type(entry.get("id")) in (int, str)]
    times = Counter(entry["id"] for entry in images)
    sizes: dict[Any, Size] = {}
    for entry in images:
        sides: list[Any] = [entry.get("height"), entry.get("width")]
        if times[entry["id"]] == 1:
            is_known = all(map(is_size, sides))
            sizes[entry["id"]] = (int(sides[0]), int(sides[1])) if is_known else None
    return sizes


def _changed(
    content: Content, sizes: dict[Any, Size], change: Callable[[Content, Size], Content]
) -> Content:
    entries = []
    for entry in entries_of(content, "annotations"):
        if isinstance(entry, dict):
            image_id = entry.get("image_id")
            entry = change(entry, sizes.get(image_id) if type(image_id) in (int, str) else None)
        entries.append(entry)
    return content | {"annotations": entries} if entries else content


def _with_polygons(entry: Content, size: Size, done: Counter[str]) -> Content:
    """An entry with its segmentation as a list of flat polygons, or as an RLE."""
    found = entry.get("segmentation")
    if isinstance(found, str):
        found, what = _from_text(found), "segmentations in a text"
    elif not isinstance(found, list) or not found:
        return entry
    elif all(map(is_number, found)):
        what = "flat polygons, now in a list"
    elif len(found) == 1 and isinstance(found[0], dict) and "counts" in found[0]:
        found, what = found[0], "run-length codes in a list, now alone"
    else:
        what = "polygons nested too deeply, now flat"
    if isinstance(found, list) and not _is_flat(found):
        parts = _parts(found)
        if parts is None or len(parts) > 1 and _may_have_holes(parts):
            return entry
        found = parts
    if found == entry["segmentation"] or size is None or segmentation_fault(found, *size):
        return entry
    done[what] += 1
    return entry | {"segmentation": found}


def _from_text(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None


def _is_flat(found: list[Any]) -> bool:
    """Whether it is a list of polygons as it should be, apart from its numbers."""
    return all(
        isinstance(part, list) and not any(isinstance(v, list | dict) for v in part)
        for part in found
    ) and any(len(part) > 2 for part in found)


def _parts(value: Any, depth: int = 5) -> list[list[float]] | None:
    """Flat polygons of numbers, points or polygons in lists in one another; None for others."""
    if not isinstance(value, list) or not value or not depth:
        return None
    if all(map(is_number, value)):
        return [value] if len(value) >= 6 and len(value) % 2 == 0 else None
    points = [_point(element) for element in value]
    if all(points):
        return [[number for point in points for number in point or ()]] if points[2:] else None
    found = [_parts(element, depth - 1) for element in value]
    return None if None in found else [part for parts in found for part in parts or ()]


def _point(value: Any) -> list[float] | None:
    """[x, y] of such a list, or of {"x": .., "y": ..}."""
    if isinstance(value, dict) and value.keys() == {"x", "y"}:
        value = [value["x"], value["y"]]
    return (
        value
        if isinstance(value, list) and len(value) == 2 and all(map(is_number, value))
        else None
    )


def _may_have_holes(parts: list[list[float]]) -> bool:
    """Whether a polygon lies in another's extent: GeoJSON has holes in the place of parts."""
    if len(parts) > MOST_PARTS:
        return True
    extents = [(min(p[::2]), min(p[1::2]), max(p[::2]), max(p[1::2])) for p in parts]
    return any(
        one is not other
        and (one[0] >= other[0] and one[1] >= other[1])
        and (one[2] <= other[2] and one[3] <= other[3])
        for one in extents
        for other in extents
    )


def _with_boxes(content: Content, sizes: dict[Any, Size], done: Counter[str]) -> Content:
    """Boxes of another form become COCO's, if all of a set are in it beyond doubt."""
    entries = entries_of(content, "annotations")
    usable = [
        entry
        for entry in entries
        if isinstance(entry, dict)
        and type(entry.get("image_id")) in (int, str)
        and sizes.get(entry["image_id"]) is not None
    ]
    known = [{"id": i, "height": s[0], "width": s[1]} for i, s in sizes.items() if s is not None]
    form = form_of_all(boxes_of(GroundTruth("", {"images": known, "annotations": usable})))
    with_box = [entry for entry in usable if _is_box(entry.get("bbox"))]
    if form is None:
        return content
    new = {id(e): form.box(e["bbox"], sizes[e["image_id"]] or (0, 0)) for e in with_box}
    if any(min(box[2:]) < 0 for box in new.values()):  # some are in another form
        return content
    done[f"boxes of the form {form.numbers}{form.unit}, now [x, y, width, height]"] += len(new)
    changed = [e | {"bbox": new[id(e)]} if id(e) in new else e for e in entries]
    return content | {"annotations": changed}


def _is_box(box: Any) -> bool:
    return isinstance(box, list) and len(box) == 4 and box_fault(box, None) is None


def _with_iscrowd(entry: Content, done: Counter[str]) -> Content:
    if entry.get("iscrowd") is not None:
        return entry
    done["annotations without iscrowd"] += 1
    return entry | {"iscrowd": 0}


def _filled(entry: Content, size: Size, done: Counter[str]) -> Content:
    """An entry with box and area, which `load_coco` would give it, too."""
    if entry.get("bbox") and entry.get("area") is not None:
        return entry
    new: Content = {}
    mask, box = entry.get("segmentation"), entry.get("bbox") or []
    is_sound = bool(mask) and size is not None and segmentation_fault(mask, *size) is None
    if box == [] and is_sound and size is not None:
        new["bbox"] = box = segmentation_box(mask or [], *size)
    if entry.get("area") is None and is_sound and size is not None:
        new["area"] = segmentation_area(mask or [], *size)
    elif entry.get("area") is None and not mask and _is_box(box):
        new["area"] = box[2] * box[3]
    for key in new:
        done[f"annotations without {key}"] += 1
    return entry | new
