import math
import tracemalloc

import cv2
import numpy as np
import pytest
from pycocotools import mask as coco_mask

from mask_rcnn_jax.annotations.segmentation import run_lengths
from mask_rcnn_jax.evaluation.paste import paste_mask
from mask_rcnn_jax.rle import encode_window
from tests.helpers import load_golden


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


def test_full_mask_covers_the_pixels_whose_centers_are_in_the_box():
    crop, origin = paste_mask(np.ones((28, 28), np.float32), (2.0, 3.0, 6.0, 5.0), 10, 12)
    assert origin == (2, 3)
    np.testing.assert_array_equal(crop, np.ones((2, 4), np.uint8))
    # Centers from 2.5 to 5.5 lie in [2.5, 5.6]; those from 3.5 to 4.5 in [2.6, 4.9].
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
        (5.6, 5.6, 6.4, 6.4),  # between pixel centers
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


@pytest.mark.parametrize(
    "box",
    [
        (9.0, 5.0, 5.0, 9.0),
        (-9.0, 2.0, -2.0, 8.0),
        (21.0, 2.0, 30.0, 8.0),
        (2.0, -9.0, 8.0, -2.0),
        (2.0, 17.0, 8.0, 30.0),
        (math.nan, 0.0, 4.0, 4.0),
        (0.0, 0.0, math.inf, 4.0),
    ],
)
def test_integer_rule_gives_an_empty_mask_outside_the_picture(box):
    crop, _ = paste_mask(np.ones((28, 28)), np.array(box), 16, 20, rule="integer")
    assert crop.size == 0


def test_integer_rule_covers_whole_pixels_by_hand():
    # Grown by 30/28 about its center the box is 8.93 .. 24.07: pixels 8 to 24, 17 for 30 cells. The
    # first reads place 0.38 between the zero border (0) and the object (1), the next one 2.15.
    full = np.ones((28, 28), np.float32)
    crop, origin = paste_mask(full, (9.43, 9.43, 23.57, 23.57), 40, 50, rule="integer")
    assert origin == (8, 8)
    assert crop.shape == (17, 17)
    np.testing.assert_array_equal(crop, np.pad(np.ones((15, 15)), 1))
    # Negative corners are cut towards zero.
    crop, origin = paste_mask(full, (-0.8, -0.8, 4.0, 4.0), 40, 50, rule="integer")
    assert origin == (0, 0)
    # A box without extent still is a pixel.
    crop, origin = paste_mask(full, (7.2, 5.1, 7.2, 5.1), 40, 50, rule="integer")
    assert (crop.tolist(), origin) == ([[1]], (7, 5))


def test_rules_differ_at_the_threshold():
    half = np.full((28, 28), 0.5, np.float32)
    box = (4.0, 4.0, 24.0, 24.0)
    assert paste_mask(half, box, 30, 30)[0].sum() > 0
    assert paste_mask(half, box, 30, 30, rule="integer")[0].sum() == 0


def test_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="rule is 'grid'"):
        paste_mask(np.ones((2, 2)), (0, 0, 2, 2), 4, 4, rule="grid")


def resized_paste(mask, box, height, width):
    """The integer rule step by step, with cv2 for the resizing."""
    side = len(mask)
    x1, y1, x2, y2 = np.asarray(box, np.float32)
    scale = np.float32((side + 2) / side)
    half = np.array([x2 - x1, y2 - y1]) * np.float32(0.5) * scale
    center = np.array([x1 + x2, y1 + y2]) * np.float32(0.5)
    (left, top), (right, bottom) = (center - half).astype(int), (center + half).astype(int)
    padded = np.pad(mask, 1)
    size = (max(int(right - left) + 1, 1), max(int(bottom - top) + 1, 1))
    pasted = (cv2.resize(padded, size) > 0.5).astype(np.uint8)
    # A picture with a margin on all sides takes any box.
    margin = 300
    picture = np.zeros((height + 2 * margin, width + 2 * margin), np.uint8)
    picture[margin + top :, margin + left :][: size[1], : size[0]] = pasted
    return picture[margin:-margin, margin:-margin]


# Below, no interpolated value is closer to one half than 2e-6, and rounding is a few times 6e-8.
def test_integer_rule_equals_cv2():
    rng = np.random.default_rng(3)
    for trial in range(60):
        mask = rng.random((28, 28)).astype(np.float32)
        if trial % 2:
            mask = cv2.GaussianBlur(mask, (0, 0), 2.0)
        corner, side = rng.uniform(-60, 150, 2), np.exp(rng.uniform(0, 5.0, 2))
        box = np.concatenate([corner, corner + side]).astype(np.float32)
        crop, origin = paste_mask(mask, box, 90, 120, rule="integer")
        np.testing.assert_array_equal(
            full_picture(crop, origin, 90, 120), resized_paste(mask, box, 90, 120), err_msg=str(box)
        )


def test_integer_rule_equals_torchvision():
    golden = load_golden("torchvision/ops")
    height, width = golden["paste_hw"]
    for mask, box, expected in zip(
        golden["paste_masks"], golden["paste_boxes"], golden["paste_out"], strict=True
    ):
        pasted = paste_mask(mask[0], box, height, width, rule="integer")
        np.testing.assert_array_equal(full_picture(*pasted, height, width), expected > 0.5)


@pytest.mark.parametrize("image", [0, 1])
def test_integer_rule_equals_torchvision_model(image):
    golden = load_golden("torchvision/small_eval")
    count, height, width = golden[f"pasted_shape{image}"]
    expected = np.unpackbits(golden[f"pasted_bin{image}"], axis=-1)[..., :width]
    assert len(expected) == count > 20
    for row in range(count):
        mask, box = golden[f"mask_probs{image}"][row, 0], golden[f"det_boxes{image}"][row]
        pasted = paste_mask(mask, box, height, width, rule="integer")
        np.testing.assert_array_equal(full_picture(*pasted, height, width), expected[row])


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


@pytest.mark.parametrize("rule", ["continuous", "integer"])
def test_large_windows_are_pasted_in_slabs(rule, monkeypatch):
    mask = cv2.GaussianBlur(np.random.default_rng(5).random((28, 28)).astype(np.float32), (0, 0), 2)
    box = np.array([-20.5, 3.2, 290.1, 240.9], np.float32)
    slabs, origin = paste_mask(mask, box, 250, 300, rule=rule)
    monkeypatch.setattr("mask_rcnn_jax.evaluation.paste._PIXELS_AT_ONCE", 10**6)
    whole, other = paste_mask(mask, box, 250, 300, rule=rule)
    assert origin == other and 0 < whole.sum() < whole.size
    assert (whole != slabs).sum() <= 1  # a sum in another order may fall beside one half


def test_objects_as_large_as_a_large_picture_take_little_memory():
    """A dozen megapixels: a picture of floats alone would be 46 MiB."""
    mask = np.pad(np.ones((26, 26), np.float32), 1)
    box = np.array([0.0, 0.0, 4000.0, 3000.0], np.float32)
    tracemalloc.start()
    for _ in range(2):
        crop, origin = paste_mask(mask, box, 3000, 4000)
        code = encode_window(crop, origin, 3000, 4000)
        assert code["size"] == [3000, 4000] and coco_mask.area(code) == crop.sum() > 1e7
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 42 * 2**20, f"{peak / 2**20:.0f} MiB"
