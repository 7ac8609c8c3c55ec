"""Read Datumaro's own json."""

import os
from pathlib import Path
from typing import Any

from mask_rcnn_jax.annotations.reader import read_json
from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.formats.coco_build import AnnotatedImage, ellipse, read_image_size, rectangle
from mask_rcnn_jax.formats.image_files import ImageFiles
from mask_rcnn_jax.formats.reading import (
    BOX_LEFT_OUT,
    Converted,
    ImageObjects,
    Options,
    check_size,
    entries,
    number,
    pairs,
)

NO_REGIONS = ("label", "caption")


def read_datumaro(source: Path, image_dir: Path | None, options: Options) -> Converted:
    """Read a json, or all in a folder's `annotations`.

    Polygons, masks and ellipses become objects, those with one label and group a single one. Masks
    with the attribute is_crowd become crowds.

    Args:
        source: the json or folder.
        image_dir: image folder; None for `images` beside the json's folder. A folder in it
            with the json's name comes first.
        options: `boxes` makes objects from boxes.

    Raises:
        OSError, ValueError: naming the file, if it cannot be read or is inconsistent.
    """
    paths = sorted((source / "annotations").glob("*.json")) if source.is_dir() else [source]
    if not paths:
        raise ValueError(f"{source}: no json in 'annotations', expected a set of Datumaro")
    default = paths[0].parent.parent / "images"
    files = ImageFiles(image_dir or (default if default.is_dir() else paths[0].parent))
    left_out: list[str] = []
    images: list[AnnotatedImage] = []
    names: list[str] = []
    for path in paths:
        content = read_json(path)
        classes = _classes(content, path)
        names += classes
        for place, item in enumerate(entries(content, "items", str(path)), start=1):
            where = f"{path}: item {show(item.get('id', place), 40)}"
            images.append(_image(item, where, path, classes, files, options, left_out))
    return Converted(images, files.folder, left_out, tuple(dict.fromkeys(names)))


def _classes(content: Any, path: Path) -> list[str]:
    categories = content.get("categories") if isinstance(content, dict) else None
    table = categories.get("label") if isinstance(categories, dict) else None
    if not isinstance(table, dict):
        raise ValueError(f"{path}: no 'label' in 'categories', expected a json of Datumaro")
    names = [entry.get("name") for entry in entries(table, "labels", str(path))]
    if not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise ValueError(f"{path}: 'labels' are not different names")
    return [str(name) for name in names]


def _image(
    item: dict[str, Any],
    where: str,
    path: Path,
    classes: list[str],
    files: ImageFiles,
    options: Options,
    left_out: list[str],
) -> AnnotatedImage:
    entry = item.get("image")
    name = entry.get("path") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(name, str):
        raise ValueError(f"{where}: no path of its 'image'")
    in_subset = f"{path.stem}/{name}"
    image = files.find(in_subset if os.path.isfile(files.folder / in_subset) else name, where)
    size = read_image_size(image, path)
    stated = entry.get("size")
    if stated is not None:
        if not isinstance(stated, list) or len(stated) != 2:
            raise ValueError(f"{where}: size {show(stated, 40)}, expected [height, width]")
        height, width = (number(side, f"{where}: size") for side in stated)
        check_size(where, (height, width), image, size)
    objects = ImageObjects(size, left_out)
    for place, shape in enumerate(entries(item, "annotations", where), start=1):
        at, kind, index = f"{where}: annotation {place}", shape.get("type"), shape.get("label_id")
        if not isinstance(kind, str):
            raise ValueError(f"{at}: type {show(kind, 40)}, expected one")
        if kind in NO_REGIONS:
            continue
        if type(index) is not int or not 0 <= index < len(classes):
            raise ValueError(f"{at}: label_id {show(index, 40)}, expected 0 to {len(classes) - 1}")
        label, group = classes[index], shape.get("group") or None
        if not isinstance(group, int | str | None):
            raise ValueError(f"{at}: group {show(group, 40)}, expected a number")
        attributes = shape.get("attributes")
        crowd = isinstance(attributes, dict) and bool(attributes.get("is_crowd"))
        if kind == "mask":
            objects.add_rle(at, label, shape.get("rle"), group, crowd=crowd)
        elif kind == "bbox" and not options.boxes:
            objects.leave_out(at, label, BOX_LEFT_OUT)
        elif kind not in ("polygon", "ellipse", "bbox"):
            objects.leave_out(at, label, f"a {show(kind, 40)}")
        else:
            objects.add_outline(at, label, _outline(kind, shape, at), kind, group)
    return AnnotatedImage(image, size, objects.joined())


def _outline(kind: str, shape: dict[str, Any], where: str) -> list[list[float]]:
    if kind == "polygon":
        return pairs(shape.get("points"), where)
    points = pairs(shape.get("bbox" if kind == "bbox" else "points"), where)
    if len(points) != 2:
        raise ValueError(f"{where}: a {kind} of {len(points)} points, expected 2")
    (x, y), (u, v) = points
    if kind == "bbox":
        return rectangle(x, y, x + u, y + v)
    return ellipse((x + u) / 2, (y + v) / 2, (u - x) / 2, (v - y) / 2)  # from corner to corner
