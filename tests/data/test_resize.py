import numpy as np
import pytest

from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.resize import ResizePlan, resize_image, resize_mask, resize_plan
from tests.bounds import rounding_bound
from tests.helpers import load_golden

MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def options(image_size, resize, **keys):
    return ExampleOptions(image_size=image_size, resize=resize, max_instances=1, **keys)


def plan_onto(canvas, size):
    return ResizePlan(canvas, size, (1.0, 1.0))


@pytest.mark.parametrize(
    "height, width, size",
    [
        # NVIDIA TF2: scale = min(832 / h, 1344 / w), sizes cut off to whole pixels
        (480, 640, (832, 1109)),
        (640, 480, (832, 624)),
        (427, 640, (832, 1247)),
        (375, 1242, (405, 1344)),
        (832, 1344, (832, 1344)),
        (2000, 4, (832, 1)),
        (4000, 1, (832, 1)),
        # 153 * (832 / 136) is 935.9999999999999 in float64: no pixel may get lost
        (136, 153, (832, 936)),
    ],
)
def test_fit_by_hand(height, width, size):
    plan = resize_plan(height, width, options((832, 1344), "fit"))
    assert plan == ((832, 1344), size, (size[0] / height, size[1] / width))


@pytest.mark.parametrize(
    "height, width, floor, rounded, caffe",
    [
        # 640 * 800 / 480 = 1066.67
        (480, 640, (800, 1066), (800, 1067), (800, 1066)),
        (640, 480, (1066, 800), (1067, 800), (1066, 800)),
        (500, 500, (800, 800), (800, 800), (800, 800)),
        # the long side binds: 300 * 1333 / 640 = 624.84; caffe: 640 * 625 / 300 = 1333.33
        (300, 640, (624, 1333), (625, 1333), (625, 1333)),
        (640, 300, (1333, 624), (1333, 625), (1333, 625)),
        # 161 * (800 / 161) is 799.9999999999999 in float64, and torchvision cuts that off
        (161, 200, (799, 993), (800, 994), (800, 993)),
        (388, 640, (799, 1319), (800, 1320), (800, 1319)),
        # 667 * 1333 / 1334 = 666.5: up, or to the even number
        (667, 1334, (666, 1333), (667, 1333), (666, 1332)),
        # 100 * 1333 / 500 = 266.6; caffe goes on with 267 and passes the limit: 500 * 2.67 = 1335
        (100, 500, (266, 1333), (267, 1333), (267, 1335)),
        # 27 * 50 = 1350 would pass the canvas
        (50, 2500, (26, 1333), (27, 1333), (27, 1344)),
        (1, 4000, (1, 1333), (1, 1333), (1, 1344)),
    ],
)
def test_shortest_edge_by_hand(height, width, floor, rounded, caffe):
    canvas = (832, 1344) if height <= width else (1344, 832)
    for rounding, size in (("floor", floor), ("round", rounded), ("caffe", caffe)):
        rule = options((800, 1333), "shortest_edge", resize_rounding=rounding)
        plan = resize_plan(height, width, rule)
        assert plan == (canvas, size, (size[0] / height, size[1] / width)), rounding


@pytest.mark.parametrize(
    "rounding, size", [("floor", (640, 853)), ("round", (640, 853)), ("caffe", (640, 853))]
)
def test_short_side_may_be_drawn(rounding, size):
    rule = options((800, 1333), "shortest_edge", resize_rounding=rounding, short_sides=(640, 800))
    assert resize_plan(480, 640, rule, 640)[:2] == ((832, 1344), size)
    assert resize_plan(480, 640, rule) == resize_plan(480, 640, rule, 800)


def test_order_of_the_two_sides_is_free():
    for size in ((320, 512), (512, 320)):
        plan = resize_plan(536, 559, options(size, "shortest_edge"))
        assert plan[:2] == ((320, 512), (320, 333))


@pytest.mark.parametrize(
    "resize, rounding",
    [
        ("fit", "floor"),
        ("shortest_edge", "floor"),
        ("shortest_edge", "round"),
        ("shortest_edge", "caffe"),
    ],
)
def test_no_image_is_larger_than_its_canvas(resize, rounding):
    rng = np.random.default_rng(0)
    rule = options((320, 512), resize, resize_rounding=rounding)
    for height, width in rng.integers(1, 3000, (500, 2)).tolist():
        plan = resize_plan(height, width, rule)
        assert 1 <= plan.size[0] <= plan.canvas[0] and 1 <= plan.size[1] <= plan.canvas[1]
        assert all(side % 64 == 0 for side in plan.canvas)
        # within one pixel of the true aspect ratio
        exact = min(plan.size[0] / height, plan.size[1] / width) + 1 / min(height, width)
        assert max(plan.scale) <= exact + 1e-9


KINDS = [{}, {"antialias": True}, {"image_dtype": "float32"}]


@pytest.mark.parametrize("kind", KINDS)
def test_image_lies_in_the_upper_left_corner(kind):
    rule = options((64, 64), "fit", **kind)
    image = np.full((20, 40, 3), 200, np.uint8)
    canvas = resize_image(image, resize_plan(20, 40, rule), rule)
    assert canvas.shape == (64, 64, 3) and canvas.dtype == rule.image_dtype
    assert (canvas[:32] == 200).all() and not canvas[32:].any()


def sampled(image, size):
    """Bilinear at pixel centers in float64, the border extended."""
    for axis, after in enumerate(size):
        before = image.shape[axis]
        position = np.clip((np.arange(after) + 0.5) * before / after - 0.5, 0, before - 1)
        low = np.minimum(position.astype(int), max(before - 2, 0))
        high = np.minimum(low + 1, before - 1)
        weight = (position - low).reshape([-1 if k == axis else 1 for k in range(3)])
        image = image.take(low, axis) * (1 - weight) + image.take(high, axis) * weight
    return image


def averaged(image, size):
    """As `sampled`, but with a triangle that is as wide as a pixel of the result, if that is wider,
    cut off at the border."""
    for axis, after in enumerate(size):
        before = image.shape[axis]
        width = max(before / after, 1.0)
        centers = (np.arange(after) + 0.5) * before / after
        weights = 1 - np.abs(np.arange(before) + 0.5 - centers[:, None]) / width
        weights = np.maximum(weights, 0)
        weights /= weights.sum(axis=1, keepdims=True)
        image = np.moveaxis(np.tensordot(weights, image, (1, axis)), 0, axis)
    return image


@pytest.mark.parametrize("size", [(64, 64), (20, 64), (64, 9), (31, 43)])
@pytest.mark.parametrize(
    "kind, oracle, tolerance",
    # Integers: weights of 11 bits and rounded; rounded after each axis. In float32, eight roundings
    # of up to 255.
    [
        (KINDS[0], sampled, 0.8),
        (KINDS[1], averaged, 1.05),
        (KINDS[2], sampled, rounding_bound(8, 255.0)),
    ],
)
def test_resize_equals_slow_oracle(size, kind, oracle, tolerance):
    rule = options((64, 64), "fit", **kind)
    image = np.random.default_rng(0).integers(0, 256, (31, 43, 3), dtype=np.uint8)
    canvas = resize_image(image, plan_onto((64, 64), size), rule)
    expected = oracle(image.astype(float), size)
    np.testing.assert_allclose(canvas[: size[0], : size[1]], expected, atol=tolerance)


def test_antialias_sees_every_pixel_and_sampling_does_not():
    stripes = np.zeros((8, 64, 3), np.uint8)
    stripes[:, ::4] = 200
    plan = plan_onto((64, 64), (8, 16))  # samples lie between the second and the third of four
    for antialias, low, high in ((True, 45, 55), (False, 0, 0)):
        rule = options((64, 64), "fit", antialias=antialias)
        row = resize_image(stripes, plan, rule)[4, 2:14]
        assert low <= row.min() and row.max() <= high


def test_nearest_mask_by_hand():
    mask = np.array([[1, 0, 0, 1], [0, 1, 0, 0]], np.uint8)
    canvas = resize_mask(mask, plan_onto((4, 6), (3, 6)))
    # rows 0, 0, 1 (floor of i * 2 / 3), columns 0, 0, 1, 2, 2, 3 (floor of j * 4 / 6)
    expected = [[1, 1, 0, 0, 0, 1], [1, 1, 0, 0, 0, 1], [0, 0, 1, 0, 0, 0], [0] * 6]
    np.testing.assert_array_equal(canvas, expected)
    assert canvas.dtype == np.uint8
    np.testing.assert_array_equal(resize_mask(mask, plan_onto((2, 4), (2, 4))), mask)


def test_nearest_mask_rounds_as_torch_does():
    # 27 * (1218 / 261) is 126 exactly; in single precision it falls below
    line = (np.arange(1218) == 125).astype(np.uint8)[None]
    canvas = resize_mask(line, plan_onto((1, 261), (1, 261)))
    assert np.flatnonzero(canvas).tolist() == [27]


def golden_masks(golden, name, index):
    shape = golden[f"{name}_shape{index}"]
    return np.unpackbits(golden[f"{name}{index}"], axis=-1)[..., : shape[2]]


@pytest.mark.parametrize("index", [0, 1])
def test_torchvision_golden_images(index):
    golden = load_golden("torchvision/small_eval")
    image = np.ascontiguousarray(golden[f"img{index}"].transpose(1, 2, 0))
    rule = options((192, 320), "shortest_edge", image_dtype="float32")
    plan = resize_plan(*image.shape[:2], rule)
    height, width = plan.size
    np.testing.assert_array_equal(plan.size, golden["image_sizes"][index])
    expected = golden["batch_sub4"][index].transpose(1, 2, 0)  # every fourth row and column
    assert plan.canvas == (4 * expected.shape[0], 4 * expected.shape[1])
    normalized = ((resize_image(image, plan, rule) / 255 - MEAN) / STD)[:height, :width][::4, ::4]
    expected = expected[: len(normalized), : normalized.shape[1]]
    # torch rounds the positions of its samples to single precision
    np.testing.assert_allclose(normalized, expected, atol=1e-4)


@pytest.mark.parametrize("index", [0, 1])
def test_torchvision_golden_masks_and_boxes(index):
    golden = load_golden("torchvision/small_train")
    masks = golden_masks(golden, "gt_masks", index)
    expected = golden_masks(golden, "gt_masks_resized", index)
    plan = resize_plan(*masks.shape[1:], options((192, 320), "shortest_edge"))
    height, width = plan.size
    assert masks.any(axis=(1, 2)).all() and expected.shape[1:] == plan.size
    for mask, resized in zip(masks, expected, strict=True):
        canvas = resize_mask(mask, plan)
        np.testing.assert_array_equal(canvas[:height, :width], resized)
        assert canvas.sum() == resized.sum()
    boxes = golden[f"gt_boxes{index}"] * (*plan.scale[::-1], *plan.scale[::-1])
    np.testing.assert_allclose(boxes, golden[f"gt_boxes_resized{index}"], rtol=1e-6)


@pytest.mark.parametrize("index", [0, 1])
def test_nvidia_golden_images(index):
    golden = load_golden("nvidia_tf2/nv_eval")
    image, info = golden[f"img{index}"], golden["image_info"][index]
    rule = options((256, 384), "fit", image_dtype="float32")
    plan = resize_plan(*image.shape[:2], rule)
    height, width = plan.size
    assert (plan.size, image.shape[:2]) == (tuple(info[:2]), tuple(info[3:]))
    normalized = ((resize_image(image, plan, rule) / 255 - MEAN) / STD)[:height, :width][::4, ::4]
    expected, (rows, columns) = golden["images_sub4"][index], normalized.shape[:2]
    np.testing.assert_allclose(normalized, expected[:rows, :columns], atol=1e-4)
    assert not expected[rows:].any() and plan.canvas == tuple(4 * n for n in expected.shape[:2])
