"""Run-length codes of masks from other formats.

A small file may hold a mask of the largest size, so memory follows the runs, and images are looked
at in blocks. Positions are those of pixels counted down the columns, as in COCO's codes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from pycocotools import mask as coco_mask

from mask_rcnn_jax.annotations.segmentation import readable, run_lengths
from mask_rcnn_jax.rle import edges_to_rle, split_long

# Of a label image or a mask: 20,000 round objects in an image of the largest size have 4,000,000.
MAX_RUNS = 6_000_000
MAX_CODES = 1 << 25  # characters of all masks in an image
_BLOCK = 1 << 21  # pixels


class Runs(NamedTuple):
    """Equal values one below the other, which may go on in the next column."""

    starts: np.ndarray  # int32 [R], rising from 0
    values: np.ndarray  # [R]


def column_runs(
    block: Callable[[int, int, int, int], np.ndarray], size: tuple[int, int], where: str
) -> Runs:
    """Find the runs of an image.

    Args:
        block: returns its values [y2 - y1, x2 - x1] in a window (x1, y1, x2, y2).
        size: its (height, width).
        where: names it in messages.

    Raises ValueError for more than MAX_RUNS.
    """
    height, width = size
    columns = max(1, _BLOCK // height)
    starts, values, total = [], [], 0
    last: Any = None
    for left in range(0, width, columns):
        for top in range(0, height, _BLOCK):  # several if a block is a part of one column
            window = left, top, min(left + columns, width), min(top + _BLOCK, height)
            flat = block(*window).T.ravel()
            changes = np.ones(len(flat), bool)
            np.not_equal(flat[1:], flat[:-1], out=changes[1:])
            changes[0] = last is None or flat[0] != last
            places = np.flatnonzero(changes)
            starts.append((places + (left * height + top)).astype(np.int32))
            values.append(flat[places])
            total, last = total + len(places), flat[-1]
            _check_runs(total, where)
    return Runs(np.concatenate(starts), np.concatenate(values))


def crop_code(crop: np.ndarray, origin: tuple[int, int], size: tuple[int, int], where: str) -> dict:
    """Encode the pixels of a crop [h, w] that are not 0, with its upper left one at (x, y)."""
    height, width = crop.shape
    if not crop.size:
        return box_code((0, 0, 0, 0), size)

    def block(x1: int, y1: int, x2: int, y2: int) -> np.ndarray:
        """With a row of zeros below, which ends all runs."""
        out = np.zeros((y2 - y1, x2 - x1), bool)
        part = crop[y1:y2, x1:x2]
        np.not_equal(part, 0, out=out[: len(part)])
        return out

    runs = column_runs(block, (height + 1, width), where)
    edges = runs.starts[0 if runs.values[0] else 1 :]
    columns, rows = np.divmod(edges, height + 1)
    return _columns_code(columns, rows, origin, size)


def rows_code(edges: np.ndarray, box: tuple[int, int, int, int], size: tuple[int, int], where: str):
    """Encode a mask whose runs follow the rows of a box (x, y, width, height).

    Args:
        edges: int64, where runs start and end, in pixels of the box counted along the rows; what
            is there twice is neither.
        size: (height, width) of the image.
        where: names the mask in messages.

    Raises ValueError for more than MAX_RUNS down the columns, of ones and of zeros.
    """
    x, y, width, _ = box
    edges = _odd(edges)
    # Where a pixel differs from the one above: the mask and itself a row lower, xor.
    starts, ends = _odd(np.concatenate([edges, edges + width])).reshape(-1, 2).T
    lengths = ends - starts
    total = int(lengths.sum())
    _check_runs(total, where)
    firsts = np.cumsum(lengths) - lengths
    places = np.repeat((starts - firsts).astype(np.int32), lengths)
    places += np.arange(total, dtype=np.int32)
    rows, columns = np.divmod(places, np.int32(width))
    return _columns_code(columns, rows, (x, y), size)


def box_code(window: tuple[int, int, int, int], size: tuple[int, int]) -> dict:
    """Encode the part of a window (x1, y1, x2, y2) that lies in the image."""
    x1, y1, x2, y2 = (min(max(v, 0), side) for v, side in zip(window, size[::-1] * 2, strict=True))
    columns = np.repeat(np.arange(x1, x2 if y1 < y2 else x1, dtype=np.int32), 2)
    return _columns_code(
        columns, np.resize(np.array([y1, y2], np.int32), len(columns)), (0, 0), size
    )


def check_codes(length: int, where: str) -> None:
    """Raise ValueError for codes of more than MAX_CODES characters in an image."""
    if length > MAX_CODES:
        what = f"more than {MAX_CODES:,} characters of run-length codes"
        raise ValueError(f"{where}: the masks of its image have {what}")


def overlap(one: dict, other: dict) -> bool:
    """Whether two masks have a pixel in common."""
    return coco_mask.area(coco_mask.merge([one, other], intersect=True)) > 0


def without(code: dict, hidden: dict) -> dict:
    """The pixels of a mask that another one does not have."""
    runs = run_lengths(hidden)
    shown = runs[1:] if runs[0] == 0 else np.concatenate([[0], runs])
    shown = split_long(np.asarray(shown, np.int64))
    rest = coco_mask.frPyObjects({"size": hidden["size"], "counts": shown}, *hidden["size"])
    return readable(coco_mask.merge([code, rest], intersect=True))


def _columns_code(
    columns: np.ndarray, rows: np.ndarray, origin: tuple[int, int], size: tuple[int, int]
) -> dict:
    """Encode runs by their ends in a crop, int32 [2 R] in any order."""
    edges = columns
    edges += origin[0]
    edges *= size[0]
    edges += rows
    edges += origin[1]
    edges.sort()
    if edges.size:  # a run that reaches the bottom may continue at the top of the next column
        once = np.ones(len(edges), bool)
        same = edges[1:] == edges[:-1]
        once[1:] &= ~same
        once[:-1] &= ~same
        edges = edges[once]
    return edges_to_rle(edges, *size)


def _odd(numbers: np.ndarray) -> np.ndarray:
    """Those that occur an odd number of times, rising."""
    found, counts = np.unique(numbers, return_counts=True)
    return found[counts % 2 == 1]


def _check_runs(count: int, where: str) -> None:
    if count > MAX_RUNS:
        raise ValueError(
            f"{where}: more than {MAX_RUNS:,} runs of equal pixels down the columns, is it a mask?"
        )
