"""Examples of windows of large images: their pixels, and the objects that they hold."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from mask_rcnn_jax.annotations.keypoints import mirror_places
from mask_rcnn_jax.data.coco import CocoDataset
from mask_rcnn_jax.data.cut import cut_objects
from mask_rcnn_jax.data.dataset import Annotation, Dataset, ImageRecord
from mask_rcnn_jax.data.example import Example
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.overview import image_size
from mask_rcnn_jax.data.packed import PackedImages
from mask_rcnn_jax.data.transforms import read_example, training_objects
from mask_rcnn_jax.rle import Window


def read_window(
    dataset: Dataset,
    index: int,
    options: ExampleOptions,
    number: int,
    rng: np.random.Generator,
    *,
    keep_empty: bool = True,
) -> Example | None:
    """A window of image `index` as an example, drawn by `Windows.draw`.

    Returns None for one without an object to learn from, unless `keep_empty`.

    Raises UndecodableImage as `decode` does.
    """
    images, windows = dataset.images, options.windows
    boxes, crowds = _boxes(images, index)
    window = windows.draw(image_size(images, index), number, boxes[~crowds], rng)
    objects = objects_in(images, index, window, windows.min_visible)
    if not keep_empty and not training_objects(objects, options):
        return None
    image = decode_window(dataset, index, window, options)
    return Example(image, objects, mirror=mirror_places(options.keypoints))


def around_objects(options: ExampleOptions) -> ExampleOptions:
    """The options, with windows around objects."""
    return replace(options, windows=replace(options.windows, place="objects"))


def objects_in(
    images: Sequence[ImageRecord], index: int, window: Window, min_visible: float
) -> tuple[Annotation, ...]:
    """The objects of a window of image `index`, in its pixels, as `cut_objects` has them."""
    boxes, _ = _boxes(images, index)
    x1, y1, x2, y2 = window
    meets = (boxes[:, :2] < (x2, y2)).all(axis=1) & (boxes[:, 2:] > (x1, y1)).all(axis=1)
    rows = np.flatnonzero(meets)
    if isinstance(images, PackedImages):
        found = images.annotations(index, rows + images.objects(index).start)
    else:
        found = tuple(images[index].annotations[row] for row in rows.tolist())
    return cut_objects(found, window, min_visible)


def decode_window(
    dataset: Dataset, index: int, window: Window, options: ExampleOptions
) -> np.ndarray:
    """A window of what `dataset.decode` gives, decoded alone where the dataset can."""
    x1, y1, x2, y2 = window
    whole = 0, 0, *image_size(dataset.images, index)[::-1]
    if window != whole and (own := _decoder(dataset)):
        return own(dataset, index, window)
    return read_example(dataset, index, options).image[y1:y2, x1:x2].copy()


def has_windows(dataset: Dataset, index: int) -> bool:
    """Whether `decode_window` decodes less than image `index`."""
    own = _decoder(dataset)
    if own is CocoDataset.decode_window:
        assert isinstance(dataset, CocoDataset)
        return dataset.has_windows(index)
    return own is not None


def _decoder(dataset: Dataset) -> Callable[..., np.ndarray] | None:
    """The dataset's `decode_window`, unless it is older than its `decode`."""
    own = getattr(type(dataset), "decode_window", None)
    is_older = type(dataset).decode is not CocoDataset.decode
    return None if own is CocoDataset.decode_window and is_older else own


def _boxes(images: Sequence[ImageRecord], index: int) -> tuple[np.ndarray, np.ndarray]:
    """Boxes [n, 4] of the objects of an image, and whether they are crowds [n]."""
    if isinstance(images, PackedImages):
        rows = images.objects(index)
        return images.arrays["boxes"][rows], images.arrays["crowds"][rows]
    found = images[index].annotations
    boxes = np.array([annotation.box for annotation in found], np.float32).reshape(-1, 4)
    return boxes, np.array([annotation.iscrowd for annotation in found], bool)
