"""Sizes, classes and boxes of a dataset as flat arrays, for statistics over all images at once."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mask_rcnn_jax.data.dataset import ImageRecord
from mask_rcnn_jax.data.packed import PackedImages

# Bounds of COCO's small, medium and large objects: the square root of their area in pixels.
SIZE_BOUNDS = (32, 96)
SIZE_NAMES = ("small", "medium", "large")


class SetObjects(NamedTuple):
    """I images and N objects; crowds are not among the objects."""

    sizes: np.ndarray  # [I, 2] int64 (height, width)
    images: np.ndarray  # [N] int64, index of each object's image, rising
    classes: np.ndarray  # [N] int64, 1..K
    boxes: np.ndarray  # [N, 4] float64 (x1, y1, x2, y2), pixels of the image
    sides: np.ndarray  # [N] float64, square root of the area in pixels
    crowds: np.ndarray  # [C, 2] int64 (index of the image, class) of each crowd

    @property
    def counts(self) -> np.ndarray:
        """[I] int64, objects in each image."""
        return np.bincount(self.images, minlength=len(self.sizes))

    @property
    def num_empty(self) -> int:
        """Number of images without objects and crowds."""
        filled = np.union1d(self.images, self.crowds[:, 0])
        return len(self.sizes) - len(filled)

    def pairs(self) -> np.ndarray:
        """[P, 2] int64: each image and class that occur together, once, by image."""
        return np.unique(np.stack([self.images, self.classes], axis=1), axis=0)


def collect(images: Sequence[ImageRecord]) -> SetObjects:
    """Return the objects in a COCO json."""
    assert isinstance(images, PackedImages)  # as `load_coco` has them
    arrays = images.arrays
    owners = np.repeat(np.arange(len(images)), np.diff(arrays["object_bounds"]))
    crowds, classes = arrays["crowds"], arrays["classes"].astype(np.int64)
    kept = ~crowds
    return SetObjects(
        sizes=np.stack([arrays["heights"], arrays["widths"]], axis=1).astype(np.int64),
        images=owners[kept],
        classes=classes[kept],
        boxes=arrays["boxes"][kept].astype(np.float64),
        sides=np.sqrt(arrays["areas"][kept]),
        crowds=np.stack([owners[crowds], classes[crowds]], axis=1),
    )


def size_counts(sides: np.ndarray) -> np.ndarray:
    """[3] int64, small, medium and large objects; a side on a bound counts as the larger."""
    return np.bincount(np.digitize(sides, SIZE_BOUNDS), minlength=len(SIZE_NAMES))


def shared_images(pairs: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Count the images in which two classes occur together.

    Args:
        pairs: as `SetObjects.pairs` returns them.
        classes: [k] int, classes 1..K, each once.

    Returns:
        [k, k] int64; on the diagonal, the images of each class.
    """
    place = np.full(max(int(pairs[:, 1].max(initial=0)), int(classes.max(initial=0))) + 1, -1)
    place[classes] = np.arange(len(classes))
    kept = pairs[place[pairs[:, 1]] >= 0]
    found, rows = np.unique(kept[:, 0], return_inverse=True)
    present = np.zeros((len(found), len(classes)))  # float64: an exact product by BLAS
    present[rows, place[kept[:, 1]]] = 1
    return np.rint(present.T @ present).astype(np.int64)
