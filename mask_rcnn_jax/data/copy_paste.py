"""Copy objects of one image into another (Ghiasi et al., 2021)."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from mask_rcnn_jax import opencv as cv2
from mask_rcnn_jax.annotations.segmentation import segmentation_box, segmentation_to_mask
from mask_rcnn_jax.data.affine import scaling
from mask_rcnn_jax.data.clip import shifted
from mask_rcnn_jax.data.dataset import Annotation
from mask_rcnn_jax.data.example import Example
from mask_rcnn_jax.ranges import Probability, Ranged
from mask_rcnn_jax.rle import encode_window

BLEND = np.ones((5, 5), np.uint8)


@dataclass(frozen=True)
class CopyPaste(Ranged):
    """Paste objects of a second image, which goes through the kinds before this one as well.

    Of n objects, n are drawn with replacement, so that about 63% are pasted. Crowds and objects
    without a mask in the image are not. Visible keypoints that they cover become hidden ones.

    Attributes:
        probability: probability for an image.
        blend: paste two pixels around the objects, too, as torchvision does.
        boxes: boxes for covered objects: "edges" are tight; in torchvision, x2 and y2 are the last
            "pixels", and all objects of the first image are recomputed so.
            With "pixels", run-length masks are also resized as in torchvision.
    """

    probability: Probability = 1.0
    blend: bool = True
    boxes: Literal["edges", "pixels"] = "edges"

    def paste(self, base: Example, source: Example, rng: np.random.Generator) -> Example:
        """Return `base` with objects of `source`; both are read."""
        if source.size != base.size:
            affine = scaling(source.size, base.size)
            source = source.then(affine._replace(torch_masks=self.boxes == "pixels")).read()
        height, width = base.size
        candidates = [one for one in source.objects if one.segmentation and not one.iscrowd]
        if not candidates:
            return base
        drawn = np.unique(rng.integers(len(candidates), size=len(candidates)))
        pasted, covered = [], np.zeros((height, width), np.uint8)
        for annotation in (candidates[i] for i in drawn):
            mask, (x, y) = _crop(annotation, base.size)
            if mask.any():
                covered[y : y + mask.shape[0], x : x + mask.shape[1]] |= mask
                pasted.append(annotation)
        if self.blend:
            cv2.dilate(covered, BLEND, covered)
        image = base.image.copy()
        cv2.copyTo(source.image, covered, image)
        left = [self._uncovered(annotation, covered) for annotation in base.objects]
        objects = (*(one for one in left if one is not None), *pasted)
        return Example(image, objects, mirror=base.mirror)

    def _uncovered(self, annotation: Annotation, covered: np.ndarray) -> Annotation | None:
        """Return the object where it is not covered, or None if nothing is left to learn from."""
        annotation = _with_hidden_keypoints(annotation, covered)
        if not annotation.segmentation:
            return annotation
        mask, (x, y) = _crop(annotation, covered.shape)
        hidden = mask & covered[y : y + mask.shape[0], x : x + mask.shape[1]]
        if self.boxes == "edges" and not hidden.any():
            return annotation
        mask = mask - hidden
        rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
        if not rows.size:
            return None
        last = 0 if self.boxes == "pixels" else 1
        ends = [columns[0], rows[0], columns[-1] + last, rows[-1] + last]
        box = np.array(ends, np.float32) + (x, y, x, y)
        if (box[2:] <= box[:2]).any():
            return None
        left = encode_window(mask, (x, y), *covered.shape)
        return replace(annotation, box=box, segmentation=left, area=float(np.count_nonzero(mask)))


def _with_hidden_keypoints(annotation: Annotation, covered: np.ndarray) -> Annotation:
    """Visible keypoints that are covered become hidden ones, which are learned from as well."""
    points = annotation.keypoints
    if points is None:
        return annotation
    x, y = np.clip(points[:, :2].astype(int), 0, np.array(covered.shape[::-1]) - 1).T
    hidden = (points[:, 2] == 2) & (covered[y, x] > 0)
    return annotation.with_keypoints(points - np.outer(hidden, (0, 0, 1)))


def _crop(annotation: Annotation, size: tuple[int, int]) -> tuple[np.ndarray, tuple[int, int]]:
    """Return an object's mask in a window around it, uint8, and the window's (x, y).

    The mask of an object beyond the border has no pixel.
    """
    segmentation = annotation.segmentation
    x, y, width, height = segmentation_box(segmentation, *size)
    x1, y1 = max(0, math.floor(x) - 1), max(0, math.floor(y) - 1)
    x2, y2 = min(size[1], math.ceil(x + width) + 1), min(size[0], math.ceil(y + height) + 1)
    if x2 <= x1 or y2 <= y1:
        return np.zeros((0, 0), np.uint8), (0, 0)
    if isinstance(segmentation, dict):
        return annotation.mask(*size)[y1:y2, x1:x2], (x1, y1)
    parts = [shifted(part, (x1, y1)).reshape(-1) for part in segmentation]
    return segmentation_to_mask(parts, y2 - y1, x2 - x1), (x1, y1)
