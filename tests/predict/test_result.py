"""The objects of an image as users handle them, on results made by hand."""

import json

import cv2
import numpy as np
import pytest
from pycocotools import mask as coco_mask

from mask_rcnn_jax.images.decode import decode_image
from mask_rcnn_jax.predict.result import Result

HEIGHT, WIDTH = 60, 90
CATEGORIES = [{"id": 3, "name": "bolt"}, {"id": 8, "name": "nut"}]
BOXES = np.array([[10, 20, 50, 40], [0, 0, 30, 60], [70, 5, 90, 25], [4, 4, 4, 9]], np.float32)
AREAS = [800, 900, 300, 0]  # of whole boxes, half a box, a ring, and no pixel


def make_result(**changes):
    grids = np.ones((4, 28, 28), np.float32)
    grids[1, :, 14:] = 0
    grids[2, 7:21, 7:21] = 0
    rng = np.random.default_rng(0)
    fields = dict(
        image=rng.integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8),
        boxes=BOXES,
        scores=np.array([0.9, 0.8, 0.7, 0.6], np.float32),
        classes=np.array([1, 2, 2, 1], np.int32),
        mask_grids=grids,
        categories=CATEGORIES,
    )
    return Result(**fields | changes)


def boxes_alone():
    return make_result(mask_grids=None)


def test_names_follow_the_classes():
    assert make_result().names == ["bolt", "nut", "nut", "bolt"]
    assert repr(make_result()) == "<Result 60 x 90: 2 bolt, 2 nut>"
    assert repr(make_result(path="a.jpg")[:0]) == "<Result a.jpg 60 x 90: no objects>"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (2, [2]),
        (-1, [3]),
        (np.int64(1), [1]),
        (np.array(1), [1]),
        (slice(1, None, 2), [1, 3]),
        ([3, 0], [3, 0]),
        ([], []),
        (np.array([True, False, True, False]), [0, 2]),
        ([False] * 4, []),
    ],
)
@pytest.mark.parametrize("make", [make_result, boxes_alone])
def test_objects_are_selected(make, rows, expected):
    whole = make()
    some, expected = whole[rows], np.array(expected, int)
    assert len(some) == len(expected)
    for name in ("boxes", "scores", "classes"):
        np.testing.assert_array_equal(getattr(some, name), getattr(whole, name)[expected])
    if whole.masks is None:
        assert some.masks is None and some.mask_grids is None
    else:
        np.testing.assert_array_equal(some.masks, whole.masks[expected])
    assert some.image is whole.image


@pytest.mark.parametrize("rows", [4, -5, [True, False], [0.5], [[0, 1]], np.True_, None])
def test_a_wrong_selection_is_an_index_error(rows):
    with pytest.raises(IndexError):
        make_result()[rows]


def test_iteration_gives_one_object_each_and_ends():
    assert [one.names for one in make_result()] == [["bolt"], ["nut"], ["nut"], ["bolt"]]


@pytest.mark.parametrize("paste", ["continuous", "integer"])
def test_masks_run_lengths_and_results_agree(paste):
    result = make_result(paste=paste)
    assert result.masks.shape == (4, HEIGHT, WIDTH) and result.masks.dtype == bool
    assert result.masks is result.masks
    decoded = np.stack([coco_mask.decode(rle) for rle in result.rle()])
    np.testing.assert_array_equal(decoded, result.masks)
    areas = decoded.sum(axis=(1, 2))
    np.testing.assert_allclose(areas, AREAS, atol=120 if paste == "integer" else 40)
    outside = result.masks.copy()
    for mask, (x1, y1, x2, y2) in zip(outside, BOXES.astype(int), strict=True):
        mask[max(0, y1 - 1) : y2 + 1, max(0, x1 - 1) : x2 + 1] = False  # "integer" enlarges boxes
    assert not outside.any()
    entries = result.to_coco(image_id=7)
    assert [entry["category_id"] for entry in entries] == [3, 8, 8, 3]
    assert entries[0]["bbox"] == [10, 20, 40, 20] and entries[0]["image_id"] == 7
    assert entries[1]["score"] == pytest.approx(0.8)
    assert json.loads(json.dumps(result.to_coco(np.uint16(7)))) == entries
    with pytest.raises(TypeError):
        result.to_coco(7.0)


def test_polygons_cover_the_masks_and_have_holes():
    result = make_result()
    polygons = result.polygons()
    assert [len(parts) for parts in polygons] == [1, 1, 2, 0]  # the box without area has none
    for parts, mask in zip(polygons[:3], result.masks[:3], strict=True):
        drawn = np.zeros((HEIGHT, WIDTH), np.uint8)
        cv2.fillPoly(drawn, [np.round(part - 0.5).astype(int) for part in parts], 1)
        union, common = (drawn | mask).sum(), (drawn & mask).sum()
        assert common / union > 0.7


def test_a_model_of_boxes_alone_has_no_masks(tmp_path):
    result = boxes_alone()
    assert result.masks is None and result.rle() == [] and result.polygons() == [[]] * 4
    assert "segmentation" not in result.to_coco()[0]
    assert np.any(result.plot(min_side=0) != result.image)


def test_nothing_found():
    result = make_result()[:0]
    assert result.masks.shape == (0, HEIGHT, WIDTH)
    assert result.names == result.rle() == result.polygons() == result.to_coco() == []
    np.testing.assert_array_equal(result.plot(min_side=0), result.image)


def test_the_drawing_is_saved(tmp_path):
    result = make_result()
    before = result.image.copy()
    result.save(tmp_path / "new" / "a.png")
    drawn = decode_image(tmp_path / "new" / "a.png")
    np.testing.assert_array_equal(drawn, result.plot())
    assert drawn.shape == (6 * HEIGHT, 6 * WIDTH, 3)  # small images are enlarged
    np.testing.assert_array_equal(result.image, before)
    (tmp_path / "notebook.png").write_bytes(result._repr_png_())
    np.testing.assert_array_equal(decode_image(tmp_path / "notebook.png"), drawn)
    with pytest.raises(ValueError, match="a.unknown: .* expected .jpg or .png"):
        result.save(tmp_path / "a.unknown")


def test_supervision_gets_the_same_objects():
    pytest.importorskip("supervision")
    result = make_result()
    found = result.to_supervision()
    np.testing.assert_array_equal(found.xyxy, BOXES)
    np.testing.assert_array_equal(found.mask, result.masks)
    assert found.class_id.tolist() == [0, 1, 1, 0] and len(found) == 4
    assert found.data["class_name"].tolist() == result.names
    assert len(boxes_alone().to_supervision()) == 4
    assert len(result[:0].to_supervision()) == 0


def test_without_supervision_the_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "supervision", None)
    with pytest.raises(ImportError, match="needs the package supervision"):
        make_result().to_supervision()
