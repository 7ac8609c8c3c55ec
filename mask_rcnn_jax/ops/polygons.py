"""Mask targets drawn from polygons, with the rule by which pycocotools fills them.

pycocotools refines the grid five times, walks each edge along its longer axis in refined pixels,
rounding the other coordinate, and notes in every column of the grid at which height the walk steps
over the refined column's middle. From there downward each pixel changes between out and in. Here
that height is a division of whole numbers for every pair of an edge and a column: nothing is
walked, and a short loop over words of bits joins the edges of each polygon.
That is the definition; on GPUs that have it, the kernel of `pallas_kernels` fills the same pixels.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from mask_rcnn_jax.ops import dispatch

REFINE = 5  # refined pixels per pixel; odd, so that a column has one in its middle
# Refined coordinates are cut off here: 32-bit integers hold 4 * LIMIT^2. With 28 pixels it lies
# 143 sides of the region away from it.
LIMIT = 20000
WORD = 32  # rows of a column held by one integer
UNROLLED = 16  # edges that one step of the loop adds


def polygon_mask_targets(
    polygons: Float[Array, "G V 3"],
    rois: Float[Array, "R 4"],
    matched_idxs: Int[Array, "R"],
    *,
    size: int = 28,
    min_size: float = 0.1,
    implementation: str | None = None,
) -> tuple[Float[Array, "R size size"], Bool[Array, "R"]]:
    """Binary target of each region: its object's polygons, filled on size x size pixels.

    Args:
        polygons: (x, y, part) of each vertex, network pixels. `part` counts the polygons of an
            object from 0; the vertices of a part follow each other, and its last one is joined to
            its first. -1 marks padding, anywhere. A pixel is 1 inside any part.
        rois: network pixels.
        matched_idxs: ground-truth row of each region.
        min_size: the least width and height in pixels that a region is taken for: 0.1 in
            Detectron2, 1 in maskrcnn-benchmark and NVIDIA's PyTorch code. None of them adds a
            pixel to the width.
        implementation: "xla", or "pallas" for the GPU kernel, or None: the kernel where the
            program is compiled for an NVIDIA GPU and `pallas_kernels` knows no reason against it.

    Returns:
        The targets, 0 or 1, and which of them stand for an object that has vertices. The others
        are 0.

    The same pixels as pycocotools (but for rounding in float32) for every polygon within 143 sides
    of its region if `size` is 28; vertices further away are moved to that distance.

    Raises NotImplementedError with the reason if "pallas" cannot be.
    """

    def load_kernel():
        from pallas_kernels import mask_targets as kernels

        return kernels.unsupported(size), partial(kernels.fill_polygons, size=size)

    xla = partial(xla_fill_polygons, size=size)
    fill = dispatch.choose("polygon_mask_targets", implementation, xla=xla, load_kernel=load_kernel)
    starts, ends, begins = _edges(lax.stop_gradient(polygons))
    used = polygons[..., 2] >= 0
    rois = lax.stop_gradient(rois)
    sides = jnp.maximum(rois[:, 2:] - rois[:, :2], min_size)

    def refined(points):
        """[G, V, 2] in network pixels to [R, V, 2]."""
        points = points[matched_idxs] - rois[:, None, :2]
        points = points * (REFINE * size / sides)[:, None] + 0.5
        # Towards zero, as a cast does in C.
        return jnp.clip(points, -LIMIT, LIMIT).astype(jnp.int32)

    edges = jnp.concatenate([refined(starts), refined(ends)], axis=-1)
    targets = fill(edges, begins[matched_idxs], used[matched_idxs])
    return targets, jnp.any(used, axis=1)[matched_idxs]


def xla_fill_polygons(
    edges: Int[Array, "R V 4"], begins: Bool[Array, "R V"], used: Bool[Array, "R V"], *, size: int
) -> Float[Array, "R size size"]:
    """The pixels inside any part; edges in refined pixels, (x, y) of the start and the end."""
    edges, begins, used = (jnp.moveaxis(x, 1, 0) for x in (edges, begins, used))
    words = _rows_below(_first_rows(edges[..., :2], edges[..., 2:], size), size)
    words = jnp.where(used[:, :, None, None], words, jnp.uint32(0))

    def add_edge(carry, edge):
        """`part`: the rows inside the part that is being drawn, `union`: inside those before."""
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
    """Both ends of the edge that starts at each vertex, and whether it is its part's first."""
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
    """The rows from `first_row` on as the set bits of integers."""
    word = jnp.arange(-(-size // WORD))[None, None, :, None]
    above = jnp.clip(first_row[:, :, None, :] - WORD * word, 0, WORD).astype(jnp.uint32)
    every = jnp.uint32(0xFFFFFFFF)
    return jnp.where(above == WORD, jnp.uint32(0), every << jnp.minimum(above, WORD - 1))


def _first_rows(
    start: Int[Array, "V R 2"], end: Int[Array, "V R 2"], size: int
) -> Int[Array, "V R size"]:
    """The first row, in each column, of the pixels below each edge; `size` where it has none.

    An edge steps over a column's middle from refined pixel `left` to its right neighbour, or back.
    The height of that step is the smaller one of both refined pixels.
    """
    left = REFINE * jnp.arange(size)[None, None, :] + REFINE // 2
    (x1, y1), (x2, y2) = (jnp.moveaxis(ends, -1, 0)[..., None] for ends in (start, end))
    width, height = jnp.abs(x2 - x1), jnp.abs(y2 - y1)
    wide = width >= height
    # The walk goes right along a wide edge and down along a tall one.
    swap = jnp.where(wide, x1 > x2, y1 > y2)
    x1, x2 = jnp.where(swap, x2, x1), jnp.where(swap, x1, x2)
    y1, y2 = jnp.where(swap, y2, y1), jnp.where(swap, y1, y2)

    # Wide: y1 + round(slope * steps) at the end of the step that is higher up in the picture.
    steps = left - x1 + (y2 < y1)
    wide_rise = 2 * (y2 - y1) * steps + width
    # Tall: y1 + the last steps with round(x1 + slope * steps) still on the near side of the step.
    right_rise = (2 * (left - x1) + 1) * height - 1
    left_rise = (2 * (x1 - left) - 1) * height
    rise = jnp.where(wide, wide_rise, jnp.where(x2 > x1, right_rise, left_rise))
    y = y1 + rise // jnp.maximum(2 * width, 1)

    row = jnp.clip((y + REFINE // 2) // REFINE, 0, size)
    crossed = (jnp.minimum(x1, x2) <= left) & (jnp.maximum(x1, x2) > left)
    return jnp.where(crossed, row, size)
