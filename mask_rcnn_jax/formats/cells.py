"""Generate a COCO data set of hundreds to thousands of overlapping cells under a microscope.

Light of cells that lie over each other adds up, so both can be seen, and a mask is that of the
whole cell: masks overlap, and are cut by the border of the image alone. They are exact: the light
is painted by them. Two channels, membranes with cytoplasm and nuclei, have 12 bits in uint16: a
dark offset, blur, uneven illumination, shot noise and noise of the camera. Each image depends only
on (seed, split, index) and what is asked for.
"""

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mask_rcnn_jax import opencv as cv2
from mask_rcnn_jax.formats.generated import SPLITS, write_split
from mask_rcnn_jax.rle import encode_window

CATEGORIES = [{"id": 1, "name": "cell", "supercategory": "microscopy"}]
DESCRIPTION = "Generated cells"
RADIUS = 9.0  # pixels, of a circle with a usual cell's area, where there is room
SMALLEST = 3.0  # pixels, the usual radius below which cells are refused
RADIUS_SPREAD = 0.22  # of its logarithm
ELONGATION = (1.0, 2.2)  # length to width
COVERED = 0.75  # of the image's area, the highest sum of the areas of the cells
CLOSEST = 0.35  # centers are that share of the sum of both radii apart
NUCLEUS = (0.4, 0.55)  # its radius to that of the cell
BITS, OFFSET, GAIN, READ_NOISE = 12, 100, 2.0, 4.0  # of the camera: counts, counts per photon
PIXEL_SIZE = 0.65  # micrometers, in the TIFFs
TILE = 256  # side of the TIFFs' tiles, of images that have more


def write_cells(
    data_dir: str | os.PathLike,
    *,
    train: int = 40,
    val: int = 10,
    seed: int = 0,
    size: tuple[int, int] = (1024, 1024),
    objects: tuple[int, int] = (500, 2000),
    bits: int = 16,
    channels: int = 2,
) -> dict[str, Path]:
    """Write `data_dir/{train,val}` and `annotations/instances_{train,val}.json`.

    Keeps existing files made with the same arguments.

    Args:
        size: (height, width).
        objects: fewest and most cells in an image.
        bits: 16 keeps the 12 bits of the camera; 8 stretches them between dark and bright.
        channels: 2, membrane and nucleus, in a TIFF, by tifffile; in a PNG their mean with 1, and
            with 3 nuclei in blue and membranes in green, red without any.

    Returns the json path per split. Raises ValueError for other annotations there, more cells than
    the size holds, or without tifffile.
    """
    if not 1 <= objects[0] <= objects[1]:
        raise ValueError(f"objects is {objects}, expected 1 <= fewest <= most")
    most = int(COVERED * size[0] * size[1] / (math.pi * SMALLEST**2))
    if objects[1] > most:
        raise ValueError(
            f"objects is {objects}, expected at most {most} cells of {2 * SMALLEST:.0f} pixels in "
            f"an image of {size[0]} x {size[1]}"
        )
    write, ending = _writer(bits, channels)
    asked = {"size": list(size), "objects": list(objects), "bits": bits, "channels": channels}
    written = {}
    for split, count in zip(SPLITS, (train, val), strict=True):
        info = {"description": DESCRIPTION, "seed": seed, "count": count, **asked}
        make = partial(_make, info, write)
        written[split] = write_split(Path(data_dir), split, info, CATEGORIES, make, ending)
    return written


def generate_cells(
    seed: int, split: str, index: int, size: tuple[int, int], objects: tuple[int, int]
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Generate an image, [H, W, 2] uint16 with 12 bits, and its COCO annotations without ids."""
    rng = np.random.default_rng([seed, SPLITS.index(split), index])
    count = int(rng.integers(objects[0], objects[1] + 1))
    usual = min(RADIUS, math.sqrt(COVERED * size[0] * size[1] / (math.pi * count)))
    spread = RADIUS_SPREAD * rng.standard_normal(count).clip(-2, 2)
    radii = usual * np.exp(spread - RADIUS_SPREAD**2)  # the mean area is that of the usual radius
    centers = _centers(rng, radii, size)
    directions = _smooth(rng, size, 4) * math.pi  # neighbors point the same way
    light = np.zeros((*size, 2), np.float32)
    annotations = []
    for (x, y), radius in zip(centers, radii, strict=True):
        direction = directions[int(y), int(x)] + rng.normal(0, 0.3)
        annotations.append(_add_cell(rng, light, (x, y), radius, direction))
    return _camera(rng, light), annotations


def _centers(rng: np.random.Generator, radii: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Draw positions [N, 2] (x, y), more of them where the image is crowded."""
    crowded = np.exp(2 * _smooth(rng, size, 6))
    crowded /= crowded.max()
    centers, closest, tries = np.empty((len(radii), 2)), CLOSEST, 0
    placed = 0
    while placed < len(radii):
        tries += 1
        if tries % (50 * len(radii)) == 0:
            closest *= 0.8  # there is no room: closer than that
        point = rng.uniform((0, 0), size[::-1])
        if rng.random() > crowded[int(point[1]), int(point[0])]:
            continue
        apart = closest * (radii[:placed] + radii[placed])
        if (((centers[:placed] - point) ** 2).sum(axis=1) >= apart**2).all():
            centers[placed] = point
            placed += 1
    return centers


def _add_cell(
    rng: np.random.Generator,
    light: np.ndarray,
    center: tuple[float, float],
    radius: float,
    direction: float,
) -> dict[str, Any]:
    """Add a cell's light to both channels and return its annotation."""
    elongation = rng.uniform(*ELONGATION)
    outline = _outline(rng, radius, elongation, direction, center)
    cell, (x, y) = _fill(outline, light.shape[:2])
    height, width = cell.shape
    window = light[y : y + height, x : x + width]
    brightness = rng.lognormal(0, 0.35)
    # Within the mask, a bright rim of about two pixels and a dimmer inside.
    depth = cv2.distanceTransform(np.pad(cell, 1), cv2.DIST_L2, 3)[1:-1, 1:-1]
    window[..., 0] += brightness * cell * (0.35 + 0.65 * (depth <= 2))
    shift = rng.uniform(-0.2, 0.2, 2) * radius
    inner = _outline(
        rng, radius * rng.uniform(*NUCLEUS), elongation**0.5, direction, center + shift
    )
    nucleus, (left, top) = _fill(inner, light.shape[:2])
    if nucleus.size:  # not beyond the border
        window = light[top : top + nucleus.shape[0], left : left + nucleus.shape[1]]
        window[..., 1] += rng.lognormal(0, 0.35) * nucleus
    return {
        "category_id": 1,
        "segmentation": encode_window(cell, (x, y), *light.shape[:2]),
        "bbox": [x, y, width, height],
        "area": int(cell.sum()),
        "iscrowd": 0,
    }


def _outline(
    rng: np.random.Generator, radius: float, elongation: float, direction: float, center: Any
) -> np.ndarray:
    """Corners [24, 2] (x, y) of an ellipse with bumps."""
    angles = np.linspace(0, 2 * math.pi, 24, endpoint=False)
    waves = np.arange(2, 5)[:, None]
    bumps = rng.normal(0, 0.05, (3, 1)) * np.cos(waves * angles + rng.uniform(0, 7, (3, 1)))
    reach = radius * (1 + bumps.sum(axis=0))
    along, across = elongation**0.5 * np.cos(angles) * reach, np.sin(angles) * reach
    across = across / elongation**0.5
    cos, sin = math.cos(direction), math.sin(direction)
    turned = np.stack([along * cos - across * sin, along * sin + across * cos], axis=1)
    return turned + center


def _fill(outline: np.ndarray, size: tuple[int, int]) -> tuple[np.ndarray, tuple[int, int]]:
    """Return the mask inside an outline, uint8 in the tightest window, and the window's (x, y)."""
    low = np.floor(outline.min(axis=0)).astype(int) - 1
    sides = np.ceil(outline.max(axis=0)).astype(int) + 2 - low
    mask, shift = np.zeros(sides[::-1], np.uint8), 4  # bits of sub-pixel position
    points = np.rint((outline - low) * 2**shift).astype(np.int32)
    cv2.fillPoly(mask, [points], 1, shift=shift)
    first = np.maximum(low, 0)
    last = np.minimum(low + sides, size[::-1])
    if (last <= first).any():
        return np.zeros((0, 0), np.uint8), (0, 0)
    inside = mask[first[1] - low[1] : last[1] - low[1], first[0] - low[0] : last[0] - low[0]]
    x, y, width, height = cv2.boundingRect(np.ascontiguousarray(inside))
    tight = np.ascontiguousarray(inside[y : y + height, x : x + width])
    return tight, (int(first[0]) + x, int(first[1]) + y)


def _smooth(rng: np.random.Generator, size: tuple[int, int], cells: int) -> np.ndarray:
    """Values of about -1 to 1 that vary over the image, [H, W] float32."""
    coarse = rng.uniform(-1, 1, (cells, cells)).astype(np.float32)
    return cv2.resize(coarse, size[::-1], interpolation=cv2.INTER_CUBIC)


def _camera(rng: np.random.Generator, light: np.ndarray) -> np.ndarray:
    """Return what the camera counts, uint16 with 12 bits, for the light of both channels."""
    sharp = light.copy()
    sharp[..., 0] += 0.05 * light[..., 1]  # nuclei shine into the channel of membranes
    blurred = cv2.GaussianBlur(sharp, (0, 0), 1.0)
    illumination = 1 + 0.3 * _smooth(rng, light.shape[:2], 3)[..., None]
    photons = illumination * (40 + np.array([360, 500], np.float32) * blurred)
    counts = OFFSET + GAIN * rng.poisson(photons) + rng.normal(0, READ_NOISE, light.shape)
    return np.clip(np.rint(counts), 0, 2**BITS - 1).astype(np.uint16)


def _make(
    info: dict[str, Any],
    write: Callable[[Path, np.ndarray], None],
    split: str,
    index: int,
    path: Path,
) -> list[dict[str, Any]]:
    (height, width), (fewest, most) = info["size"], info["objects"]
    image, annotations = generate_cells(info["seed"], split, index, (height, width), (fewest, most))
    write(path, _with_channels(_with_bits(image, info["bits"]), info["channels"]))
    return annotations


def _with_bits(image: np.ndarray, bits: int) -> np.ndarray:
    """Keep 12 bits in uint16, or stretch what lies above the dark offset to uint8."""
    if bits == 16:
        return image
    white = 2**BITS * 0.6  # few pixels are brighter
    return np.clip((image.astype(np.float32) - OFFSET) / (white - OFFSET) * 255, 0, 255).astype(
        np.uint8
    )


def _with_channels(image: np.ndarray, channels: int) -> np.ndarray:
    """Return [H, W, channels], RGB with three."""
    if channels == 1:
        return image.mean(axis=2, keepdims=True).astype(image.dtype)
    return np.insert(image, 0, 0, axis=2) if channels == 3 else image


def _writer(bits: int, channels: int) -> tuple[Callable[[Path, np.ndarray], None], str]:
    """Return what writes an image [H, W, C], and the ending of its files."""
    if bits not in (8, 16) or channels not in (1, 2, 3):
        given = f"bits={bits} and channels={channels}"
        raise ValueError(f"cells have {given}, expected 8 or 16 bits and 1, 2 or 3 channels")
    if channels != 2:
        return _write_png, "png"
    try:
        import tifffile  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "cells of two channels are TIFFs, which need tifffile: pip install "
            "'mask-rcnn-jax[tiff]', or ask for 1 or 3 channels"
        ) from error
    return _write_tiff, "tif"


def _write_png(path: Path, image: np.ndarray) -> None:
    cv2.imwrite(str(path), image[:, :, ::-1])


def _write_tiff(path: Path, image: np.ndarray) -> None:
    import tifffile

    tiled: dict[str, Any] = {"tile": (TILE, TILE)} if min(image.shape[:2]) > TILE else {}
    per_centimeter = 10_000 / PIXEL_SIZE
    tifffile.imwrite(
        path, image, photometric="minisblack", planarconfig="contig", extrasamples=(0,),
        resolution=(per_centimeter, per_centimeter), resolutionunit="CENTIMETER",
        metadata={"axes": "YXC"}, **tiled,
    )  # fmt: skip
