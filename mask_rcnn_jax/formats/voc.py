"""Read Pascal VOC: label images, and an XML with the classes for each."""

from pathlib import Path
from xml.etree.ElementTree import Element

import numpy as np

from mask_rcnn_jax.formats.coco_build import AnnotatedImage, read_image_size, rectangle
from mask_rcnn_jax.formats.image_files import ImageFiles
from mask_rcnn_jax.formats.label_image import instances, read_label_image
from mask_rcnn_jax.formats.mask_codes import box_code, overlap
from mask_rcnn_jax.formats.reading import (
    BOX_LEFT_OUT,
    Converted,
    ImageObjects,
    Options,
    check_size,
    number,
)
from mask_rcnn_jax.formats.xml_tree import child_text, read_xml
from mask_rcnn_jax.terminal.safe_text import cut

VOID = 255  # outlines, and what is not annotated


def _palette() -> np.ndarray:
    """[256] colors in 24 bits: the bits in an index are dealt to red, green, blue."""
    index = np.arange(256)
    colors = np.zeros(256, np.int64)
    for bit in range(8):
        colors |= (index >> bit & 1) << (23 - 8 * (bit % 3) - bit // 3)
    return colors


def read_voc(source: Path, image_dir: Path | None, options: Options) -> Converted:
    """Read `Annotations`, and `SegmentationObject` if it is there, in a folder.

    With `SegmentationObject`, the images are those that it has: others have no masks.
    Value n in a mask is the n-th object in the XML. Without it, polygons in the XML are objects,
    as Roboflow and supervision write them; boxes are left out.

    Raises:
        OSError, ValueError: naming the file, if it cannot be read or is inconsistent.
    """
    places = [source / "Annotations", source / "annotations", source]
    folder = next((path for path in places if any(path.glob("*.xml"))), None)
    if folder is None:
        raise ValueError(f"{source}: no XML in it or in 'Annotations', expected Pascal VOC")
    masks = source / "SegmentationObject"
    default = source / "JPEGImages"
    files = ImageFiles(image_dir or (default if default.is_dir() else source))
    if masks.is_dir():
        stems = sorted(path.stem for path in masks.glob("*.png"))
    else:
        stems = sorted(path.stem for path in folder.glob("*.xml"))
    if not stems:
        raise ValueError(f"{masks}: no PNG, expected label images")
    left_out: list[str] = []
    images = []
    for stem in stems:
        path = folder / f"{stem}.xml"
        root = read_xml(path)
        if root.tag != "annotation":
            raise ValueError(f"{path}: <{cut(root.tag)}>, expected an <annotation> of Pascal VOC")
        name = child_text(root, "filename")
        image = files.find_stem(stem, str(path)) or files.find(name, str(path))
        size = read_image_size(image, path)
        if root.find("size") is not None:
            sides = [number(root.findtext(f"size/{key}"), f"{path}: {key}") for key in _SIDES]
            check_size(str(path), (sides[0], sides[1]), image, size)
        objects = ImageObjects(size, left_out)
        if masks.is_dir():
            _add_masks(masks / f"{stem}.png", path, root, size, objects)
        else:
            _add_outlines(path, root, options.boxes, objects)
        images.append(AnnotatedImage(image, size, objects.joined()))
    return Converted(images, files.folder, left_out)


_SIDES = ("height", "width")


def _add_masks(
    path: Path, xml: Path, root: Element, size: tuple[int, int], objects: ImageObjects
) -> None:
    runs = read_label_image(path, size)
    if runs.values.dtype == np.uint32:  # colors instead of a palette, as Datumaro and CVAT write
        runs = runs._replace(values=_indices(runs.values, path))
    entries = root.findall("object")
    for value, rle in instances(runs, size, str(path)):
        if value in (0, VOID):
            continue
        if value > len(entries):
            raise ValueError(f"{path}: object {value}, but {xml} has {len(entries)}")
        entry = entries[value - 1]
        label = _label(entry, f"{xml}: object {value}")
        x1, y1, x2, y2 = _box(entry, f"{xml}: object {value}")
        if overlap(rle, box_code((round(x1), round(y1), round(x2), round(y2)), size)):
            objects.add_rle(f"{path}: object {value}", label, rle)
        else:  # numbered in another order
            objects.leave_out(f"{path}: object {value}", label, f"outside its box in {xml.name}")


def _indices(colors: np.ndarray, path: Path) -> np.ndarray:
    palette = _palette()
    order = np.argsort(palette)
    places = order[np.searchsorted(palette[order], colors).clip(max=255)]
    if (unknown := palette[places] != colors).any():
        first = int(colors[unknown][0])
        raise ValueError(f"{path}: the color {first:06x} is not in the palette of Pascal VOC")
    return places


def _add_outlines(path: Path, root: Element, boxes: bool, objects: ImageObjects) -> None:
    for place, entry in enumerate(root.findall("object"), start=1):
        where = f"{path}: object {place}"
        label, polygon = _label(entry, where), entry.find("polygon")
        if polygon is not None:
            values = [number(child.text, f"{where}: <{cut(child.tag)}>") - 1 for child in polygon]
            if len(values) % 2:
                raise ValueError(f"{where}: a polygon of {len(values)} numbers, expected x, y, ..")
            points = [values[n : n + 2] for n in range(0, len(values), 2)]
            objects.add_outline(where, label, points, "polygon")
        elif boxes:
            objects.add_outline(where, label, rectangle(*_box(entry, where)), "box")
        else:
            objects.leave_out(where, label, BOX_LEFT_OUT)


def _label(entry: Element, where: str) -> str:
    label = child_text(entry, "name")
    if not label:
        raise ValueError(f"{where} has no <name>")
    return label


def _box(entry: Element, where: str) -> tuple[float, float, float, float]:
    """A box as x1, y1, x2, y2; in the file its first pixel is 1 and the last belongs to it."""
    x1, y1, x2, y2 = (
        number(entry.findtext(f"bndbox/{key}"), f"{where}: {key}")
        for key in ("xmin", "ymin", "xmax", "ymax")
    )
    return x1 - 1, y1 - 1, x2, y2
