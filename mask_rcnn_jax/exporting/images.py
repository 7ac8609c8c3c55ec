"""Load images and place them on an exported model's canvas for self-check and calibration."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import cv2
import numpy as np
from absl import logging

from mask_rcnn_jax.data.images import IMAGE_SUFFIXES, decode_image, endings, is_image_name
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.resize import ResizePlan, resize_image, resize_plan
from mask_rcnn_jax.exporting.options import ArtifactOptions
from mask_rcnn_jax.formats.shapes import generate_image


def image_paths(folder: str) -> list[Path]:
    """Return the image files in a folder, sorted by name. Raises ValueError if there are none."""
    if not Path(folder).is_dir():
        raise ValueError(f"--calibration {folder} is not a folder")
    files = sorted(path for path in Path(folder).iterdir() if path.is_file())
    paths = [path for path in files if is_image_name(path.name)]
    if others := endings(path.name for path in files if not is_image_name(path.name)):
        logging.info("--calibration %s: these files are not read: %s", folder, others)
    if not paths:
        suffixes = ", ".join(IMAGE_SUFFIXES)
        raise ValueError(f"--calibration {folder}: no images found ({suffixes})")
    return paths


def on_canvas(
    images: Sequence[np.ndarray] | Iterator[np.ndarray],
    options: ExampleOptions,
    canvas: tuple[int, int],
    fixed_size: tuple[int, int] | None,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Convert uint8 images to model inputs, as `Predictor` does.

    Images that belong on the other orientation's canvas are rotated. fixed_size: (height, width) to
    which all images are resized first. Yields images [1, H, W, 3] and image_sizes [1, 2].
    """
    for image in images:
        if fixed_size is not None:
            image = cv2.resize(image, fixed_size[::-1], interpolation=cv2.INTER_LINEAR)
        plan = resize_plan(image.shape[0], image.shape[1], options)
        if plan.canvas != canvas:
            image = np.ascontiguousarray(np.rot90(image))
            plan = resize_plan(image.shape[0], image.shape[1], options)
        resized = resize_image(image, plan, options)
        yield resized[None], np.array([plan.size], np.int32)


def placement(example: ExampleOptions, options: ArtifactOptions) -> ResizePlan:
    """Return the exported canvas, and the size there of an image that is typical for it."""
    if options.picture_size:
        return resize_plan(*options.picture_size, example)
    if example.resize != "shortest_edge":
        return resize_plan(*example.image_size, example)
    short, long = sorted(example.image_size)
    landscape = options.orientation == "landscape"
    return resize_plan(*((short, long) if landscape else (long, short)), example)


def check_images(folder: str, canvas: tuple[int, int], count: int) -> list[np.ndarray]:
    """Decode the first `count` images of a folder, or generate `count` images if it has none."""
    files = sorted(Path(folder).iterdir()) if Path(folder).is_dir() else []
    if paths := [path for path in files if is_image_name(path.name)]:
        return [decode_image(path) for path in paths[:count]]
    side = min(max(canvas), 512)
    sizes = [(side * 3 // 4, side), (side, side), (side // 2, side)]
    return [generate_image(0, "val", i, sizes[i % len(sizes)])[0] for i in range(count)]
