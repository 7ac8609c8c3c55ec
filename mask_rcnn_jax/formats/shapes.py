"""Generate a COCO data set of overlapping textured shapes with exact masks.

It takes seconds and no download, and covers the variety of real sets: several classes with gaps in
their ids, occluded and split objects, polygons and both kinds of RLE, crowds, empty images. Each
image depends only on (seed, split, index).
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mask_rcnn_jax import opencv as cv2
from mask_rcnn_jax.formats.generated import SPLITS, write_split
from mask_rcnn_jax.rle import compressed_rle

CATEGORIES = {1: "circle", 2: "square", 4: "triangle", 7: "star"}
DESCRIPTION = "Generated shapes"
MAX_OBJECTS = 5
# Shape radius relative to the shorter image side: 28 to 70 pixels in diameter at 128.
RADIUS = (0.11, 0.275)
CROWD_RADIUS = (0.02, 0.035)
# Maximum share of a shape that a new shape may cover.
MAX_COVERED = 0.35
# One image in twenty is empty, and one has a crowd.
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

    Keeps existing files made with the same arguments; raises ValueError for other annotations.
    `size` is (height, width). Returns the json path per split.
    """
    categories = [{"id": i, "name": n, "supercategory": "shape"} for i, n in CATEGORIES.items()]
    written = {}
    for split, count in zip(SPLITS, (train, val), strict=True):
        info = {"description": DESCRIPTION, "seed": seed, "size": list(size), "count": count}
        written[split] = write_split(
            Path(data_dir), split, info, categories, partial(_make, info), "jpg"
        )
    return written


def _make(info: dict[str, Any], split: str, index: int, path: Path) -> list[dict[str, Any]]:
    height, width = info["size"]
    image, objects = generate_image(info["seed"], split, index, (height, width))
    cv2.imwrite(str(path), image[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, 95])
    return objects


def generate_image(
    seed: int, split: str, index: int, size: tuple[int, int]
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Generate an image, [H, W, 3] uint8 RGB, and its COCO annotations without ids."""
    rng = np.random.default_rng([seed, SPLITS.index(split), index])
    image = _background(rng, size)
    annotations, masks, categories = [], [], []  # masks of the visible parts so far
    crowd = np.zeros(size, np.uint8)
    if index % PERIOD == CROWD_AT:
        category = int(rng.choice(list(CATEGORIES)))
        crowd = _draw_crowd(rng, image, category)
    if index % PERIOD != EMPTY_AT:
        for _ in range(rng.integers(1, MAX_OBJECTS + 1)):
            _draw_object(rng, image, masks, categories, crowd)
    if crowd.any():
        annotations.append(_annotation(crowd, category, uncompressed_rle(crowd), iscrowd=1))
    for mask, object_category in zip(masks, categories, strict=True):
        polygons = mask_to_polygons(mask) if rng.random() < 0.5 else None
        segmentation = polygons or compressed_rle(mask)
        annotations.append(_annotation(mask, object_category, segmentation, iscrowd=0))
    noise = rng.normal(0, 4, image.shape)
    return np.clip(image + noise, 0, 255).astype(np.uint8), annotations


def _draw_object(
    rng: np.random.Generator,
    image: np.ndarray,
    masks: list[np.ndarray],
    categories: list[int],
    crowd: np.ndarray,
) -> None:
    """Draw a shape on top; give up after ten positions that hide too much of another shape."""
    height, width = image.shape[:2]
    category = int(rng.choice(list(CATEGORIES)))
    for _ in range(10):
        radius = rng.uniform(*RADIUS) * min(height, width)
        center = rng.uniform((radius, radius), (width - radius, height - radius))
        shape = _shape_mask((height, width), CATEGORIES[category], center, radius, rng)
        below = [*masks, crowd] if crowd.any() else masks
        if all((mask & shape).sum() <= MAX_COVERED * mask.sum() for mask in below):
            break
    else:
        return
    for mask in below:
        mask[shape > 0] = 0
    masks.append(shape)
    categories.append(category)
    _paint(rng, image, shape)


def _draw_crowd(rng: np.random.Generator, image: np.ndarray, category: int) -> np.ndarray:
    """Draw a cluster of tiny shapes of one class and return their union."""
    size = image.shape[:2]
    side = min(size)
    crowd = np.zeros(size, np.uint8)
    middle = rng.uniform(0.25, 0.75, 2) * size[::-1]
    for _ in range(rng.integers(8, 16)):
        center = middle + rng.uniform(-0.18, 0.18, 2) * side
        radius = rng.uniform(*CROWD_RADIUS) * side
        shape = _shape_mask(size, CATEGORIES[category], center, radius, rng)
        _paint(rng, image, shape)
        crowd |= shape
    return crowd


def _shape_mask(
    size: tuple[int, int], name: str, center: np.ndarray, radius: float, rng: np.random.Generator
) -> np.ndarray:
    """Mask [H, W] uint8 of a rotated shape with corners at distance `radius` from the center."""
    corners, inner, angle = {
        "circle": (64, 1.0, 0.0),
        "square": (4, 1.0, rng.uniform(-0.35, 0.35) + np.pi / 4),
        "triangle": (3, 1.0, rng.uniform(-np.pi, np.pi)),
        "star": (10, 0.45, rng.uniform(-np.pi, np.pi)),
    }[name]
    angles = angle + np.arange(corners) * 2 * np.pi / corners
    reach = np.where(np.arange(corners) % 2, inner, 1.0) * radius
    points = center + reach[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    mask = np.zeros(size, np.uint8)
    shift = 4  # bits of sub-pixel position
    cv2.fillPoly(mask, [np.rint(points * 2**shift).astype(np.int32)], 1, shift=shift)
    return mask


def _background(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Dull, uneven, striped background, [H, W, 3] float32."""
    height, width = size
    coarse = rng.uniform(40, 120, (5, 5, 1)) + rng.uniform(-15, 15, (5, 5, 3))
    image = cv2.resize(coarse.astype(np.float32), (width, height), interpolation=cv2.INTER_CUBIC)
    return image + 12 * _stripes(rng, size)[:, :, None]


def _paint(rng: np.random.Generator, image: np.ndarray, mask: np.ndarray) -> None:
    """Fill the mask with a bright color, independent of the class, and a pattern."""
    color = rng.permutation([rng.uniform(190, 255), rng.uniform(60, 220), rng.uniform(20, 90)])
    pattern = _stripes(rng, mask.shape)
    if rng.random() < 0.5:
        pattern = pattern * _stripes(rng, mask.shape)
    inside = mask > 0
    image[inside] = color + 25 * pattern[inside][:, None]


def _stripes(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Waves in -1..1 with random direction and a length of 5 to 16 pixels, [H, W] float32."""
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
    """Trace outlines along pixel edges; None if the mask has a hole, which polygons lack."""
    factor = 4  # findContours follows pixel centers, 1/8 pixel from the edge at this factor
    fine = cv2.resize(mask, None, fx=factor, fy=factor, interpolation=cv2.INTER_NEAREST)
    contours, hierarchy = cv2.findContours(fine, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    if any(parent >= 0 for parent in hierarchy[0, :, 3]):
        return None
    return [((contour.reshape(-1) + 0.5) / factor).tolist() for contour in contours]


def uncompressed_rle(mask: np.ndarray) -> dict[str, Any]:
    """Encode a mask as RLE with list counts, as COCO stores crowds."""
    pixels = mask.ravel(order="F")
    edges = np.flatnonzero(np.diff(pixels, prepend=0)) if pixels.size else np.zeros(0, int)
    counts = np.diff(edges, prepend=0, append=pixels.size).tolist()
    return {"size": list(mask.shape), "counts": counts}
