"""Select the mask targets of RoIs by a recipe's rule."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from mask_rcnn_jax.ops import masks as mask_ops
from mask_rcnn_jax.ops.polygons import polygon_mask_targets
from mask_rcnn_jax.structures import Targets


@dataclass(frozen=True)
class MaskTargets:
    """Mask targets of foreground RoIs, 28 x 28.

    Attributes:
        kind: "crops" samples 112 x 112 crops of the ground truth and thresholds them; "soft"
            averages crops without a threshold; "whole" averages masks of the whole image
            (torchvision; needs data.mask_frame=image); "polygons" draws polygons by the COCO API's
            rule, and takes crops where an object has none (Detectron2, maskrcnn-benchmark; needs
            data.max_vertices).
        aligned: crop pixels have their centers at +0.5; False reads coordinates as pixel indices.
            Of "crops" alone.
    """

    kind: Literal["crops", "soft", "whole", "polygons"] = "crops"
    aligned: bool = True

    def __call__(
        self,
        targets: Targets,
        rois: jax.Array,
        matched_idxs: jax.Array,
        image_size: jax.Array,
        *,
        min_size: float,
        implementation: str | None = None,
    ) -> jax.Array:
        """[F, 28, 28] targets in 0..1 of one image's foreground RoIs [F, 4].

        matched_idxs: [F] ground-truth rows. min_size: smallest side that `ops.polygons` assumes.
        """
        sources = targets.masks, targets.boxes, rois, matched_idxs
        if self.kind == "soft":
            return mask_ops.soft_mask_targets(*sources)
        if self.kind == "whole":
            return mask_ops.soft_mask_targets(*sources, image_size=image_size)
        crops = mask_ops.mask_targets(*sources, aligned=self.aligned)
        if self.kind == "crops":
            return crops
        drawn, is_drawn = polygon_mask_targets(
            targets.polygons,
            rois,
            matched_idxs,
            min_size=min_size,
            implementation=implementation,
        )
        return jnp.where(is_drawn[:, None, None], drawn, crops)
