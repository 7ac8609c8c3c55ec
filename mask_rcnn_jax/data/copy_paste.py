"""Copy objects of one image into another (Ghiasi et al., 2021)."""

from dataclasses import dataclass, replace
from typing import Literal

import cv2
import numpy as np

from mask_rcnn_jax.data.affine import scaling
from mask_rcnn_jax.data.dataset import Annotation
from mask_rcnn_jax.data.example import Example
from mask_rcnn_jax.data.geometry import check_probability

BLEND = np.ones((5, 5), np.uint8)


@dataclass(frozen=True)
class CopyPaste:
    """Paste objects of a second image, which goes through the kinds before this one as well.

    Of n objects, n are drawn with replacement, so that about 63% are pasted. Crowds and objects
    without a mask are not.

    Attributes:
        probability: probability for an image.
        blend: paste two pixels around the objects, too, as torchvision does.
        boxes: boxes for covered objects: "edges" are tight; in torchvision, x2 and y2 are the last
            "pixels", and all objects of the first image are recomputed so.
    """

    probability: float = 1.0
    blend: bool = True
    boxes: Literal["edges", "pixels"] = "edges"

    def __post_init__(self):
        check_probability(self.probability)

    def paste(self, base: Example, source: Example, rng: np.random.Generator) -> Example:
        """Return `base` with objects of `source`; both are read."""
        if source.size != base.size:
            source = source.then(scaling(source.size, base.size)).read()
        height, width = base.size
        candidates = [one for one in source.objects if one.segmentation and not one.iscrowd]
        if not candidates:
            return base
        drawn = np.unique(rng.integers(len(candidates), size=len(candidates)))
        pasted = [candidates[i] for i in drawn]
        masks = [annotation.mask(height, width) for annotation in pasted]
        covered = np.bitwise_or.reduce(masks)
        if self.blend:
            covered = cv2.dilate(covered, BLEND)
        image = base.image.copy()
        cv2.copyTo(source.image, covered, image)
        left = [self._uncovered(annotation, covered) for annotation in base.objects]
        return Example(image, (*(one for one in left if one is not None), *pasted))

    def _uncovered(self, annotation: Annotation, covered: np.ndarray) -> Annotation | None:
        """Return the object where it is not covered, or None if nothing is left to learn from."""
        if not annotation.segmentation:
            return annotation
        mask = annotation.mask(*covered.shape)
        hidden = mask & covered
        if self.boxes == "edges" and not hidden.any():
            return annotation
        mask -= hidden
        if not mask.any():
            return None
        annotation = annotation.with_mask(mask)
        if self.boxes == "edges":
            return annotation
        box = annotation.box - np.array([0, 0, 1, 1], np.float32)
        return None if (box[2:] <= box[:2]).any() else replace(annotation, box=box)
