"""Check, measure and rasterize the segmentations of COCO.

A segmentation is a list of polygons `[[x1, y1, x2, y2, ...], ...]` in pixels, or a run-length
encoding `{"size": [height, width], "counts": ...}`, whose counts are a list (uncompressed) or a
string. All functions also accept the compact form returned by `compact`. No polygon at all is the
segmentation of an object that has a box and no mask.

pycocotools checks nothing: time and memory for a polygon grow with the length of its outline, and
it reads out of bounds where run lengths do not add up. So whatever it gets passes through here.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from pycocotools import mask as coco_mask

from mask_rcnn_jax.rle import LONG_RUN, split_long

Segmentation = Sequence[Any] | dict[str, Any]
# A coordinate may lie this many times the longer side of the image from its corner.
MAX_SIDES = 100
# Pixels of an outline. To draw it takes about 100 bytes and 0.1 microseconds each.
MAX_OUTLINE = 2_000_000
# Pixels, since pycocotools counts fifths of a pixel in 32 bits.
MAX_COORDINATE = 400_000_000
# Symbols of a run in a string: 30 bits, since pycocotools shifts numbers of 32. Runs of images of
# LONG_RUN pixels or more may have seven, see `readable`.
_MAX_SYMBOLS = 6
_RUNS = 1 << 18  # that are decoded at once
_DENSE = 256  # pixels of an image for each symbol of a code, above which its runs are written alone


def show(value: Any, length: int = 100) -> str:
    """Return `repr(value)` for a message, cut to `length` characters."""
    text = repr(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def segmentation_fault(
    segmentation: Any, height: int, width: int, *, is_compact: bool = False
) -> str | None:
    """Return why a segmentation is invalid for an image of this size; None if it is valid.

    `is_compact` expects the compact form, otherwise that of a COCO json.
    """
    if isinstance(segmentation, dict):
        return rle_fault(segmentation, height, width) or _emptiness(segmentation)
    if not isinstance(segmentation, tuple | list if is_compact else list) or not segmentation:
        return "segmentation is empty, expected polygons or RLE"
    for part in segmentation:
        if is_compact and not (isinstance(part, np.ndarray) and part.ndim == 1):
            return "segmentation holds a polygon that is not a flat array of x, y"
        if fault := part_fault(part.tolist() if is_compact else part, height, width):
            return fault
    return outline_fault(segmentation)


def part_fault(part: Any, height: int, width: int) -> str | None:
    """Return why a polygon of a COCO json is invalid for an image of this size."""
    if not isinstance(part, list):
        expected = "expected a list of polygons"
        if isinstance(part, int | float):
            return f"segmentation is a flat list, {expected}"
        if isinstance(part, dict) and "counts" in part:
            expected = "expected the RLE itself, without a list around it"
        return f"segmentation holds {show(part, 40)}, {expected}"
    if any(isinstance(value, list | dict) for value in part[:1]):
        return f"polygon of points such as {show(part[0], 40)}, {_FLAT}"
    if len(part) < 6 or len(part) % 2:
        joined = " in one flat list" if len(part) == 2 else ""
        return f"polygon of {len(part)} numbers, expected x, y of three points or more{joined}"
    if not set(map(type, part)) <= {int, float}:
        odd = next(value for value in part if type(value) not in (int, float))
        return f"polygon has the coordinate {show(odd)}, which is not a finite number"
    limit = min(MAX_SIDES * max(height, width), MAX_COORDINATE)
    low, high = min(part), max(part)
    if not (-limit <= low and high <= limit and math.isfinite(sum(part))):
        far = next(value for value in part if not -limit <= value <= limit)
        if not -math.inf < far < math.inf:
            return f"polygon has the coordinate {far}, which is not a finite number"
        return f"polygon has the coordinate {show(far)}, expected {-limit} to {limit} ({_SIDES})"
    return None


_FLAT = "expected a flat list of numbers x1, y1, x2, y2, .."
_SIDES = f"{MAX_SIDES} times the longer side of the image"


def outline_fault(polygons: Iterable[Sequence[float]]) -> str | None:
    """Return why sound polygons are too long to be drawn."""
    if outline_length(polygons, (1, 1), MAX_OUTLINE) > MAX_OUTLINE:
        return f"outline of more than {MAX_OUTLINE:,} pixels"
    return None


def outline_length(
    polygons: Iterable[Sequence[float]], unit: tuple[float, float], enough: float
) -> float:
    """Length of outlines of which each edge counts its longer side, as rasterizing it costs.

    Args:
        unit: (x, y) pixels that count as 1.
        enough: a rough upper bound is returned if it is not above this, which is quicker.
    """
    polygons = list(polygons)
    bound = sum(len(part) * (max(part) - min(part)) for part in polygons) / 2 / min(unit)
    if bound <= enough:
        return bound
    length = 0.0
    for part in polygons:
        points = np.asarray(part, np.float64).reshape(-1, 2) / unit
        length += np.abs(points - np.roll(points, 1, axis=0)).max(axis=1).sum()
    return length


def rle_fault(rle: Any, height: int, width: int) -> str | None:
    """Return why a run-length encoding does not describe a mask of [height, width]."""
    if not isinstance(rle, dict):
        return f"segmentation is {show(rle, 40)}, neither polygons nor an RLE"
    for key in ("size", "counts"):
        if key not in rle:
            return f"RLE lacks {key!r}"
    if not isinstance(rle["size"], list | tuple) or list(rle["size"]) != [height, width]:
        return f"RLE of size {show(rle['size'])}, expected [{height}, {width}]"
    counts = rle["counts"]
    if isinstance(counts, list) and not set(map(type, counts)) <= {int}:
        return "RLE counts cannot be read: a count is not a whole number"
    try:
        runs = run_lengths(rle)
    except (TypeError, ValueError, AttributeError, OverflowError):
        return "RLE counts cannot be read"
    if runs.min(initial=0) < 0:
        return "RLE counts cannot be read or have a negative run"
    # A single run is looked at, too: the sum of huge ones may overflow to the right number.
    covered = max(int(runs.max(initial=0)), int(runs.sum()))
    if covered != height * width:
        return f"RLE covers {covered} pixels, expected {height} x {width} = {height * width}"
    return None


def run_lengths(rle: dict) -> np.ndarray:
    """Decode a COCO RLE to runs, zeros first: int64 [runs]. A broken string has a negative run.

    A string holds a number per run, five bits per character, low bits first. Bit 5 is set on all
    characters except a number's last, whose bit 4 is the sign. From the fourth on, numbers are
    differences from the number two before.
    """
    counts = rle["counts"]
    if isinstance(counts, list):
        return np.array(counts, np.int64)
    counts = counts.encode("ascii") if isinstance(counts, str) else counts
    symbols = np.frombuffer(counts, np.uint8) - np.uint8(48)  # those below are above 207 then
    ends = np.flatnonzero(symbols & 32 == 0)
    if not symbols.size or symbols.max() > 63 or not ends.size or ends[-1] != symbols.size - 1:
        return np.array([-1])
    longest = _MAX_SYMBOLS + (math.prod(rle["size"]) >= LONG_RUN)
    runs, start = np.empty(len(ends), np.int64), 0
    for first in range(0, len(ends), _RUNS):
        part = ends[first : first + _RUNS] - start
        numbers = _numbers(symbols[start : start + part[-1] + 1], part, longest)
        if numbers is None:
            return np.array([-1])
        runs[first : first + _RUNS] = numbers
        start += part[-1] + 1
    runs[1::2] = np.cumsum(runs[1::2])
    runs[2::2] = np.cumsum(runs[2::2])
    return runs


def _numbers(symbols: np.ndarray, ends: np.ndarray, longest: int) -> np.ndarray | None:
    """Decode numbers by their symbols, uint8, and the places of their last; None if one is longer
    than `longest` symbols."""
    starts = np.concatenate([[0], ends[:-1] + 1])
    sizes = ends - starts + 1
    if sizes.max() > longest:
        return None
    shifts = 5 * (np.arange(symbols.size) - np.repeat(starts, sizes))
    numbers = np.add.reduceat((symbols & 31).astype(np.int64) << shifts, starts)
    numbers -= (symbols[ends] & 16 != 0) * (1 << 5 * sizes)
    return numbers


def _emptiness(rle: dict[str, Any]) -> str | None:
    return None if run_lengths(rle)[1::2].any() else "RLE has no pixel"


def compact(segmentation: Segmentation, height: int, width: int) -> Segmentation:
    """Convert a valid segmentation to float64 arrays or compressed RLE, a quarter of the memory.

    In float32, pycocotools would round fifths of a pixel to the other side in a third of the masks.
    """
    if isinstance(segmentation, dict):
        return to_rle(segmentation, height, width)
    return tuple(np.asarray(part, np.float64) for part in segmentation)


def mask_to_rle(mask: np.ndarray) -> dict[str, Any]:
    """Compressed RLE of a bool mask [H, W]."""
    return coco_mask.encode(np.asfortranarray(mask, np.uint8))


def segmentation_area(segmentation: Segmentation, height: int, width: int) -> float:
    """Return the area in pixels."""
    return float(coco_mask.area(to_rle(segmentation, height, width)))


def segmentation_box(segmentation: Segmentation, height: int, width: int) -> list[float]:
    """Return the tight box `[x, y, width, height]` in pixels."""
    if isinstance(segmentation, dict):
        return code_box(to_rle(segmentation, height, width))
    points = np.concatenate([np.asarray(part, np.float64).reshape(-1, 2) for part in segmentation])
    low, high = points.min(axis=0), points.max(axis=0)
    return [*low.tolist(), *(high - low).tolist()]


def code_box(code: dict[str, Any]) -> list[float]:
    """Return the tight box `[x, y, width, height]` of a compressed RLE in pixels."""
    height, width = code["size"]
    if height * width < LONG_RUN:
        return coco_mask.toBbox(code).tolist()
    edges = np.cumsum(run_lengths(code))
    starts, ends = edges[:-1:2], edges[1::2]
    starts, ends = starts[ends > starts], ends[ends > starts]  # pycocotools counts empty runs
    if not starts.size:
        return [0.0] * 4
    first, last = starts // height, (ends - 1) // height
    rows, ends_at = starts - first * height, ends - last * height
    if (first != last).any():  # on from the foot of a column to the head of the next
        top, bottom = 0, height
    else:
        top, bottom = int(rows.min()), int(ends_at.max())
    return [float(first[0]), float(top), float(last[-1] - first[0] + 1), float(bottom - top)]


def clipped_box(box: Sequence[float], height: int, width: int) -> np.ndarray:
    """[x1, y1, x2, y2] float32, the part of the box [x, y, width, height] inside the image."""
    x, y, w, h = box
    corners = np.array([x, y, x + w, y + h], np.float32)
    limits = np.array([width, height, width, height], np.float32)
    return np.minimum(np.maximum(corners, 0), limits)  # np.clip takes twice as long


def segmentation_to_mask(segmentation: Segmentation, height: int, width: int) -> np.ndarray:
    """Rasterize to [height, width] uint8 in {0, 1}."""
    if isinstance(segmentation, dict) and len(segmentation["counts"]) * _DENSE < height * width:
        return _draw_runs(run_lengths(segmentation), height, width)
    return coco_mask.decode(to_rle(segmentation, height, width))


def _draw_runs(runs: np.ndarray, height: int, width: int) -> np.ndarray:
    """Write few runs: memory of zeros that is not written to costs nothing."""
    edges = np.cumsum(runs).tolist()
    if not edges or edges[-1] != height * width or runs.min() < 0:
        raise ValueError(f"runs do not add up to {height} x {width} pixels")
    pixels = np.zeros(height * width, np.uint8)
    for start, end in zip(edges[::2], edges[1::2], strict=False):  # the last run may be of zeros
        pixels[start:end] = 1
    return pixels.reshape(width, height).T


def to_rle(segmentation: Segmentation, height: int, width: int) -> dict[str, Any]:
    """Compressed RLE of a valid segmentation, as pycocotools takes it."""
    if isinstance(segmentation, dict):
        counts = segmentation["counts"]
        if isinstance(counts, list):
            counts = split_long(np.array(counts, np.int64))
            rle = {"size": [height, width], "counts": counts}
            return coco_mask.frPyObjects(rle, height, width)
        counts = counts.encode() if isinstance(counts, str) else counts
        return readable({"size": [height, width], "counts": counts})
    if not segmentation:
        return mask_to_rle(np.zeros((height, width), bool))
    polygons = (np.asarray(part, np.float64).tolist() for part in segmentation)
    return union(coco_mask.frPyObjects([part], height, width)[0] for part in polygons)


def union(codes: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Join masks of one image in pairs: one after the other, all runs are read for each mask."""
    joined: list[dict[str, Any]] = []
    for count, code in enumerate(codes, start=1):
        joined.append(code)
        while count % 2 == 0:
            joined[-2:] = [readable(coco_mask.merge(joined[-2:]))]
            count //= 2
    return readable(coco_mask.merge(joined))


def readable(code: dict[str, Any]) -> dict[str, Any]:
    """The same mask, in runs that pycocotools reads; see `rle.split_long`."""
    height, width = code["size"]
    if height * width < LONG_RUN:
        return code
    runs = {"size": [height, width], "counts": split_long(run_lengths(code))}
    return coco_mask.frPyObjects(runs, height, width)
