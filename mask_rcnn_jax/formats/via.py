"""Annotations of the VGG Image Annotator (VIA 1 and 2), one json for all, as drawn pictures."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from mask_rcnn_jax.formats.coco_build import (
    DrawnObject,
    DrawnPicture,
    check_pictures_exist,
    ellipse,
    has_area,
    join_parts,
    picture_size,
    rectangle,
)

# Which numbers of a region make its outline.
NUMBERS = {
    "rect": ("x", "y", "width", "height"),
    "circle": ("cx", "cy", "r"),
    "ellipse": ("cx", "cy", "rx", "ry"),
    "polygon": ("all_points_x", "all_points_y"),
}


def read_via(
    json_path: str | os.PathLike,
    image_dir: str | os.PathLike | None,
    *,
    attribute: str | None = None,
    class_name: str | None = None,
) -> tuple[list[DrawnPicture], list[str]]:
    """The pictures of a saved project or of exported annotations, in `image_dir` or beside it.

    attribute: the region attribute that names the class; the only one if None.
    class_name: makes every region of this class, whatever its attributes are.

    Returns the pictures and a line for each region that is left out since it has no area.
    Raises ValueError or OSError, naming the file, for what cannot be read or does not fit.
    """
    json_path = Path(json_path)
    folder = json_path.parent if image_dir is None else Path(image_dir)
    entries = _read(json_path)
    if class_name is None and attribute is None:
        attribute = _only_attribute(json_path, entries)
    check_pictures_exist(json_path, [folder / entry["filename"] for entry in entries])
    pictures, left_out = [], []
    for entry in entries:
        objects = []
        for number, region in enumerate(entry["regions"], start=1):
            where = f"{json_path}: {entry['filename']}, region {number}"
            label = class_name or _label(region, attribute, where)
            outline = _outline(region, where)
            if has_area(outline):
                objects.append(DrawnObject(label, join_parts([outline])))
            else:
                kind = region["shape_attributes"].get("name")
                left_out.append(f"{where} ({label}), a {kind} without area")
        path = folder / entry["filename"]
        pictures.append(DrawnPicture(path, picture_size(path), objects))
    return pictures, left_out


def _read(path: Path) -> list[dict[str, Any]]:
    """One entry per picture, with a list of regions whatever the version."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {os.fspath(path)!r}, expected a json of VIA")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from error
    content = content if isinstance(content, dict) else {}
    if {"images", "annotations"} <= content.keys():
        raise ValueError(f"{path}: a COCO json already, take it as it is")
    if {"project", "metadata"} <= content.keys():
        raise ValueError(f"{path}: a project of VIA 3, expected one of VIA 2")
    content = content.get("_via_img_metadata", content)
    entries = list(content.values()) if isinstance(content, dict) else []
    if not entries or not all(
        isinstance(entry, dict) and isinstance(entry.get("filename"), str) and "regions" in entry
        for entry in entries
    ):
        raise ValueError(f"{path}: not a json of VIA: expected pictures with filename and regions")
    found = []
    for entry in entries:
        regions = entry["regions"]
        regions = list(regions.values()) if isinstance(regions, dict) else regions
        sound = isinstance(regions, list) and all(
            isinstance(region, dict)
            and isinstance(region.get("shape_attributes"), dict)
            and isinstance(region.get("region_attributes", {}), dict)
            for region in regions
        )
        if not sound:
            raise ValueError(f"{path}: {entry['filename']}: a region has no shape_attributes")
        found.append(entry | {"regions": regions})
    return found


def _only_attribute(path: Path, entries: list[dict]) -> str:
    names = sorted({name for entry in entries for region in entry["regions"]
                    for name in region.get("region_attributes", {})})  # fmt: skip
    if not names:
        raise ValueError(
            f"{path}: no region has an attribute that could name its class; --class_name makes "
            "all of them of one"
        )
    if len(names) > 1:
        raise ValueError(f"{path}: --attribute must say which of {names} names the class")
    return names[0]


def _label(region: dict, attribute: str, where: str) -> str:
    value = region.get("region_attributes", {}).get(attribute)
    if isinstance(value, dict):  # check boxes
        ticked = [name for name, on in value.items() if on]
        value = ticked[0] if len(ticked) == 1 else None
    label = "" if value is None else str(value).strip()
    if not label:
        raise ValueError(f"{where}: attribute {attribute!r} names no class, or more than one")
    return label


def _outline(region: dict, where: str) -> list[list[float]]:
    """Points (x, y) in pixels; none of a point or a line."""
    shape = region["shape_attributes"]
    kind = shape.get("name")
    if kind not in NUMBERS:
        return []
    try:
        values = [np.asarray(shape[name], np.float64) for name in NUMBERS[kind]]
        turn = float(shape.get("theta", 0.0))
        if not all(np.isfinite(value).all() for value in [*values, turn]):
            raise ValueError
        if kind == "polygon":
            return np.stack(values, axis=1).tolist()
        first, second, *sides = (float(value) for value in values)
    except (KeyError, TypeError, ValueError) as error:
        expected = ", ".join(NUMBERS[kind])
        raise ValueError(f"{where}: a {kind} needs the numbers {expected}") from error
    if kind == "rect":
        return rectangle(first, second, first + sides[0], second + sides[1])
    return ellipse(first, second, sides[0], sides[-1], turn)
