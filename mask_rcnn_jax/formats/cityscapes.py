"""Read Cityscapes' fine or coarse annotations (Cordts et al., 2016)."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mask_rcnn_jax.annotations.reader import below, read_json
from mask_rcnn_jax.annotations.segmentation import show, to_rle, union
from mask_rcnn_jax.formats.coco_build import (
    AnnotatedImage,
    check_outline,
    has_area,
    read_image_size,
)
from mask_rcnn_jax.formats.image_files import ImageFiles
from mask_rcnn_jax.formats.label_image import instances, read_label_image
from mask_rcnn_jax.formats.mask_codes import box_code, check_codes, overlap, without
from mask_rcnn_jax.formats.reading import (
    Converted,
    ImageObjects,
    Options,
    check_size,
    entries,
    number,
)

# Classes whose instances are told apart, by the number of the label.
CLASSES = {
    24: "person",
    25: "rider",
    26: "car",
    27: "truck",
    28: "bus",
    29: "caravan",
    30: "trailer",
    31: "train",
    32: "motorcycle",
    33: "bicycle",
}
PER_CLASS = 1000  # a pixel is label * PER_CLASS + instance, or the label alone in a group
GROUP = "group"  # behind the label of objects that are not told apart
_ENDING = re.compile(r"_gt(?:Fine|Coarse)_(?:instanceIds\.png|polygons\.json)$")


def read_cityscapes(source: Path, image_dir: Path | None, options: Options) -> Converted:
    """Read `*_instanceIds.png` below a folder, and `*_polygons.json` where there is no PNG.

    Groups become crowds. Later polygons may cover a polygon: it is kept as it is if none does,
    otherwise its visible part, as a mask.

    Args:
        source: folder such as gtFine/train.
        image_dir: image folder; None for leftImg8bit instead of the last gtFine or gtCoarse in the
            path of `source`.
        options: not used.

    Raises:
        OSError, ValueError: naming the file, if it cannot be read or is inconsistent.
    """
    found: dict[str, Path] = {}
    for path in below(source, "*_gt*"):  # instanceIds come before polygons
        if _ENDING.search(path.name):
            found.setdefault(_ENDING.sub("", str(path)), path)
    if not found:
        raise ValueError(f"{source}: no *_gtFine_instanceIds.png or *_gtFine_polygons.json")
    files = ImageFiles(image_dir or _image_folder(source))
    left_out: list[str] = []
    images = []
    for path in found.values():
        stem = _ENDING.sub("", path.name)
        image = files.find_stem(f"{stem}_leftImg8bit", str(path)) or files.find_stem(
            stem, str(path)
        )
        if image is None:
            raise ValueError(f"{path}: no image {stem}_leftImg8bit in {files.folder}")
        size = read_image_size(image, path)
        objects = ImageObjects(size, left_out)
        if path.suffix == ".png":
            _add_pixels(path, size, objects)
        else:
            _add_polygons(path, size, image, objects)
        images.append(AnnotatedImage(image, size, objects.joined()))
    return Converted(images, files.folder, left_out, tuple(CLASSES.values()))


def _image_folder(source: Path) -> Path:
    parts = source.absolute().parts
    last = max((n for n, part in enumerate(parts) if part in ("gtFine", "gtCoarse")), default=None)
    return source if last is None else Path(*parts[:last], "leftImg8bit", *parts[last + 1 :])


def _add_pixels(path: Path, size: tuple[int, int], objects: ImageObjects) -> None:
    for value, rle in instances(read_label_image(path, size), size, str(path)):
        is_group = value < PER_CLASS
        label = CLASSES.get(value if is_group else value // PER_CLASS)
        if label is not None:
            objects.add_rle(f"{path}: value {value}", label, rle, crowd=is_group)


def _add_polygons(path: Path, size: tuple[int, int], image: Path, objects: ImageObjects) -> None:
    content = read_json(path)
    shapes = entries(content, "objects", str(path))
    height, width = (
        number(content.get(key), f"{path}: {key}") for key in ("imgHeight", "imgWidth")
    )
    check_size(str(path), (height, width), image, size)
    for where, label, points, visible in reversed(list(_visible(shapes, size, path))):
        name = label.removesuffix(GROUP)
        if name not in CLASSES.values():
            continue
        if visible is None:
            objects.add_outline(where, name, points, "polygon")
        else:
            objects.add_rle(where, name, visible, crowd=name != label)


def _visible(
    shapes: list[dict[str, Any]], size: tuple[int, int], path: Path
) -> Iterator[tuple[str, str, list, dict | None]]:
    """Each polygon, the last first, with its mask if it is a group or partly covered by others."""
    covered, total = box_code((0, 0, 0, 0), size), 0
    for place in range(len(shapes), 0, -1):
        shape, where = shapes[place - 1], f"{path}: object {place}"
        label, points = shape.get("label"), shape.get("polygon")
        if not isinstance(label, str) or not isinstance(points, list):
            raise ValueError(f"{where}: label {show(label, 40)}, expected one and a polygon")
        if shape.get("deleted"):
            continue
        if not all(isinstance(point, list) and len(point) == 2 for point in points):
            raise ValueError(f"{where}: a point is not [x, y]")
        points = [[number(value, f"{where}: a coordinate") for value in point] for point in points]
        if not has_area(points):
            yield where, label, points, None
            continue
        check_outline(points, size, where)
        code = to_rle([[value for point in points for value in point]], *size)
        visible = code if label.endswith(GROUP) else None
        if label.removesuffix(GROUP) in CLASSES.values():
            visible = without(code, covered) if overlap(code, covered) else visible
            total += len(visible["counts"]) if visible else 0
        yield where, label, points, visible
        covered = union([covered, code])
        check_codes(max(total, len(covered["counts"])), where)
