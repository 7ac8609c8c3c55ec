"""What loaders need to know about all images at once, without making each object."""

from collections.abc import Sequence

import numpy as np

from mask_rcnn_jax.data.dataset import Dataset, ImageRecord
from mask_rcnn_jax.data.drawn import ImageBoxes
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.packed import PackedImages
from mask_rcnn_jax.data.repeat import Repeats
from mask_rcnn_jax.data.segmentation import vertex_count
from mask_rcnn_jax.data.transforms import training_objects
from mask_rcnn_jax.data.windows import Windows


def image_ids(dataset: Dataset) -> list[int | str]:
    """Return all images' ids."""
    images = dataset.images
    if isinstance(images, PackedImages):
        return list(map(images.id, range(len(images))))
    return [record.id for record in images]


def image_id(images: Sequence[ImageRecord], index: int) -> int | str:
    """Return an image's id."""
    return images.id(index) if isinstance(images, PackedImages) else images[index].id


def image_size(images: Sequence[ImageRecord], index: int) -> tuple[int, int]:
    """Return (height, width) of an image."""
    if isinstance(images, PackedImages):
        return images.size(index)
    return images[index].height, images[index].width


def num_objects(images: Sequence[ImageRecord], count: int) -> int:
    """Count the objects in the first `count` images, crowds included."""
    if isinstance(images, PackedImages):
        return int(images.arrays["object_bounds"][count])
    return sum(len(images[index].annotations) for index in range(count))


def class_counts(images: Sequence[ImageRecord], num_classes: int) -> list[int]:
    """Count the objects of each class, class 1 first, crowds included."""
    if isinstance(images, PackedImages):
        classes = images.arrays["classes"]
    else:
        classes = np.array([a.class_index for one in images for a in one.annotations], int)
    return np.bincount(classes, minlength=num_classes + 1)[1 : num_classes + 1].tolist()


def training_counts(dataset: Dataset, options: ExampleOptions) -> tuple[np.ndarray, np.ndarray]:
    """Count what `training_objects` keeps.

    Returns:
        Objects of each image, [images] int64, and vertices of each object, 0 for a code, [objects]
        int64.
    """
    images = dataset.images
    if not isinstance(images, PackedImages):
        objects = [training_objects(record.annotations, options) for record in images]
        vertices = [vertex_count(a.segmentation) for found in objects for a in found]
        return np.array(list(map(len, objects)), np.int64), np.array(vertices, np.int64)
    kept = _kept(images, options)
    up_to = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)])
    return np.diff(up_to[images.arrays["object_bounds"]]), images.vertices()[kept]


def training_boxes(dataset: Dataset, options: ExampleOptions) -> ImageBoxes:
    """Return the boxes of what `training_objects` keeps."""
    images = dataset.images
    counts, _ = training_counts(dataset, options)
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    if isinstance(images, PackedImages):
        sizes = np.stack([images.arrays["heights"], images.arrays["widths"]], axis=1)
        return ImageBoxes(sizes, bounds, images.arrays["boxes"][_kept(images, options)])
    sizes = np.array([(one.height, one.width) for one in images]).reshape(-1, 2)
    kept = [a.box for one in images for a in training_objects(one.annotations, options)]
    return ImageBoxes(sizes, bounds, np.array(kept, np.float32).reshape(-1, 4))


def epoch_factors(
    dataset: Dataset, options: ExampleOptions, repeats: Repeats, *, keep_empty: bool
) -> np.ndarray:
    """Return how often each image, or a window of it, comes in an epoch, [images] float64; 0 for
    one that is left out."""
    counts, _ = training_counts(dataset, options)
    kept = np.ones(len(counts), bool) if keep_empty else counts > 0
    if options.min_keypoints:
        kept &= labeled_keypoints(dataset.images) >= options.min_keypoints
    if not repeats.repeat_threshold:
        factors = kept.astype(np.float64)
    else:
        factors = repeats.factors(*training_classes(dataset, options), kept)
    return factors * window_counts(dataset.images, options.windows)


def labeled_keypoints(images: Sequence[ImageRecord]) -> np.ndarray:
    """Count the labeled keypoints of all objects of each image, [images] int64."""
    if not isinstance(images, PackedImages):
        points = [
            [a.keypoints for a in one.annotations if a.keypoints is not None] for one in images
        ]
        return np.array([sum(int((p[:, 2] > 0).sum()) for p in of_one) for of_one in points], int)
    arrays, counts = images.arrays, np.zeros(len(images.arrays["boxes"]), np.int64)
    if "keypoints" in arrays:
        has_some = arrays["keypoint_rows"] >= 0
        labeled = (arrays["keypoints"][..., 2] > 0).sum(axis=1)
        counts[has_some] = labeled[arrays["keypoint_rows"][has_some]]
    up_to = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return np.diff(up_to[arrays["object_bounds"]])


def window_counts(images: Sequence[ImageRecord], windows: Windows) -> np.ndarray:
    """How many windows of each image are in an epoch, [images] int64; 1 without windows."""
    if not windows.is_on:
        return np.ones(len(images), np.int64)
    if isinstance(images, PackedImages):
        return windows.counts(images.arrays["heights"], images.arrays["widths"])
    sizes = np.array([(record.height, record.width) for record in images], np.int64)
    return windows.counts(*sizes.reshape(-1, 2).T)


def densest_windows(dataset: Dataset, options: ExampleOptions) -> np.ndarray:
    """Objects in each window of a grid, as `training_objects` keeps them, of all images [n] int64;
    an object counts where its center is. An estimate of what windows anywhere hold."""
    images, (height, width) = dataset.images, options.windows.size
    if isinstance(images, PackedImages):
        kept = _kept(images, options)
        boxes = images.arrays["boxes"][kept]
        owners = np.repeat(np.arange(len(images)), np.diff(images.arrays["object_bounds"]))[kept]
    else:
        objects = [training_objects(record.annotations, options) for record in images]
        boxes = np.array([a.box for found in objects for a in found], np.float32).reshape(-1, 4)
        owners = np.repeat(np.arange(len(objects)), list(map(len, objects)))
    centers = (boxes[:, :2] + boxes[:, 2:]) / 2 // np.array([width, height])
    cells = np.column_stack([owners, centers]).astype(np.int64)
    return np.unique(cells, axis=0, return_counts=True)[1]


def training_classes(dataset: Dataset, options: ExampleOptions) -> tuple[np.ndarray, np.ndarray]:
    """Return each pair of an image and a class of the objects that `training_objects` keeps once.

    Returns:
        Indices of the images [n] and classes 1..K [n], int64.
    """
    images = dataset.images
    if isinstance(images, PackedImages):
        kept, counts = _kept(images, options), np.diff(images.arrays["object_bounds"])
        owners = np.repeat(np.arange(len(images)), counts)[kept]
        pairs = np.stack([owners, images.arrays["classes"][kept]], axis=1)
    else:
        objects = [training_objects(record.annotations, options) for record in images]
        rows = [(image, a.class_index) for image, found in enumerate(objects) for a in found]
        pairs = np.array(rows, np.int64).reshape(-1, 2)
    image, class_index = np.unique(pairs, axis=0).astype(np.int64).T
    return image, class_index


def _kept(images: PackedImages, options: ExampleOptions) -> np.ndarray:
    """Return which objects `training_objects` keeps, [objects] bool."""
    arrays, offset = images.arrays, float(options.inclusive_boxes)
    kept = ~(arrays["crowds"] & options.skip_crowd)
    if offset:
        boxes = arrays["boxes"]
        kept &= ~((boxes[:, 2:] - boxes[:, :2]).min(axis=1, initial=np.inf) <= offset)
    return kept
