"""A generated data set in COCO format: textured shapes that overlap, with exact masks.

It needs no download, is made in seconds, and holds what real sets hold: several classes with gaps
in their ids, occluded and split objects, polygons and both kinds of RLE, crowds, empty images.
Every picture is a function of (seed, split, index) alone.
"""

import json
import os
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from pycocotools import mask as coco_mask

CATEGORIES = {1: "circle", 2: "square", 4: "triangle", 7: "star"}
SPLITS = ("train", "val")
DESCRIPTION = "Generated shapes"
MAX_OBJECTS = 5
# Radius of a shape as a part of the image's shorter side: 28 to 70 pixels across at 128.
RADIUS = (0.11, 0.275)
CROWD_RADIUS = (0.02, 0.035)
# A new shape may cover this much of a shape below it.
MAX_COVERED = 0.35
# One image in twenty of each kind.
PERIOD, EMPTY_AT, CROWD_AT = 20, 7, 13


def write_shapes(
    data_dir: str | os.PathLike,
    *,
    train: int = 400,
    val: int = 60,
    seed: int = 0,
    size: tuple[int, int] = (128, 128),
) -> dict[str, Path]:
    """Write `data_dir/{train,val}/*.jpg` and `annotations/instances_{train,val}.json`.

    What is already there with the same arguments is left alone; any other annotation file of those
    names stops. `size` is (height, width). Returns the path of each split's json.
    """
    written = {}
    for split, count in zip(SPLITS, (train, val), strict=True):
        info = {"description": DESCRIPTION, "seed": seed, "size": list(size), "count": count}
        written[split] = _write_split(Path(data_dir), split, info)
    return written


def _write_split(data_dir: Path, split: str, info: dict[str, Any]) -> Path:
    image_dir = data_dir / split
    json_path = data_dir / "annotations" / f"instances_{split}.json"
    if json_path.exists():
        _refuse_other(json_path, info)
        if len(list(image_dir.glob("*.jpg"))) == info["count"]:
            return json_path
    image_dir.mkdir(parents=True, exist_ok=True)
    json_path.parent.mkdir(parents=True, exist_ok=True)

    height, width = info["size"]
    images, annotations = [], []
    for index in range(info["count"]):
        picture, objects = draw_picture(info["seed"], split, index, (height, width))
        file_name = f"{index:06d}.jpg"
        cv2.imwrite(str(image_dir / file_name), picture[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, 95])
        image_id = index + 1
        images.append({"id": image_id, "file_name": file_name, "height": height, "width": width})
        for entry in objects:
            annotations.append({"id": len(annotations) + 1, "image_id": image_id, **entry})
    categories = [{"id": i, "name": n, "supercategory": "shape"} for i, n in CATEGORIES.items()]
    content = {
        "info": info,
        "licenses": [],
        "images": images,
        "categories": categories,
        "annotations": annotations,
    }
    # Renamed when whole: an interrupted run never leaves half a file behind.
    partial = json_path.with_suffix(".partial")
    partial.write_text(json.dumps(content))
    partial.replace(json_path)
    return json_path


def _refuse_other(json_path: Path, info: dict[str, Any]) -> None:
    try:
        found = json.loads(json_path.read_text())["info"]
    except (ValueError, KeyError, TypeError):
        found = None
    if found != info:
        raise ValueError(f"{json_path} holds other data than {info}, expected a new --data_dir")


def draw_picture(
    seed: int, split: str, index: int, size: tuple[int, int]
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """[H, W, 3] uint8 RGB and its COCO annotations, without ids."""
    rng = np.random.default_rng([seed, SPLITS.index(split), index])
    picture = _background(rng, size)
    annotations = []
    crowd = np.zeros(size, np.uint8)
    masks: list[np.ndarray] = []  # visible parts so far
    categories: list[int] = []
    if index % PERIOD == CROWD_AT:
        category = int(rng.choice(list(CATEGORIES)))
        crowd = _draw_crowd(rng, picture, category)
    if index % PERIOD != EMPTY_AT:
        for _ in range(rng.integers(1, MAX_OBJECTS + 1)):
            _draw_object(rng, picture, masks, categories, crowd)
    if crowd.any():
        annotations.append(_annotation(crowd, category, uncompressed_rle(crowd), iscrowd=1))
    for mask, object_category in zip(masks, categories, strict=True):
        polygons = mask_to_polygons(mask) if rng.random() < 0.5 else None
        segmentation = polygons or compressed_rle(mask)
        annotations.append(_annotation(mask, object_category, segmentation, iscrowd=0))
    noise = rng.normal(0, 4, picture.shape)
    return np.clip(picture + noise, 0, 255).astype(np.uint8), annotations


def _draw_object(
    rng: np.random.Generator,
    picture: np.ndarray,
    masks: list[np.ndarray],
    categories: list[int],
    crowd: np.ndarray,
) -> None:
    """Lay one more shape on top, unless ten places in a row would hide too much of another."""
    height, width = picture.shape[:2]
    category = int(rng.choice(list(CATEGORIES)))
    for _ in range(10):
        radius = rng.uniform(*RADIUS) * min(height, width)
        centre = rng.uniform((radius, radius), (width - radius, height - radius))
        shape = _shape_mask((height, width), CATEGORIES[category], centre, radius, rng)
        below = [*masks, crowd] if crowd.any() else masks
        if all((mask & shape).sum() <= MAX_COVERED * mask.sum() for mask in below):
            break
    else:
        return
    for mask in below:
        mask[shape > 0] = 0
    masks.append(shape)
    categories.append(category)
    _paint(rng, picture, shape)


def _draw_crowd(rng: np.random.Generator, picture: np.ndarray, category: int) -> np.ndarray:
    """A cluster of tiny shapes of one class; returns their union."""
    size = picture.shape[:2]
    side = min(size)
    crowd = np.zeros(size, np.uint8)
    middle = rng.uniform(0.25, 0.75, 2) * size[::-1]
    for _ in range(rng.integers(8, 16)):
        centre = middle + rng.uniform(-0.18, 0.18, 2) * side
        radius = rng.uniform(*CROWD_RADIUS) * side
        shape = _shape_mask(size, CATEGORIES[category], centre, radius, rng)
        _paint(rng, picture, shape)
        crowd |= shape
    return crowd


def _shape_mask(
    size: tuple[int, int],
    name: str,
    centre: np.ndarray,
    radius: float,
    rng: np.random.Generator,
) -> np.ndarray:
    """[H, W] uint8 in {0, 1} of a turned shape whose corners lie `radius` from the centre."""
    corners, inner, turn = {
        "circle": (64, 1.0, 0.0),
        "square": (4, 1.0, rng.uniform(-0.35, 0.35) + np.pi / 4),
        "triangle": (3, 1.0, rng.uniform(-np.pi, np.pi)),
        "star": (10, 0.45, rng.uniform(-np.pi, np.pi)),
    }[name]
    angles = turn + np.arange(corners) * 2 * np.pi / corners
    reach = np.where(np.arange(corners) % 2, inner, 1.0) * radius
    points = centre + reach[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    mask = np.zeros(size, np.uint8)
    shift = 4  # bits of sub-pixel position
    cv2.fillPoly(mask, [np.rint(points * 2**shift).astype(np.int32)], 1, shift=shift)
    return mask


def _background(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """[H, W, 3] float32: dull, uneven, striped."""
    height, width = size
    coarse = rng.uniform(40, 120, (5, 5, 1)) + rng.uniform(-15, 15, (5, 5, 3))
    picture = cv2.resize(coarse.astype(np.float32), (width, height), interpolation=cv2.INTER_CUBIC)
    return picture + 12 * _stripes(rng, size)[:, :, None]


def _paint(rng: np.random.Generator, picture: np.ndarray, mask: np.ndarray) -> None:
    """Fill the mask with a bright colour and a pattern; the colour says nothing of the class."""
    colour = rng.permutation([rng.uniform(190, 255), rng.uniform(60, 220), rng.uniform(20, 90)])
    pattern = _stripes(rng, mask.shape)
    if rng.random() < 0.5:
        pattern = pattern * _stripes(rng, mask.shape)
    inside = mask > 0
    picture[inside] = colour + 25 * pattern[inside][:, None]


def _stripes(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """[H, W] float32 waves between -1 and 1, 5 to 16 pixels long, in any direction."""
    y, x = np.mgrid[: size[0], : size[1]].astype(np.float32)
    angle, length, phase = rng.uniform(0, np.pi), rng.uniform(5, 16), rng.uniform(0, 2 * np.pi)
    return np.sin((x * np.cos(angle) + y * np.sin(angle)) * (2 * np.pi / length) + phase)


def _annotation(
    mask: np.ndarray, category: int, segmentation: Any, *, iscrowd: int
) -> dict[str, Any]:
    x, y, width, height = cv2.boundingRect(mask)
    return {
        "category_id": category,
        "segmentation": segmentation,
        "bbox": [x, y, width, height],
        "area": int(mask.sum()),
        "iscrowd": iscrowd,
    }


def mask_to_polygons(mask: np.ndarray) -> list[list[float]] | None:
    """Outlines along the edges of the mask's pixels; None if a hole makes polygons inexact."""
    factor = 4  # findContours runs through pixel centres: 1/8 pixel from the edge at this factor
    fine = cv2.resize(mask, None, fx=factor, fy=factor, interpolation=cv2.INTER_NEAREST)
    contours, hierarchy = cv2.findContours(fine, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    if any(parent >= 0 for parent in hierarchy[0, :, 3]):
        return None
    return [((contour.reshape(-1) + 0.5) / factor).tolist() for contour in contours]


def compressed_rle(mask: np.ndarray) -> dict[str, Any]:
    """RLE whose counts are a string."""
    rle = coco_mask.encode(np.asfortranarray(mask))
    return {"size": list(mask.shape), "counts": rle["counts"].decode()}


def uncompressed_rle(mask: np.ndarray) -> dict[str, Any]:
    """RLE whose counts are a list, as COCO stores crowds."""
    pixels = mask.ravel(order="F")
    edges = np.flatnonzero(np.diff(pixels, prepend=0)) if pixels.size else np.zeros(0, int)
    return {
        "size": list(mask.shape),
        "counts": np.diff(edges, prepend=0, append=pixels.size).tolist(),
    }
