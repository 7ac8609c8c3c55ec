"""COCO run-length encoding (RLE) for masks."""

from typing import NamedTuple

import numpy as np
from pycocotools import mask as coco_mask

Window = tuple[int, int, int, int]  # (x0, y0, x1, y1) in pixels of an image
# Pixels from which on a run is written in parts. In strings, runs are differences from the run two
# before, of which pycocotools reads none below -LONG_RUN.
LONG_RUN = 1 << 29


def compressed_rle(mask: np.ndarray) -> dict:
    """Encode a uint8 mask [H, W] of zeros and ones as COCO RLE with string counts."""
    rle = coco_mask.encode(np.asfortranarray(mask))
    return {"size": list(mask.shape), "counts": rle["counts"].decode("ascii")}


class WindowMask(NamedTuple):
    """A mask that is zero outside a window of its image, and takes no memory there."""

    x: int  # of the window's upper left pixel
    y: int
    rle: dict  # COCO RLE of the window alone

    @classmethod
    def from_crop(cls, crop: np.ndarray, origin: tuple[int, int]) -> "WindowMask":
        """Encode a uint8 crop [h, w] of zeros and ones, whose upper left pixel is at (x, y)."""
        return cls(*origin, compressed_rle(crop))

    def crop(self) -> tuple[np.ndarray, tuple[int, int]]:
        """Invert `from_crop`."""
        return coco_mask.decode(self.rle), (self.x, self.y)


def cut(crop: np.ndarray, origin: tuple[int, int], window: Window) -> np.ndarray:
    """Return another window of the same image, [y1 - y0, x1 - x0], zero outside the crop.

    Args:
        crop: [h, w], with its upper left pixel at (x, y) `origin`.
        window: may lie outside the crop, or have no area.
    """
    x0, y0, x1, y1 = window
    height, width = crop.shape
    left, top = origin[0] - x0, origin[1] - y0  # of the crop in the window
    out = np.zeros((max(0, y1 - y0), max(0, x1 - x0)), crop.dtype)
    rows = slice(max(0, top), max(0, top + height))
    columns = slice(max(0, left), max(0, left + width))
    part = out[rows, columns]
    first_row, first_column = max(0, -top), max(0, -left)
    part[...] = crop[first_row:, first_column:][: part.shape[0], : part.shape[1]]
    return out


def encode_window(crop: np.ndarray, origin: tuple[int, int], height: int, width: int) -> dict:
    """Encode a [height, width] image that is zero outside one window as COCO RLE.

    Only the window is searched for runs, so the cost does not grow with the image.

    Args:
        crop: uint8 [h, w], 0 or 1, entirely inside the image.
        origin: (x, y) position for the crop's upper left pixel.

    Returns:
        {"size": [height, width], "counts": str}
    """
    h, w = crop.shape
    x0, y0 = origin
    # COCO runs follow the columns. A zero above and below ends every run within its column, unless
    # columns are whole: a run that reaches the bottom then continues at the top of the next.
    rows, length = (w, h) if h < height else (1, w * h)
    padded = np.zeros((rows, length + 2), bool)
    padded[:, 1:-1].reshape(w, h)[...] = crop.T
    changes = np.flatnonzero(padded[:, 1:] != padded[:, :-1])  # start, end, start, end, ...
    edges = changes + changes // (length + 1) * (height - length - 1) + (x0 * height + y0)
    return edges_to_rle(edges, height, width)


def edges_to_rle(edges: np.ndarray, height: int, width: int) -> dict:
    """Encode a mask as COCO RLE whose runs of ones start and end at rising `edges`, even in number,
    of its pixels counted down the columns."""
    kind = edges.dtype.type
    counts = np.diff(edges, prepend=kind(0), append=kind(height * width))
    if edges.size and edges[-1] == height * width:
        counts = counts[:-1]  # the last run belongs to the object, nothing follows
    size = [height, width]
    rle = coco_mask.frPyObjects({"size": size, "counts": split_long(counts)}, height, width)
    return {"size": size, "counts": rle["counts"].decode("ascii")}


def split_long(runs: np.ndarray) -> np.ndarray:
    """Cut runs of `LONG_RUN` pixels or more into shorter ones, with empty runs between.

    Only those that another run refers to: pycocotools stops where two masks have an empty run at
    one place.
    """
    is_long = runs >= LONG_RUN
    is_long[:1] = is_long[-2:] = False
    if not is_long.any():
        return runs
    most = LONG_RUN - 1
    parts = np.where(is_long, runs // most, 0).astype(np.int64)
    ends = np.cumsum(1 + 2 * parts) - 1
    split = np.zeros(int(ends[-1]) + 1, np.int64)
    split[ends] = runs - parts * most
    for place in np.flatnonzero(parts).tolist():
        split[ends[place] - 2 * parts[place] : ends[place] : 2] = most
    return split
