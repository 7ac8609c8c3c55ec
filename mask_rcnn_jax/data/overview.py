"""What loaders need to know about all images at once, without making each object."""

from collections.abc import Sequence

import numpy as np

from mask_rcnn_jax.data.dataset import Dataset, ImageRecord
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.packed import PackedImages
from mask_rcnn_jax.data.segmentation import vertex_count
from mask_rcnn_jax.data.transforms import training_objects


def image_ids(dataset: Dataset) -> list[int | str]:
    """Return the ids of all images."""
    images = dataset.images
    if isinstance(images, PackedImages):
        return list(map(images.id, range(len(images))))
    return [record.id for record in images]


def image_id(images: Sequence[ImageRecord], index: int) -> int | str:
    """Return the id of an image."""
    return images.id(index) if isinstance(images, PackedImages) else images[index].id


def image_size(images: Sequence[ImageRecord], index: int) -> tuple[int, int]:
    """Return (height, width) of an image."""
    if isinstance(images, PackedImages):
        return int(images.arrays["heights"][index]), int(images.arrays["widths"][index])
    return images[index].height, images[index].width


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
    arrays, offset = images.arrays, float(options.inclusive_boxes)
    kept = ~(arrays["crowds"] & options.skip_crowd)
    if offset:
        boxes = arrays["boxes"]
        kept &= ~((boxes[:, 2:] - boxes[:, :2]).min(axis=1, initial=np.inf) <= offset)
    up_to = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)])
    return np.diff(up_to[arrays["object_bounds"]]), images.vertices()[kept]
