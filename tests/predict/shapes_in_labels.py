"""Objects of many shapes, which do not overlap, as a label image and as a result."""

import numpy as np

from mask_rcnn_jax.predict.result import Result
from mask_rcnn_jax.rle import WindowMask

HEIGHT, WIDTH = 60, 90
BANDS = ("nuclei", "membrane")


def label_image() -> np.ndarray:
    """int [60, 90]: a tilted ellipse, a ring, a line, a pixel, two parts, noise, a square."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    noise = np.random.default_rng(0).random((HEIGHT, WIDTH)) < 0.4
    u, v = 0.8 * (x - 18) + 0.6 * (y - 16), 0.8 * (y - 16) - 0.6 * (x - 18)
    radius = np.hypot(x - 50, y - 15)
    shapes = [
        (u / 14) ** 2 + (v / 6) ** 2 <= 1,
        (radius <= 10) & (radius > 4),
        (x - 70 == y) & (x < 88),
        (x == 40) & (y == 40),
        (abs(y - 50) < 4) & ((abs(x - 10) < 5) | (abs(x - 25) < 3)),
        noise & (x >= 45) & (x < 65) & (y >= 35),
        (x >= 70) & (x < 80) & (y >= 40) & (y < 50),
    ]
    return sum(k * shape for k, shape in enumerate(shapes, start=1))


def pixels() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 4096, (HEIGHT, WIDTH, 2)).astype(np.uint16)


def window_masks(labels: np.ndarray) -> tuple[np.ndarray, list[WindowMask]]:
    """Boxes [N, 4] around each object and, with a margin, its mask."""
    boxes, masks = [], []
    for k in range(1, labels.max() + 1):
        y, x = np.nonzero(labels == k)
        box = x.min(), y.min(), x.max() + 1, y.max() + 1
        left, top = max(box[0] - 2, 0), max(box[1] - 1, 0)
        crop = (labels[top : box[3] + 3, left : box[2] + 1] == k).astype(np.uint8)
        boxes.append(box)
        masks.append(WindowMask.from_crop(crop, (int(left), int(top))))
    return np.array(boxes, np.float32), masks


def make_shapes(**changes) -> Result:
    labels = label_image()
    boxes, masks = window_masks(labels)
    fields = dict(
        image=np.zeros((HEIGHT, WIDTH, 3), np.uint8),
        boxes=boxes,
        scores=np.linspace(0.9, 0.6, len(boxes)).astype(np.float32),
        classes=np.array([1, 2, 1, 1, 2, 2, 1], np.int32),
        mask_grids=None,
        categories=[{"id": 3, "name": "cell"}, {"id": 8, "name": "debris"}],
        window_masks=masks,
        pixels=pixels(),
        band_names=BANDS,
    )
    return Result(**fields | changes)
