"""RoIAlign over a feature pyramid (He et al. 2017), as a weighted sum of gathered rows.

Each level is a pixel table, [B * H_l * W_l, C], with rows numbered on from the level before it, and
each output cell is a weighted sum of rows. Bilinear interpolation takes 2 taps per axis for each of
S sample points, so 2S x 2S taps per cell, whose weights are products of one factor per axis. With
adaptive S, neighboring samples are at most one cell apart, so the taps along an axis are at most S
+ 1 adjacent cells. Taps are visited one at a time: no intermediate is larger than the output and
the tables. This is the definition; the kernel in `pallas_kernels` computes the same sum on GPUs
that support it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from mask_rcnn_jax.ops import boxes as box_ops
from mask_rcnn_jax.ops import dispatch, roi_align_windows
from mask_rcnn_jax.ops.bilinear import adaptive_samples, mean_bilinear_weights
from mask_rcnn_jax.ops.extent import STRIDES
from mask_rcnn_jax.ops.whole import quotient
from mask_rcnn_jax.platforms import by_platform
from mask_rcnn_jax.ranges import Count, NotNegative, Range, Ranged, Whole

MIN_LEVEL = 2  # features[0] is P2
FEW_TAPS = 16  # of a cell: with no more, XLA's code takes 0.9 to 1.0 of the kernel's time
MAX_UNROLLED = 8  # taps per axis; more run in a device loop over the used ones


def assign_levels(
    boxes: Float[Array, "*dims 4"], *, max_level: int, offset: float = 0.0
) -> Int[Array, "*dims"]:
    """Return each box's pyramid level: floor(log2(sqrt(area) / 224)) + 4, clamped to the range.

    Counts the level boundaries reached by the area, which gives the same number without a rounded
    logarithm and without log(0) for empty boxes (these get `MIN_LEVEL`).
    `offset`: 1 for areas with inclusive pixels (width = x2 - x1 + 1).
    """
    area = box_ops.area(boxes, offset=offset)
    level = jnp.full(area.shape, MIN_LEVEL, jnp.int32)
    for boundary in range(MIN_LEVEL + 1, max_level + 1):
        side = 224.0 * 2.0 ** (boundary - 4)
        level += (area >= side * side).astype(jnp.int32)
    return level


@dataclass(frozen=True)
class RoIAlign(Ranged):
    """Sampling parameters of `roi_align`.

    Attributes:
        max_level: coarsest map to read, 2 to the last of `model.anchors.sizes`; the finest is P2.
        sampling_ratio: S; an output cell averages S x S bilinear samples. 0 adapts S to each box
            and axis: ceil(map cells per output cell), as torchvision and Detectron2 do. A box
            without extent along an axis has no samples there and gives 0.
        max_sampling_ratio: adaptive sampling is exact up to this S. An output cell needing more
            averages max_sampling_ratio + 1 evenly spaced points per axis, each read from the
            nearest map cell. Costs up to (max_sampling_ratio + 1)^2 taps.
        aligned: subtract half a cell before sampling, for pixel centers at +0.5 (Detectron2).
        border: "clamp" moves samples to the nearest map cell (NVIDIA's TensorFlow examples); "zero"
            gives 0 for samples more than one cell outside (torchvision, Detectron2).
        min_size: smallest box side in cells; 0 for no limit. torchvision uses 1 unless `aligned`.
    """

    max_level: Annotated[int, Range("2 to 7", lambda level: 2 <= level <= 7)] = 5
    sampling_ratio: Whole = 2
    max_sampling_ratio: Count = 8
    aligned: bool = False
    border: Literal["clamp", "zero"] = "zero"
    min_size: NotNegative = 1.0


@dispatch.named
def roi_align(
    features: Sequence[Float[Array, "B _H _W C"]],
    boxes: Float[Array, "G N 4"],
    options: RoIAlign,
    *,
    output_size: int | tuple[int, int],
    level_offset: float = 0.0,
    extent: Int[Array, "2"] | None = None,
    of_rows: tuple[Int[Array, "G N"], Bool[Array, "G N"]] | None = None,
    implementation: str | None = None,
) -> Float[Array, "G N P Q C"]:
    """Pool each box to P x Q cells from the pyramid level matching its size.

    Args:
        features: NHWC maps from P2 upward; maps above `options.max_level` are not read.
        boxes: network pixels, in G groups. A padded (all-zero) row gives the features at the top
            left corner, or zeros with adaptive sampling and no `min_size`.
        output_size: P and Q, or one number for both.
        level_offset: `offset` for `assign_levels`.
        extent: (height, width) in pixels if the maps are larger than their valid area: only the
            first ceil(extent / stride) rows and columns are valid. None: whole maps.
        of_rows: image of each box, and which boxes to pool; others give zeros and cost the gradient
            nothing on a GPU. None: there is a group for each image, and all are pooled.
        implementation: see `dispatch.choose`.

    Returns:
        [G, N, P, Q, C] in the features' dtype; weights and sums are float32. Gradients flow to the
        features only, never to the boxes.

    Raises:
        NotImplementedError: "pallas" is not supported; the message gives the reason.
        ValueError: there is no group for each image and no `of_rows`.
    """
    features = features[: options.max_level - MIN_LEVEL + 1]
    batch, (groups, num), channels = len(features[0]), boxes.shape[:2], features[0].shape[-1]
    if of_rows is None and groups != batch:
        raise ValueError(f"{groups} groups of boxes for {batch} images, expected one for each")
    images, valid = of_rows or (None, None)
    boxes = lax.stop_gradient(boxes).reshape(-1, 4)
    level = assign_levels(boxes, max_level=MIN_LEVEL + len(features) - 1, offset=level_offset)
    level -= MIN_LEVEL
    sizes = np.array([f.shape[1:3] for f in features], np.int32)
    origin, heights, widths = _places(sizes, level, batch, images)
    tables = [f.reshape(-1, channels) for f in features]
    rows, columns = heights, widths
    strides = STRIDES[: len(features)]
    if extent is not None:
        sides = jnp.asarray(strides, jnp.int32)[:, None]
        cells = quotient(extent[None, :] + (sides - 1), sides)  # [levels, 2]
        rows, columns = jnp.clip(cells, 1, jnp.asarray(sizes))[level].T
    cells = boxes / jnp.asarray(strides, jnp.float32)[level][:, None]
    p, q = (output_size, output_size) if isinstance(output_size, int) else output_size
    axis_taps = _axis_taps if options.sampling_ratio else _adaptive_taps
    y_taps, y_weights = axis_taps(cells[:, 1], cells[:, 3], rows, p, options)
    x_taps, x_weights = axis_taps(cells[:, 0], cells[:, 2], columns, q, options)
    y_taps = origin[:, None, None] + y_taps * widths[:, None, None]
    if valid is not None:
        y_weights = jnp.where(valid.reshape(-1, 1, 1), y_weights, 0.0)
    pooled = gather_sum(implementation, tables, y_taps, x_taps, y_weights, x_weights)
    return pooled.reshape(groups, num, p, q, channels)


def _places(
    sizes: np.ndarray, level: Int[Array, "R"], batch: int, images: Int[Array, "G N"] | None
) -> tuple[Int[Array, "R"], Int[Array, "R"], Int[Array, "R"]]:
    """Return where each box's map is in the tables: first row, height and width.

    sizes: (height, width) of each level's maps.
    """
    first = batch * np.concatenate([[0], np.cumsum(sizes.prod(axis=1))[:-1]])
    heights, widths = (jnp.asarray(side)[level] for side in sizes.T)
    if images is None:
        each, total = len(level) // batch, len(level)
        images = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), each, total_repeat_length=total)
    origin = jnp.asarray(first.astype(np.int32))[level] + images.reshape(-1) * heights * widths
    return origin, heights, widths


def _axis_taps(
    start: Float[Array, "R"],
    end: Float[Array, "R"],
    side: Int[Array, "R"],
    output_size: int,
    options: RoIAlign,
) -> tuple[Int[Array, "R P T"], Float[Array, "R P T"]]:
    """Tap indices and weights along one map axis; T = 2 * sampling_ratio taps per output cell."""
    sampling = options.sampling_ratio
    length = _lengths(start, end, options)
    samples = (np.arange(output_size * sampling) + 0.5) / sampling  # positions in bins
    bin_size = (length / output_size)[:, None]
    at = (start - _shift(options))[:, None] + jnp.asarray(samples, jnp.float32)[None] * bin_size
    side = side[:, None]
    weight = jnp.full(at.shape, 1.0 / sampling)
    if options.border == "zero":
        weight = jnp.where((at < -1.0) | (at > side), 0.0, weight)
    at = jnp.clip(at, 0.0, (side - 1).astype(jnp.float32))
    # Clip again as integers: NaN boxes of a diverged run must not index outside the tables.
    low = jnp.clip(jnp.floor(at).astype(jnp.int32), 0, side - 1)
    high = jnp.minimum(low + 1, side - 1)
    fraction = at - low
    taps = jnp.stack([low, high], axis=-1)
    weights = jnp.stack([weight * (1.0 - fraction), weight * fraction], axis=-1)
    shape = (start.shape[0], output_size, 2 * sampling)
    return taps.reshape(shape), weights.reshape(shape)


def _adaptive_taps(
    start: Float[Array, "R"],
    end: Float[Array, "R"],
    side: Int[Array, "R"],
    output_size: int,
    options: RoIAlign,
) -> tuple[Int[Array, "R P T"], Float[Array, "R P T"]]:
    """`_axis_taps` with ceil(cells per bin) samples; T = max_sampling_ratio + 1."""
    max_samples = options.max_sampling_ratio
    start, end = start - _shift(options), end - _shift(options)
    length = _lengths(start, end, options)
    first, step, count = adaptive_samples(start, length, output_size)
    side, tap = side[:, None, None], jnp.arange(max_samples + 1)[None, None, :]
    limit = (side - 1).astype(jnp.float32)

    # Exact: consecutive cells, starting at the first sample's.
    low = jnp.clip(jnp.floor(jnp.clip(first, 0.0, limit)).astype(jnp.int32), 0, side - 1) + tap
    cell = low.astype(jnp.float32)
    weights = mean_bilinear_weights(cell, first, step, count, side, border=options.border)

    # Too many samples: fewer points with the same center and spread.
    bin_start, bin_size = first - 0.5 * step, count * step
    spread = bin_start + (tap + 0.5) / (max_samples + 1) * bin_size
    nearest = jnp.floor(jnp.clip(spread, 0.0, limit) + 0.5).astype(jnp.int32)
    even = jnp.full(spread.shape, 1.0 / (max_samples + 1))
    if options.border == "zero":
        even = jnp.where((spread < -1.0) | (spread > side), 0.0, even)

    taps = jnp.clip(jnp.where(count > max_samples, nearest, low), 0, side - 1)
    return taps, jnp.where(count > max_samples, even, weights)


def _shift(options: RoIAlign) -> float:
    return 0.5 if options.aligned else 0.0


def _lengths(
    start: Float[Array, "R"], end: Float[Array, "R"], options: RoIAlign
) -> Float[Array, "R"]:
    length = end - start
    return jnp.maximum(length, options.min_size) if options.min_size else length


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_sum(
    implementation: str | None,
    tables: Sequence[Float[Array, "_pixels C"]],
    y_taps: Int[Array, "R P T"],
    x_taps: Int[Array, "R Q U"],
    y_weights: Float[Array, "R P T"],
    x_weights: Float[Array, "R Q U"],
) -> Float[Array, "R P Q C"]:
    """out[r, p, q] = sum over taps of weight * table[y_tap + x_tap], each r from one table."""
    if implementation is None and y_taps.shape[-1] * x_taps.shape[-1] <= FEW_TAPS:
        forms: Any = dict(tpu=roi_align_windows.gather_sum, default=xla_gather_sum)
        return by_platform(tables, y_taps, x_taps, y_weights, x_weights, **forms)

    def load_kernel():
        from pallas_kernels import roi_align as kernels

        channels, dtype = tables[0].shape[1], tables[0].dtype
        return kernels.unsupported(channels, dtype), kernels.gather_sum

    choices: Any = {"xla": xla_gather_sum, "tpu": roi_align_windows.gather_sum}
    run = dispatch.choose("gather_sum", implementation, **choices, load_kernel=load_kernel)
    return run(tables, y_taps, x_taps, y_weights, x_weights)


def _gather_sum_fwd(implementation, tables, *taps):
    # Backward only needs the tables' lengths; save them as tables without channels.
    return gather_sum(implementation, tables, *taps), ([table[:, :0] for table in tables], taps)


def _gather_sum_bwd(implementation, saved, grad):
    empty_tables, taps = saved
    sizes = [len(table) for table in empty_tables]
    table = gather_sum_transpose(implementation, grad, sum(sizes), *taps)
    # One array: the sum of a map's gradients reads its part where it is.
    return lax.split(table, sizes), None, None, None, None


gather_sum.defvjp(_gather_sum_fwd, _gather_sum_bwd)


def gather_sum_transpose(
    implementation: str | None, grad: Float[Array, "R P Q C"], num_rows: int, *taps: Array
) -> Float[Array, "pixels C"]:
    """Return the gradient of all tables of `gather_sum`, joined; `taps` are those given to it."""

    def load_kernel():
        from pallas_kernels import roi_align as kernels

        reason = kernels.unsupported(grad.shape[-1], grad.dtype)
        return reason, partial(kernels.gather_sum_transpose, num_rows=num_rows)

    xla, tpu = xla_gather_sum_transpose, roi_align_windows.gather_sum_transpose
    forms = {"xla": partial(xla, num_rows=num_rows), "tpu": partial(tpu, num_rows=num_rows)}
    run = dispatch.choose("gather_sum", implementation, **forms, load_kernel=load_kernel)
    return run(grad, *taps)


def xla_gather_sum(
    tables: Sequence[Float[Array, "_pixels C"]], *taps: Array
) -> Float[Array, "R P Q C"]:
    """Compute `gather_sum`; `taps` are its remaining arguments."""
    y_taps, x_taps, y_weights, _ = taps
    table = jnp.concatenate(tables)

    def add_row(i, total):
        for j in range(x_taps.shape[-1]):
            rows, weights = _tap(i, j, *taps)
            picked = table.at[rows].get(mode="promise_in_bounds").astype(jnp.float32)
            total += picked * weights[..., None]
        return total

    if y_taps.shape[-1] <= MAX_UNROLLED:
        total: Any = 0.0
        for i in range(y_taps.shape[-1]):
            total = add_row(i, total)
    else:
        shape = (y_taps.shape[0], y_taps.shape[1], x_taps.shape[1], table.shape[1])
        total = lax.fori_loop(0, _num_used(y_weights), add_row, jnp.zeros(shape, jnp.float32))
    return total.astype(table.dtype)


def _tap(i, j, y_taps, x_taps, y_weights, x_weights):
    """Table rows and weights, [R, P, Q] each, for tap (i, j) of every output cell."""
    rows = y_taps[:, :, None, i] + x_taps[:, None, :, j]
    return rows, y_weights[:, :, None, i] * x_weights[:, None, :, j]


def _num_used(weights: Float[Array, "R P T"]) -> int | Int[Array, ""]:
    """Leading taps up to the last one with a nonzero weight in any cell."""
    num = weights.shape[-1]
    if num <= MAX_UNROLLED:
        return num
    return jnp.max(jnp.where(weights != 0.0, jnp.arange(1, num + 1)[None, None, :], 0))


def xla_gather_sum_transpose(
    grad: Float[Array, "R P Q C"], *taps: Array, num_rows: int
) -> Float[Array, "pixels C"]:
    """Scatter-add all taps into one float32 array; autodiff would allocate one for each tap.

    Uses a device loop, so that only one tap's contribution is in memory at a time.
    """
    used_y, used_x = _num_used(taps[2]), _num_used(taps[3])

    def add_tap(tap, total):
        rows, weights = _tap(*divmod(tap, used_x), *taps)
        update = grad.astype(jnp.float32) * weights[..., None]
        return total.at[rows].add(update, mode="promise_in_bounds")

    total = jnp.zeros((num_rows, grad.shape[-1]), jnp.float32)
    return lax.fori_loop(0, used_y * used_x, add_tap, total).astype(grad.dtype)
