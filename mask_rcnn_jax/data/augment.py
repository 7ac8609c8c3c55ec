"""Augmentation on the host: a function of one example and its random numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mask_rcnn_jax.data.dataset import (
    Annotation,
    Dataset,
    annotation_fault,
    image_name,
    is_boxes_only,
)


@dataclass(frozen=True)
class Example:
    """An image and its objects, in original pixels, before it is resized."""

    image: np.ndarray  # uint8 [H, W, 3], RGB; a copy, which may be written to
    objects: tuple[Annotation, ...]  # crowds included; must not be written to


# `augment(example, rng)` returns a new example:
#   * the image may have another size; it is resized afterwards as any other image is;
#   * image and objects must agree: replace every object that moved by its `with_mask` or
#     `with_polygons`, which recompute box and area too;
#   * an object that is left out is dropped; one without any pixel left must be left out;
#   * all random numbers must come from `rng`. It depends on the seed, the image and how often the
#     image has been drawn, not on processes, workers or the step that a run was resumed at.
Augment = Callable[[Example, np.random.Generator], Example]


def augmented(
    augment: Augment, seed: tuple[int, ...], dataset: Dataset, index: int, example: Example
) -> Example:
    """Apply an augmentation to the example of image `index` and check its result.

    Raises:
        ValueError: the augmentation failed, or its result cannot be trained on.
    """
    where, rng = image_name(dataset, index), np.random.default_rng(seed)
    try:
        result = augment(Example(example.image.copy(), example.objects), rng)
    except Exception as error:  # of somebody else's code
        raise ValueError(f"{where}: augment failed: {type(error).__name__}: {error}") from error
    if fault := _fault(result, len(dataset.class_names), is_boxes_only(dataset)):
        raise ValueError(f"{where}: augment returned {fault}")
    return result


def _fault(example: Any, num_classes: int, boxes_only: bool) -> str | None:
    if not isinstance(example, Example):
        return f"{type(example).__name__}, expected an Example"
    image = example.image
    if not is_image(image):
        found = f"{getattr(image, 'dtype', type(image).__name__)} {np.shape(image)}"
        return f"an image of {found}, expected uint8 [H, W, 3]"
    if not isinstance(example.objects, tuple | list):
        return f"objects of type {type(example.objects).__name__}, expected a tuple"
    height, width, _ = image.shape
    for number, annotation in enumerate(example.objects):
        size = height, width
        fault = annotation_fault(annotation, *size, num_classes, boxes_only=boxes_only)
        if fault:
            return f"object {number}: {fault}"
    return None


def is_image(value: Any) -> bool:
    """Whether a value is an RGB image: uint8 [H, W, 3], not empty."""
    return (
        isinstance(value, np.ndarray)
        and value.dtype == np.uint8
        and value.ndim == 3
        and value.shape[2] == 3
        and value.size > 0
    )
