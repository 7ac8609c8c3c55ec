"""COCO results of the detections in all images."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import chain
from typing import NamedTuple

import jax

from mask_rcnn_jax.data.dataset import Dataset
from mask_rcnn_jax.data.overview import image_ids
from mask_rcnn_jax.evaluation.encode import ImageDetections
from mask_rcnn_jax.evaluation.keypoints import split
from mask_rcnn_jax.evaluation.workers import count_workers, encode_images
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.training import processes


class Found(NamedTuple):
    """COCO results of the detections in images."""

    boxes: list[dict]
    masks: list[dict] | None  # None: the model has none
    keypoints: list[dict] | None  # likewise
    image_ids: list  # of all images, also those without detections


class Rules(NamedTuple):
    """How detections become COCO results."""

    paste: str  # see `evaluation.paste`
    inclusive_boxes: bool  # see `evaluation.encode.encode_image`
    has_masks: bool
    has_keypoints: bool
    keypoint_offset: float = 0.0  # see `data.keypoint_offset`

    @classmethod
    def of(cls, recipe: Recipe) -> "Rules":
        """Those of a recipe."""
        data = recipe.data
        has = recipe.model.has_masks, recipe.model.has_keypoints
        return cls(recipe.eval.paste, data.inclusive_boxes, *has, data.keypoint_offset)


def encode(
    images: Iterable[ImageDetections], num_images: int, dataset: Dataset, rules: Rules
) -> Found:
    """Encode and gather the detections of all processes, as `evaluator.detect` returns them.

    Args:
        images: those of this process, read while others are encoded.
        num_images: of all processes.
        rules: how they become results.
    """
    found: tuple[list[dict], list[dict], list] = ([], [], [])  # boxes, masks and ids

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
    alone, points = split(boxes)
    return Found(
        alone,
        masks if rules.has_masks else None,
        points if rules.has_keypoints else None,
        sorted(ids, key=place.__getitem__),
    )
