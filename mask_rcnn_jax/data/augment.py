"""Augmentation on the host: a list of kinds and functions, applied to an example in turn."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mask_rcnn_jax.data.affine import Affine
from mask_rcnn_jax.data.copy_paste import CopyPaste
from mask_rcnn_jax.data.dataset import Dataset, annotation_fault, image_name, is_boxes_only
from mask_rcnn_jax.data.example import Example
from mask_rcnn_jax.data.geometry import Geometry

# `augment(example, rng)` returns a new example:
#   * the image is [H, W, C], uint8 or float32 in 0..255, and stays so; it may have another size: it
#     is resized afterwards as any other image is;
#   * image and objects must agree: replace every object that moved by its `with_mask` or
#     `with_polygons`, which recompute box and area too, then by its `with_keypoints` if it has any;
#   * an object that is left out is dropped; one without any pixel left must be left out;
#   * all random numbers must come from `rng`. It depends on the seed, the image and its place in
#     the order of training, not on processes, workers or the step that a run was resumed at.
Augment = Callable[[Example, np.random.Generator], Example]
Kind = Geometry | CopyPaste | Augment
# Draws a second image, for `CopyPaste`; None if it cannot be read.
Partner = Callable[[np.random.Generator], Example | None]


def augmented(
    augment: Kind | Sequence[Kind],
    seed: tuple[int, ...],
    dataset: Dataset,
    index: int,
    example: Example,
    partner: Partner | None = None,
) -> Example:
    """Apply one or several augmentations to the example of image `index`.

    Affine maps at the end of a list are left pending.

    Raises:
        ValueError: a kind failed, or its result cannot be trained on.
    """
    fault = partial(_fault, len(dataset.class_names), is_boxes_only(dataset))
    try:
        return _apply(as_kinds(augment), example, np.random.default_rng(seed), partner, fault)
    except _Failed as error:  # the name of an image costs a record
        where = image_name(dataset, index)
        raise ValueError(f"{where}: augment {error}") from error.__cause__


def read_pending(
    example: Example,
    dataset: Dataset,
    index: int,
    last: Affine | None = None,
    out: np.ndarray | None = None,
) -> Example:
    """Apply the maps that `augmented` left pending, and a `last` one, to image `index`.

    Args:
        out: a canvas for the image, if a map is pending.

    Raises:
        ValueError: a map failed.
    """
    try:
        return (example if last is None else example.then(last)).read(out)
    except Exception as error:
        failure = f"failed: {type(error).__name__}: {error}"
        raise ValueError(f"{image_name(dataset, index)}: augment {failure}") from error


def as_kinds(augment: Kind | Sequence[Kind] | None) -> tuple[Kind, ...]:
    """Return one, several or no augmentations as a tuple."""
    if augment is None:
        return ()
    return tuple(augment) if isinstance(augment, Sequence) else (augment,)


def _apply(
    kinds: Sequence[Kind],
    example: Example,
    rng: np.random.Generator,
    partner: Partner | None,
    fault: Callable[[Any, Example], str | None],
) -> Example:
    fill = None  # the first one is that of all padding, whether or not an image is read in between
    for number, kind in enumerate(kinds):
        if isinstance(kind, Geometry):
            affine = _affine(kind, rng, example.size)
            fill = affine.fill if fill is None else fill
            example = _call(example.then, affine._replace(fill=fill))
        elif isinstance(kind, CopyPaste):
            source = partner(rng) if partner and rng.random() < kind.probability else None
            if source is not None:
                source = _apply(kinds[:number], source, rng, partner, fault)
                example = _call(kind.paste, _call(example.read), _call(source.read), rng)
        else:
            before = _call(example.read)
            given = Example(before.image.copy(), before.objects, mirror=before.mirror)
            example = _call(kind, given, rng)
            if found := fault(example, before):
                raise _Failed(f"returned {found}")
            example = replace(example, mirror=before.mirror)
    return example


class _Failed(Exception):
    """A kind failed or returned what cannot be trained on; the message says so of "augment"."""


def _affine(kind: Geometry, rng: np.random.Generator, size: tuple[int, int]) -> Affine:
    affine = _call(kind.affine, rng, size)
    if not isinstance(affine, Affine):
        raise _Failed(f"returned {type(affine).__name__}, expected an Affine")
    return affine


def _call(function: Callable, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        raise _Failed(f"failed: {type(error).__name__}: {error}") from error


def _fault(num_classes: int, boxes_only: bool, example: Any, before: Example) -> str | None:
    if not isinstance(example, Example):
        return f"{type(example).__name__}, expected an Example"
    image = example.image
    given = before.image
    if not is_image(image, given.shape[2]) or image.dtype != given.dtype:
        found = f"{getattr(image, 'dtype', type(image).__name__)} {np.shape(image)}"
        return f"an image of {found}, expected {given.dtype} [H, W, {given.shape[2]}]"
    if not isinstance(example.objects, tuple | list):
        return f"objects of type {type(example.objects).__name__}, expected a tuple"
    height, width, _ = image.shape
    same = {id(annotation) for annotation in before.objects if image.shape == before.image.shape}
    for number, annotation in enumerate(example.objects):
        if id(annotation) in same:
            continue
        size = height, width
        fault = annotation_fault(annotation, *size, num_classes, boxes_only=boxes_only)
        if not fault and before.mirror:
            fault = _keypoints_fault(annotation.keypoints, len(before.mirror))
        if fault:
            return f"object {number}: {fault}"
    return None


def _keypoints_fault(points: np.ndarray | None, count: int) -> str | None:
    if points is None:
        return "no keypoints, expected those of its `with_keypoints`"
    return None if len(points) == count else f"{len(points)} keypoints, expected {count}"


def is_image(value: Any, bands: int) -> bool:
    """Whether a value is an image: [H, W, bands], uint8 or float32, not empty."""
    return (
        isinstance(value, np.ndarray)
        and value.dtype in (np.uint8, np.float32)
        and value.ndim == 3
        and value.shape[2] == bands
        and value.size > 0
    )
