"""Sample RoIs for second-stage training."""

from dataclasses import dataclass
from typing import Annotated, no_type_check

import jax
import jax.numpy as jnp
from flax import struct

from mask_rcnn_jax.ops import boxes as box_ops
from mask_rcnn_jax.ops import matching
from mask_rcnn_jax.ops.boxes import BoxCoder
from mask_rcnn_jax.ops.whole import quotient
from mask_rcnn_jax.ranges import FROM_0_TO_1, Count, Fraction, Ranged, Whole, numbers
from mask_rcnn_jax.structures import Proposals, Targets

_POINTS = 0x504F494E  # sets the keys of RoIs apart from others of their image


@no_type_check  # `jax.tree.map` may put anything into its fields
@struct.dataclass
class SampledRoIs:
    """RoIs sampled from one image for training; foreground rows come first."""

    boxes: jax.Array  # [R, 4]
    classes: jax.Array  # [R] int32, 0 for background
    deltas: jax.Array  # [R, 4] regression targets; zero unless foreground
    matched_idxs: jax.Array  # [R] int32 ground-truth row
    foreground: jax.Array  # [R] bool
    valid: jax.Array  # [R] bool


@no_type_check  # `jax.tree.map` may put anything into its fields
@struct.dataclass
class MaskRoIs:
    """Foreground RoIs of all images on a device, for the mask head; padding rows come last."""

    boxes: jax.Array  # [N, 4]; zero in padding rows
    classes: jax.Array  # [N] int32, 0 in padding rows
    images: jax.Array  # [N] int32 image of the batch, ascending
    matched_idxs: jax.Array  # [N] int32 ground-truth row of that image
    foreground: jax.Array  # [N] bool; the others are padding

    def keys(self, of_images: jax.Array | None, images: int) -> jax.Array:
        """Return a random key [N] per RoI, a function of its image's key and its rank there.

        of_images: [B]; None: always the same.
        """
        if of_images is None:
            of_images = jax.random.split(jax.random.key(0), images)
        rank = jnp.arange(len(self.images)) - jnp.searchsorted(
            self.images, self.images, method="compare_all"
        )
        own = jax.vmap(jax.random.fold_in, (0, None))(of_images, _POINTS)
        return jax.vmap(jax.random.fold_in)(own[self.images], rank)


IouRange = Annotated[tuple[float, float], numbers("two numbers from 0 to 1", FROM_0_TO_1.allows)]


@dataclass(frozen=True)
class RoISampling(Ranged):
    """RoI sampling (Girshick, "Fast R-CNN", 2015, section 2.3).

    Attributes:
        batch_size_per_image: RoIs sampled per image.
        positive_fraction: largest foreground share among them.
        fg_iou_thresh: RoIs with at least this IoU are foreground.
        fg_strict: foreground needs an IoU above `fg_iou_thresh` (NVIDIA's TensorFlow examples).
        bg_iou_range: background IoU, from the first value to below the second.
        mask_rois_per_image: the mask head trains on at most this many foreground RoIs per image, on
            average over the images that a device takes at a time: those with the largest boxes. 0:
            on all. The time of the mask head on a GPU follows it. Multiples of 16 suit all devices.
    """

    batch_size_per_image: Count = 512
    positive_fraction: Fraction = 0.25
    fg_iou_thresh: Fraction = 0.5
    fg_strict: bool = False
    bg_iou_range: IouRange = (0.0, 0.5)
    mask_rois_per_image: Whole = 0

    @property
    def max_foreground(self) -> int:
        """Maximum foreground RoIs per image; they come first in `SampledRoIs`."""
        return round(self.batch_size_per_image * self.positive_fraction)

    def mask_rois(
        self, rois: SampledRoIs, *, limit: bool = True
    ) -> tuple[MaskRoIs, jax.Array | None]:
        """Select the mask head's RoIs from those of a device's images, with a B axis.

        limit: keep `mask_rois_per_image`; otherwise all.

        Returns:
            The RoIs, and how many are dropped per image; None if none can be.
        """
        images, most = len(rois.boxes), self.max_foreground
        foreground = jax.tree.map(lambda x: x[:, :most], rois)  # they come first
        if not (limit and 0 < self.mask_rois_per_image < most):
            return pack_foreground(foreground, images * most), None
        packed = pack_foreground(foreground, images * self.mask_rois_per_image)
        return packed, (jnp.sum(rois.foreground) - jnp.sum(packed.foreground)) / images

    def __call__(
        self, key: jax.Array | None, proposals: Proposals, targets: Targets, *, coder: BoxCoder
    ) -> SampledRoIs:
        """Sample one image's RoIs from its proposals and ground-truth boxes.

        key: None samples the lowest rows.
        """
        candidates = jnp.concatenate([proposals.boxes, targets.boxes])
        matched_idxs, labels = matching.match_rois(
            coder.iou(candidates, targets.boxes),
            targets.valid,
            jnp.concatenate([proposals.valid, targets.valid]),
            fg_thresh=self.fg_iou_thresh,
            bg_thresh=self.bg_iou_range[1],
            bg_thresh_low=self.bg_iou_range[0],
            strict=self.fg_strict,
        )
        idxs, labels, valid = matching.sample(
            key, labels, num=self.batch_size_per_image, fg_fraction=self.positive_fraction
        )
        foreground = valid & (labels == 1)
        boxes = jnp.where(valid[:, None], candidates[idxs], 0.0)
        matched_idxs = matched_idxs[idxs]
        deltas = coder.encode_rois(targets.boxes[matched_idxs], boxes)
        return SampledRoIs(
            boxes=boxes,
            classes=jnp.where(foreground, targets.classes[matched_idxs], 0),
            deltas=jnp.where(foreground[:, None], deltas, 0.0),
            matched_idxs=matched_idxs,
            foreground=foreground,
            valid=valid,
        )


def pack_foreground(rois: SampledRoIs, count: int) -> MaskRoIs:
    """Move the foreground RoIs of all images to the front of `count` rows, in their order.

    If there are more, those with the largest boxes are kept, and of equal ones the first.

    Args:
        rois: with a B axis.
        count: rows to return, at most B * R.
    """
    batch, slots = rois.foreground.shape
    flat = jax.tree.map(lambda x: x.reshape(batch * slots, *x.shape[2:]), rois)
    end = batch * slots
    kept = flat.foreground
    if count < end:
        # Ranks and places by comparing all with all: a GPU sorts so few in more launches.
        areas = jnp.where(kept, box_ops.area(flat.boxes), -1.0)
        index = jnp.arange(end)
        is_before = (areas[None] == areas[:, None]) & (index[None] < index[:, None])
        ranks = jnp.sum((areas[None] > areas[:, None]) | is_before, axis=1)
        kept &= ranks < count
    # Row i has the RoI with which the number of those kept reaches i + 1.
    rows = jnp.searchsorted(jnp.cumsum(kept), jnp.arange(1, count + 1), method="compare_all")
    foreground = rows < end
    rows = jnp.minimum(rows, end - 1)
    return MaskRoIs(
        boxes=jnp.where(foreground[:, None], flat.boxes[rows], 0.0),
        classes=jnp.where(foreground, flat.classes[rows], 0),
        images=quotient(rows, max(slots, 1)),
        matched_idxs=flat.matched_idxs[rows],
        foreground=foreground,
    )
