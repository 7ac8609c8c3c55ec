import numpy as np
import pytest

from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.data.transforms import (
    load_example,
    padding_example,
    resize_image,
    resize_plan,
)
from tests.data.small_set import rectangle

OPTIONS = {"image_size": (128, 192), "resize": "fit", "max_instances": 3, "mask_size": 8}


@pytest.mark.parametrize(
    "height, width, image_size, rule, canvas, size",
    [
        # NVIDIA TF2: scale = min(832 / h, 1344 / w), sizes cut off to whole pixels
        (480, 640, (832, 1344), "fit", (832, 1344), (832, 1109)),
        (640, 480, (832, 1344), "fit", (832, 1344), (832, 624)),
        (427, 640, (832, 1344), "fit", (832, 1344), (832, 1247)),
        (375, 1242, (832, 1344), "fit", (832, 1344), (405, 1344)),
        (832, 1344, (832, 1344), "fit", (832, 1344), (832, 1344)),
        (2000, 4, (832, 1344), "fit", (832, 1344), (832, 1)),
        # 153 * (832 / 136) is 935.9999999999999 in float64: no pixel may get lost
        (136, 153, (832, 1344), "fit", (832, 1344), (832, 936)),
        # torchvision: scale = min(800 / short, 1333 / long), output cut off
        (480, 640, (800, 1333), "shortest_edge", (832, 1344), (800, 1066)),
        (640, 480, (800, 1333), "shortest_edge", (1344, 832), (1066, 800)),
        (500, 500, (800, 1333), "shortest_edge", (832, 1344), (800, 800)),
        (300, 640, (800, 1333), "shortest_edge", (832, 1344), (624, 1333)),
        (640, 300, (800, 1333), "shortest_edge", (1344, 832), (1333, 624)),
        (536, 559, (320, 512), "shortest_edge", (320, 512), (320, 333)),
    ],
)
def test_resize_plan_by_hand(height, width, image_size, rule, canvas, size):
    plan = resize_plan(height, width, image_size, rule)
    assert plan.canvas == canvas and plan.size == size
    assert plan.scale == (size[0] / height, size[1] / width)


@pytest.mark.parametrize("image_size", [(800, 1344), (832, 1333), (0, 64)])
def test_fixed_canvas_must_divide(image_size):
    with pytest.raises(ValueError, match="data.image_size is .* multiples of 64"):
        resize_plan(480, 640, image_size, "fit")


def test_unknown_rule_is_named():
    with pytest.raises(ValueError, match="data.resize is 'stretch', expected 'fit' or"):
        resize_plan(480, 640, (832, 1344), "stretch")


@pytest.mark.parametrize("rule", ["fit", "shortest_edge"])
def test_no_image_is_larger_than_its_canvas(rule):
    rng = np.random.default_rng(0)
    for height, width in rng.integers(1, 3000, (500, 2)).tolist():
        plan = resize_plan(height, width, (320, 512), rule)
        assert 1 <= plan.size[0] <= plan.canvas[0] and 1 <= plan.size[1] <= plan.canvas[1]
        assert all(side % 64 == 0 for side in plan.canvas)
        # within one pixel of the true aspect ratio
        exact = min(plan.size[0] / height, plan.size[1] / width) + 1 / min(height, width)
        assert max(plan.scale) <= exact + 1e-9


def test_image_lies_in_the_upper_left_corner():
    image = np.full((20, 40, 3), 200, np.uint8)
    canvas = resize_image(image, resize_plan(20, 40, (64, 64), "fit"))
    assert canvas.shape == (64, 64, 3) and canvas.dtype == np.uint8
    assert (canvas[:32] == 200).all() and not canvas[32:].any()


def test_resize_is_bilinear_at_pixel_centres():
    ramp = np.repeat(np.arange(0, 160, 10, dtype=np.uint8)[None, :, None], 16, 0).repeat(3, 2)
    canvas = resize_image(ramp, resize_plan(16, 16, (64, 64), "fit"))
    centres = (np.arange(64) + 0.5) / 4 - 0.5
    expected = np.clip(10 * centres, 0, 150)
    np.testing.assert_allclose(canvas[30, :, 0], expected, atol=0.51)


def test_example_by_hand(coco_files):
    objects = [rectangle(6, 4, 30, 20), rectangle(0, 0, 60, 40, category_id=7)]
    row = load_example(load_coco(*coco_files(annotations=objects)), 0, **OPTIONS)
    # 40 x 60 on 128 x 192: everything times 3.2
    assert row.images.shape == (128, 192, 3)
    np.testing.assert_array_equal(row.image_sizes, [128, 192])
    np.testing.assert_allclose(row.scales, [3.2, 3.2], rtol=1e-6)
    boxes = [[19.2, 12.8, 115.2, 76.8], [0, 0, 192, 128], [0, 0, 0, 0]]
    np.testing.assert_allclose(row.targets.boxes, boxes, rtol=1e-6)
    np.testing.assert_array_equal(row.targets.classes, [1, 2, 0])
    np.testing.assert_array_equal(row.targets.valid, [True, True, False])
    assert (row.targets.masks[:2] == 255).all() and not row.targets.masks[2].any()
    dtypes = [row.images, row.targets.boxes, row.targets.classes, row.targets.masks]
    assert [a.dtype for a in dtypes] == [np.uint8, np.float32, np.int32, np.uint8]


def test_each_axis_has_its_own_scale(coco_files):
    dataset = load_coco(*coco_files(sizes=[(37, 61)], annotations=[rectangle(0, 0, 61, 37)]))
    row = load_example(dataset, 0, **OPTIONS)
    height, width = row.image_sizes
    assert (height, width) == (116, 192)
    np.testing.assert_allclose(row.targets.boxes[0], [0, 0, width, height], rtol=1e-6)


def test_crowds_are_no_targets(coco_files):
    crowd = rectangle(0, 0, 50, 30, iscrowd=1)
    dataset = load_coco(*coco_files(annotations=[crowd, rectangle(1, 1, 5, 5)]))
    row = load_example(dataset, 0, **OPTIONS)
    assert row.targets.valid.sum() == 1
    np.testing.assert_allclose(row.targets.boxes[0], np.array([1, 1, 6, 6]) * 3.2, rtol=1e-6)


def test_image_without_objects_has_no_valid_row(coco_files):
    dataset = load_coco(*coco_files(), require_annotations=False)
    row = load_example(dataset, 0, **OPTIONS)
    assert not row.targets.valid.any() and row.image_index == 0


def test_largest_objects_are_kept_in_their_order(coco_files):
    sides = [4, 12, 3, 9, 7]
    dataset = load_coco(*coco_files(annotations=[rectangle(0, 0, s, s) for s in sides]))
    row = load_example(dataset, 0, **OPTIONS)
    np.testing.assert_allclose(row.targets.boxes[:, 2], np.array([12, 9, 7]) * 3.2, rtol=1e-6)
    assert row.targets.valid.all()


def test_size_that_disagrees_with_the_json_stops(coco_files):
    entry = {"id": 1, "file_name": "001.png", "height": 60, "width": 40}
    dataset = load_coco(*coco_files(images=[entry]), require_annotations=False)
    with pytest.raises(ValueError, match="001.png: the file is 40 x 60"):
        load_example(dataset, 0, **OPTIONS)


def test_padding_row_has_the_shapes_of_an_example(coco_files):
    row = load_example(load_coco(*coco_files(), require_annotations=False), 0, **OPTIONS)
    pad = padding_example((128, 192), 3, 8)
    for name in ("images", "image_sizes", "scales", "image_index"):
        real, empty = getattr(row, name), getattr(pad, name)
        assert (real.shape, real.dtype) == (empty.shape, empty.dtype)
    assert pad.image_index == -1 and not pad.targets.valid.any() and not pad.images.any()
    np.testing.assert_array_equal(pad.image_sizes, [1, 1])
    np.testing.assert_array_equal(pad.scales, [1, 1])
