"""Rasterize polygons into mask targets with pycocotools' fill rule.

pycocotools refines the grid five times, walks each edge along its longer axis in refined pixels,
rounding the other coordinate, and records in each grid column the height where the walk crosses the
middle of the column. All pixels below that height toggle between outside and inside. Here that
height is one integer division per edge and column instead of a walk, and a short loop over bit
words combines each polygon's edges.
This is the definition; the kernel in `pallas_kernels` fills the same pixels.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from mask_rcnn_jax.ops import dispatch

REFINE = 5  # refined pixels per pixel; odd, so that a column has a middle one
# Clip refined coordinates here: 32-bit integers hold 4 * LIMIT^2. For size 28 this is 143 RoI sides
# away from the RoI.
LIMIT = 20000
WORD = 32  # column rows per integer
UNROLLED = 16  # edges per loop step


def polygon_mask_targets(
    polygons: Float[Array, "G V 3"],
    rois: Float[Array, "R 4"],
    matched_idxs: Int[Array, "R"],
    *,
    size: int = 28,
    min_size: float = 0.1,
    implementation: str | None = None,
) -> tuple[Float[Array, "R size size"], Bool[Array, "R"]]:
    """Fill each RoI's object polygons on size x size pixels.

    Fills the same pixels as pycocotools (up to float32 rounding) for polygons within 143 RoI sides
    if `size` is 28; vertices further away are moved to that distance.

    Args:
        polygons: (x, y, part) per vertex, network pixels. `part` counts an object's polygons from
            0; vertices in a part are consecutive, and its last one connects to its first. -1 marks
            padding, anywhere. A pixel is 1 inside any part.
        rois: network pixels.
        matched_idxs: ground-truth row of each RoI.
        size: pixels per side.
        min_size: smallest width and height assumed for a RoI, in pixels: 0.1 in Detectron2, 1 in
            maskrcnn-benchmark and NVIDIA's PyTorch code. None of them adds a pixel to the width.
        implementation: "xla", "pallas" for the GPU kernel, or None for the kernel in programs
            compiled for an NVIDIA GPU, where supported.

    Returns:
        Targets, 0 or 1, and whether each RoI's object has vertices; targets are 0 if not.

    Raises:
        NotImplementedError: "pallas" is not supported; the message gives the reason.
    """

    def load_kernel():
        from pallas_kernels import mask_targets as kernels

        return kernels.unsupported(size), partial(kernels.fill_polygons, size=size)

    xla = partial(xla_fill_polygons, size=size)
    fill = dispatch.choose("fill_polygons", implementation, xla=xla, load_kernel=load_kernel)
    starts, ends, begins = _edges(lax.stop_gradient(polygons))
    used = polygons[..., 2] >= 0
    rois = lax.stop_gradient(rois)
    sides = jnp.maximum(rois[:, 2:] - rois[:, :2], min_size)

    def refined(points):
        """Convert [G, V, 2] in network pixels to refined RoI pixels [R, V, 2]."""
        points = points[matched_idxs] - rois[:, None, :2]
        points = points * (REFINE * size / sides)[:, None] + 0.5
        # Truncates toward zero, as a C cast does.
        return jnp.clip(points, -LIMIT, LIMIT).astype(jnp.int32)

    edges = jnp.concatenate([refined(starts), refined(ends)], axis=-1)
    targets = fill(edges, begins[matched_idxs], used[matched_idxs])
    return targets, jnp.any(used, axis=1)[matched_idxs]


def xla_fill_polygons(
    edges: Int[Array, "R V 4"], begins: Bool[Array, "R V"], used: Bool[Array, "R V"], *, size: int
) -> Float[Array, "R size size"]:
    """Set the pixels inside any part; edges are (x1, y1, x2, y2) in refined pixels."""
    edges, begins, used = (jnp.moveaxis(x, 1, 0) for x in (edges, begins, used))
    words = _rows_below(_first_rows(edges[..., :2], edges[..., 2:], size), size)
    words = jnp.where(used[:, :, None, None], words, jnp.uint32(0))

    def add_edge(carry, edge):
        """`part` has the rows inside the current part, `union` those inside earlier parts."""
        (union, part), (word, begins) = carry, edge
        union = jnp.where(begins, union | part, union)
        return (union, jnp.where(begins, word, part ^ word)), None

    outside = jnp.zeros(words.shape[1:], jnp.uint32)
    with_words = (words, begins[:, :, None, None])
    (union, part), _ = lax.scan(add_edge, (outside, outside), with_words, unroll=UNROLLED)
    inside = union | part  # [R, words, columns]
    bits = (inside[:, :, None, :] >> jnp.arange(WORD, dtype=jnp.uint32)[None, None, :, None]) & 1
    return bits.astype(jnp.float32).reshape(edges.shape[1], -1, size)[:, :size]


def _edges(
    polygons: Float[Array, "G V 3"],
) -> tuple[Float[Array, "G V 2"], Float[Array, "G V 2"], Bool[Array, "G V"]]:
    """Start and end of the edge leaving each vertex, and whether it is its part's first edge."""
    points, part = polygons[..., :2], polygons[..., 2]
    last = part.shape[1] - 1
    index = jnp.broadcast_to(jnp.arange(last + 1)[None], part.shape)
    begins = (index == 0) | (part != jnp.roll(part, 1, axis=1))
    closes = (index == last) | (part != jnp.roll(part, -1, axis=1))
    first = lax.cummax(jnp.where(begins, index, 0), axis=1)
    following = jnp.where(closes, first, index + 1)
    ends = jnp.take_along_axis(points, following[..., None], axis=1)
    return points, ends, begins


def _rows_below(first_row: Int[Array, "V R size"], size: int) -> UInt[Array, "V R words size"]:
    """Set the bits of all rows from `first_row` down."""
    word = jnp.arange(-(-size // WORD))[None, None, :, None]
    above = jnp.clip(first_row[:, :, None, :] - WORD * word, 0, WORD).astype(jnp.uint32)
    ones = jnp.uint32(0xFFFFFFFF)
    return jnp.where(above == WORD, jnp.uint32(0), ones << jnp.minimum(above, WORD - 1))


def _first_rows(
    start: Int[Array, "V R 2"], end: Int[Array, "V R 2"], size: int
) -> Int[Array, "V R size"]:
    """First row below each edge in each column; `size` if the edge does not cross the column.

    An edge crosses a column's middle between refined pixel `left` and its right neighbor; the
    crossing height is the smaller one.
    """
    left = REFINE * jnp.arange(size)[None, None, :] + REFINE // 2
    (x1, y1), (x2, y2) = (jnp.moveaxis(ends, -1, 0)[..., None] for ends in (start, end))
    width, height = jnp.abs(x2 - x1), jnp.abs(y2 - y1)
    wide = width >= height
    # Walk right along a wide edge, down along a tall one.
    swap = jnp.where(wide, x1 > x2, y1 > y2)
    x1, x2 = jnp.where(swap, x2, x1), jnp.where(swap, x1, x2)
    y1, y2 = jnp.where(swap, y2, y1), jnp.where(swap, y1, y2)

    # Wide: y1 + round(slope * steps) at the crossing's upper pixel.
    steps = left - x1 + (y2 < y1)
    wide_rise = 2 * (y2 - y1) * steps + width
    # Tall: y1 + the last step for which round(x1 + slope * steps) is still before the crossing.
    right_rise = (2 * (left - x1) + 1) * height - 1
    left_rise = (2 * (x1 - left) - 1) * height
    rise = jnp.where(wide, wide_rise, jnp.where(x2 > x1, right_rise, left_rise))
    y = y1 + rise // jnp.maximum(2 * width, 1)

    row = jnp.clip((y + REFINE // 2) // REFINE, 0, size)
    crossed = (jnp.minimum(x1, x2) <= left) & (jnp.maximum(x1, x2) > left)
    return jnp.where(crossed, row, size)
