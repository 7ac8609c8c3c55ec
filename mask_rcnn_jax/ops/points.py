"""Maps and masks at single points, bilinear, with zeros outside."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Num

from mask_rcnn_jax.ops.masks import MIN_SIDE


def grid_points(side: int) -> np.ndarray:
    """[side * side, 2] float32: (x, y) of the cells' centers, as fractions of a grid, by rows."""
    at = (np.arange(side, dtype=np.float32) + 0.5) / side
    return np.stack(np.meshgrid(at, at), axis=-1).reshape(-1, 2)


def in_image(points: Float[Array, "*R P 2"], boxes: Float[Array, "*R 4"]) -> Float[Array, "*R P 2"]:
    """Convert points (x, y) from fractions of their boxes to pixels of the image."""
    low, high = boxes[..., None, :2], boxes[..., None, 2:]
    return low + points * (high - low)


def sample_map(
    maps: Num[Array, "B h w C"],
    points: Float[Array, "B1 R P 2"],
    rows: Int[Array, "B1 R"] | None = None,
) -> Num[Array, "B1 R P C"]:
    """Sample feature maps at points (x, y) in cells, whose centers are at +0.5.

    The gradient adds up rows in any order on a GPU.

    rows: index of each R's map, with B1 = 1; None: B1 is B, and points are in the map of their B.
    """
    height, width, channels = maps.shape[1:]
    flat = maps.reshape(len(points), -1, channels)
    total = jnp.zeros((*points.shape[:-1], channels), jnp.float32)
    x, y = jnp.moveaxis(lax.stop_gradient(points) - 0.5, -1, 0)
    for dx, dy in ((0, 0), (1, 0), (0, 1), (1, 1)):
        column, row = jnp.floor(x) + dx, jnp.floor(y) + dy
        weight = (1.0 - jnp.abs(x - column)) * (1.0 - jnp.abs(y - row))
        inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
        weight = jnp.where(inside, weight, 0.0)
        column, row = jnp.clip(column, 0, width - 1), jnp.clip(row, 0, height - 1)
        index = row.astype(jnp.int32) * width + column.astype(jnp.int32)
        if rows is not None:
            index += height * width * rows[..., None]
        index = index.reshape(len(points), -1, 1)
        found = jnp.take_along_axis(flat, index, axis=1, mode="promise_in_bounds")
        total += weight[..., None] * found.reshape(*points.shape[:-1], channels)
    return total.astype(maps.dtype)


def grid_weights(points: Float[Array, "*R P 2"], side: int) -> Float[Array, "*R P S"]:
    """Weights of a grid's side * side cells, by rows, at points (x, y) as fractions of it."""
    at = points * side - 0.5
    cells = jnp.expand_dims(jnp.arange(side, dtype=jnp.float32), range(at.ndim))
    weights = jnp.maximum(1.0 - jnp.abs(at[..., None] - cells), 0.0)
    x, y = weights[..., 0, :], weights[..., 1, :]
    return (y[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], side * side)


def point_targets(
    masks: Num[Array, "G M N"],
    gt_boxes: Float[Array, "G 4"] | None,
    matched_idxs: Int[Array, "R"],
    points: Float[Array, "R P 2"],
) -> Float[Array, "R P"]:
    """Ground truth 0..1 at points in network pixels.

    Args:
        masks: 0..255: crops of objects in their `gt_boxes`, or, without, whole-image masks in
            network pixels.
        matched_idxs: ground-truth row of each R.
    """
    height, width = masks.shape[1:]
    if gt_boxes is not None:
        boxes = gt_boxes[matched_idxs][:, None]
        sides = jnp.maximum(boxes[..., 2:] - boxes[..., :2], MIN_SIDE)
        size = jnp.array([[[width, height]]], jnp.float32)
        points = (points - boxes[..., :2]) * size / sides
    found = sample_map(masks[..., None].astype(jnp.float32), points[None], matched_idxs[None])
    return jnp.clip(found[0, ..., 0] / 255.0, 0.0, 1.0)


def doubled(x: Float[Array, "*R S S"]) -> Float[Array, "*R S2 S2"]:
    """Resize grids to twice their side, bilinear with the edge repeated."""
    side = x.shape[-1]
    at = (np.arange(2 * side) + 0.5) / 2 - 0.5
    cells = np.arange(side)
    weights = np.maximum(1 - np.abs(np.clip(at, 0, side - 1)[:, None] - cells), 0)
    weights = weights.astype(np.float32)
    x = jnp.einsum("ij,...jk->...ik", weights, x, precision="highest")
    return jnp.einsum("ij,...kj->...ki", weights, x, precision="highest")
