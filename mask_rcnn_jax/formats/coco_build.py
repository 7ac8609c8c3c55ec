"""A COCO json out of pictures with drawn objects, and one COCO json made two."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from pycocotools import mask as coco_mask

from mask_rcnn_jax.data.segmentation import (
    Segmentation,
    segmentation_area,
    segmentation_box,
    segmentation_to_mask,
)

EXIF_ORIENTATION = 0x0112
ROUND_VERTICES = 64  # of circles and ellipses: 0.2 percent of their area is lost


@dataclass(frozen=True)
class DrawnObject:
    """One object: its class by name; polygons or compressed RLE as in COCO."""

    label: str
    segmentation: Segmentation


@dataclass(frozen=True)
class DrawnPicture:
    """A picture's file, its (height, width) as stored, and what is drawn on it."""

    path: Path
    size: tuple[int, int]
    objects: Sequence[DrawnObject]


def build_coco(pictures: Sequence[DrawnPicture], image_dir: str | os.PathLike) -> dict[str, Any]:
    """The content of a COCO json; `file_name` is relative to `image_dir`.

    Classes are numbered from 1 in the order of their names. Raises ValueError for a picture that
    comes twice.
    """
    labels = sorted({drawn.label for picture in pictures for drawn in picture.objects})
    category_of = {label: i for i, label in enumerate(labels, start=1)}
    names = [Path(os.path.relpath(picture.path, image_dir)).as_posix() for picture in pictures]
    for name, times in Counter(names).items():
        if times > 1:
            raise ValueError(f"image {name!r} is annotated {times} times, expected once")
    images, annotations = [], []
    for image_id, (picture, name) in enumerate(zip(pictures, names, strict=True), start=1):
        height, width = picture.size
        images.append({"id": image_id, "file_name": name, "height": height, "width": width})
        for drawn in picture.objects:
            annotations.append({
                "id": len(annotations) + 1,
                "image_id": image_id,
                "category_id": category_of[drawn.label],
                "bbox": segmentation_box(drawn.segmentation, height, width),
                "area": segmentation_area(drawn.segmentation, height, width),
                "segmentation": drawn.segmentation,
                "iscrowd": 0,
            })  # fmt: skip
    categories = [{"id": i, "name": label} for label, i in category_of.items()]
    return {"images": images, "categories": categories, "annotations": annotations}


def picture_size(path: Path) -> tuple[int, int]:
    """(height, width) of a picture as stored, from its header.

    Raises ValueError for what is no picture, and for one that its EXIF entry turns: annotation
    tools show it turned, and this package reads what is stored.
    """
    try:
        with Image.open(path) as picture:
            orientation = picture.getexif().get(EXIF_ORIENTATION, 1)
            width, height = picture.size
    except (UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path}: damaged or not an image") from error
    if orientation not in (0, 1):
        raise ValueError(
            f"{path}: turned by its EXIF entry (orientation {orientation}), so that annotations "
            "made on screen do not fit the stored pixels; store it upright"
        )
    return height, width


def check_pictures_exist(source: str | os.PathLike, paths: Sequence[Path]) -> None:
    """Raise FileNotFoundError with the first absent file and the number of the others."""
    absent = [path for path in paths if not path.is_file()]
    if absent:
        more = f" and {len(absent) - 1} more" if absent[1:] else ""
        raise FileNotFoundError(f"{source}: no image {os.fspath(absent[0])!r}{more}")


def ellipse(x: float, y: float, rx: float, ry: float, turn: float = 0.0) -> list[list[float]]:
    """Outline [ROUND_VERTICES] of (x, y), pixels; `turn` in radians, clockwise on the screen."""
    points = []
    for i in range(ROUND_VERTICES):
        angle = 2 * math.pi * i / ROUND_VERTICES
        along, across = rx * math.cos(angle), ry * math.sin(angle)
        points.append([
            x + along * math.cos(turn) - across * math.sin(turn),
            y + along * math.sin(turn) + across * math.cos(turn),
        ])  # fmt: skip
    return points


def rectangle(x1: float, y1: float, x2: float, y2: float) -> list[list[float]]:
    """Outline of (x, y) of two opposite corners."""
    return [[x1, y1], [x2, y1], [x2, y2], [x1, y2]]


def has_area(points: Sequence[Sequence[float]]) -> bool:
    """Whether an outline of (x, y) has three points and is neither a vertical nor a flat line."""
    return len(points) > 2 and all(len(set(axis)) > 1 for axis in zip(*points, strict=True))


def join_parts(parts: Sequence[list[list[float]] | np.ndarray]) -> Segmentation:
    """One object of outlines of (x, y) and whole-picture masks [H, W]: RLE if there is a mask."""
    polygons = [[float(v) for point in part for v in point] for part in parts
                if not isinstance(part, np.ndarray)]  # fmt: skip
    masks = [part > 0 for part in parts if isinstance(part, np.ndarray)]
    if not masks:
        return polygons
    if polygons:
        masks.append(segmentation_to_mask(polygons, *masks[0].shape) > 0)
    together = np.any(masks, axis=0).astype(np.uint8, order="F")
    counts = coco_mask.encode(together)["counts"].decode("ascii")
    return {"size": list(together.shape), "counts": counts}


def split_coco(content: dict[str, Any], val: int, seed: int) -> dict[str, dict[str, Any]]:
    """The json of "train" and of "val", the latter of `val` images drawn at random.

    All categories stay in both, also those without an object there. Raises ValueError if one of the
    two would have no image.
    """
    images = content["images"]
    if not 0 < val < len(images):
        raise ValueError(f"--val is {val}, expected 1 to {len(images) - 1} of {len(images)} images")
    order = np.random.default_rng(seed).permutation(len(images))
    chosen = {images[i]["id"] for i in order[:val]}
    return {
        split: content
        | {
            "images": [entry for entry in images if (entry["id"] in chosen) == held_out],
            "annotations": [
                entry
                for entry in content["annotations"]
                if (entry["image_id"] in chosen) == held_out
            ],
        }
        for split, held_out in (("train", False), ("val", True))
    }
