"""Read Supervisely's annotations, one json per image."""

import base64
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from mask_rcnn_jax import opencv as cv2
from mask_rcnn_jax.annotations.reader import below, read_json
from mask_rcnn_jax.annotations.segmentation import show, to_rle, union
from mask_rcnn_jax.formats.coco_build import (
    AnnotatedImage,
    check_outline,
    has_area,
    read_image_size,
    rectangle,
)
from mask_rcnn_jax.formats.image_files import ImageFiles
from mask_rcnn_jax.formats.mask_codes import crop_code, without
from mask_rcnn_jax.formats.reading import (
    BOX_LEFT_OUT,
    Converted,
    ImageObjects,
    Options,
    check_size,
    entries,
    number,
)
from mask_rcnn_jax.images.decode import check_header

MAX_BYTES = 1 << 28  # of a mask's PNG


def read_supervisely(source: Path, image_dir: Path | None, options: Options) -> Converted:
    """Read every json in folders named `ann` below a project or a dataset.

    Args:
        source: the folder.
        image_dir: image folder; None for `img` beside each `ann`.
        options: `boxes` makes objects from rectangles.

    Raises:
        OSError, ValueError: naming the file, if it cannot be read or is inconsistent.
    """
    paths = below(source, "ann/*.json")
    if not paths:
        raise ValueError(f"{source}: no json in folders 'ann', expected a project of Supervisely")
    files = {folder: ImageFiles(image_dir or folder.parent / "img")
             for folder in {path.parent for path in paths}}  # fmt: skip
    left_out: list[str] = []
    images = []
    for path in paths:
        content = read_json(path)
        shapes = entries(content, "objects", str(path))
        image = files[path.parent].find(path.stem, str(path))  # a.png.json is that of a.png
        size = read_image_size(image, path)
        stated = content.get("size")
        sides = stated if isinstance(stated, dict) else {}
        height, width = (number(sides.get(k), f"{path}: {k}") for k in ("height", "width"))
        check_size(str(path), (height, width), image, size)
        objects = ImageObjects(size, left_out)
        for place, shape in enumerate(shapes, start=1):
            _add(shape, f"{path}: object {place}", size, options, objects)
        images.append(AnnotatedImage(image, size, objects.joined()))
    return Converted(images, image_dir or source, left_out)


def _add(
    shape: dict[str, Any],
    where: str,
    size: tuple[int, int],
    options: Options,
    objects: ImageObjects,
) -> None:
    label, kind = shape.get("classTitle"), shape.get("geometryType")
    if not isinstance(label, str) or not label:
        raise ValueError(f"{where}: classTitle {show(label, 40)}, expected a class")
    if kind == "bitmap":
        objects.add_rle(where, label, _bitmap(shape.get("bitmap"), size, where))
    elif kind == "rectangle" and not options.boxes:
        objects.leave_out(where, label, BOX_LEFT_OUT)
    elif kind == "rectangle":
        corners = _points(shape, "exterior", where)
        if len(corners) != 2:
            raise ValueError(f"{where}: a rectangle of {len(corners)} points, expected 2")
        objects.add_outline(where, label, rectangle(*corners[0], *corners[1]), kind)
    elif kind == "polygon":
        _add_polygon(shape, where, label, size, objects)
    else:
        objects.leave_out(where, label, f"a {show(kind, 40)}")


def _add_polygon(
    shape: dict[str, Any], where: str, label: str, size: tuple[int, int], objects: ImageObjects
) -> None:
    """Add a polygon, as a mask if it has holes."""
    exterior, holes = _points(shape, "exterior", where), shape["points"].get("interior") or []
    if not isinstance(holes, list):
        raise ValueError(f"{where}: interior {show(holes, 40)}, expected a list of holes")
    outlines = [_points({"points": {"a hole": hole}}, "a hole", where) for hole in holes]
    outlines = [outline for outline in outlines if has_area(outline)]
    if not outlines or not has_area(exterior):
        objects.add_outline(where, label, exterior, "polygon")
        return
    for outline in (exterior, *outlines):
        check_outline(outline, size, where)
    whole, *parts = ([[v for xy in outline for v in xy]] for outline in (exterior, *outlines))
    hidden = union(to_rle(part, *size) for part in parts)
    objects.add_rle(where, label, without(to_rle(whole, *size), hidden))


def _points(shape: dict[str, Any], key: str, where: str) -> list[list[float]]:
    points = shape.get("points")
    found = points.get(key) if isinstance(points, dict) else None
    if not isinstance(found, list) or not all(isinstance(p, list) and len(p) == 2 for p in found):
        raise ValueError(f"{where}: {key} is not a list of [x, y]")
    return [[number(value, f"{where}: a coordinate") for value in point] for point in found]


def _bitmap(bitmap: Any, size: tuple[int, int], where: str) -> dict:
    """Return the RLE for a PNG, zipped and in base64, at its origin."""
    try:
        data = zlib.decompressobj()
        png = data.decompress(base64.b64decode(bitmap["data"], validate=True), MAX_BYTES)
        x, y = (int(number(value, f"{where}: origin")) for value in bitmap["origin"])
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise ValueError(f"{where}: a bitmap without zipped 'data' and 'origin'") from error
    check_header(png, f"{where}: its bitmap")
    try:
        pixels = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_UNCHANGED) if png else None
    except cv2.error:
        pixels = None
    if pixels is None or pixels.ndim == 3 and pixels.shape[2] != 4:
        raise ValueError(f"{where}: its bitmap is no PNG with opacity or of one channel")
    crop = pixels if pixels.ndim == 2 else pixels[..., 3]
    if min(x, y) < 0 or y + crop.shape[0] > size[0] or x + crop.shape[1] > size[1]:
        raise ValueError(f"{where}: its bitmap is not within {size[0]} x {size[1]} pixels")
    return crop_code(crop, (x, y), size, where)
