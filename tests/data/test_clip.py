"""Polygons clipped to a canvas."""

import numpy as np
import pytest

from mask_rcnn_jax.data.clip import area, clip_polygon

SIZE = (20, 30)  # height, width


def corners(points):
    return sorted(map(tuple, np.round(points, 6).tolist()))


def test_a_polygon_inside_is_itself():
    points = np.array([[1, 2], [30, 2], [5, 20.0]])
    (part,) = clip_polygon(points, SIZE)
    assert part is points


@pytest.mark.parametrize("shift", [(-40, 0), (31, 0), (0, -21), (0, 20.5), (-40, 50)])
def test_a_polygon_outside_is_gone(shift):
    points = np.array([[1, 2], [9, 2], [5, 15.0]]) + shift
    assert not [part for part in clip_polygon(points, SIZE) if len(part)]


def test_a_corner_is_cut_off():
    square = np.array([[-5.0, -5], [10, -5], [10, 10], [-5, 10]])
    (part,) = clip_polygon(square, SIZE)
    assert corners(part) == [(0, 0), (0, 10), (10, 0), (10, 10)]
    assert area(part) == 100


def test_a_polygon_around_the_canvas_becomes_the_canvas():
    (part,) = clip_polygon(np.array([[-50.0, -40], [90, -60], [80, 90], [-60, 70]]), SIZE)
    assert corners(part) == [(0, 0), (0, 20), (30, 0), (30, 20)]


COMB = np.array([[-8, 2], [6, 2], [6, 5], [-3, 5], [-3, 9], [6, 9], [6, 12], [-8, 12.0]])


def test_a_concave_polygon_splits():
    parts = clip_polygon(COMB, SIZE)
    assert sorted(map(corners, parts)) == [
        [(0, 2), (0, 5), (6, 2), (6, 5)],
        [(0, 9), (0, 12), (6, 9), (6, 12)],
    ]


def test_teeth_that_point_inward_stay_connected():
    (part,) = clip_polygon(COMB * [-1, 1] + [5, 0], SIZE)
    assert area(part) == 14 * 10 - 9 * 4 - 1 * 6  # COMB without its tips, which reach x = -1


@pytest.mark.parametrize("axis, limit", [(0, 0.0), (0, 30.0), (1, 0.0), (1, 20.0)])
def test_lines_and_points_on_the_border_are_dropped(axis, limit):
    points = np.array([[limit, 3], [limit, 9], [limit + (limit > 0) * 8 - (limit == 0) * 8, 6.0]])
    assert clip_polygon(points if axis == 0 else points[:, ::-1].copy(), SIZE) == []


def test_a_vertex_that_touches_the_border_stays():
    points = np.array([[0, 5], [10, 2], [40, 5], [10, 9.0]])
    (part,) = clip_polygon(points, SIZE)
    assert (0, 5) in corners(part) and part[:, 0].max() == 30


def grid(per_pixel, low, high):
    ends = [np.array(end) * per_pixel for end in (low, high)]
    return np.meshgrid(*((np.arange(a, b) + 0.5) / per_pixel for a, b in zip(*ends, strict=True)))


def inside(points, x, y):
    """Even-odd rule, edge by edge."""
    result = np.zeros(x.shape, bool)
    for (x1, y1), (x2, y2) in zip(points, np.roll(points, -1, axis=0), strict=True):
        if y1 != y2:
            crosses = (y1 <= y) != (y2 <= y)
            result ^= crosses & (x < x1 + (y - y1) * (x2 - x1) / (y2 - y1))
    return result


def star(rng, count):
    angle = np.sort(rng.uniform(0, 2 * np.pi, count))
    radius = rng.uniform(3, 25, (count, 1))
    return [15, 10] + radius * np.stack([np.cos(angle), np.sin(angle)], axis=1)


BOW = np.array([[5, -4], [25, 12], [25, -4], [5, 12.0]])


@pytest.mark.parametrize("points", [BOW, BOW[:, ::-1] + [-4, 0], BOW - [12, 0]])
def test_lobes_that_cancel_are_kept(points):
    parts = clip_polygon(points, SIZE)
    x, y = grid(10, (0, 0), (30, 20))
    covered = sum(inside(part, x, y).astype(int) for part in parts) % 2 == 1
    np.testing.assert_array_equal(covered, inside(points, x, y))
    assert covered.any()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("simple", [True, False])
def test_the_parts_cover_the_same_points_as_the_polygon(seed, simple):
    rng = np.random.default_rng(seed)
    points = star(rng, 15) if simple else rng.uniform([-10, -10], [40, 30], (9, 2))
    parts = clip_polygon(points, SIZE)
    x, y = grid(5, (0, 0), (30, 20))
    covered = np.zeros(x.shape, int)
    for part in parts:
        assert (part >= 0).all() and (part <= [30, 20]).all()
        covered += inside(part, x, y)
    np.testing.assert_array_equal(covered % 2 == 1, inside(points, x, y))
    if simple:
        assert covered.max() <= 1
        pixels = sum(map(area, parts))
        np.testing.assert_allclose(pixels, inside(points, x, y).mean() * 600, rtol=0.02)
