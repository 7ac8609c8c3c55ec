"""Build a COCO json from annotated images."""

import io
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import UnidentifiedImageError

from mask_rcnn_jax.annotations.checks import MAX_PIXELS
from mask_rcnn_jax.annotations.ids import MAX_NAME
from mask_rcnn_jax.annotations.reader import read_regular
from mask_rcnn_jax.annotations.segmentation import (
    Segmentation,
    outline_fault,
    part_fault,
    segmentation_area,
    segmentation_box,
    show,
)
from mask_rcnn_jax.disk import write_whole
from mask_rcnn_jax.images.decode import MAX_BYTES
from mask_rcnn_jax.images.headers import MissingPackage, open_header

EXIF_ORIENTATION = 0x0112
ELLIPSE_VERTICES = 64  # loses 0.2 percent of the area


@dataclass(frozen=True)
class AnnotatedObject:
    """An object: its class name, and polygons or compressed RLE as in COCO."""

    label: str
    segmentation: Segmentation
    crowd: bool = False  # a group that is not told apart


@dataclass(frozen=True)
class AnnotatedImage:
    """An image file, its stored (height, width), and its objects."""

    path: Path
    size: tuple[int, int]
    objects: Sequence[AnnotatedObject]


def build_coco(
    annotated_images: Sequence[AnnotatedImage],
    image_dir: str | os.PathLike,
    classes: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Build the content of a COCO json.

    `file_name` is relative to `image_dir`. Classes are numbered from 1, in the order of `classes`,
    which hold those of all objects, or else in alphabetical order.
    Raises ValueError for duplicate images.
    """
    found = {entry.label for image in annotated_images for entry in image.objects}
    labels = sorted(found) if classes is None else classes
    category_ids = {label: i for i, label in enumerate(labels, start=1)}
    names = [Path(os.path.relpath(image.path, image_dir)).as_posix() for image in annotated_images]
    for name, times in Counter(names).items():
        if times > 1:
            raise ValueError(f"image {name!r} is annotated {times} times, expected once")
    images, annotations = [], []
    for image_id, (image, name) in enumerate(zip(annotated_images, names, strict=True), start=1):
        height, width = image.size
        images.append({"id": image_id, "file_name": name, "height": height, "width": width})
        for entry in image.objects:
            annotation = {
                "id": len(annotations) + 1,
                "image_id": image_id,
                "category_id": category_ids[entry.label],
                "bbox": segmentation_box(entry.segmentation, height, width),
                "area": segmentation_area(entry.segmentation, height, width),
                "segmentation": entry.segmentation,
                "iscrowd": int(entry.crowd),
            }
            annotations.append(annotation)
    categories = [{"id": i, "name": label} for label, i in category_ids.items()]
    return {"images": images, "categories": categories, "annotations": annotations}


def check_label(label: str, where: str) -> None:
    """Raise ValueError, starting with `where`, for a class name that is too long."""
    if len(label) > MAX_NAME:
        raise ValueError(f"{where}: label {show(label)} has more than {MAX_NAME} characters")


def check_outline(points: list[list[float]], size: tuple[int, int], where: str) -> None:
    """Raise ValueError, starting with `where`, for an outline (x, y) that cannot be drawn.

    Args:
        size: (height, width) of the image.
    """
    part = [float(value) for point in points for value in point]
    if fault := part_fault(part, *size) or outline_fault([part]):
        raise ValueError(f"{where}: {fault}")


def read_image_size(path: Path, source: str | os.PathLike) -> tuple[int, int]:
    """Read the stored (height, width) of an image from its header.

    Raises ValueError, naming also the `source` of the image's name, for a file that is not an
    image, and for an image rotated by its EXIF entry: annotation tools show it rotated, but this
    package reads the stored pixels.
    """
    try:
        with open_header(io.BytesIO(read_regular(path, MAX_BYTES))) as image:
            orientation = image.getexif().get(EXIF_ORIENTATION, 1)
            width, height = image.size
    except MissingPackage as error:
        raise MissingPackage(f"{source}: {path}: {error}") from error
    except OSError as error:
        if not isinstance(error, UnidentifiedImageError):
            raise
        raise ValueError(f"{source}: {path}: damaged or not an image") from error
    except Exception as error:  # whatever Pillow's parsers raise on damaged files
        raise ValueError(f"{source}: {path}: damaged or not an image") from error
    if height * width > MAX_PIXELS:
        raise ValueError(
            f"{source}: {path}: {height} x {width} pixels, at most {MAX_PIXELS:,} are read"
        )
    if orientation not in (0, 1):
        reason = (
            "so annotations made on screen do not match the stored pixels; store it upright "
            "(data.apply_exif=always is for a COCO json of what is seen)"
        )
        raise ValueError(
            f"{source}: {path}: rotated by its EXIF entry (orientation {orientation}), {reason}"
        )
    return height, width


def ellipse(x: float, y: float, rx: float, ry: float, angle: float = 0.0) -> list[list[float]]:
    """Approximate an ellipse by ELLIPSE_VERTICES points (x, y) in pixels.

    `angle` is its rotation in radians, clockwise on screen.
    """
    points, cos, sin = [], math.cos(angle), math.sin(angle)
    for i in range(ELLIPSE_VERTICES):
        phase = 2 * math.pi * i / ELLIPSE_VERTICES
        u, v = rx * math.cos(phase), ry * math.sin(phase)
        points.append([x + u * cos - v * sin, y + u * sin + v * cos])
    return points


def rectangle(x1: float, y1: float, x2: float, y2: float) -> list[list[float]]:
    """Points (x, y) of the rectangle with two opposite corners."""
    return [[x1, y1], [x2, y1], [x2, y2], [x1, y2]]


def has_area(points: Sequence[Sequence[float]]) -> bool:
    """Check that an outline has three points and is not a horizontal or vertical line."""
    return len(points) > 2 and all(len(set(axis)) > 1 for axis in zip(*points, strict=True))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a COCO json and print what it holds."""
    write_whole(path, json.dumps(content))
    objects = Counter(entry["category_id"] for entry in content["annotations"])
    counts = ", ".join(f"{entry['name']} {objects[entry['id']]}" for entry in content["categories"])
    annotated = {entry["image_id"] for entry in content["annotations"]}
    empty = sum(image["id"] not in annotated for image in content["images"])
    print(f"{path}: {len(content['images'])} images, {empty} of them without objects; {counts}")
