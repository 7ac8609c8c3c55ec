"""Shapes of CVAT's XML: polygons, masks, boxes and ellipses."""

from xml.etree.ElementTree import Element

import numpy as np

from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.formats.coco_build import ellipse, rectangle
from mask_rcnn_jax.formats.mask_codes import rows_code
from mask_rcnn_jax.formats.reading import BOX_LEFT_OUT, ImageObjects, Options, number, rotated
from mask_rcnn_jax.terminal.safe_text import cut

WITHOUT_AREA = ("polyline", "points", "cuboid", "skeleton")


def add_shape(
    shape: Element, label: str, group: str, where: str, objects: ImageObjects, options: Options
) -> None:
    """Add a shape to an image's objects, joined with those of its label and group unless "0"."""
    kind, joined = shape.tag, None if group in ("", "0") else group
    if kind == "mask":
        objects.add_rle(where, label, _mask(shape, objects.size, where), joined)
    elif kind == "box" and not options.boxes:
        objects.leave_out(where, label, BOX_LEFT_OUT)
    elif kind in WITHOUT_AREA:
        objects.leave_out(where, label, f"a {kind}")
    else:
        objects.add_outline(where, label, _outline(shape, where), kind, joined)


def _outline(shape: Element, where: str) -> list[list[float]]:
    if shape.tag == "polygon":
        return polygon_points(shape, where)
    if shape.tag == "box":
        x1, y1, x2, y2 = _numbers(shape, ("xtl", "ytl", "xbr", "ybr"), where)
        outline, center = rectangle(x1, y1, x2, y2), ((x1 + x2) / 2, (y1 + y2) / 2)
    elif shape.tag == "ellipse":
        x, y, rx, ry = _numbers(shape, ("cx", "cy", "rx", "ry"), where)
        outline, center = ellipse(x, y, rx, ry), (x, y)
    else:
        raise ValueError(f"{where}: <{cut(shape.tag)}>, which is no shape of CVAT's")
    angle = number(shape.get("rotation", "0"), f"{where}: rotation")
    return rotated(outline, center, angle) if angle else outline


def polygon_points(shape: Element, where: str) -> list[list[float]]:
    """Read the points (x, y) of a polygon; ValueError, starting with `where`, for other texts."""
    points = [point.split(",") for point in shape.get("points", "").split(";")]
    if not all(len(point) == 2 for point in points):
        raise ValueError(f"{where}: points {show(shape.get('points'), 40)}, expected x,y;x,y")
    return [[number(value, f"{where}: a coordinate") for value in point] for point in points]


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
    edges = np.cumsum(runs)[: len(runs) // 2 * 2]  # zeros at the end have none
    return rows_code(edges, (left, top, width, height), size, where)


def _numbers(shape: Element, names: tuple[str, ...], where: str) -> list[float]:
    return [number(shape.get(name), f"{where}: {name}") for name in names]
