"""Keypoints as heatmaps over RoIs (He et al., "Mask R-CNN", 2017, section 5): targets and loss, and
points from heatmaps as torchvision and detectron2 read them.

A heatmap of S x S cells lies on a box; a point belongs to the cell that it is in.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from mask_rcnn_jax.ops.dispatch import named
from mask_rcnn_jax.platforms import by_platform

TAPS = 4  # cells per axis that a bicubic value depends on
CUBIC = -0.75  # the kernel's coefficient, torch's
CANDIDATES = 64  # patches of a heatmap in which its maximum is looked for at a time
BOXES_AT_ONCE = 8  # of an image, whose pixels are in memory at a time
BOXES_AT_ONCE_CUDA = 100  # each turn of a loop has 25 launches


def keypoint_targets(
    keypoints: Float[Array, "R P 3"], rois: Float[Array, "R 4"], *, size: int
) -> tuple[Int[Array, "R P"], Bool[Array, "R P"]]:
    """Return the cell of each keypoint, row by row from 0, and whether it counts.

    Those count that are labeled, visible or hidden, and lie inside the RoI, its right and lower
    edges included, whose points are in the last cell. A RoI without area has none.

    Args:
        keypoints: x, y in network pixels and COCO's visibility, 0 for not labeled.
        rois: network pixels.
        size: cells per side.
    """
    counts = keypoints[..., 2] > 0
    cells = []
    for axis in (0, 1):
        start, end = rois[:, axis, None], rois[:, axis + 2, None]
        at = keypoints[..., axis]
        side = end - start
        cell = jnp.floor((at - start) * (size / jnp.where(side > 0, side, 1.0)))
        cell = jnp.where(at == end, size - 1, cell)
        counts &= (side > 0) & (cell >= 0) & (cell < size)
        cells.append(jnp.clip(cell, 0, size - 1).astype(jnp.int32))
    x, y = cells
    return jnp.where(counts, y * size + x, 0), counts


def keypoint_loss(
    logits: Float[Array, "R P S S"],
    cells: Int[Array, "R P"],
    counts: Bool[Array, "R P"],
    divisor: float | Float[Array, ""] | None = None,
) -> Float[Array, ""]:
    """Sum the softmax cross-entropy over all cells of a heatmap, for keypoints that count.

    divisor: of the sum; None: how many count, or 1.
    """
    flat = logits.reshape(*cells.shape, -1).astype(jnp.float32)
    is_cell = jnp.arange(flat.shape[-1])[None, None] == cells[..., None]
    error = jax.nn.logsumexp(flat, axis=-1) - jnp.sum(jnp.where(is_cell, flat, 0.0), axis=-1)
    total = jnp.sum(jnp.where(counts, error, 0.0))
    return total / (jnp.maximum(jnp.sum(counts), 1) if divisor is None else divisor)


def double(x: Float[Array, "*dims S S"]) -> Float[Array, "*dims S2 S2"]:
    """Resize maps to twice their side, bilinear, with pixel centers at +0.5 and repeated edges."""
    for axis in (-2, -1):
        x = jnp.moveaxis(x, axis, -1)
        before = jnp.concatenate([x[..., :1], x[..., :-1]], axis=-1)
        after = jnp.concatenate([x[..., 1:], x[..., -1:]], axis=-1)
        pairs = jnp.stack([0.25 * before + 0.75 * x, 0.75 * x + 0.25 * after], axis=-1)
        x = jnp.moveaxis(pairs.reshape(*x.shape[:-1], -1), -1, axis)
    return x


def heatmaps_to_points(
    heatmaps: Float[Array, "D P S S"], boxes: Float[Array, "D 4"], *, longest: int
) -> tuple[Float[Array, "D P 2"], Float[Array, "D P"]]:
    """Return the points (x, y) of the heatmaps' maxima in network pixels, and the values there.

    A heatmap is resized by bicubic interpolation to its box in pixels, sides rounded up; the point
    is the center of the pixel with the largest value, the first of equal ones.

    The boxes' sides differ and shapes here do not, so no heatmap is resized as a whole. Between
    four neighboring cells the interpolation is one bicubic polynomial, whose Bezier control points
    bound it from above. The pixels of `CANDIDATES` patches at a time are computed, those with the
    highest bounds first, until no other bound is above the largest of them: mostly once. A program
    in ONNX looks once.

    Args:
        boxes: network pixels.
        longest: no box is longer, pixels.
    """
    one = partial(_point, longest=longest)

    def in_turns(heatmaps, boxes, count=BOXES_AT_ONCE):
        return lax.map(lambda row: one(*row), (heatmaps, boxes), batch_size=count)

    all_at_once = partial(in_turns, count=BOXES_AT_ONCE_CUDA)
    return by_platform(heatmaps, boxes, cuda=all_at_once, default=in_turns)


def _point(
    maps: Float[Array, "P S S"], box: Float[Array, "4"], *, longest: int
) -> tuple[Float[Array, "P 2"], Float[Array, "P"]]:
    """Return the points of one box."""
    size = maps.shape[-1]
    sides = jnp.maximum(box[2:] - box[:2], 1.0)  # (width, height)
    pixels = jnp.ceil(sides)
    firsts = [_first_pixels(pixels[axis], size, longest) for axis in (0, 1)]
    padded = jnp.pad(maps, ((0, 0), (2, 2), (2, 2)), mode="edge")
    flat = _bounds(padded, firsts, size / pixels).reshape(len(maps), -1)
    numbers, count = jnp.arange(flat.shape[-1]), min(CANDIDATES, flat.shape[-1] - 1)

    def look(bounds: jax.Array, best: jax.Array, first: jax.Array) -> tuple[jax.Array, ...]:
        """Look at the patches of the highest bounds; return what is the highest of the others."""
        highest, chosen = lax.top_k(bounds, count + 1)
        value, index = _best_pixels(padded, chosen[:, :-1], firsts, pixels, longest)
        sooner = (value > best) | ((value == best) & (index < first))
        first = jnp.where(sooner, index, first)
        return bounds, chosen[:, :-1], highest[:, -1], jnp.maximum(best, value), first

    def look_again(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        bounds, seen, _, best, first = state
        is_seen = jnp.any(seen[:, None] == numbers[None, :, None], axis=-1)
        return look(jnp.where(is_seen, -jnp.inf, bounds), best, first)

    nowhere = jnp.full(len(maps), longest * longest, jnp.int32)
    start = look(flat, jnp.full(len(maps), -jnp.inf), nowhere)
    *_, best, first = until_highest(look_again, start)
    width = pixels[0].astype(jnp.int32)
    place = jnp.stack([first % width, first // width], axis=-1)
    return (place + 0.5) * (sides / pixels)[None] + box[None, :2], best


@named
def until_highest(look_again: Callable, start: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Look again until no bound of a patch not yet seen is above the largest value."""
    return lax.while_loop(lambda state: jnp.any(state[2] > state[3]), look_again, start)


def _best_pixels(
    padded: Float[Array, "P S4 S4"],
    chosen: Int[Array, "P C"],
    firsts: Sequence[Int[Array, "S2"]],
    pixels: Float[Array, "2"],
    longest: int,
) -> tuple[Float[Array, "P"], Int[Array, "P"]]:
    """Return the largest value in the chosen patches, and its pixel's number, row by row from 0."""
    size = padded.shape[-1] - TAPS
    patches = chosen % (size + 1), chosen // (size + 1)  # along x, along y

    def along(axis: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Pixels [P, C, n] of the patches, whether they are there, and weights [P, C, n, 4]."""
        patch, first = patches[axis], firsts[axis]
        index = first[patch][..., None] + jnp.arange(-(-longest // size) + 1)[None, None]
        weights = _cubic_weights(index, patch[..., None], size / pixels[axis])
        return index, index < first[patch + 1][..., None], weights

    (columns, in_x, along_x), (rows, in_y, along_y) = along(0), along(1)
    taps, across = jnp.arange(TAPS), padded.shape[-1]
    places = (patches[1][..., None, None] + taps[None, None, :, None]) * across
    places += patches[0][..., None, None] + taps[None, None, None]  # [P, C, 4, 4]
    lists = padded.reshape(len(padded), -1), places.reshape(len(padded), -1)
    cells = jnp.take_along_axis(lists[0], lists[1], axis=1, mode="promise_in_bounds")
    cells = cells.reshape(places.shape)
    # Along x first, as torch does.
    lines = _interpolated(cells[..., None, :, :], along_x[..., None, :])  # [P, C, n, 4]
    values = _interpolated(lines[..., None, :, :], along_y[..., :, None, :])  # [P, C, n, n]
    values = jnp.where(in_y[..., :, None] & in_x[..., None, :], values, -jnp.inf)
    best = jnp.max(values, axis=(1, 2, 3))
    width = pixels[0].astype(jnp.int32)
    index = rows[..., :, None] * width + columns[..., None, :]
    is_best = values == best[:, None, None, None]
    return best, jnp.min(jnp.where(is_best, index, longest * longest), axis=(1, 2, 3))


def _interpolated(
    cells: Float[Array, "*#dims 4"], weights: Float[Array, "*#dims 4"]
) -> Float[Array, "..."]:
    """Sum the weighted cells term by term: four are no work for a matrix product."""
    first, *others = (cells[..., i] * weights[..., i] for i in range(TAPS))
    return sum(others, first)


def _first_pixels(pixels: Float[Array, ""], size: int, longest: int) -> Int[Array, "S2"]:
    """Return the first pixel of each patch along an axis, and at the end how many pixels there are.

    Patch i is between the centers of cells i - 1 and i, of `size` cells; pixels: along the axis.
    """
    index = jnp.arange(longest)
    patch = jnp.floor((index + 0.5) * (size / pixels) - 0.5) + 1
    is_there = index < pixels
    before = is_there[None] & (patch[None] < jnp.arange(size + 2)[:, None])
    return jnp.sum(before, axis=1, dtype=jnp.int32)


def _cubic_weights(
    index: Int[Array, "*dims"], patch: Int[Array, "*#dims"], scale: Float[Array, ""]
) -> Float[Array, "*dims 4"]:
    """Return torch's bicubic weights of a patch's four cells for pixels of it along an axis.

    scale: cells per pixel.
    """
    t = (index + 0.5) * scale - 0.5 - (patch - 1)  # 0..1 between the inner two

    def inner(x):
        return ((CUBIC + 2) * x - (CUBIC + 3)) * x * x + 1

    def outer(x):
        return ((CUBIC * x - 5 * CUBIC) * x + 8 * CUBIC) * x - 4 * CUBIC

    return jnp.stack([outer(t + 1), inner(t), inner(1 - t), outer(2 - t)], axis=-1)


def _bounds(
    padded: Float[Array, "P S4 S4"], firsts: Sequence[Int[Array, "S2"]], scales: Float[Array, "2"]
) -> Float[Array, "P S1 S1"]:
    """Return an upper bound for the pixels of each patch, by row and column; -inf without any.

    It is the largest value itself where a patch has at most `TAPS` pixels along both axes.
    """
    columns = _extremes(padded, firsts[0], scales[0])  # [P, S4, S1, 4]
    both = _extremes(jnp.moveaxis(columns, 1, -1), firsts[1], scales[1])  # [P, S1, 4, S1, 4]
    bounds = jnp.swapaxes(jnp.max(both, axis=(2, 4)), 1, 2)
    x, y = (first[1:] > first[:-1] for first in firsts)
    return jnp.where((y[:, None] & x[None])[None], bounds, -jnp.inf)


def _extremes(
    x: Float[Array, "*dims S4"], first: Int[Array, "S2"], scale: Float[Array, ""]
) -> Float[Array, "*dims S1 4"]:
    """Return four numbers for each patch along the last axis, none of whose pixels is above the
    largest: its pixels, the last of them repeated, or control points where there are more."""
    counts = first[1:] - first[:-1]
    at = first[:-1, None] + jnp.minimum(jnp.arange(TAPS)[None], jnp.maximum(counts - 1, 0)[:, None])
    weights = _cubic_weights(at, jnp.arange(len(counts))[:, None], scale)  # [S1, 4, 4]
    weights, counts = (jnp.expand_dims(y, range(x.ndim - 1)) for y in (weights, counts[:, None]))
    cells = jnp.stack([x[..., i : i + weights.shape[-3]] for i in range(TAPS)], axis=-1)
    values = _interpolated(cells[..., None, :], weights)
    return jnp.where(counts <= TAPS, values, _control_points(x))


def _control_points(x: Float[Array, "*dims S4"]) -> Float[Array, "*dims S1 4"]:
    """Return the control points of the cubic between neighbors; x has two more on either side."""
    third = (-CUBIC / 3) * (x[..., 2:] - x[..., :-2])  # of the slopes
    left, right = x[..., 1:-2], x[..., 2:-1]
    return jnp.stack([left, left + third[..., :-1], right - third[..., 1:], right], axis=-1)
