"""Read VGG Image Annotator annotations (VIA 1 and 2), one json for all images."""

import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from mask_rcnn_jax.annotations.reader import read_json
from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.formats import coco_build
from mask_rcnn_jax.formats.image_files import ImageFiles, file_below
from mask_rcnn_jax.formats.reading import ImageObjects

# Shape attributes that define the outline of a region.
OUTLINE_KEYS = {
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
) -> tuple[list[coco_build.AnnotatedImage], list[str]]:
    """Read a saved project or exported annotations.

    Args:
        json_path: the VIA json.
        image_dir: image folder; None for the folder of the json.
        attribute: region attribute with the class; None if there is only one.
        class_name: class of all regions, regardless of their attributes.

    Returns:
        The images, and one line per region skipped because it has no area.

    Raises:
        OSError, ValueError: naming the file, if it cannot be read or is inconsistent.
    """
    json_path = Path(json_path)
    folder = json_path.parent if image_dir is None else Path(image_dir)
    entries = _read(json_path)
    if class_name is None and attribute is None:
        attribute = _only_attribute(json_path, entries)
    paths = _image_paths(json_path, folder, [entry["filename"] for entry in entries])
    left_out: list[str] = []
    images = []
    for entry, path in zip(entries, paths, strict=True):
        size = coco_build.read_image_size(path, json_path)
        objects = ImageObjects(size, left_out)
        for number, region in enumerate(entry["regions"], start=1):
            where = f"{json_path}: {entry['filename']}, region {number}"
            label = class_name or _label(region, attribute, where)
            outline, kind = _outline(region, where), region["shape_attributes"].get("name")
            if outline or kind:
                objects.add_outline(where, label, outline, kind)
            else:
                objects.leave_out(where, label, "a region without a shape")
        images.append(coco_build.AnnotatedImage(path, size, objects.joined()))
    return images, left_out


def _read(path: Path) -> list[dict[str, Any]]:
    """Return one entry per image, with its regions as a list for both versions."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {os.fspath(path)!r}, expected a VIA json")
    content = read_json(path)
    content = content if isinstance(content, dict) else {}
    if {"images", "annotations"} <= content.keys():
        raise ValueError(f"{path}: already a COCO json, use it as it is")
    if {"project", "metadata"} <= content.keys():
        raise ValueError(f"{path}: a VIA 3 project, expected VIA 2")
    content = content.get("_via_img_metadata", content)
    entries = list(content.values()) if isinstance(content, dict) else []
    if not entries or not all(
        isinstance(entry, dict) and isinstance(entry.get("filename"), str) and "regions" in entry
        for entry in entries
    ):
        raise ValueError(f"{path}: not a VIA json: expected images with filename and regions")
    found = []
    for entry in entries:
        regions = entry["regions"]
        regions = list(regions.values()) if isinstance(regions, dict) else regions
        is_valid = isinstance(regions, list) and all(
            isinstance(region, dict)
            and isinstance(region.get("shape_attributes"), dict)
            and isinstance(region.get("region_attributes", {}), dict)
            for region in regions
        )
        if not is_valid:
            fault = "a region has no shape_attributes"
            if not isinstance(regions, list):
                fault = f"regions is {show(regions, 40)}, expected a list"
            raise ValueError(f"{path}: {entry['filename']}: {fault}")
        found.append(entry | {"regions": regions})
    return found


def _image_paths(json_path: Path, folder: Path, names: list[str]) -> list[Path]:
    """The images in the json, below the folder."""
    found = [file_below(folder, folder / name) for name in names]
    paths = [path for path in found if path is not None]
    if len(paths) == len(names):
        return paths
    files = ImageFiles(folder)
    return [
        path or files.find(name, str(json_path)) for path, name in zip(found, names, strict=True)
    ]


def _only_attribute(path: Path, entries: list[dict]) -> str:
    regions = [region for entry in entries for region in entry["regions"]]
    names = sorted({name for region in regions for name in region.get("region_attributes", {})})
    if not names:
        advice = "--class_name assigns one class to all regions"
        raise ValueError(f"{path}: no region has an attribute; {advice}")
    if len(names) > 1:
        raise ValueError(
            f"{path}: several attributes, choose one with --attribute: {show(names, 300)}"
        )
    return names[0]


def _label(region: dict, attribute: str | None, where: str) -> str:
    value = region.get("region_attributes", {}).get(attribute)
    if isinstance(value, dict):  # check boxes
        ticked = [name for name, on in value.items() if on]
        value = ticked[0] if len(ticked) == 1 else None
    label = "" if value is None else str(value).strip()
    if not label:
        raise ValueError(f"{where}: attribute {show(attribute)} must name exactly one class")
    return label


def _outline(region: dict, where: str) -> list[list[float]]:
    """Outline points (x, y) in pixels; empty for a point or a line."""
    shape = region["shape_attributes"]
    kind = shape.get("name")
    if not isinstance(kind, str) or kind not in OUTLINE_KEYS:
        return []
    dimensions = 1 if kind == "polygon" else 0
    try:
        values = [np.asarray(shape[name], np.float64) for name in OUTLINE_KEYS[kind]]
        angle = float(shape.get("theta", 0.0))
        if any(value.ndim != dimensions or not np.isfinite(value).all() for value in values):
            raise ValueError
        if not math.isfinite(angle):
            raise ValueError
        if kind == "polygon":
            return np.stack(values, axis=1).tolist()
        first, second, *sides = (float(value) for value in values)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        expected = ", ".join(OUTLINE_KEYS[kind])
        raise ValueError(f"{where}: {kind} expects the numbers {expected}") from error
    if kind == "rect":
        return coco_build.rectangle(first, second, first + sides[0], second + sides[1])
    return coco_build.ellipse(first, second, sides[0], sides[-1], angle)
