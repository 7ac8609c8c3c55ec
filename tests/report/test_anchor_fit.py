"""How anchors fit boxes, against all anchors of the grid and every box."""

import numpy as np
import pytest

from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.ops.anchors import AnchorGrid
from mask_rcnn_jax.ops.extent import ValidExtent
from mask_rcnn_jax.report.anchor_fit import (
    MIN_GAIN,
    MIN_STEP,
    SMALLEST_SIDES,
    NetworkBoxes,
    best_iou,
    box_shapes,
    box_sizes,
    describe_shapes,
    fitting_anchors,
    measure_fit,
    network_boxes,
)

TALL = ((0.5, 2.0), (1.0, 1.0), (0.7, 1.4))


def boxes_in(canvas, count, seed=0, most=300.0):
    """Boxes anywhere inside a canvas (height, width), also thin ones and some of its size."""
    rng = np.random.default_rng(seed)
    limit = np.array(canvas[::-1], float)
    sides = np.minimum(np.exp(rng.uniform(np.log(1.5), np.log(most), (count, 2))), limit)
    corners = rng.uniform(0, 1, (count, 2)) * (limit - sides)
    corners[: count // 5] = 0  # at the edge
    corners[count // 5 : 2 * count // 5] = (limit - sides)[count // 5 : 2 * count // 5]
    return np.concatenate([corners, corners + sides], axis=1)


def slow_iou(box, other):
    width = min(box[2], other[2]) - max(box[0], other[0])
    height = min(box[3], other[3]) - max(box[1], other[1])
    overlap = max(width, 0) * max(height, 0)
    areas = [(b[2] - b[0]) * (b[3] - b[1]) for b in (box, other)]
    return overlap / (sum(areas) - overlap)


@pytest.mark.parametrize("grid", [
    AnchorGrid(),
    AnchorGrid(sizes=(12.0, 24.0, 48.0, 96.0, 192.0), aspect_ratios=TALL, center=0.5),
    AnchorGrid(sizes=(20.0, 30.0, 60.0, 90.0, 300.0), rounding="half_sides"),
    AnchorGrid(rounding="base_window", aspect_ratios=TALL, center=0.5),
])  # fmt: skip
def test_the_best_anchor_is_the_best_of_all(grid):
    canvas = (192, 320)
    boxes = boxes_in(canvas, 60)
    anchors = np.concatenate(grid(ValidExtent(canvas, None)).boxes).astype(np.float64)
    low = np.maximum(boxes[:, None, :2], anchors[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], anchors[None, :, 2:])
    overlap = np.prod(np.maximum(high - low, 0), axis=2)
    areas = [np.prod(b[:, 2:] - b[:, :2], axis=1) for b in (boxes, anchors)]
    iou = overlap / (areas[0][:, None] + areas[1][None] - overlap)
    assert iou[3, 40] == pytest.approx(slow_iou(boxes[3], anchors[40]))  # the oracle itself
    canvases = np.tile(canvas, (len(boxes), 1))
    found = best_iou(NetworkBoxes(boxes, canvases), grid)
    np.testing.assert_allclose(found, iou.max(axis=1), rtol=1e-5)
    fit = measure_fit(NetworkBoxes(boxes, canvases), grid)
    assert fit.at_50 == np.mean(iou.max(axis=1) >= 0.5)
    assert fit.at_70 == np.mean(iou.max(axis=1) >= 0.7)


def test_numbers_worked_by_hand():
    """Boxes of 32 pixels on the cell (0, 0) of P2, half a cell off, and twice as high."""
    grid, canvas = AnchorGrid(aspect_ratios=((1.0, 1.0),)), (64, 64)
    boxes = np.array([[-16, -16, 16, 16], [18, 16, 50, 48], [16, 0, 48, 64]], float)
    boxes[0] += 32
    found = best_iou(NetworkBoxes(boxes, np.tile(canvas, (3, 1))), grid)
    half = 32 * 30 / (2 * 32 * 32 - 32 * 30)
    # A square of 64 on P3, whose centers are 8 apart: (32, 32) covers all of it.
    np.testing.assert_allclose(found, [1, half, 0.5])


def test_canvases_end_where_they_end():
    """In a canvas of one cell of P6, the last levels have a single anchor."""
    grid = AnchorGrid(sizes=(1.0, 1.0, 1.0, 1.0, 64.0), aspect_ratios=((1.0, 1.0),))
    boxes = np.array([[0.0, 0, 32, 32]] * 2)
    small, large = best_iou(NetworkBoxes(boxes, np.array([[64, 64], [128, 128]])), grid)
    assert small == pytest.approx(1 / 4) and large == pytest.approx(1 / 4)
    boxes += 64  # of which the small canvas knows nothing
    small, large = best_iou(NetworkBoxes(boxes, np.array([[64, 64], [192, 192]])), grid)
    assert small == 0 and large == pytest.approx(1 / 4)


def test_boxes_reach_the_network_as_images_do():
    """A landscape image, a portrait and one that its long side limits, at (100, 200)."""
    sizes = np.array([[50, 75], [80, 40], [50, 200]])
    options = ExampleOptions((100, 200), "shortest_edge", 10)
    boxes = np.array([[1, 2, 3, 4], [10, 20, 40, 80], [0, 0, 200, 50], [1, 1, 2, 2]], float)
    found = network_boxes(sizes, np.array([0, 1, 2, 0]), boxes, options)
    expected = [[2, 4, 6, 8], [25, 50, 100, 200], [0, 0, 200, 50], [2, 2, 4, 4]]
    np.testing.assert_allclose(found.boxes, expected)
    landscape, portrait = [128, 256], [256, 128]
    assert found.canvases.tolist() == [landscape, portrait, landscape, landscape]


def on_a_canvas(boxes, canvas=(512, 512)):
    return NetworkBoxes(boxes, np.tile(canvas, (len(boxes), 1)))


def test_small_upright_boxes_get_small_upright_anchors():
    rng = np.random.default_rng(1)
    corners = rng.uniform(0, 450, (400, 2))
    sides = np.exp(rng.normal(0, 0.15, (400, 1))) * (9, 27)
    found = on_a_canvas(np.concatenate([corners, corners + sides], axis=1))
    grid = AnchorGrid()
    better = fitting_anchors(found, grid)
    assert better.sizes[0] <= 16 and len(better.aspect_ratios) == 3
    assert all(2 < height / width < 4.5 for width, height in better.aspect_ratios)
    assert measure_fit(found, grid).at_50 < 0.1 and measure_fit(found, better).at_50 > 0.95
    assert fitting_anchors(found, better) == better  # and nothing gains any more


def test_anchors_stay_that_fit_and_without_boxes():
    grid = AnchorGrid()
    anchors = np.concatenate(grid(ValidExtent((192, 320), None)).boxes)
    assert fitting_anchors(on_a_canvas(anchors[::50].astype(float)), grid) is grid
    none = on_a_canvas(np.zeros((0, 4)))
    assert fitting_anchors(none, grid) is grid and np.isnan(measure_fit(none, grid)).all()


def test_the_sum_of_both_shares_decides():
    """All sides that are tried, one by one, with the recipe's shapes and both of the boxes'."""
    rng = np.random.default_rng(3)
    corners, sides = rng.uniform(0, 300, (300, 2)), np.exp(rng.normal(3.5, 0.7, (300, 2)))
    found = on_a_canvas(np.concatenate([corners, corners + sides], axis=1))
    grid = AnchorGrid()
    sums = {}
    for side in SMALLEST_SIDES:
        of_boxes = box_shapes(found.boxes, 3), box_sizes(found.boxes, 3)
        for shapes in (grid.aspect_ratios, *of_boxes):
            tried = AnchorGrid(tuple(side * 2.0**level for level in range(5)), shapes)
            best = best_iou(found, tried)
            sums[tried] = np.mean(best >= 0.5) + np.mean(best >= 0.7)
    better = fitting_anchors(found, grid)
    assert sums[better] == pytest.approx(max(sums.values())) and better != grid
    assert sums[better] >= sums[grid] + MIN_GAIN


def test_shapes_are_those_of_boxes_and_never_the_same():
    sides = np.array([[40, 10], [40, 10], [20, 20], [20, 20], [10, 40], [10, 40]], float)
    shapes = box_shapes(np.concatenate([np.zeros((6, 2)), sides], axis=1), 3)
    assert shapes == ((2.0, 0.5), (1.0, 1.0), (0.5, 2.0))
    one = box_shapes(np.array([[0, 0, 5.0, 5.0]]), 3)
    ratios = [height / width for width, height in one]
    np.testing.assert_allclose(ratios, [1 / MIN_STEP, 1, MIN_STEP], rtol=0.02)
    assert box_shapes(np.array([[0, 0, 10.0, 40.0]]), 1) == ((0.5, 2.0),)


def test_round_objects_of_many_sizes_get_three_sizes_an_octave():
    rng = np.random.default_rng(4)
    corners, sides = rng.uniform(0, 450, (400, 2)), np.exp2(rng.uniform(3.5, 5.5, (400, 1)))
    found = on_a_canvas(np.concatenate([corners, corners + sides * (1, 1.02)], axis=1))
    grid = AnchorGrid(sizes=(12.0, 24.0, 48.0, 96.0, 192.0))
    better = fitting_anchors(found, grid)
    areas = [width * height for width, height in better.aspect_ratios]
    np.testing.assert_allclose(np.sqrt(areas), [2 ** (-1 / 3), 1, 2 ** (1 / 3)], rtol=0.01)
    assert measure_fit(found, better).at_70 > measure_fit(found, grid).at_70 + 0.2
    assert describe_shapes(better.aspect_ratios).startswith("Sizes are 0.79, 1, 1.3 times")
    assert describe_shapes(grid.aspect_ratios) == "Heights are 0.5, 1, 2 times the widths"


def test_sizes_have_the_median_shape_of_the_boxes():
    upright = np.array([[0, 0, 10.0, 40.0], [0, 0, 20.0, 80.0], [0, 0, 30.0, 30.0]])
    assert box_sizes(upright, 1) == ((0.5, 2.0),)
    small, large = box_sizes(upright, 2)
    np.testing.assert_allclose([small[1] / small[0], large[1] / large[0]], 4, rtol=0.05)
    assert large[0] / small[0] == pytest.approx(2**0.5, rel=0.02)
