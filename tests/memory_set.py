"""A dataset without a json: shapes that are drawn in memory."""

from functools import cache, cached_property

import numpy as np

from mask_rcnn_jax.annotations.segmentation import segmentation_to_mask
from mask_rcnn_jax.data.dataset import Annotation, ImageRecord
from mask_rcnn_jax.formats.shapes import CATEGORIES, generate_image

draw = cache(generate_image)  # each run of a test reads the same few


class ShapeSet:
    """Implements `Dataset` and nothing beyond it."""

    class_names = tuple(CATEGORIES.values())

    def __init__(self, split: str, count: int, size: tuple[int, int] = (64, 64)):
        self.split, self.count, self.size = split, count, size

    @cached_property
    def images(self) -> list[ImageRecord]:
        return [self._record(index) for index in range(self.count)]

    def decode(self, index: int) -> np.ndarray:
        return draw(0, self.split, index, self.size)[0].copy()

    def _record(self, index: int) -> ImageRecord:
        objects = []
        for entry in draw(0, self.split, index, self.size)[1]:
            class_index = list(CATEGORIES).index(entry["category_id"]) + 1
            if isinstance(entry["segmentation"], dict):
                mask = segmentation_to_mask(entry["segmentation"], *self.size)
                crowd = bool(entry["iscrowd"])
                objects.append(Annotation.from_mask(mask, class_index, iscrowd=crowd))
            else:
                polygons = entry["segmentation"]
                objects.append(Annotation.from_polygons(polygons, class_index, self.size))
        return ImageRecord(index + 1, f"{index:06d}.jpg", *self.size, tuple(objects))
