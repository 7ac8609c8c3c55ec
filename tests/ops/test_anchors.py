from functools import partial

import jax
import numpy as np
import pytest

from mask_rcnn_jax.ops.anchors import AnchorGrid
from mask_rcnn_jax.ops.extent import ValidExtent, valid_extent
from tests.helpers import load_golden

NVIDIA = AnchorGrid(aspect_ratios=((1.0, 1.0), (1.4, 0.7), (0.7, 1.4)), center=0.5)
TORCHVISION = AnchorGrid(rounding="half_sides")


def grid(anchors: AnchorGrid, canvas: tuple[int, int], **options) -> list[np.ndarray]:
    """The levels of the whole canvas."""
    return [np.asarray(level) for level in anchors(ValidExtent(canvas, None), **options).boxes]


@partial(jax.jit, static_argnums=(0, 1))
def run(anchors, canvas, image_sizes):
    """Boxes and which are valid, if images are padded to 32 pixels."""
    found = anchors(valid_extent(canvas, image_sizes, 32))
    return found.boxes, found.valid


def test_grid_by_hand():
    anchors = AnchorGrid((1.0, 10.0, 1.0, 1.0, 1.0), ((1.0, 1.0), (2.0, 0.5)), center=0.5)
    level = grid(anchors, (16, 20))[1]
    assert level.dtype == np.float32
    expected = []
    for y in (4, 12):
        for x in (4, 12, 20):  # ceil(20 / 8) = 3 cells
            expected += [[x - 5, y - 5, x + 5, y + 5], [x - 10, y - 2.5, x + 10, y + 2.5]]
    np.testing.assert_array_equal(level, expected)


def test_number_of_anchors_on_nvidia_canvas():
    levels = grid(NVIDIA, (832, 1344))
    assert [len(level) for level in levels] == [209664, 52416, 13104, 3276, 819]


def test_there_is_a_size_for_every_level():
    with pytest.raises(ValueError, match=r"sizes is \(32.0,\), expected 5"):
        AnchorGrid(sizes=(32.0,))


def test_grid_equals_nvidia():
    golden = load_golden("nvidia_tf2/nv_eval")["anchors_sub8"][:, [1, 0, 3, 2]]
    np.testing.assert_array_equal(np.concatenate(grid(NVIDIA, (256, 384)))[::8], golden)


def test_grid_equals_torchvision():
    golden = load_golden("torchvision/ops")
    levels = grid(TORCHVISION, (192, 320))
    np.testing.assert_array_equal(np.concatenate(levels), golden["anchors_192x320"])
    picked = np.concatenate(grid(TORCHVISION, (832, 1344)))[golden["anchors_832x1344_idx"]]
    np.testing.assert_array_equal(picked, golden["anchors_832x1344_at_idx"])


def test_caffe_rounding_by_hand():
    """maskrcnn-benchmark's anchors at the first cell: sides rounded at the size of one cell."""
    levels = grid(AnchorGrid(center=0.5, rounding="base_window"), (64, 64), offset=1.0)
    # Base windows of 4, 8 and 64 pixels: 6 x 3, 4 x 4, 3 x 6; 11 x 6, ..; 91 x 46 (45.5 to even).
    np.testing.assert_array_equal(
        levels[0][:3], [[-22, -10, 25, 13], [-14, -14, 17, 17], [-10, -22, 13, 25]]
    )
    np.testing.assert_array_equal(levels[1][0], [-40, -20, 47, 27])
    np.testing.assert_array_equal(levels[4][0], [32 - 364, 32 - 184, 32 + 363, 32 + 183])


def test_strides_follow_the_map():
    """torchvision divides 800 padded rows by the 13 cells of the last level: 61 pixels."""
    anchors = AnchorGrid((512.0,) * 5, ((1.0, 1.0),), rounding="half_sides", stride="map")
    (*_, last), _ = run(anchors, (832, 1344), np.array([[800, 1216]]))
    last = last.reshape(13, 21, 4)
    np.testing.assert_array_equal(last[:3, 0, 1] + 256, [0, 61, 122])
    np.testing.assert_array_equal(last[0, :3, 0] + 256, [0, 64, 128])


def test_anchors_outside_the_extent_are_not_valid():
    levels = run(NVIDIA, (64, 128), np.array([[20, 40], [30, 30]]))  # of 32 x 64 pixels
    assert NVIDIA(ValidExtent((64, 128), None)).valid is None
    for stride, boxes, valid in zip((4, 8, 16, 32, 64), *levels, strict=True):
        rows, columns = -(-64 // stride), -(-128 // stride)
        expected = np.zeros((rows, columns, 3), bool)
        expected[: -(-32 // stride), : -(-64 // stride)] = True
        np.testing.assert_array_equal(valid, expected.reshape(-1))
        assert len(boxes) == len(valid)
