"""Mask targets for foreground RoIs, by each recipe's rule."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mask_rcnn_jax.models.sampling import MaskRoIs
from mask_rcnn_jax.ops import masks as mask_ops
from mask_rcnn_jax.ops.points import point_targets
from mask_rcnn_jax.ops.polygons import polygon_mask_targets
from mask_rcnn_jax.structures import Targets


@dataclass(frozen=True)
class MaskTargets:
    """Mask targets for foreground RoIs.

    Attributes:
        kind: "crops" samples 112 x 112 ground-truth crops and thresholds them; "soft" averages
            crops without a threshold; "whole" averages whole-image masks (torchvision; needs
            data.mask_frame=image); "polygons" fills polygons by the COCO API's rule, or uses crops
            for objects without polygons (Detectron2, maskrcnn-benchmark; needs data.max_vertices).
        aligned: crop pixels have their centers at +0.5; False reads coordinates as pixel indices.
            Only for "crops" and objects without polygons.
    """

    kind: Literal["crops", "soft", "whole", "polygons"] = "crops"
    aligned: bool = True

    def __call__(
        self,
        targets: Targets,
        rois: MaskRoIs,
        image_sizes: jax.Array,
        *,
        min_size: float,
        size: int = 28,
        implementation: str | None = None,
    ) -> jax.Array:
        """Return targets [N, size, size] in 0..1 for RoIs; those of padding rows are unspecified.

        Args:
            targets: with a B axis.
            rois: N RoIs of these images.
            image_sizes: [B, 2] (height, width).
            min_size: smallest RoI side for `ops.polygons`, pixels.
        """
        targets, matched_idxs = _flat(targets, rois)
        sources = targets.masks, targets.boxes, rois.boxes, matched_idxs
        if self.kind == "soft":
            return mask_ops.soft_mask_targets(*sources, size=size)
        if self.kind == "whole":
            sizes = image_sizes[rois.images]
            return mask_ops.soft_mask_targets(*sources, size=size, image_size=sizes)
        crops = mask_ops.mask_targets(*sources, size=size, aligned=self.aligned)
        if self.kind == "crops":
            return crops
        options: dict[str, Any] = dict(size=size, min_size=min_size, implementation=implementation)
        polygons = targets.polygons, rois.boxes, matched_idxs
        filled, has_polygons = polygon_mask_targets(*polygons, **options)
        return jnp.where(has_polygons[:, None, None], filled, crops)

    def at(self, targets: Targets, rois: MaskRoIs, points: jax.Array) -> jax.Array:
        """Return ground truth [N, P] in 0..1 at points [N, P, 2] in network pixels.

        Of whole-image masks or of crops; those of polygons are drawn as crops, too.
        """
        flat, matched_idxs = _flat(targets, rois)
        boxes = None if self.kind == "whole" else flat.boxes
        return point_targets(flat.masks, boxes, matched_idxs, points)


def _flat(targets: Targets, rois: MaskRoIs) -> tuple[Targets, jax.Array]:
    """All images' targets in one row, and each RoI's place among them."""
    images, instances = targets.valid.shape
    rows = images * instances
    flat = jax.tree.map(lambda x: x.reshape(rows, *x.shape[2:]), targets)
    return flat, rois.images * instances + rois.matched_idxs
