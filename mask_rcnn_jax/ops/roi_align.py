"""RoIAlign over a feature pyramid (He et al. 2017), as a weighted sum of gathered rows.

All levels are laid out in one table of pixels, [B * sum(H_l * W_l), C]. Every output cell is a
weighted sum of rows of that table: bilinear interpolation gives 2 taps an axis for each of the S
sample points, so 2S x 2S taps a cell, and the weights are products of one factor per axis.
The taps are walked one at a time: no intermediate is larger than the output and the table.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from mask_rcnn_jax.ops import boxes as box_ops

MIN_LEVEL = 2  # features[0] is P2


def assign_levels(
    boxes: Float[Array, "*dims 4"],
    *,
    min_level: int = MIN_LEVEL,
    max_level: int,
    canonical_size: float = 224.0,
    canonical_level: int = 4,
) -> Int[Array, "*dims"]:
    """Pyramid level of each box: floor(log2(sqrt(area) / 224)) + 4, within the levels there are.

    Counts the level boundaries that the area has reached, which is the same number without the
    rounding of a logarithm and without log(0) for an empty box (that goes to `min_level`).
    """
    area = box_ops.area(boxes)
    level = jnp.full(area.shape, min_level, jnp.int32)
    for boundary in range(min_level + 1, max_level + 1):
        side = canonical_size * 2.0 ** (boundary - canonical_level)
        level += (area >= side * side).astype(jnp.int32)
    return level


def roi_align(
    features: Sequence[Float[Array, "B _H _W C"]],
    boxes: Float[Array, "B N 4"],
    *,
    output_size: int,
    strides: Sequence[int],
    sampling: int = 1,
    half_pixel: bool = False,
    border: str = "clamp",
    min_size: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B N P P C"]:
    """Features of each box at P x P cells, from the level that fits its size.

    Args:
        features: maps from P2 upward, NHWC; `strides` holds pixels per cell of each.
        boxes: network pixels. A padded (all-zero) row gives the features of the top left corner.
        output_size: P.
        sampling: S; a cell is the mean of S x S bilinear samples.
        half_pixel: subtract half a cell before sampling, which is right for pixel centres at +0.5
            (Detectron2 "aligned"); NVIDIA and torchvision do not.
        border: "clamp" moves samples to the nearest cell of the map (NVIDIA TF); "zero" makes
            samples further than one cell outside count 0 (torchvision, Detectron2).
        min_size: smallest side of a box in cells, or None for no limit; torchvision has 1 unless
            `half_pixel`.
        implementation: "xla" or None for the code below.

    Weights and sums are float32, the result has the features' dtype. Gradients flow to the
    features only, never to the boxes.
    """
    _check_settings(len(features), strides, sampling, border, implementation)
    boxes = lax.stop_gradient(boxes)
    batch, num = boxes.shape[:2]
    channels = features[0].shape[-1]
    boxes = boxes.reshape(-1, 4)

    # Where each box's map lies in the table: first row, height, width.
    level = assign_levels(boxes, max_level=MIN_LEVEL + len(features) - 1) - MIN_LEVEL
    sizes = np.array([f.shape[1:3] for f in features], np.int32)
    first = batch * np.concatenate([[0], np.cumsum(sizes.prod(axis=1))[:-1]])
    heights, widths = (jnp.asarray(side)[level] for side in sizes.T)
    image = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), num, total_repeat_length=batch * num)
    origin = jnp.asarray(first.astype(np.int32))[level] + image * heights * widths
    table = jnp.concatenate([f.reshape(-1, channels) for f in features])

    cells = boxes / jnp.asarray(strides, jnp.float32)[level][:, None]
    axis = (output_size, sampling, 0.5 if half_pixel else 0.0, border == "zero", min_size)
    y_taps, y_weights = _axis_taps(cells[:, 1], cells[:, 3], heights, *axis)
    x_taps, x_weights = _axis_taps(cells[:, 0], cells[:, 2], widths, *axis)
    y_taps = origin[:, None, None] + y_taps * widths[:, None, None]
    pooled = _gather_sum(table, y_taps, x_taps, y_weights, x_weights)
    return pooled.reshape(batch, num, output_size, output_size, channels)


def _check_settings(
    num_maps: int, strides: Sequence[int], sampling: int, border: str, implementation: str | None
) -> None:
    if implementation == "pallas":
        raise NotImplementedError("roi_align: implementation='pallas' is not in this build")
    if implementation not in (None, "xla"):
        raise ValueError(f"implementation is {implementation!r}, expected None, 'xla' or 'pallas'")
    if border not in ("clamp", "zero"):
        raise ValueError(f"border is {border!r}, expected 'clamp' or 'zero'")
    if sampling < 1:
        raise ValueError(f"sampling is {sampling}, expected at least 1 point per cell and axis")
    if len(strides) != num_maps:
        raise ValueError(f"{len(strides)} strides for {num_maps} feature maps, expected one each")


def _axis_taps(
    start: Float[Array, "R"],
    end: Float[Array, "R"],
    side: Int[Array, "R"],
    output_size: int,
    sampling: int,
    shift: float,
    zero_outside: bool,
    min_size: float | None,
) -> tuple[Int[Array, "R P T"], Float[Array, "R P T"]]:
    """Indices along one axis of the map and their weights, T = 2 * sampling taps a cell."""
    length = end - start if min_size is None else jnp.maximum(end - start, min_size)
    places = (np.arange(output_size * sampling) + 0.5) / sampling  # of the samples, in bins
    bin_size = (length / output_size)[:, None]
    at = (start - shift)[:, None] + jnp.asarray(places, jnp.float32)[None] * bin_size
    side = side[:, None]
    weight = jnp.full(at.shape, 1.0 / sampling)
    if zero_outside:
        weight = jnp.where((at < -1.0) | (at > side), 0.0, weight)
    at = jnp.clip(at, 0.0, (side - 1).astype(jnp.float32))
    # Clipped again as an integer: a NaN box of a diverged run must not index outside the table.
    low = jnp.clip(jnp.floor(at).astype(jnp.int32), 0, side - 1)
    high = jnp.minimum(low + 1, side - 1)
    fraction = at - low
    taps = jnp.stack([low, high], axis=-1)
    weights = jnp.stack([weight * (1.0 - fraction), weight * fraction], axis=-1)
    shape = (start.shape[0], output_size, 2 * sampling)
    return taps.reshape(shape), weights.reshape(shape)


@jax.custom_vjp
def _gather_sum(
    table: Float[Array, "pixels C"],
    y_taps: Int[Array, "R P T"],
    x_taps: Int[Array, "R P T"],
    y_weights: Float[Array, "R P T"],
    x_weights: Float[Array, "R P T"],
) -> Float[Array, "R P P C"]:
    """out[r, p, q] = sum over taps of weight * table[y_tap + x_tap]."""
    side, total = y_taps.shape[-1], 0.0
    for tap in range(side * side):
        rows, weights = _tap(tap, y_taps, x_taps, y_weights, x_weights)
        picked = table.at[rows].get(mode="promise_in_bounds").astype(jnp.float32)
        total += picked * weights[..., None]
    return total.astype(table.dtype)


def _tap(tap, y_taps, x_taps, y_weights, x_weights):
    """Table rows [R, P, P] and weights [R, P, P] of one of the T * T taps of every cell."""
    i, j = divmod(tap, y_taps.shape[-1])
    rows = y_taps[:, :, None, i] + x_taps[:, None, :, j]
    return rows, y_weights[:, :, None, i] * x_weights[:, None, :, j]


def _gather_sum_fwd(table, *taps):
    # Backward needs the table's length and dtype only: a table without channels carries both.
    return _gather_sum(table, *taps), (table[:, :0], taps)


def _gather_sum_bwd(saved, grad):
    """Adds the taps' shares into one float32 table; automatic differentiation would make one each.

    A loop of the program, not of Python, so that only one tap's share is in memory at a time.
    """
    empty_table, taps = saved

    def add_tap(tap, total):
        rows, weights = _tap(tap, *taps)
        share = grad.astype(jnp.float32) * weights[..., None]
        return total.at[rows].add(share, mode="promise_in_bounds")

    total = jnp.zeros((empty_table.shape[0], grad.shape[-1]), jnp.float32)
    total = lax.fori_loop(0, taps[0].shape[-1] ** 2, add_tap, total)
    return total.astype(empty_table.dtype), None, None, None, None


_gather_sum.defvjp(_gather_sum_fwd, _gather_sum_bwd)
