"""COCO run-length encoding (RLE) for masks."""

import numpy as np
from pycocotools import mask as coco_mask


def compressed_rle(mask: np.ndarray) -> dict:
    """Encode a uint8 mask [H, W] of zeros and ones as COCO RLE with string counts."""
    rle = coco_mask.encode(np.asfortranarray(mask))
    return {"size": list(mask.shape), "counts": rle["counts"].decode("ascii")}


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
    # COCO runs follow the columns. A zero above and below ends every run within its column.
    columns = np.zeros((w, h + 2), np.int8)
    columns[:, 1:-1] = crop.T
    column, row = np.nonzero(np.diff(columns, axis=1))
    edges = (x0 + column) * height + y0 + row  # start, end, start, end, ...
    # A run reaching the bottom continues at the top of the next column, where its end equals the
    # next run's start. Dropping both joins the runs.
    values, repeats = np.unique(edges, return_counts=True)
    edges = values[repeats == 1]
    counts = np.diff(np.concatenate(([0], edges, [height * width])))
    if edges.size and edges[-1] == height * width:
        counts = counts[:-1]  # the last run belongs to the object, nothing follows
    size = [height, width]
    rle = coco_mask.frPyObjects({"size": size, "counts": counts.tolist()}, height, width)
    return {"size": size, "counts": rle["counts"].decode("ascii")}
