"""How many objects training examples hold once augmentation has cut, shifted and pasted."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mask_rcnn_jax.data.affine import Affine, transform
from mask_rcnn_jax.data.augment import Kind
from mask_rcnn_jax.data.copy_paste import CopyPaste
from mask_rcnn_jax.data.geometry import Geometry, HorizontalFlip, QuarterTurns, VerticalFlip

DRAWS = 400  # examples that are drawn to count
KEEPS_ALL = (HorizontalFlip, VerticalFlip, QuarterTurns)
MIN_SIDE = 0.5  # pixels of a box on the canvas; of what is narrower, no pixel may be left


class ImageBoxes(NamedTuple):
    """Boxes of the objects in I images."""

    sizes: np.ndarray  # [I, 2] (height, width)
    bounds: np.ndarray  # [I + 1], the rows of image k are k to k + 1 of it
    boxes: np.ndarray  # [N, 4] (x1, y1, x2, y2), pixels of the image


def changes_counts(kinds: Sequence[Kind]) -> bool:
    """Check whether a kind may change the number of objects; functions of users are unknown."""
    return any(
        isinstance(kind, CopyPaste)
        or (isinstance(kind, Geometry) and not isinstance(kind, KEEPS_ALL))
        for kind in kinds
    )


def drawn_counts(found: ImageBoxes, kinds: Sequence[Kind], seed: int = 0) -> np.ndarray:
    """Draw examples and count their objects, [DRAWS] int64; [0] without images.

    Images come equally often. An object counts if its box reaches the canvas; what a pasted one
    covers counts, too.
    """
    rng, images = np.random.default_rng(seed), len(found.sizes)
    if not images:
        return np.zeros(0, np.int64)
    rounds = [rng.permutation(images) for _ in range(-(-DRAWS // images))]
    chosen = np.concatenate(rounds)[:DRAWS].tolist()
    return np.array([len(_draw(found, index, kinds, rng)) for index in chosen], np.int64)


def _draw(
    found: ImageBoxes, index: int, kinds: Sequence[Kind], rng: np.random.Generator
) -> np.ndarray:
    """The boxes [n, 4] of an example."""
    boxes = found.boxes[found.bounds[index] : found.bounds[index + 1]].astype(np.float64)
    height, width = found.sizes[index].tolist()
    size = (height, width)
    for number, kind in enumerate(kinds):
        if isinstance(kind, Geometry):
            affine = kind.affine(rng, size)
            boxes, size = _mapped(boxes, affine), affine.size
        elif isinstance(kind, CopyPaste) and rng.random() < kind.probability:
            other = _draw(found, int(rng.integers(len(found.sizes))), kinds[:number], rng)
            pasted = np.unique(rng.integers(len(other), size=len(other))) if len(other) else []
            boxes = np.concatenate([boxes, other[pasted]])
    return boxes


def _mapped(boxes: np.ndarray, affine: Affine) -> np.ndarray:
    """The boxes around mapped ones, those that reach the canvas."""
    corners = transform(affine.matrix, boxes[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 2))
    corners = corners.clip(0, affine.size[::-1]).reshape(-1, 4, 2)
    mapped = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)
    return mapped[(mapped[:, 2:] - mapped[:, :2] >= MIN_SIDE).all(axis=1)]
