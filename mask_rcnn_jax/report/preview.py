"""A sheet of training images as the model gets them, with their objects drawn."""

from collections.abc import Callable, Sequence

import numpy as np

from mask_rcnn_jax import opencv as cv2
from mask_rcnn_jax.data.dataset import Dataset, keypoints
from mask_rcnn_jax.data.kinds import build_augment
from mask_rcnn_jax.data.loader import TrainLoader, TrainOrder
from mask_rcnn_jax.data.options import DataOptions
from mask_rcnn_jax.data.overview import image_ids
from mask_rcnn_jax.data.repeat import Repeats
from mask_rcnn_jax.evaluation.visualize import Lines, draw_ground_truth
from mask_rcnn_jax.structures import Batch

COLUMNS, CELL, GAP = 4, 480, 8  # images per row, their longer side and the distance in pixels
MASK_SIDE = 112


def preview_sheet(
    data: DataOptions,
    dataset: Dataset,
    count: int,
    *,
    seed: int = 0,
    left_out: Sequence[int | str] = (),
) -> np.ndarray:
    """Draw the first `count` training images: uint8 [H, W, 3] RGB.

    seed, left_out: `train.seed` and `train.skip_images`.
    """
    options, augment, ids = data.in_training(), build_augment(data), image_ids(dataset)
    order = TrainOrder(
        seed,
        batch_size=1,
        keep_empty=data.keep_empty,
        skip=frozenset(index for index, image_id in enumerate(ids) if image_id in left_out),
        repeats=Repeats(data.repeat_threshold),
    )
    loader = TrainLoader(dataset, options, order, num_workers=0, augment=augment)
    try:
        frame, names = options.mask_frame, dataset.class_names
        shown, lines = data.bands.to_rgb, keypoints(dataset).skeleton
        cells = [_draw(next(loader), names, frame, shown, lines) for _ in range(count)]
    finally:
        loader.close()
    rows = [_row(cells[start : start + COLUMNS]) for start in range(0, count, COLUMNS)]
    width = max(row.shape[1] for row in rows)
    padded = [np.pad(row, ((0, GAP), (0, width - row.shape[1]), (0, 0)), **_WHITE) for row in rows]
    return np.concatenate(padded)


_WHITE: dict = {"mode": "constant", "constant_values": 255}


def _draw(
    batch: Batch,
    class_names: Sequence[str],
    mask_frame: str,
    shown: Callable[[np.ndarray], np.ndarray],
    skeleton: Lines,
) -> np.ndarray:
    """Draw the only image of a batch, its longer side scaled to CELL."""
    height, width = batch.image_sizes[0]
    image = shown(batch.images[0, :height, :width])
    scale = CELL / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    image = cv2.resize(image, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR)
    targets = batch.targets
    boxes, masks = targets.boxes[0], targets.masks[0]
    if mask_frame == "image":
        masks = np.array([_inside(box, mask) for box, mask in zip(boxes, masks, strict=True)])
    given = image, boxes * scale, targets.classes[0], masks, class_names
    points = None
    if targets.keypoints is not None:
        points = targets.keypoints[0] * (scale, scale, 1), skeleton
    return draw_ground_truth(*given, min_side=0, keypoints=points)


def _inside(box: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Crop a mask of the whole image to a box."""
    x1, y1 = np.floor(box[:2]).astype(int)
    x2, y2 = np.maximum(np.ceil(box[2:]).astype(int), (x1 + 1, y1 + 1))
    side = MASK_SIDE, MASK_SIDE
    return cv2.resize(mask[y1:y2, x1:x2], side, interpolation=cv2.INTER_NEAREST)


def _row(cells: Sequence[np.ndarray]) -> np.ndarray:
    height = max(cell.shape[0] for cell in cells)
    widths = [((0, height - cell.shape[0]), (0, GAP), (0, 0)) for cell in cells]
    pairs = zip(cells, widths, strict=True)
    return np.concatenate([np.pad(cell, width, **_WHITE) for cell, width in pairs], axis=1)
