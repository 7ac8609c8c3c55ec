"""Load images and place them on an exported model's canvas for self-check and calibration."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from absl import logging

from mask_rcnn_jax import opencv as cv2
from mask_rcnn_jax.data.options import DataOptions, ExampleOptions
from mask_rcnn_jax.data.resize import ResizePlan, resize_image, resize_plan
from mask_rcnn_jax.exporting.options import ArtifactOptions
from mask_rcnn_jax.formats.shapes import generate_image
from mask_rcnn_jax.images.bands import Bands
from mask_rcnn_jax.images.suffixes import endings
from mask_rcnn_jax.predict.pixels import image_suffixes, is_other_band, read_pixels
from mask_rcnn_jax.tars.members import find_members
from mask_rcnn_jax.tars.patterns import are_tars


def image_paths(folder: str, bands: Bands) -> list[Path]:
    """Return the image files in a folder or in tars, sorted by name; where each band has a file,
    the first ones. Raises ValueError if there are none."""
    if not (are_tars(folder) or Path(folder).is_dir()):
        raise ValueError(f"--calibration {folder} is not a folder")
    files = _files(folder)
    paths = [path for path in files if _is_image(path, bands)]
    rest = (path.name for path in files if path not in paths)
    if others := endings(name for name in rest if not is_other_band(name, bands)):
        logging.info("--calibration %s: these files are not read: %s", folder, others)
    if not paths:
        suffixes = ", ".join(image_suffixes(bands))
        raise ValueError(f"--calibration {folder}: no images found ({suffixes})")
    return paths


def _files(folder: str) -> list[Path]:
    """The files in a folder or in tars, sorted by name; none if there is no such folder."""
    if are_tars(folder):
        return [Path(tar, name) for tar, name in find_members(folder)]
    found = Path(folder).iterdir() if Path(folder).is_dir() else ()
    return sorted(path for path in found if path.is_file())


def _is_image(path: Path, bands: Bands) -> bool:
    is_known = path.name.lower().endswith(image_suffixes(bands)) and path.name[0] != "."
    return is_known and not is_other_band(path.name, bands)


def decoded(path: Path, data: DataOptions) -> np.ndarray:
    """[H, W, C] in 0..255 of a file, as the model is trained with it."""
    return data.bands.scaled(read_pixels(path, data.bands, data.apply_exif == "always"))


def on_canvas(
    images: Sequence[np.ndarray] | Iterator[np.ndarray],
    options: ExampleOptions,
    canvas: tuple[int, int],
    fixed_size: tuple[int, int] | None,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Convert images [H, W, C] in 0..255 to model inputs, as `Predictor` does.

    Images that belong on the other orientation's canvas are rotated. fixed_size: (height, width) to
    which all images are resized first. Yields images [1, H, W, C] and image_sizes [1, 2].
    """
    for image in images:
        if fixed_size is not None:
            resized = cv2.resize(image, fixed_size[::-1], interpolation=cv2.INTER_LINEAR)
            image = resized.reshape(*fixed_size, image.shape[2])  # OpenCV drops a single band
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


def check_images(data: DataOptions, canvas: tuple[int, int], count: int) -> list[np.ndarray]:
    """Decode the first `count` images of `data.val_images`, or generate `count` if it has none."""
    if paths := [path for path in _files(data.val_images) if _is_image(path, data.bands)]:
        return [decoded(path, data) for path in paths[:count]]
    side = min(max(canvas), 512)
    sizes = [(side * 3 // 4, side), (side, side), (side // 2, side)]
    images = [generate_image(0, "val", i, sizes[i % len(sizes)])[0] for i in range(count)]
    if not data.bands.names:
        return images
    bands = np.resize([0, 1, 2], data.bands.count)
    return [image[..., bands].astype(data.image_dtype) for image in images]
