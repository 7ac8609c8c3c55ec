"""COCO results of the detections in all images."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import chain
from typing import NamedTuple

import jax

from mask_rcnn_jax.data.dataset import Dataset
from mask_rcnn_jax.data.overview import image_ids
from mask_rcnn_jax.evaluation.encode import ImageDetections
from mask_rcnn_jax.evaluation.workers import count_workers, encode_images
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.training import processes

# COCO results of boxes, with their keypoints if there are any, and, unless the model has boxes
# alone, masks; ids of all images.
Found = tuple[list[dict], list[dict] | None, list]


class Rules(NamedTuple):
    """How detections become COCO results."""

    paste: str  # see `evaluation.paste`
    inclusive_boxes: bool  # see `evaluation.encode.encode_image`
    has_masks: bool
    keypoint_offset: float = 0.0  # see `data.keypoint_offset`

    @classmethod
    def of(cls, recipe: Recipe) -> "Rules":
        """Those of a recipe."""
        data = recipe.data
        has_masks, offset = recipe.model.has_masks, data.keypoint_offset
        return cls(recipe.eval.paste, data.inclusive_boxes, has_masks, offset)


def encode(
    images: Iterable[ImageDetections], num_images: int, dataset: Dataset, rules: Rules
) -> Found:
    """Encode and gather the detections of all processes, as `evaluator.detect` returns them.

    Args:
        images: those of this process, read while others are encoded.
        num_images: of all processes.
        rules: how they become results.
    """
    found: tuple[list[dict], list[dict], list] = ([], [], [])

    def noted() -> Iterator[ImageDetections]:
        for image in images:
            found[2].append(image.image_id)
            yield image

    encoded = encode_images(
        noted(),
        paste=rules.paste,
        inclusive_boxes=rules.inclusive_boxes,
        num_workers=count_workers(
            num_images // jax.process_count(), processes.count_sharing_cores()
        ),
    )
    with closing(encoded):
        for boxes, masks in encoded:
            found[0].extend(boxes)
            found[1].extend(masks)
    place = {one: index for index, one in enumerate(image_ids(dataset))}
    boxes, masks, ids = (list(chain(*processes.gather(entries))) for entries in found)
    for entries in (boxes, masks):
        entries.sort(key=lambda entry: place[entry["image_id"]])
    return boxes, masks if rules.has_masks else None, sorted(ids, key=place.__getitem__)
