import jax
import numpy as np
import pytest

from mask_rcnn_jax.annotations.segmentation import segmentation_to_mask
from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.transforms import empty_batch, load_example, training_objects
from mask_rcnn_jax.formats.shapes import uncompressed_rle
from tests.data.small_set import rectangle
from tests.helpers import shared


def options(**keys):
    fit = {"image_size": (128, 192), "resize": "fit", "max_instances": 3, "mask_size": 8}
    return ExampleOptions(**(fit | keys))


def example(files, **keys):
    return load_example(load_coco(*files, require_annotations=False), 0, options(**keys))


def rle(annotation):
    """The same annotation of a 40 x 60 image as a run-length encoding."""
    mask = segmentation_to_mask(annotation["segmentation"], 40, 60)
    return annotation | {"segmentation": uncompressed_rle(mask)}


def test_example_by_hand(coco_files):
    objects = [rectangle(6, 4, 30, 20), rectangle(0, 0, 60, 40, category_id=7)]
    row = example(coco_files(annotations=objects))
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
    assert row.targets.polygons.shape == (3, 0, 3) and row.targets.polygons.dtype == np.float32


def test_each_axis_has_its_own_scale(coco_files):
    row = example(coco_files(sizes=[(37, 61)], annotations=[rectangle(0, 0, 61, 37)]))
    height, width = row.image_sizes
    assert (height, width) == (116, 192)
    np.testing.assert_allclose(row.targets.boxes[0], [0, 0, width, height], rtol=1e-6)


def test_drawn_short_side_moves_everything_on_the_same_canvas(coco_files):
    objects = [rectangle(6, 4, 30, 20), rle(rectangle(10, 10, 20, 10))]
    dataset = load_coco(*coco_files(annotations=objects))
    rule = options(
        image_size=(100, 160), resize="shortest_edge", short_sides=(60, 80),
        max_vertices=4, mask_frame="image",
    )  # fmt: skip
    for short_side, scale in ((None, 2.5), (60, 1.5), (80, 2.0)):
        row = load_example(dataset, 0, rule, short_side)
        assert row.images.shape == (128, 192, 3) and row.targets.masks.shape == (3, 128, 192)
        np.testing.assert_array_equal(row.image_sizes, [40 * scale, 60 * scale])
        assert row.images[: int(40 * scale), : int(60 * scale)].all()
        box = np.array([6, 4, 36, 24]) * scale
        np.testing.assert_allclose(row.targets.boxes[0], box, rtol=1e-6)
        np.testing.assert_allclose(row.targets.polygons[0, [0, 2], :2].ravel(), box, rtol=1e-6)
        y, x = np.nonzero(row.targets.masks[0])
        assert (x.min(), y.min(), x.max() + 1, y.max() + 1) == tuple(box)


def test_pixels_may_stay_unrounded(coco_files):
    files = coco_files()
    row = example(files, image_dtype="float32")
    assert row.images.dtype == np.float32
    np.testing.assert_allclose(row.images, example(files).images, atol=1e-4)


@pytest.mark.parametrize("kind", [lambda entry: entry, rle])
def test_whole_mask_lies_on_the_canvas(coco_files, kind):
    objects = [kind(rectangle(6, 4, 30, 20)), kind(rectangle(50, 30, 10, 10))]
    row = example(coco_files(annotations=objects), image_size=(128, 128), mask_frame="image")
    # 40 x 60 becomes 85 x 128: row i shows floor(i * 40 / 85), column j floor(j * 60 / 128)
    expected = np.zeros((3, 128, 128), np.uint8)
    expected[0, 9:51, 13:77] = 255
    expected[1, 64:85, 107:128] = 255
    np.testing.assert_array_equal(row.targets.masks, expected)


def test_whole_masks_and_crops_agree(coco_files):
    triangle = [[5.0, 3.0, 55.0, 20.0, 12.0, 38.0]]
    entry = rectangle(5, 3, 50, 35) | {"segmentation": triangle}
    files = coco_files(annotations=[entry])
    crop = example(files, mask_size=32).targets.masks[0]
    row = example(files, mask_frame="image")
    x1, y1, x2, y2 = row.targets.boxes[0]
    at = (np.arange(32) + 0.5) / 32
    rows, columns = (y1 + at * (y2 - y1)).astype(int), (x1 + at * (x2 - x1)).astype(int)
    sampled = row.targets.masks[0][rows[:, None], columns]
    assert (crop != sampled).mean() < 0.05 and 0.3 < (crop > 0).mean() < 0.6


def test_polygons_by_hand(coco_files):
    two = rectangle(6, 4, 30, 20, segmentation=[[6, 4, 36, 4, 36, 24], [6, 4, 7, 4, 7, 5, 6, 5]])
    row = example(coco_files(annotations=[two, rectangle(0, 0, 10, 10)]), max_vertices=8)
    polygons = row.targets.polygons
    assert polygons.shape == (3, 8, 3) and polygons.dtype == np.float32
    expected = np.array(
        [[6, 4, 0], [36, 4, 0], [36, 24, 0], [6, 4, 1], [7, 4, 1], [7, 5, 1], [6, 5, 1]]
    )
    np.testing.assert_allclose(polygons[0, :7], expected * (3.2, 3.2, 1), rtol=1e-6)
    corners = [[0, 0, 0], [10, 0, 0], [10, 10, 0], [0, 10, 0]]
    np.testing.assert_allclose(polygons[1, :4], np.array(corners) * (3.2, 3.2, 1), rtol=1e-6)
    for unused in (polygons[0, 7:], polygons[1, 4:], polygons[2]):
        assert (unused == (0, 0, -1)).all()


def test_object_without_a_small_enough_outline_keeps_its_crop(coco_files):
    small, box = rectangle(0, 0, 10, 10), rectangle(6, 4, 30, 20)
    pentagon = box | {"segmentation": [[6, 4, 36, 4, 36, 24, 20, 24, 6, 24]]}
    row = example(coco_files(annotations=[rle(box), pentagon, small]), max_vertices=4)
    assert (row.targets.polygons[:2] == (0, 0, -1)).all() and row.targets.valid.all()
    assert (row.targets.masks == 255).all()
    assert (row.targets.polygons[2, :, 2] == 0).all()


def test_boxes_may_end_at_their_last_pixel(coco_files):
    objects = [
        rectangle(6, 4, 30, 20),
        rectangle(50, 30, 20, 20),  # clipped to x2 = 60, y2 = 40: the last pixels are 59 and 39
        rectangle(5, 5, 1, 9),  # one pixel wide: nothing is left
        rectangle(5, 5, 9, 0.5),
    ]
    files = coco_files(annotations=objects)
    row = example(files, inclusive_boxes=True)
    boxes = np.array([[6, 4, 35, 23], [50, 30, 59, 39], [0] * 4]) * 3.2
    np.testing.assert_allclose(row.targets.boxes, boxes, rtol=1e-6)
    assert row.targets.valid.tolist() == [True, True, False]
    assert (row.targets.masks[:2] == 255).all()  # the crop's frame is the box of the targets
    assert example(files).targets.valid.sum() == 3


def test_crop_follows_inclusive_boxes(coco_files):
    # the left half of the box 10..21, whose offset box is 10..20: five of ten columns, not of 11
    entry = rectangle(10, 10, 11, 11) | {"segmentation": [[10, 10, 15, 10, 15, 21, 10, 21]]}
    row = example(coco_files(annotations=[entry]), inclusive_boxes=True, mask_size=10)
    expected = np.zeros((10, 10), np.uint8)
    expected[:, :5] = 255
    np.testing.assert_array_equal(row.targets.masks[0], expected)


def test_crowds_are_no_targets_unless_asked_for(coco_files):
    crowd = rle(rectangle(0, 0, 50, 30, iscrowd=1))
    files = coco_files(annotations=[crowd, rectangle(1, 1, 5, 5)])
    row = example(files)
    assert row.targets.valid.sum() == 1
    np.testing.assert_allclose(row.targets.boxes[0], np.array([1, 1, 6, 6]) * 3.2, rtol=1e-6)
    row = example(files, skip_crowd=False)
    assert row.targets.valid.sum() == 2
    np.testing.assert_allclose(row.targets.boxes[0], np.array([0, 0, 50, 30]) * 3.2, rtol=1e-6)


def test_image_without_objects_has_no_valid_row(coco_files):
    row = example(coco_files(), max_vertices=3)
    assert not row.targets.valid.any() and row.image_index == 0
    assert (row.targets.polygons == (0, 0, -1)).all()


def test_largest_objects_are_kept_in_their_order(coco_files):
    sides = [4, 12, 3, 9, 7]
    row = example(coco_files(annotations=[rectangle(0, 0, s, s) for s in sides]))
    np.testing.assert_allclose(row.targets.boxes[:, 2], np.array([12, 9, 7]) * 3.2, rtol=1e-6)
    assert row.targets.valid.all()


def test_size_that_disagrees_with_the_json_stops(coco_files):
    entry = {"id": 1, "file_name": "001.png", "height": 60, "width": 40}
    with pytest.raises(ValueError, match="001.png: the file is 40 x 60"):
        example(coco_files(images=[entry]))


@pytest.mark.parametrize(
    "keys", [{}, {"image_dtype": "float32", "mask_frame": "image", "max_vertices": 5}]
)
def test_padding_row_has_the_shapes_of_an_example(coco_files, keys):
    row = example(coco_files(annotations=[rectangle(0, 0, 9, 9)]), **keys)
    batch = empty_batch(2, (128, 192), options(**keys))
    pad = jax.tree.map(lambda leaf: leaf[1], batch)
    shapes, expected = (
        jax.tree.map(lambda leaf: f"{leaf.dtype} {leaf.shape}", example) for example in (pad, row)
    )
    assert shapes == expected
    assert pad.image_index == -1 and not pad.targets.valid.any() and not pad.images.any()
    np.testing.assert_array_equal(pad.image_sizes, [1, 1])
    np.testing.assert_array_equal(pad.scales, [1, 1])
    assert (pad.targets.polygons == (0, 0, -1)).all() and not pad.targets.masks.any()


def test_real_polygons_lie_in_their_boxes():
    folder = shared("data/coco_mini")
    dataset = load_coco(folder / "annotations/instances_train2017.json", folder / "train2017")
    rule = options(
        image_size=(256, 416), resize="shortest_edge", resize_rounding="round", antialias=True,
        max_instances=30, max_vertices=200,
    )  # fmt: skip
    for index in range(12):
        targets = load_example(dataset, index, rule).targets
        objects = training_objects(dataset.images[index].annotations, rule)
        assert targets.valid.sum() == min(len(objects), 30)
        for box, vertices in zip(targets.boxes, targets.polygons, strict=True):
            points = vertices[vertices[:, 2] >= 0, :2]
            if len(points):  # within one pixel of COCO's own rounding, at a scale below 2
                np.testing.assert_allclose(points.min(axis=0), box[:2], atol=2)
                np.testing.assert_allclose(points.max(axis=0), box[2:], atol=2)
