import numpy as np
import pytest

from mask_rcnn_jax.ops.anchors import anchor_grid
from tests.helpers import shared

STRIDES, SIZES = (4, 8, 16, 32, 64), (32.0, 64.0, 128.0, 256.0, 512.0)
NVIDIA_SHAPES = ((1.0, 1.0), (1.4, 0.7), (0.7, 1.4))
TORCH_SHAPES = tuple((r**-0.5, r**0.5) for r in (0.5, 1.0, 2.0))


def test_grid_by_hand():
    (level,) = anchor_grid((16, 20), strides=(8,), sizes=(10.0,), shapes=((1.0, 1.0), (2.0, 0.5)))
    assert level.dtype == np.float32
    expected = []
    for y in (4, 12):
        for x in (4, 12, 20):  # ceil(20 / 8) = 3 cells
            expected += [[x - 5, y - 5, x + 5, y + 5], [x - 10, y - 2.5, x + 10, y + 2.5]]
    np.testing.assert_array_equal(level, expected)


def test_number_of_anchors_on_nvidia_canvas():
    levels = anchor_grid((832, 1344), strides=STRIDES, sizes=SIZES, shapes=NVIDIA_SHAPES)
    assert [len(level) for level in levels] == [209664, 52416, 13104, 3276, 819]


def test_strides_and_sizes_must_pair_up():
    with pytest.raises(ValueError, match="2 anchor strides but 1 sizes"):
        anchor_grid((64, 64), strides=(4, 8), sizes=(32.0,), shapes=NVIDIA_SHAPES)


def test_grid_equals_nvidia():
    golden = np.load(shared("goldens/nvidia_tf2/nv_eval.npz"))["anchors"][:, [1, 0, 3, 2]]
    levels = anchor_grid((256, 384), strides=STRIDES, sizes=SIZES, shapes=NVIDIA_SHAPES)
    np.testing.assert_array_equal(np.concatenate(levels), golden)


def test_grid_equals_torchvision():
    golden = np.load(shared("goldens/torchvision/ops.npz"))
    settings = {"sizes": SIZES, "shapes": TORCH_SHAPES, "centre": 0.0, "rounding": "half_sides"}
    levels = anchor_grid((192, 320), strides=STRIDES, **settings)
    np.testing.assert_array_equal(np.concatenate(levels), golden["anchors_192x320"])
    levels = anchor_grid((832, 1344), strides=STRIDES, **settings)
    picked = np.concatenate(levels)[golden["anchors_832x1344_idx"]]
    np.testing.assert_array_equal(picked, golden["anchors_832x1344_at_idx"])


def test_caffe_rounding_by_hand():
    """maskrcnn-benchmark's anchors at the first cell: sides rounded at the size of one cell."""
    levels = anchor_grid(
        (64, 64), strides=STRIDES, sizes=SIZES, shapes=TORCH_SHAPES, rounding="base_window",
        offset=1.0,
    )  # fmt: skip
    # Base windows of 4, 8 and 64 pixels: 6 x 3, 4 x 4, 3 x 6; 11 x 6, ..; 91 x 46 (45.5 to even).
    np.testing.assert_array_equal(
        levels[0][:3], [[-22, -10, 25, 13], [-14, -14, 17, 17], [-10, -22, 13, 25]]
    )
    np.testing.assert_array_equal(levels[1][0], [-40, -20, 47, 27])
    np.testing.assert_array_equal(levels[4][0], [32 - 364, 32 - 184, 32 + 363, 32 + 183])


def test_unknown_rounding_is_named():
    with pytest.raises(ValueError, match="model.anchor_rounding is 'up'"):
        anchor_grid((64, 64), strides=(4,), sizes=(32.0,), shapes=NVIDIA_SHAPES, rounding="up")
