"""Read CVAT's "CVAT for images 1.1", one XML for all images."""

from pathlib import Path
from xml.etree.ElementTree import Element

import numpy as np

from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.formats.coco_build import AnnotatedImage, ellipse, read_image_size, rectangle
from mask_rcnn_jax.formats.image_files import ImageFiles
from mask_rcnn_jax.formats.reading import (
    BOX_LEFT_OUT,
    Converted,
    ImageObjects,
    Options,
    check_size,
    number,
    rotated,
)
from mask_rcnn_jax.formats.xml_tree import read_xml, text_of
from mask_rcnn_jax.rle import encode_window

WITHOUT_AREA = ("polyline", "points", "cuboid", "skeleton")


def read_cvat(source: Path, image_dir: Path | None, options: Options) -> Converted:
    """Read an exported XML, or `annotations.xml` in a folder.

    Polygons, masks and ellipses become objects, those with one label and group a single one.

    Raises:
        OSError, ValueError: naming the file, if it cannot be read or is inconsistent.
    """
    path = source / "annotations.xml" if source.is_dir() else source
    root = read_xml(path)
    if root.tag != "annotations" or root.find("image") is None:
        found = "tracks of a video" if root.find("track") is not None else f"<{root.tag}>"
        raise ValueError(f"{path}: {found}, expected an export as 'CVAT for images 1.1'")
    files = ImageFiles(image_dir or path.parent)
    left_out: list[str] = []
    images = [_image(entry, path, files, options, left_out) for entry in root.iterfind("image")]
    labels = [
        label for label in root.iterfind("meta//labels/label") if not text_of(label, "parent")
    ]
    declared = [text_of(label, "name") for label in labels if text_of(label, "type") != "skeleton"]
    used = sorted({entry.label for image in images for entry in image.objects})
    return Converted(images, files.folder, left_out, tuple(dict.fromkeys(declared + used)))


def _image(
    entry: Element, path: Path, files: ImageFiles, options: Options, left_out: list[str]
) -> AnnotatedImage:
    name = entry.get("name", "")
    where = f"{path}: image {show(name)}"
    image = files.find(name, str(path))
    size = read_image_size(image, path)
    stated = tuple(number(entry.get(key), f"{where}: {key}") for key in ("height", "width"))
    check_size(where, (stated[0], stated[1]), image, size)
    objects = ImageObjects(size, left_out)
    for place, shape in enumerate(entry, start=1):
        if shape.tag == "tag":
            continue
        label, kind = shape.get("label"), shape.tag
        at = f"{where}: shape {place}"
        if not label:
            raise ValueError(f"{at}, a {show(kind)}, has no label")
        group = shape.get("group_id", "0")
        joined = None if group in ("", "0") else group
        if kind == "mask":
            objects.add_rle(at, label, _mask(shape, size, at), joined)
        elif kind == "box" and not options.boxes:
            objects.leave_out(at, label, BOX_LEFT_OUT)
        elif kind in WITHOUT_AREA:
            objects.leave_out(at, label, f"a {kind}")
        else:
            objects.add_outline(at, label, _outline(shape, at), kind, joined)
    return AnnotatedImage(image, size, objects.joined())


def _outline(shape: Element, where: str) -> list[list[float]]:
    if shape.tag == "polygon":
        points = [point.split(",") for point in shape.get("points", "").split(";")]
        if not all(len(point) == 2 for point in points):
            raise ValueError(f"{where}: points {show(shape.get('points'), 40)}, expected x,y;x,y")
        return [[number(value, f"{where}: a coordinate") for value in point] for point in points]
    if shape.tag == "box":
        x1, y1, x2, y2 = _numbers(shape, ("xtl", "ytl", "xbr", "ybr"), where)
        outline, center = rectangle(x1, y1, x2, y2), ((x1 + x2) / 2, (y1 + y2) / 2)
    elif shape.tag == "ellipse":
        x, y, rx, ry = _numbers(shape, ("cx", "cy", "rx", "ry"), where)
        outline, center = ellipse(x, y, rx, ry), (x, y)
    else:
        raise ValueError(f"{where}: <{shape.tag}>, which is no shape of CVAT's")
    angle = number(shape.get("rotation", "0"), f"{where}: rotation")
    return rotated(outline, center, angle) if angle else outline


def _mask(shape: Element, size: tuple[int, int], where: str) -> dict:
    """Return a mask's RLE; in the file its runs follow the rows in a box, zeros first."""
    box = [int(value) for value in _numbers(shape, ("left", "top", "width", "height"), where)]
    left, top, width, height = box
    if min(box) < 0 or not width * height or left + width > size[1] or top + height > size[0]:
        raise ValueError(f"{where}: the box of its mask is not within {size[0]} x {size[1]} pixels")
    try:
        runs = np.array([int(run) for run in shape.get("rle", "").split(",")], np.int64)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{where}: rle {show(shape.get('rle'), 40)}, expected runs") from error
    if runs.min() < 0 or runs.max() > width * height or runs.sum() != width * height:
        raise ValueError(f"{where}: rle does not have {width} x {height} pixels")
    crop = np.repeat(np.arange(len(runs)) % 2, runs).astype(np.uint8)
    return encode_window(crop.reshape(height, width), (left, top), *size)


def _numbers(shape: Element, names: tuple[str, ...], where: str) -> list[float]:
    return [number(shape.get(name), f"{where}: {name}") for name in names]
