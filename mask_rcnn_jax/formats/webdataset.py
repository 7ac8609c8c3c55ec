"""Read annotations in WebDataset's tars, one json beside each image.

No standard says what such a json holds. Read are those with a list `annotations` of objects as in
COCO: what RF-DETR packs, and SA-1B.
"""

import posixpath
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mask_rcnn_jax import stores
from mask_rcnn_jax.annotations.reader import read_json
from mask_rcnn_jax.annotations.segmentation import show, to_rle
from mask_rcnn_jax.formats.coco_build import (
    AnnotatedImage,
    check_outline,
    has_area,
    read_image_size,
    rectangle,
)
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
from mask_rcnn_jax.images.suffixes import is_image_name
from mask_rcnn_jax.tars.members import above_all, find_members
from mask_rcnn_jax.tars.patterns import are_tars

INDEX = "-index.json"  # ending of the file in which RF-DETR names the categories of its tars
Names = Mapping[Any, str]  # of categories, by id


def read_webdataset(source: Path, image_dir: Path | None, options: Options) -> Converted:
    """Read the json of each image in tars, `a.json` of `a.jpg`.

    An object's class is its `category`, or the name of its `category_id`, in the json itself or in
    a file of RF-DETR beside the tars, or else `class_name`.

    Args:
        source: a tar, a pattern of tars, or a folder of tars.
        image_dir: None.
        options: `boxes` keeps objects without a mask; `class_name` is the class of all.

    Raises:
        OSError, ValueError: naming tar and member, if it cannot be read or is inconsistent.
    """
    if image_dir is not None:
        raise ValueError(f"--images {image_dir}: the images are in the tars, expected none")
    pattern = str(source) if are_tars(source) else f"{source}/*.tar"
    members = find_members(pattern)
    folder = above_all({tar for tar, _ in members})
    names = {tar: _names_of(tar) for tar in dict.fromkeys(tar for tar, _ in members)}
    pairs_found, left_out = _pairs(members)
    images = []
    for tar, image, text in pairs_found:
        path, where = Path(tar, image), f"{tar}/{text}"
        content, size = read_json(where), read_image_size(path, where)
        shapes = entries(content, "annotations", where)
        _check_size(content, where, path, size)
        objects = ImageObjects(size, left_out)
        known = names[tar] | _by_id(content.get("categories", []), where)
        for place, shape in enumerate(shapes, start=1):
            name = f"{where}: object {place}"
            _add(shape, name, _label(shape, known, options, name), options, objects)
        images.append(AnnotatedImage(path, size, objects.joined()))
    return Converted(images, Path(folder), left_out)


def _pairs(members: list[tuple[str, str]]) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Tar, image and json of each pair, and a line for each that is alone."""
    images: dict[tuple[str, str], str] = {}
    jsons: dict[tuple[str, str], str] = {}
    for tar, name in members:
        stem, ending = posixpath.splitext(name)
        if is_image_name(posixpath.basename(name)):
            if (tar, stem) in images:
                both = f"{show(images[tar, stem])} and {show(name)}"
                raise ValueError(f"{tar}: {both} are both an image of {stem}.json")
            images[tar, stem] = name
        elif ending == ".json":
            jsons[tar, stem] = name
    alone = [f"{tar}: {show(images[tar, stem])} has no json"
             for tar, stem in images if (tar, stem) not in jsons]  # fmt: skip
    alone += [f"{tar}: {show(jsons[tar, stem])} has no image"
              for tar, stem in jsons if (tar, stem) not in images]  # fmt: skip
    found = [(key[0], images[key], jsons[key]) for key in images if key in jsons]
    return found, alone


def _names_of(tar: str) -> dict[Any, str]:
    """Names of categories by id, of the file beside a tar that lists it."""
    folder, _, name = tar.rpartition("/")
    if stores.is_store(tar):
        beside = [entry for entry in stores.list_folder(folder) if entry.endswith(INDEX)]
    else:
        beside = [path.name for path in Path(folder or ".").glob(f"*{INDEX}")]
    for entry in sorted(beside):
        where = f"{folder}/{entry}" if folder else entry
        content = read_json(where)
        if isinstance(content, dict) and name in (content.get("shards") or ()):
            return _by_id(content.get("categories"), where)
    return {}


def _by_id(categories: Any, where: str) -> dict[Any, str]:
    """Names of categories by id; ValueError if it is no list of these."""
    found = {}
    for entry in entries({"categories": categories}, "categories", where):
        if not isinstance(entry.get("name"), str) or not isinstance(entry.get("id"), int | str):
            raise ValueError(f"{where}: category {show(entry, 40)} has no id or name")
        found[entry["id"]] = entry["name"]
    return found


def _check_size(content: Mapping[str, Any], where: str, path: Path, size: tuple[int, int]) -> None:
    """Refuse an image of another size than its json states, if it does."""
    found = content.get("image")
    sides = [(found if isinstance(found, dict) else content).get(k) for k in ("height", "width")]
    if None not in sides:
        height, width = (number(side, f"{where}: a side of the image") for side in sides)
        check_size(where, (height, width), path, size)


def _label(shape: Mapping[str, Any], names: Names, options: Options, where: str) -> str:
    if options.class_name:
        return options.class_name
    label = shape.get("category")
    if label is None and "category_id" in shape:
        found = shape["category_id"]
        label = names.get(found) if isinstance(found, int | str) else None
        if label is None:
            advice = f"expected 'category', or a file NAME{INDEX} beside the tar that names it"
            raise ValueError(f"{where}: category_id {show(found, 40)} has no name; {advice}")
    if not isinstance(label, str) or not label:
        advice = "--class_name gives one to all objects"
        raise ValueError(f"{where}: category {show(label, 40)}, expected a name; {advice}")
    return label


def _add(
    shape: Mapping[str, Any], where: str, label: str, options: Options, objects: ImageObjects
) -> None:
    outline, crowd = shape.get("segmentation"), shape.get("iscrowd") in (1, True)
    if isinstance(outline, dict):
        objects.add_rle(where, label, outline, crowd=crowd)
    elif outline and isinstance(outline, list):
        parts = [pairs(part, f"{where}: segmentation") for part in outline]
        if crowd:
            _add_crowd(parts, where, label, objects)
            return
        for part in parts:
            objects.add_outline(where, label, part, "polygon", group=where)
    elif outline:
        raise ValueError(f"{where}: segmentation {show(outline, 40)}, expected polygons or RLE")
    elif options.boxes:
        box = shape.get("bbox")
        if not isinstance(box, list) or len(box) != 4:
            raise ValueError(f"{where}: bbox {show(box, 40)}, expected [x, y, width, height]")
        x, y, width, height = (number(side, f"{where}: bbox") for side in box)
        objects.add_outline(where, label, rectangle(x, y, x + width, y + height), "box")
    else:
        objects.leave_out(where, label, BOX_LEFT_OUT)


def _add_crowd(parts: list[list], where: str, label: str, objects: ImageObjects) -> None:
    """Polygons of a crowd, which only a mask can be."""
    drawn = [part for part in parts if has_area(part)]
    for part in drawn:
        check_outline(part, objects.size, where)
    flat = [[value for point in part for value in point] for part in drawn]
    if flat:
        objects.add_rle(where, label, to_rle(flat, *objects.size), crowd=True)
    else:
        objects.leave_out(where, label, "a polygon without area")
