"""Run-length encoding of masks in COCO's format."""

import numpy as np
from pycocotools import mask as coco_mask


def encode_window(crop: np.ndarray, origin: tuple[int, int], height: int, width: int) -> dict:
    """COCO run-length code of a picture that is zero but for one window.

    The runs are found in the window alone, so that the cost does not grow with the picture.

    Args:
        crop: uint8 [h, w] of zeros and ones, wholly inside the picture.
        origin: (x, y) of the crop's upper left pixel.

    Returns:
        {"size": [height, width], "counts": str}
    """
    h, w = crop.shape
    x0, y0 = origin
    # COCO runs go down the columns. A zero above and below ends every run within its column.
    columns = np.zeros((w, h + 2), np.int8)
    columns[:, 1:-1] = crop.T
    column, row = np.nonzero(np.diff(columns, axis=1))
    edges = (x0 + column) * height + y0 + row  # begin, end, begin, end, ...
    # A run that reaches the bottom goes on at the top of the next column. There its end is the
    # next one's begin, the same number twice: without the two the runs are one.
    values, times = np.unique(edges, return_counts=True)
    marks = values[times == 1]
    counts = np.diff(np.concatenate(([0], marks, [height * width])))
    if marks.size and marks[-1] == height * width:
        counts = counts[:-1]  # the last run is the object's, nothing follows
    size = [height, width]
    code = coco_mask.frPyObjects({"size": size, "counts": counts.tolist()}, height, width)
    return {"size": size, "counts": code["counts"].decode("ascii")}


def run_lengths(code: dict) -> np.ndarray:
    """The runs of a COCO code, zeros first: int64 [runs]. A broken string has a negative run.

    A string holds one number per run, five bits per character, low bits first, bit 5 set on all
    characters but a number's last, bit 4 of which is the sign. From the fourth number on they are
    differences from the number two before.
    """
    counts = code["counts"]
    if isinstance(counts, list):
        return np.array(counts, np.int64)
    counts = counts.encode("ascii") if isinstance(counts, str) else counts
    symbols = np.frombuffer(counts, np.uint8).astype(np.int64) - 48
    ends = np.flatnonzero(symbols & 32 == 0)
    if not ends.size or ends[-1] != symbols.size - 1:
        return np.array([-1])
    starts = np.concatenate([[0], ends[:-1] + 1])
    sizes = ends - starts + 1
    shifts = 5 * (np.arange(symbols.size) - np.repeat(starts, sizes))
    runs = np.add.reduceat((symbols & 31) << np.minimum(shifts, 50), starts)
    runs -= (symbols[ends] & 16 != 0) * (1 << np.minimum(5 * sizes, 55))
    runs[1::2] = np.cumsum(runs[1::2])
    runs[2::2] = np.cumsum(runs[2::2])
    return runs
