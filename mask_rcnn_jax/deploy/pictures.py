"""Pictures on the canvas of an exported model, to check and to calibrate it with."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import cv2
import numpy as np

from mask_rcnn_jax.data.coco import decode_image
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.resize import resize_image, resize_plan
from mask_rcnn_jax.deploy.inputs import IMAGE_SUFFIXES
from mask_rcnn_jax.formats.shapes import generate_image


def picture_paths(folder: str) -> list[Path]:
    """The picture files of a folder, by name. Raises ValueError if there are none."""
    if not Path(folder).is_dir():
        raise ValueError(f"--calibration {folder} is no folder")
    paths = sorted(path for path in Path(folder).iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
    if not paths:
        raise ValueError(f"--calibration {folder}: no pictures there ({', '.join(IMAGE_SUFFIXES)})")
    return paths


def on_canvas(
    pictures: Sequence[np.ndarray] | Iterator[np.ndarray],
    options: ExampleOptions,
    canvas: tuple[int, int],
    picture_size: tuple[int, int] | None,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """images [1, H, W, 3] and image_sizes [1, 2] of uint8 pictures, as `Predictor` makes them.

    One for the other orientation's canvas is turned. picture_size: all are resized to it first.
    """
    for picture in pictures:
        if picture_size is not None:
            picture = cv2.resize(picture, picture_size[::-1], interpolation=cv2.INTER_LINEAR)
        plan = resize_plan(*picture.shape[:2], options)
        if plan.canvas != canvas:
            picture = np.ascontiguousarray(np.rot90(picture))
            plan = resize_plan(*picture.shape[:2], options)
        image = resize_image(picture, plan, options)
        yield image[None], np.array([plan.size], np.int32)


def check_pictures(paths: Sequence[Path], canvas: tuple[int, int], count: int) -> list[np.ndarray]:
    """The first `count` pictures of `paths`, or as many generated ones if there are none."""
    if paths:
        return [decode_image(path) for path in paths[:count]]
    side = min(max(canvas), 512)
    sizes = [(side * 3 // 4, side), (side, side), (side // 2, side)]
    return [generate_image(0, "val", i, sizes[i % len(sizes)])[0] for i in range(count)]
