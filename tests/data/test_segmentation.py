import json

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from mask_rcnn_jax.annotations.segmentation import (
    compact,
    segmentation_area,
    segmentation_box,
    segmentation_fault,
    segmentation_to_mask,
)
from mask_rcnn_jax.data.segmentation import crop_mask, polygon_vertices, vertex_count
from mask_rcnn_jax.formats.shapes import uncompressed_rle
from mask_rcnn_jax.rle import compressed_rle
from tests.helpers import shared

SQUARE = [[2, 1, 6, 1, 6, 4, 2, 4]]


def blob(height=50, width=70, seed=0):
    """A mask with ragged edges, a hole and two parts."""
    y, x = np.mgrid[:height, :width]
    mask = ((y - 22) ** 2 + (x - 30) ** 2 < 300) & ((y - 20) ** 2 + (x - 27) ** 2 > 40)
    mask |= (y > 40) & (x > 60)
    return (mask & (np.random.default_rng(seed).random(mask.shape) > 0.1)).astype(np.uint8)


def oracle_crop(mask, box, side):
    """Bilinear samples at the crop's pixel centers, one at a time, the border extended."""
    height, width = mask.shape
    crop = np.zeros((side, side))
    for i in range(side):
        for j in range(side):
            y = box[1] + (i + 0.5) * (box[3] - box[1]) / side - 0.5
            x = box[0] + (j + 0.5) * (box[2] - box[0]) / side - 0.5
            for yy in (int(np.floor(y)), int(np.floor(y)) + 1):
                for xx in (int(np.floor(x)), int(np.floor(x)) + 1):
                    weight = (1 - abs(y - yy)) * (1 - abs(x - xx))
                    crop[i, j] += (
                        weight * mask[np.clip(yy, 0, height - 1), np.clip(xx, 0, width - 1)]
                    )
    return 255 * crop


def test_polygon_mask_counted_by_hand():
    mask = segmentation_to_mask(SQUARE, 6, 8)
    expected = np.zeros((6, 8), np.uint8)
    expected[1:4, 2:6] = 1
    np.testing.assert_array_equal(mask, expected)
    assert segmentation_area(SQUARE, 6, 8) == 12
    assert segmentation_box(SQUARE, 6, 8) == [2, 1, 4, 3]


def test_parts_of_a_polygon_are_united():
    two = [SQUARE[0], [4, 2, 8, 2, 8, 6, 4, 6]]
    union = segmentation_to_mask(two[:1], 6, 8) | segmentation_to_mask(two[1:], 6, 8)
    np.testing.assert_array_equal(segmentation_to_mask(two, 6, 8), union)
    assert segmentation_box(two, 6, 8) == [2, 1, 6, 5]


@pytest.mark.parametrize("encode", [compressed_rle, uncompressed_rle])
@pytest.mark.parametrize("start", [0, 1])
def test_rle_round_trip(encode, start):
    mask = blob()
    mask[0, 0] = start  # a first run of length zero
    rle = encode(mask)
    assert segmentation_fault(rle, 50, 70) is None
    np.testing.assert_array_equal(segmentation_to_mask(rle, 50, 70), mask)
    np.testing.assert_array_equal(segmentation_to_mask(compact(rle, 50, 70), 50, 70), mask)
    assert segmentation_area(rle, 50, 70) == mask.sum()
    box = [12, 4, 30, 25]
    assert segmentation_box(encode(blob_in(box)), 50, 70) == box


def blob_in(box):
    """A cross that touches all four sides of (x, y, width, height)."""
    x, y, width, height = box
    mask = np.zeros((50, 70), np.uint8)
    mask[y + height // 2, x : x + width] = mask[y : y + height, x + width // 2] = 1
    return mask


@pytest.mark.parametrize("form", [uncompressed_rle, compressed_rle])
@pytest.mark.parametrize("where", ["nowhere", "whole", "first", "last", "middle", "stripes"])
def test_codes_of_small_objects_in_large_images(form, where):
    """They are decoded in another way, which must not show."""
    mask = np.zeros((300, 400), np.uint8)
    if where == "stripes":
        mask[::30, 40:44] = 1
    elif where != "nowhere":
        part = {"whole": np.s_[:], "first": np.s_[:2, :3], "last": np.s_[-9:, -4:],
                "middle": np.s_[40:80, 50:55]}[where]  # fmt: skip
        mask[part] = 1
    code = form(mask)
    assert len(code["counts"]) * 256 < mask.size
    decoded = segmentation_to_mask(code, 300, 400)
    np.testing.assert_array_equal(decoded, mask)
    expected = coco_mask.decode(compressed_rle(mask))
    assert decoded.dtype == expected.dtype and decoded.strides == expected.strides
    assert decoded.flags.writeable


def test_codes_of_another_size_are_refused():
    code = compressed_rle(np.ones((300, 400), np.uint8))
    with pytest.raises(ValueError, match="do not add up to 300 x 500 pixels"):
        segmentation_to_mask(code, 300, 500)


def test_compact_polygons_draw_the_same_mask():
    polygons = [[3.25, 2.5, 30.75, 5.5, 12.0, 39.0], [40, 10, 60, 10, 60, 30]]
    small = compact(polygons, 50, 70)
    assert all(part.dtype == np.float64 for part in small)
    np.testing.assert_array_equal(
        segmentation_to_mask(small, 50, 70), segmentation_to_mask(polygons, 50, 70)
    )


@pytest.mark.parametrize(
    "segmentation, words",
    [
        ([], "empty"),
        (None, "empty"),
        ([1, 2, 3, 4, 5, 6], "flat list"),
        ([[1, 2, 3, 4]], "polygon of 4 numbers"),
        ([[1, 2, 3, 4, 5, 6, 7]], "polygon of 7 numbers"),
        ([SQUARE[0], [1, 2]], "polygon of 2 numbers"),
        ([[1, 2, 3, float("nan"), 5, 6]], "not a finite number"),
        ([[1, 2, 3, float("inf"), 5, -float("inf")]], "not a finite number"),
        ([[1, 2, 3, "4", 5, 6]], "not a finite number"),
        ([[1, 2, 3, None, 5, 6]], "not a finite number"),
        ({"counts": [48]}, "lacks 'size'"),
        ({"size": [6, 8]}, "lacks 'counts'"),
        ({"size": [8, 6], "counts": [10, 20, 18]}, "RLE of size [8, 6], expected [6, 8]"),
        ({"size": 48, "counts": [10, 20, 18]}, "RLE of size 48"),
        ({"size": [6, 8], "counts": [10, 20, 17]}, "RLE covers 47 pixels, expected 6 x 8 = 48"),
        ({"size": [6, 8], "counts": [10, 60, -22]}, "negative run"),
        ({"size": [6, 8], "counts": compressed_rle(blob())["counts"]}, "RLE covers 3500 pixels"),
        ({"size": [6, 8], "counts": "ooo"}, "cannot be read"),
        ({"size": [6, 8], "counts": 12}, "cannot be read"),
        ({"size": [6, 8], "counts": [48]}, "no pixel"),
    ],
)
def test_fault_is_named(segmentation, words):
    assert words in segmentation_fault(segmentation, 6, 8)


def test_sound_segmentations_have_no_fault():
    for segmentation in (SQUARE, uncompressed_rle(np.eye(6, 8)), compressed_rle(blob(6, 8) | 1)):
        assert segmentation_fault(segmentation, 6, 8) is None


@pytest.mark.parametrize("encode", [compressed_rle, uncompressed_rle])
@pytest.mark.parametrize(
    "box", [(12, 4, 48, 40), (13.3, 4.7, 20.1, 39.2), (0, 0, 70, 50), (60, 41, 70, 50)]
)
def test_rle_crop_equals_slow_oracle(encode, box):
    mask = blob()
    crop = crop_mask(encode(mask), np.array(box, np.float32), 50, 70, side=13)
    assert crop.dtype == np.uint8 and crop.shape == (13, 13)
    # float32 box corners move a sample by 1e-6 pixels; the crop is rounded to whole numbers
    np.testing.assert_allclose(crop, oracle_crop(mask, box, 13), atol=0.51)


def test_rle_crop_of_whole_pixels_is_the_mask():
    mask = blob()
    crop = crop_mask(compressed_rle(mask), np.array([12, 4, 48, 40]), 50, 70, side=36)
    np.testing.assert_array_equal(crop, 255 * mask[4:40, 12:48])


def test_polygon_crop_differs_from_exact_geometry_only_at_the_edge():
    corners = np.array([[10, 5], [30, 12], [27, 33], [18, 25], [6, 29]], float)
    box = np.array([6, 5, 30, 33], float)
    side = 56
    crop = crop_mask([corners.ravel().tolist()], box, 40, 50, side)
    assert set(np.unique(crop)) == {0, 255}
    local = (corners - box[:2]) * side / (box[2:] - box[:2])
    y, x = np.mgrid[:side, :side] + 0.5
    inside, distance = point_in_polygon(np.stack([x, y], -1), local)
    wrong = (crop > 0) != inside
    assert distance[wrong].max(initial=0) < 0.71  # half a crop pixel, diagonally
    assert wrong.mean() < 0.01


def point_in_polygon(points, corners):
    """Ray casting, and the distance to the nearest edge, for points [..., 2]."""
    inside = np.zeros(points.shape[:-1], bool)
    distance = np.full(points.shape[:-1], np.inf)
    for a, b in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        crosses = (a[1] > points[..., 1]) != (b[1] > points[..., 1])
        with np.errstate(divide="ignore", invalid="ignore"):
            at = a[0] + (points[..., 1] - a[1]) / (b[1] - a[1]) * (b[0] - a[0])
        inside ^= crosses & (points[..., 0] < at)
        t = np.clip(((points - a) @ (b - a)) / ((b - a) @ (b - a)), 0, 1)
        nearest = a + t[..., None] * (b - a)
        distance = np.minimum(distance, np.linalg.norm(points - nearest, axis=-1))
    return inside, distance


def test_vertices_carry_the_number_of_their_polygon():
    two = [SQUARE[0], [0.5, 0.25, 3, 1, 2, 2]]
    for segmentation in (two, compact(two, 6, 8)):
        assert vertex_count(segmentation) == 7
        vertices = polygon_vertices(segmentation, 7)
        points = np.array(two[0] + two[1]).reshape(-1, 2)
        np.testing.assert_array_equal(vertices[:, :2], points)
        np.testing.assert_array_equal(vertices[:, 2], [0, 0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize("limit, count", [(0, 0), (3, 0), (4, 4), (9, 4)])
def test_polygons_of_too_many_vertices_are_left_out(limit, count):
    assert polygon_vertices(SQUARE, limit).shape == (count, 3)


def test_rle_has_no_vertices():
    for rle in (uncompressed_rle(blob()), compressed_rle(blob())):
        assert vertex_count(rle) == 0 and polygon_vertices(rle, 100).shape == (0, 3)


def test_polygon_crop_outside_the_polygon_is_empty():
    assert not crop_mask(SQUARE, np.array([20, 20, 30, 30]), 40, 40).any()


def test_real_polygons_and_their_rle_give_the_same_crops():
    folder = shared("data/pennfudan/annotations")
    polygons = json.loads((folder / "instances_val.json").read_text())
    exact = json.loads((folder / "instances_val_rle.json").read_text())
    sizes = {image["id"]: (image["height"], image["width"]) for image in exact["images"]}
    overlaps = []
    for a, b in list(zip(polygons["annotations"], exact["annotations"], strict=True))[:40]:
        assert (a["id"], a["bbox"]) == (b["id"], b["bbox"])
        x, y, width, height = a["bbox"]
        box = np.array([x, y, x + width, y + height])
        size = sizes[a["image_id"]]
        left = crop_mask(a["segmentation"], box, *size) >= 128
        right = crop_mask(b["segmentation"], box, *size) >= 128
        overlaps.append((left & right).sum() / (left | right).sum())
    assert np.mean(overlaps) > 0.98 and min(overlaps) > 0.95


def test_real_crowds_are_sound():
    content = json.loads(shared("data/coco_mini/annotations/instances_val2017.json").read_text())
    sizes = {image["id"]: (image["height"], image["width"]) for image in content["images"]}
    crowds = [entry for entry in content["annotations"] if entry["iscrowd"]]
    assert len(crowds) == 11
    for entry in crowds:
        height, width = sizes[entry["image_id"]]
        assert segmentation_fault(entry["segmentation"], height, width) is None
        packed = coco_mask.frPyObjects(entry["segmentation"], height, width)
        assert segmentation_fault(dict(packed), height, width) is None
        mask = segmentation_to_mask(entry["segmentation"], height, width)
        assert mask.sum() == sum(entry["segmentation"]["counts"][1::2])
