"""Mirror images and their objects inside jit."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from mask_rcnn_jax.ops import boxes as box_ops
from mask_rcnn_jax.structures import Batch


def random_flip(
    batch: Batch,
    keys: jax.Array,
    probability: float,
    *,
    box_offset: float = 0.0,
    whole_masks: bool = False,
    keypoint_mirror: tuple[int, ...] = (),
) -> Batch:
    """Mirror each image left to right with that probability, inside its own width.

    box_offset: 1 where boxes are inclusive. Polygons then go to W - 1 - x with them, a pixel beside
    their places in the mirror image, as in maskrcnn-benchmark; keypoints, as places, to W - x.
    whole_masks: masks are of the image, not of the box. keypoint_mirror:
    `annotations.keypoints.mirror_places` of the keypoints.
    """

    def one(image, size, targets, key):
        flip = jax.random.bernoulli(key, probability)
        columns = jnp.arange(image.shape[1])
        source = jnp.where(flip, mirrored(columns, size[1]), columns)
        image = jnp.take(image, source, axis=1)
        whole_width = size[1].astype(jnp.float32)
        width = whole_width - box_offset
        flips = flip & targets.valid[:, None]
        boxes = jnp.where(flips, box_ops.flip(targets.boxes, width), targets.boxes)
        if whole_masks:
            masks = jnp.take(targets.masks, source, axis=2)
        else:
            masks = jnp.where(flip, targets.masks[..., ::-1], targets.masks)
        x, y, part = (targets.polygons[..., i] for i in range(3))
        polygons = jnp.stack([jnp.where(flip & (part >= 0), width - x, x), y, part], axis=-1)
        targets = targets.replace(boxes=boxes, masks=masks, polygons=polygons)
        if targets.keypoints is not None:
            points = _mirrored_keypoints(targets.keypoints, whole_width, keypoint_mirror)
            targets = targets.replace(keypoints=jnp.where(flip, points, targets.keypoints))
        return image, targets

    images, targets = jax.vmap(one)(batch.images, batch.image_sizes, batch.targets, keys)
    return replace(batch, images=images, targets=targets)


def _mirrored_keypoints(
    keypoints: jax.Array, width: jax.Array, mirror: tuple[int, ...]
) -> jax.Array:
    """Keypoints [G, P, 3] of the mirror image; those that are not labeled stay zero."""
    x, y, v = jnp.moveaxis(keypoints[:, np.array(mirror, int)], -1, 0)
    return jnp.stack([jnp.where(v > 0, width - x, 0), y, v], axis=-1)


def mirrored(columns: jax.Array, width: jax.Array) -> jax.Array:
    """Columns [W] of the mirror image of an image that is `width` pixels wide."""
    return jnp.where(columns < width, width - 1 - columns, columns)
