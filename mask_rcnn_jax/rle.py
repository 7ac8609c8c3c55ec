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
    # COCO runs follow the columns. A zero above and below ends every run within its column, unless
    # columns are whole: a run that reaches the bottom then continues at the top of the next.
    rows, length = (w, h) if h < height else (1, w * h)
    padded = np.zeros((rows, length + 2), bool)
    padded[:, 1:-1].reshape(w, h)[...] = crop.T
    changes = np.flatnonzero(padded[:, 1:] != padded[:, :-1])  # start, end, start, end, ...
    edges = changes + changes // (length + 1) * (height - length - 1) + (x0 * height + y0)
    counts = np.diff(np.concatenate(([0], edges, [height * width])))
    if edges.size and edges[-1] == height * width:
        counts = counts[:-1]  # the last run belongs to the object, nothing follows
    size = [height, width]
    rle = coco_mask.frPyObjects({"size": size, "counts": counts.tolist()}, height, width)
    return {"size": size, "counts": rle["counts"].decode("ascii")}
