"""Filling polygons, run in several ways: against the XLA body and pycocotools' walk in Python."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.ops import polygons as polygon_ops
from mask_rcnn_jax.ops.polygons import polygon_mask_targets
from pallas_kernels import mask_targets as kernels
from pallas_kernels.cases import MASK_TARGET_CASES, example
from tests.kernels.conftest import all_but, of_values

xla_fill = jax.jit(polygon_ops.xla_fill_polygons, static_argnames="size")
TINY = [case for case in MASK_TARGET_CASES if case.tiny]
NO_EDGE = (1, 2, 33, 14)  # would be seen if it were drawn


def crossings(edge, size):
    """(column, first row below) of each step over a column's middle, walking as pycocotools does:
    along the longer axis, left to right or top to bottom, rounding the other coordinate."""
    x1, y1, x2, y2 = (int(v) for v in edge)
    width, height = abs(x2 - x1), abs(y2 - y1)
    if (x1 > x2) if width >= height else (y1 > y2):
        x1, y1, x2, y2 = x2, y2, x1, y1
    if width >= height:
        slope = (y2 - y1) / max(width, 1)
        walk = [(x1 + t, int(y1 + slope * t + 0.5)) for t in range(width + 1)]
    else:
        slope = (x2 - x1) / height
        walk = [(int(x1 + slope * t + 0.5), y1 + t) for t in range(height + 1)]
    for (x, y), (next_x, next_y) in zip(walk[:-1], walk[1:], strict=True):
        column = (min(x, next_x) + 0.5) / 5 - 0.5
        if x != next_x and column == int(column) and 0 <= column < size:
            row = (min(y, next_y) + 0.5) / 5 - 0.5
            yield int(column), int(np.ceil(min(max(row, 0), size)))


def filled(edges, begins, used, *, size):
    """[R, size, size] of 0 and 1."""
    out = np.zeros((len(edges), size, size), bool)
    for roi, rows in enumerate(used):
        part = np.zeros((size, size), bool)
        for row in np.flatnonzero(rows):
            if begins[roi, row]:
                out[roi] |= part
                part = np.zeros((size, size), bool)
            for column, first in crossings(edges[roi, row], size):
                part[first:, column] ^= True
        out[roi] |= part
    return out.astype(np.float32)


def assert_all_agree(run, edges, begins, used, *, size):
    """Kernel, XLA body and oracle; returns what they agree on."""
    edges, begins, used = np.asarray(edges, np.int32), np.asarray(begins), np.asarray(used)
    expected = filled(edges, begins, used, size=size)
    args = [jnp.asarray(x) for x in (edges, begins, used)]
    targets = run(kernels.fill_polygons, *args, size=size)
    assert targets.dtype == jnp.float32
    np.testing.assert_array_equal(targets, expected, err_msg="kernel")
    np.testing.assert_array_equal(xla_fill(*args, size=size), expected, err_msg="XLA body")
    return expected


def closed(points):
    """Edges of one outline, pixels to refined pixels."""
    points = np.asarray(points) * 5
    return np.concatenate([points, np.roll(points, -1, axis=0)], axis=1).tolist()


@of_values
@pytest.mark.parametrize("case", TINY, ids=str)
def test_tiny_cases(case, run):
    targets = assert_all_agree(run, *example(case), **case.options)
    assert 0.1 < targets.mean() < 0.9


def test_parts_holes_gaps_and_nothing_by_hand(run):
    square, inner = (
        closed([(0, 0), (8, 0), (8, 8), (0, 8)]),
        closed([(2, 2), (6, 2), (6, 6), (2, 6)]),
    )
    corner = closed([(0, 0), (1, 0), (1, 1), (0, 1)])
    nothing, first, later = [NO_EDGE] * 4, [True] + [False] * 3, [False] * 4
    regions = {
        "three parts": (square + inner + corner, first * 3, [True] * 12),
        "a part with a hole": (square + inner + nothing, first + later * 2, [True] * 8 + later),
        "padding around": (nothing + inner + nothing, first * 3, later + [True] * 4 + later),
        "nothing": (nothing * 3, [True] * 12, later * 3),
    }
    union, hole, small, empty = assert_all_agree(run, *zip(*regions.values(), strict=True), size=8)
    assert union.all()
    assert small.sum() == 16 and small[2:6, 2:6].all()
    np.testing.assert_array_equal(hole, 1 - small)
    assert not empty.any()


@of_values
def test_more_rows_than_a_word_holds(run):
    edges = [closed([(0, 3), (40, 3), (40, 36), (0, 36)])]
    begins, used = [[True, False, False, False]], [[True] * 4]
    [target] = assert_all_agree(run, edges, begins, used, size=40)
    np.testing.assert_array_equal(np.flatnonzero(target.all(axis=1)), np.arange(3, 36))
    assert target.sum() == 33 * 40


@of_values
def test_degenerate_and_far_edges(run):
    """Points, flat and upright edges, diagonals, and outlines out to the limit, in one region each;
    five vertices, which is not a multiple of what a step takes."""
    far = polygon_ops.LIMIT
    edges = [
        [(70, 70, 70, 70)] * 5,
        [(0, 40, 140, 40), (140, 40, 0, 40), NO_EDGE, NO_EDGE, NO_EDGE],
        [(40, 0, 40, 140), (40, 140, 40, 0), NO_EDGE, NO_EDGE, NO_EDGE],
        [(0, 0, 139, 139), (139, 139, 139, 0), (139, 0, 0, 0), NO_EDGE, NO_EDGE],
        [(-far, -far, far, far), (far, far, far, -far), (far, -far, -far, -far), NO_EDGE, NO_EDGE],
        [(-far, 71, far, 70), (far, 70, 33, far), (33, far, -far, 71), NO_EDGE, NO_EDGE],
        [(69, -far, 71, far), (71, far, -far, far), (-far, far, 69, -far), NO_EDGE, NO_EDGE],
    ]
    begins = np.tile([True] + [False] * 4, (len(edges), 1))
    used = np.any(np.array(edges) != NO_EDGE, axis=-1)
    targets = assert_all_agree(run, edges, begins, used, size=28)
    assert not targets[:3].any()
    assert targets[3:].mean(axis=(1, 2)).tolist() == pytest.approx([0.5] * 4, abs=0.05)


@of_values
def test_the_op_runs_the_kernel_also_under_vmap(run, monkeypatch):
    """Two images whose objects differ and whose regions are the same."""
    kernel = kernels.fill_polygons

    def targets(*args, implementation, interpret=None):
        monkeypatch.setattr(kernels, "fill_polygons", partial(kernel, interpret=interpret))
        draw = partial(polygon_mask_targets, size=14, implementation=implementation)
        return jax.vmap(draw, in_axes=(0, None, None))(*args)

    polygons = np.random.default_rng(0).uniform(0, 30, (2, 2, 9, 3)).astype(np.float32)
    polygons[..., 2] = [0, 0, 0, -1, 1, 1, 1, 1, -1]
    rois = jnp.array([[2.0, 3.0, 20.0, 25.0], [0.0, 0.0, 30.0, 30.0], [9.0, 9.0, 9.0, 9.0]])
    args = jnp.asarray(polygons), rois, jnp.array([0, 1, 1])
    expected = jax.jit(partial(targets, implementation="xla"))(*args)
    for a, b in zip(run(targets, *args, implementation="pallas"), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert 0.1 < np.mean(expected[0]) < 0.9


def test_no_regions_and_no_vertices():
    for shape in ((0, 5), (3, 0)):
        flag = jnp.zeros(shape, bool)
        targets = kernels.fill_polygons(jnp.zeros((*shape, 4), jnp.int32), flag, flag, size=28)
        assert targets.shape == (shape[0], 28, 28)
        assert not targets.any()


def program_for_gpus(case, implementation):
    """For a batch of images, as the model calls it."""
    rois, vertices = case.args[1].shape
    args = (
        jax.ShapeDtypeStruct((2, 10, vertices, 3), jnp.float32),
        jax.ShapeDtypeStruct((2, rois, 4), jnp.float32),
        jax.ShapeDtypeStruct((2, rois), jnp.int32),
    )
    draw = partial(polygon_mask_targets, **case.options, implementation=implementation)
    traced = jax.jit(jax.vmap(draw)).trace(*args)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "case", all_but(MASK_TARGET_CASES, "mask_train_2_images", "tiny_40"), ids=str
)
def test_on_nvidia_gpus_the_op_is_one_kernel(case):
    assert program_for_gpus(case, None).count("mosaic_gpu_v2") == 1


def test_on_nvidia_gpus_the_choice_is_followed():
    assert program_for_gpus(MASK_TARGET_CASES[0], "pallas").count("mosaic_gpu_v2") == 1
    assert "mosaic_gpu" not in program_for_gpus(MASK_TARGET_CASES[0], "xla")


def test_without_a_gpu_the_op_is_the_xla_body_also_under_vmap():
    rng = np.random.default_rng(1)
    polygons = rng.uniform(0, 30, (2, 3, 7, 3)).astype(np.float32)
    polygons[..., 2] = 0
    args = polygons, np.tile(np.float32([1, 2, 25, 26]), (2, 3, 1)), np.tile(np.arange(3), (2, 1))
    default, xla = (
        jax.jit(jax.vmap(partial(polygon_mask_targets, implementation=i)))(*args)
        for i in (None, "xla")
    )
    for a, b in zip(default, xla, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_the_kernel_cannot_do_is_refused_by_name_and_else_left_to_xla():
    args = jnp.zeros((1, 3, 3)), jnp.ones((1, 4)), jnp.zeros(1, jnp.int32)
    with pytest.raises(NotImplementedError, match="mask targets.*pallas.*size 129"):
        polygon_mask_targets(*args, size=129, implementation="pallas")
    traced = jax.jit(partial(polygon_mask_targets, size=129)).trace(*args)
    assert "mosaic_gpu" not in traced.lower(lowering_platforms=("cuda",)).as_text()
    with pytest.raises(ValueError, match="implementation is 'cuda'"):
        polygon_mask_targets(*args, implementation="cuda")
    flag = jnp.ones((1, 3), bool)
    with pytest.raises(NotImplementedError, match="size 129"):
        kernels.fill_polygons(jnp.zeros((1, 3, 4), jnp.int32), flag, flag, size=129)
