import math

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from mask_rcnn_jax.evaluation.paste import encode_window, paste_mask, run_lengths


def full_picture(crop, origin, height, width):
    picture = np.zeros((height, width), np.uint8)
    x, y = origin
    picture[y : y + crop.shape[0], x : x + crop.shape[1]] = crop
    return picture


def slow_probability(mask, box, height, width):
    """Bilinear interpolation one pixel at a time, in plain Python."""
    x1, y1, x2, y2 = (float(value) for value in box)
    side = len(mask)
    picture = np.zeros((height, width))
    for y in range(height):
        for x in range(width):
            u = (x + 0.5 - x1) / (x2 - x1) * side - 0.5
            v = (y + 0.5 - y1) / (y2 - y1) * side - 0.5
            i, j = math.floor(v), math.floor(u)
            for row, row_weight in ((i, 1 - (v - i)), (i + 1, v - i)):
                for column, column_weight in ((j, 1 - (u - j)), (j + 1, u - j)):
                    if 0 <= row < side and 0 <= column < side:
                        picture[y, x] += row_weight * column_weight * float(mask[row, column])
    return picture


def test_full_mask_covers_the_pixels_whose_centres_are_in_the_box():
    crop, origin = paste_mask(np.ones((28, 28), np.float32), (2.0, 3.0, 6.0, 5.0), 10, 12)
    assert origin == (2, 3)
    np.testing.assert_array_equal(crop, np.ones((2, 4), np.uint8))
    # Centres from 2.5 to 5.5 lie in [2.5, 5.6]; those from 3.5 to 4.5 in [2.6, 4.9].
    crop, origin = paste_mask(np.ones((28, 28), np.float32), (2.5, 2.6, 5.6, 4.9), 10, 12)
    assert origin == (2, 3)
    assert crop.shape == (2, 4)


def test_half_mask_ends_in_the_middle_of_its_box():
    mask = np.zeros((4, 4), np.float32)
    mask[:, :2] = 1  # the left half
    crop, origin = paste_mask(mask, (0.0, 0.0, 8.0, 4.0), 4, 8)
    np.testing.assert_array_equal(crop[1], [1, 1, 1, 1, 0, 0, 0, 0])
    assert origin == (0, 0)


@pytest.mark.parametrize(
    "box",
    [
        (3.3, 4.1, 30.7, 21.9),
        (-6.2, -3.0, 12.5, 14.5),
        (20.4, 10.2, 55.0, 44.4),
        (-20.0, -20.0, 60.0, 60.0),
        (10.0, 10.0, 11.2, 24.0),
    ],
)
def test_paste_equals_slow_bilinear_oracle(box):
    mask = np.random.default_rng(0).random((7, 7)).astype(np.float32)
    expected = slow_probability(mask, box, 32, 40)
    pasted = full_picture(*paste_mask(mask, np.array(box, np.float32), 32, 40), 32, 40)
    decided = np.abs(expected - 0.5) > 1e-4
    assert 0 < pasted.sum() < pasted.size
    np.testing.assert_array_equal(pasted[decided], expected[decided] >= 0.5)
    assert decided.mean() > 0.99


@pytest.mark.parametrize(
    "box",
    [
        (5.0, 5.0, 5.0, 9.0),
        (5.0, 9.0, 9.0, 5.0),
        (5.6, 5.6, 6.4, 6.4),  # between pixel centres
        (-9.0, 2.0, -1.0, 8.0),
        (21.0, 2.0, 30.0, 8.0),
        (2.0, -9.0, 8.0, -1.0),
        (2.0, 16.0, 8.0, 30.0),
        (math.nan, 0.0, 4.0, 4.0),
        (0.0, 0.0, math.inf, 4.0),
    ],
)
def test_box_without_pixels_gives_an_empty_mask(box):
    crop, origin = paste_mask(np.ones((28, 28), np.float32), np.array(box), 16, 20)
    assert crop.size == 0
    code = encode_window(crop, origin, 16, 20)
    assert code["size"] == [16, 20]
    assert coco_mask.area(code) == 0


def test_encode_window_joins_runs_over_column_ends():
    # Two full columns, then the upper pixel of the third: one run of 7 after 3 zeros.
    crop = np.array([[1, 1, 1], [1, 1, 0], [1, 1, 0]], np.uint8)
    code = encode_window(crop, (1, 0), 3, 5)
    expected = coco_mask.frPyObjects({"size": [3, 5], "counts": [3, 7, 5]}, 3, 5)
    assert code == {"size": [3, 5], "counts": expected["counts"].decode()}


def test_encode_window_equals_pycocotools_on_the_whole_picture():
    rng = np.random.default_rng(1)
    for _ in range(400):
        height, width = (int(side) for side in rng.integers(1, 9, 2))
        x0, x1 = np.sort(rng.integers(0, width + 1, 2))
        y0, y1 = np.sort(rng.integers(0, height + 1, 2))
        density = rng.choice([0.0, 0.3, 0.9, 1.0])
        crop = (rng.random((y1 - y0, x1 - x0)) < density).astype(np.uint8)
        picture = full_picture(crop, (x0, y0), height, width)
        expected = coco_mask.encode(np.asfortranarray(picture))
        code = encode_window(crop, (int(x0), int(y0)), height, width)
        assert code == {"size": [height, width], "counts": expected["counts"].decode()}


def test_run_lengths_read_both_kinds_of_code():
    rng = np.random.default_rng(2)
    for _ in range(100):
        runs = rng.integers(1, rng.choice([3, 40, 90000]), rng.integers(1, 30))
        plain = {"size": [1, int(runs.sum())], "counts": runs.tolist()}
        code = coco_mask.frPyObjects(plain, *plain["size"])
        assert run_lengths(code).tolist() == run_lengths(plain).tolist() == runs.tolist()
        text = {**code, "counts": code["counts"].decode()}
        assert run_lengths(text).tolist() == runs.tolist()
