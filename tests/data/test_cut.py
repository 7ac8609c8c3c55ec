"""Objects of a window of an image."""

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from mask_rcnn_jax.annotations.segmentation import (
    code_box,
    mask_to_rle,
    rle_fault,
    segmentation_area,
    to_rle,
)
from mask_rcnn_jax.data.cut import cut_code, cut_mask, cut_objects
from mask_rcnn_jax.data.dataset import Annotation
from mask_rcnn_jax.rle import LONG_RUN, edges_to_rle

SIDE = 30_000  # of an image with more pixels than LONG_RUN


@pytest.mark.parametrize("seed", range(20))
def test_cuts_a_code_as_the_decoded_mask_is_cut(seed):
    rng = np.random.default_rng(seed)
    height, width = rng.integers(1, 30, 2)
    mask = (rng.random((height, width)) < rng.choice([0.0, 0.1, 0.5, 0.9, 1.0])).astype(np.uint8)
    x1, y1 = rng.integers(0, width), rng.integers(0, height)
    x2, y2 = rng.integers(x1, width) + 1, rng.integers(y1, height) + 1
    window = tuple(map(int, (x1, y1, x2, y2)))
    cut, total = cut_code(mask_to_rle(mask != 0), window)
    expected = mask[window[1] : window[3], window[0] : window[2]]
    assert total == mask.sum()
    assert cut == mask_to_rle(expected != 0)
    np.testing.assert_array_equal(cut_mask(mask_to_rle(mask != 0), window), expected)


def block(x: int, y: int, width: int, height: int, side: int = SIDE) -> list[int]:
    """Edges of the runs of a block of pixels."""
    return [(x + column) * side + y + end for column in range(width) for end in (0, height)]


def test_cuts_a_code_of_a_very_large_image():
    edges = np.array(block(29_000, 17, 40, 30))
    code = {**edges_to_rle(edges, SIDE, SIDE)}
    window = 28_990, 0, 29_020, 64
    mask = cut_mask(code, window)
    assert mask.shape == (64, 30) and mask.sum() == 20 * 30
    assert mask[17:47, 10:].all()


def test_parts_far_apart_are_read_as_they_are_written():
    edges = np.array(block(3, 5, 4, 6) + block(29_990, 100, 2, 3))
    code = edges_to_rle(edges, SIDE, SIDE)
    assert edges[8] - edges[7] > LONG_RUN
    assert not rle_fault(code, SIDE, SIDE)
    assert segmentation_area(code, SIDE, SIDE) == 30
    assert code_box(to_rle(code, SIDE, SIDE)) == [3, 5, 29_989, 98]
    # pycocotools reads the places, too.
    last = to_rle(edges_to_rle(edges[8:], SIDE, SIDE), SIDE, SIDE)
    both = to_rle(code, SIDE, SIDE)
    assert coco_mask.iou([both], [last], [1]).item() == pytest.approx(6 / 30)
    assert coco_mask.area(coco_mask.merge([both, last], intersect=True)) == 6


def test_polygons_far_apart_are_joined():
    far = [[10, 10, 20, 10, 20, 20, 10, 20], [29_000, 10, 29_010, 10, 29_010, 20, 29_000, 20]]
    code = to_rle(far, SIDE, SIDE)
    assert coco_mask.area(code) == 200
    assert code_box(code) == [10, 10, 29_000, 10]
    assert coco_mask.iou([code], [to_rle(far[1:], SIDE, SIDE)], [1]).item() == 0.5


SQUARE = [np.array([10, 10, 30, 10, 30, 30, 10, 30], np.float32)]
MASK = np.zeros((64, 64), bool)
MASK[10:30, 10:30] = True


@pytest.fixture(params=["polygons", "code", "box"])
def square(request):
    if request.param == "code":
        return Annotation.from_mask(MASK, 1)
    one = Annotation.from_polygons(SQUARE, 1, (64, 64))
    return one if request.param == "polygons" else Annotation(one.box, 1, (), one.area)


def test_an_object_inside_moves(square):
    (cut,) = cut_objects([square], (8, 4, 40, 36), 0.5)
    np.testing.assert_array_equal(cut.box, [2, 6, 22, 26])
    assert cut.area == square.area == 400
    if square.segmentation:
        np.testing.assert_array_equal(cut.mask(32, 32)[6:26, 2:22], 1)


def test_a_cut_object_stays_by_the_share_that_is_inside(square):
    window = 24, 0, 64, 64  # 6 of 20 columns
    assert cut_objects([square], window, 0.31) == ()
    (cut,) = cut_objects([square], window, 0.3)
    np.testing.assert_array_equal(cut.box, [0, 10, 6, 30])
    assert cut.area == pytest.approx(120)
    if square.segmentation:
        assert cut.mask(64, 40).sum() == 120


def test_an_object_outside_is_left_out(square):
    assert cut_objects([square], (30, 0, 64, 64), 0.0) == ()
    assert cut_objects([square], (0, 40, 64, 64), 0.0) == ()


def test_the_box_is_that_of_the_mask_which_is_left():
    corner = [np.array([0, 0, 40, 0, 0, 40], np.float32)]  # a triangle
    triangle = Annotation.from_polygons(corner, 1, (64, 64))
    (cut,) = cut_objects([triangle], (30, 0, 64, 64), 0.0)
    np.testing.assert_allclose(cut.box, [0, 0, 10, 10])
    assert cut.area == pytest.approx(50)
