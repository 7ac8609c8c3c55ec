"""Mask targets of sampled regions, cut from crops of the ground-truth masks."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

MIN_SIDE = 1e-6  # pixels; keeps an empty ground-truth box from dividing by zero


def mask_targets(
    masks: Num[Array, "G M M"],
    gt_boxes: Float[Array, "G 4"],
    rois: Float[Array, "R 4"],
    matched_idxs: Int[Array, "R"],
    *,
    size: int = 28,
    half_pixel: bool = True,
) -> Float[Array, "R size size"]:
    """Binary target of each region: its object's mask at the centres of size x size bins.

    Args:
        masks: 0..255, each object inside its own box, resampled to M x M.
        gt_boxes: the boxes of those crops, network pixels.
        rois: network pixels; a degenerate one samples a line or a point.
        matched_idxs: ground-truth row of each region.
        half_pixel: crop pixels have their centres at +0.5, which is where the loader samples them.
            False reads coordinates as pixel indices, as NVIDIA's TensorFlow recipes do.

    Bilinear, with zeros outside the crop, then 1 from one half up. Interpolation is separable, so
    it is two small matrix products instead of four gathers.
    """
    crop_side = masks.shape[-1]
    boxes = gt_boxes[matched_idxs]
    shift = 0.5 if half_pixel else 0.0
    along_x = _interpolation(rois[:, 0::2], boxes[:, 0::2], size, crop_side, shift)
    along_y = _interpolation(rois[:, 1::2], boxes[:, 1::2], size, crop_side, shift)
    crops = masks[matched_idxs].astype(jnp.float32)
    sampled = jnp.einsum("rpy,ryx,rqx->rpq", along_y, crops, along_x, precision="highest")
    return (sampled >= 127.5).astype(jnp.float32)


def _interpolation(
    roi: Float[Array, "R 2"], box: Float[Array, "R 2"], size: int, crop_side: int, shift: float
) -> Float[Array, "R size M"]:
    """Bilinear weights of the crop's pixels at the bin centres, along one axis (start, end)."""
    bins = jnp.asarray((np.arange(size) + 0.5) / size, jnp.float32)[None]
    place = roi[:, :1] + bins * (roi[:, 1:] - roi[:, :1])  # [R, size] network pixels
    scale = crop_side / jnp.maximum(box[:, 1:] - box[:, :1], MIN_SIDE)
    at = (place - box[:, :1]) * scale - shift
    pixels = jnp.arange(crop_side, dtype=jnp.float32)
    return jnp.maximum(1.0 - jnp.abs(at[:, :, None] - pixels[None, None, :]), 0.0)
