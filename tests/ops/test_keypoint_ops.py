"""Keypoints as heatmaps: torchvision's numbers, slow oracles, and what has no area or no label."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.ops.keypoints import (
    double,
    heatmaps_to_points,
    keypoint_loss,
    keypoint_targets,
)
from tests.helpers import assert_finite_with_grad, load_golden

targets = jax.jit(keypoint_targets, static_argnames="size")
points = jax.jit(heatmaps_to_points, static_argnames="longest")


def golden():
    return load_golden("torchvision/keypoints")


def test_targets_and_loss_are_torchvisions():
    expected = golden()
    keypoints = expected["gt"][expected["matched"]]
    cells, counts = targets(keypoints, expected["rois"], size=12)
    assert 5 < np.sum(expected["counts"]) < expected["counts"].size - 5
    np.testing.assert_array_equal(counts, expected["counts"])
    np.testing.assert_array_equal(cells, expected["cells"])
    given = jnp.asarray(expected["logits"]), cells, counts
    loss, gradient = jax.jit(jax.value_and_grad(keypoint_loss))(*given)
    np.testing.assert_allclose(loss, expected["loss"], rtol=1e-6)
    np.testing.assert_allclose(gradient, expected["gradient"], atol=1e-7)
    # detectron2's other divisor: all keypoints that there could be.
    scaled = keypoint_loss(*given, 50.0)
    np.testing.assert_allclose(scaled, expected["loss"] * np.sum(counts) / 50, rtol=1e-6)


def test_targets_by_hand():
    roi = np.float32([[10, 20, 30, 60]])  # cells of 5 x 10 pixels
    keypoints = np.float32(
        [[[10, 20, 2], [14.9, 30, 1], [30, 60, 2], [30.1, 40, 2], [20, 19.9, 2], [20, 40, 0]]]
    )
    cells, counts = targets(keypoints, roi, size=4)
    np.testing.assert_array_equal(cells, [[0, 4, 15, 0, 0, 0]])
    np.testing.assert_array_equal(counts, [[True, True, True, False, False, False]])


def test_nothing_counts_and_all_is_finite():
    rois = np.float32([[0, 0, 0, 0], [5, 5, 5, 9], [1, 2, 30, 40]])
    keypoints = np.zeros((3, 2, 3), np.float32)
    keypoints[:2] = (5, 5, 2)
    cells, counts = targets(keypoints, rois, size=6)
    assert not counts.any() and not cells.any()
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 6, 6)), jnp.float32)
    loss = functools.partial(keypoint_loss, cells=cells, counts=counts)
    assert loss(logits) == 0
    assert_finite_with_grad(loss, logits)
    assert not jax.grad(loss)(logits).any()


def test_doubled_maps_and_points_are_torchvisions():
    expected = golden()
    maps = jax.jit(double)(expected["low"])
    found, scores = points(maps, expected["map_boxes"], longest=140)
    np.testing.assert_allclose(found, expected["points"][..., :2], atol=1e-4)
    np.testing.assert_allclose(scores, expected["point_scores"], atol=2e-6)


def slow_resize(row, count):
    """Bicubic values of a row of cells at `count` pixels, with torch's kernel, in float64."""
    row, found = np.float64(row), []
    for pixel in range(count):
        at = (pixel + 0.5) * len(row) / count - 0.5
        total = 0.0
        for cell in range(int(np.floor(at)) - 1, int(np.floor(at)) + 3):
            x, a = abs(at - cell), -0.75
            near, far = (
                ((a + 2) * x - (a + 3)) * x * x + 1,
                ((a * x - 5 * a) * x + 8 * a) * x - 4 * a,
            )
            total += (near if x <= 1 else far) * row[np.clip(cell, 0, len(row) - 1)]
        found.append(total)
    return np.array(found)


def check_maxima(maps, width, height):
    """Compare with whole resized heatmaps."""
    box = np.float32([[3.5, 2.25, 3.5 + width, 2.25 + height]])
    found, scores = points(maps, box, longest=100)
    sides = max(width, 1), max(height, 1)
    columns, rows = (int(np.ceil(side)) for side in sides)
    for k in range(3):
        lines = np.stack([slow_resize(row, columns) for row in maps[0, k]])
        resized = np.stack([slow_resize(column, rows) for column in lines.T], axis=1)
        y, x = np.unravel_index(np.argmax(resized), resized.shape)
        at = 3.5 + (x + 0.5) * sides[0] / columns, 2.25 + (y + 0.5) * sides[1] / rows
        np.testing.assert_allclose(found[0, k], at, atol=1e-4)
        np.testing.assert_allclose(scores[0, k], resized.max(), atol=1e-5)


@pytest.mark.parametrize(("width", "height"), [(0.2, 5.0), (23.4, 7.1), (40.0, 61.7), (9.0, 99.9)])
def test_points_are_the_maxima_of_resized_heatmaps(width, height):
    """Of white noise, where many places are nearly as high."""
    maps = np.random.default_rng(int(width)).normal(size=(1, 3, 9, 9)).astype(np.float32)
    check_maxima(maps, width, height)


@pytest.mark.parametrize(("width", "height"), [(6.2, 82.5), (20.0, 95.0)])
def test_maxima_are_found_where_many_patches_may_have_them(width, height):
    """Of stripes, along which all patches have bounds alike, more than are computed at a time."""
    rng = np.random.default_rng(1)
    maps = rng.normal(size=(1, 3, 1, 56)) + 0.1 * rng.normal(size=(1, 3, 56, 56))
    check_maxima(maps.astype(np.float32), width, height)
    check_maxima(maps.swapaxes(2, 3).astype(np.float32), height, width)


def test_of_equal_places_the_first_is_found():
    found, scores = points(
        np.ones((2, 1, 8, 8), np.float32), np.float32([[0, 0, 8, 8]] * 2), longest=8
    )
    np.testing.assert_allclose(found[:, 0], [[0.5, 0.5]] * 2)
    np.testing.assert_allclose(scores, 1, atol=1e-6)


def test_boxes_of_padding_and_longer_limits_change_nothing():
    expected = golden()
    maps = np.concatenate([expected["low"], np.zeros((3, 4, 14, 14), np.float32)])
    boxes = np.concatenate([expected["map_boxes"], np.zeros((3, 4), np.float32)])
    found, scores = points(maps, boxes, longest=500)
    alone, alone_scores = points(expected["low"], expected["map_boxes"], longest=140)
    np.testing.assert_allclose(found[:6], alone, atol=1e-4)
    np.testing.assert_allclose(scores[:6], alone_scores, atol=1e-6)
    assert np.isfinite(found).all()
