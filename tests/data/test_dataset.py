"""Datasets without a json: their annotations, their checks and their COCO ground truth."""

import dataclasses
import json

import numpy as np
import pytest

from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.data.dataset import (
    Annotation,
    ImageRecord,
    categories,
    category_ids,
    check_classes,
    check_dataset,
    dataset_name,
    image_name,
)
from mask_rcnn_jax.data.ground_truth import coco_content, ground_truth
from mask_rcnn_jax.evaluation.coco import score
from mask_rcnn_jax.formats.shapes import CATEGORIES, write_shapes
from tests.memory_set import ShapeSet


def mask_of(*pixels, size=(6, 8)):
    mask = np.zeros(size, np.uint8)
    for y, x in pixels:
        mask[y, x] = 1
    return mask


def test_annotation_of_a_mask_by_hand():
    """The box ends where its last pixel does."""
    mask = mask_of((1, 2), (1, 3), (4, 3))
    for values in (mask, mask.astype(bool), mask * 255, mask.astype(np.int64)):
        found = Annotation.from_mask(values, 2)
        np.testing.assert_array_equal(found.box, np.float32([2, 1, 4, 5]))
        assert found.box.dtype == np.float32
        assert (found.class_index, found.area, found.iscrowd) == (2, 3.0, False)
        np.testing.assert_array_equal(found.mask(6, 8), mask)


def test_the_same_object_elsewhere_keeps_its_class_and_stays_a_crowd():
    crowd = Annotation.from_mask(mask_of((1, 2)), 2, iscrowd=True)
    moved = crowd.with_mask(mask_of((3, 4)))
    assert (moved.class_index, moved.iscrowd, moved.area) == (2, True, 1.0)
    np.testing.assert_array_equal(moved.box, np.float32([4, 3, 5, 4]))
    outlined = crowd.with_polygons([[1, 1, 5, 1, 5, 4, 1, 4]], (6, 8))
    assert (outlined.class_index, outlined.iscrowd, outlined.area) == (2, True, 12.0)


@pytest.mark.parametrize(
    "polygons",
    [
        [[1, 1, 5, 1, 5, 4, 1, 4]],
        [np.array([[1, 1], [5, 1], [5, 4], [1, 4]])],
        ([1.0, 1, 3, 1, 3, 4, 1, 4], [3.0, 1, 5, 1, 5, 4, 3, 4]),
    ],
)
def test_annotation_of_polygons_by_hand(polygons):
    found = Annotation.from_polygons(polygons, 3, (6, 8))
    np.testing.assert_array_equal(found.box, np.float32([1, 1, 5, 4]))
    assert found.area == 12 and found.class_index == 3
    expected = np.zeros((6, 8), np.uint8)
    expected[1:4, 1:5] = 1
    np.testing.assert_array_equal(found.mask(6, 8), expected)


def test_the_box_of_polygons_is_clipped_to_the_image():
    found = Annotation.from_polygons([[-3, 2, 20, 2, 20, 50, -3, 50]], 1, (6, 8))
    np.testing.assert_array_equal(found.box, np.float32([0, 2, 8, 6]))
    assert found.area == 8 * 4


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Annotation.from_mask(np.zeros((4, 4)), 1), "at least one pixel"),
        (lambda: Annotation.from_mask(np.ones((4, 4, 1)), 1), "shape .4, 4, 1. is not .H, W."),
        (lambda: Annotation.from_polygons([], 1, (4, 4)), "segmentation is empty"),
        (lambda: Annotation.from_polygons([[0, 0, 1, 1]], 1, (4, 4)), "three points or more"),
        (lambda: Annotation.from_polygons([[0, 0, 1, 1, 2]], 1, (4, 4)), "polygon of 5 numbers"),
        (
            lambda: Annotation.from_polygons([[0, 0, 1, np.nan, 2, 2]], 1, (4, 4)),
            "not a finite number",
        ),
        (
            lambda: Annotation.from_polygons([[9, 0, 12, 0, 12, 3]], 1, (4, 4)),
            "no area inside the image of 4 x 4",
        ),
    ],
)
def test_annotations_without_an_object_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_optional_members_have_defaults():
    dataset = ShapeSet("train", 2)
    assert category_ids(dataset) == (1, 2, 3, 4)
    assert categories(dataset)[1] == {"id": 2, "name": "square"}
    assert dataset_name(dataset) == "ShapeSet"
    assert image_name(dataset, 1) == "ShapeSet: image '000001.jpg'"
    dataset.category_ids = tuple(CATEGORIES)
    assert [entry["id"] for entry in categories(dataset)] == [1, 2, 4, 7]
    check_classes(dataset, categories(dataset), "the run")
    with pytest.raises(ValueError, match=r"ShapeSet has 4 categories.*\(2, 'square'\)"):
        check_classes(ShapeSet("val", 1), [{"id": 9, "name": "square"}], "the run")


def test_a_sound_dataset_passes():
    check_dataset(ShapeSet("train", 14), "train_set")


class Broken(ShapeSet):
    """One image with one object, both as a test wants them."""

    def __init__(self, record=None, annotation=None, **members):
        super().__init__("train", 1)
        self.replace = record or {}, annotation or {}
        for name, value in members.items():
            setattr(self, name, value)

    def _record(self, index):
        record = super()._record(index)
        first = dataclasses.replace(record.annotations[0], **self.replace[1])
        return dataclasses.replace(record, annotations=(first,), **self.replace[0])


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (object(), r"val_set \(object\) has no 'class_names', 'images', 'decode'"),
        (Broken(class_names=()), "class_names is \\[\\]"),
        (Broken(class_names=("a", "a", "b", "c")), "expected different names"),
        (Broken(class_names="star"), "class_names is 'star', expected a sequence of names"),
        (Broken(class_names=None), "class_names is None, expected a sequence of names"),
        (Broken(images=iter(())), "images is <.*>, expected a sequence of ImageRecord"),
        (Broken(decode=None), "decode: None is not a callable object, expected a method"),
        (ShapeSet, r"val_set \(type\): images is .*, expected a sequence of ImageRecord"),
        (Broken(keypoints=("nose",)), r"'keypoints' is \('nose',\), expected an anno"),
        (Broken(category_ids=(1, 2)), r"category_ids is \(1, 2\), expected 4 different"),
        (Broken(category_ids=(1, 2, 3, 3)), "expected 4 different"),
        (ShapeSet("train", 0), "'images' is empty"),
        (Broken(record={"id": 1.5}), "image '000000.jpg' has the id 1.5"),
        (Broken(record={"height": 0}), "has the size 0 x 64"),
        (Broken(record={"width": 3}), "object 0: box .* no area inside the image of 64 x 3 "),
        (Broken(annotation={"class_index": 0}), "object 0: class_index 0, expected 1 to 4"),
        (Broken(annotation={"class_index": 5}), "class_index 5, expected 1 to 4"),
        (Broken(annotation={"class_index": "star"}), "class_index 'star'"),
        (Broken(annotation={"box": [1, 2, 3]}), "expected four finite numbers"),
        (Broken(annotation={"box": [1, 2, np.inf, 3]}), "expected four finite numbers"),
        (Broken(annotation={"box": [5, 2, 5, 3]}), "no area inside the image"),
        (Broken(annotation={"area": np.nan}), "area nan"),
        (Broken(annotation={"segmentation": ()}), "segmentation is empty"),
        (Broken(annotation={"segmentation": ([1, 1, 2, 2, 3, 1],)}), "not a flat array"),
        (
            Broken(annotation={"segmentation": {"size": [64, 65], "counts": b"0"}}),
            r"RLE of size \[64, 65\], expected \[64, 64\]",
        ),
        (
            Broken(annotation={"segmentation": {"size": [64, 64], "counts": [3, 4]}}),
            "RLE covers 7 pixels",
        ),
    ],
)
def test_a_broken_dataset_is_named(dataset, message):
    with pytest.raises(ValueError, match=message) as error:
        check_dataset(dataset, "val_set")
    assert str(error.value).startswith("val_set (") and "\n" not in str(error.value)


def test_ids_are_of_one_image_and_some_image_has_an_object():
    dataset = ShapeSet("train", 3)
    dataset.images[2] = dataclasses.replace(dataset.images[2], id=1)
    with pytest.raises(ValueError, match="image '000002.jpg' has the id 1"):
        check_dataset(dataset, "train_set")
    dataset.images[:] = [ImageRecord(1, "a", 64, 64, ())]
    with pytest.raises(ValueError, match="no image has an annotation"):
        check_dataset(dataset, "train_set")
    dataset.images[:] = [{"id": 1}]
    with pytest.raises(ValueError, match="'images' holds dict, expected ImageRecord"):
        check_dataset(dataset, "train_set")


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    """The validation pictures of `ShapeSet` as a COCO json, with a crowd and an empty image."""
    folder = tmp_path_factory.mktemp("shapes")
    path = write_shapes(folder, train=1, val=16, size=(64, 64))["val"]
    return load_coco(path, folder / "val")


def shaken(content, rng):
    """Results: every object, moved a little, with a random score."""
    boxes, masks = [], []
    for entry in content["annotations"]:
        result = {k: entry[k] for k in ("image_id", "category_id")} | {"score": rng.random()}
        box = np.array(entry["bbox"], float) + rng.uniform(-2, 2, 4) * (1, 1, 0, 0)
        boxes.append({**result, "bbox": box.tolist()})
        if isinstance(entry["segmentation"], dict):
            masks.append({**result, "segmentation": entry["segmentation"]})
    return boxes, masks


def test_ground_truth_without_a_json_scores_as_the_json_does(on_disk):
    dataset = ShapeSet("val", 16)
    dataset.category_ids = tuple(CATEGORIES)
    assert ground_truth(on_disk).source == on_disk.json_path
    content = ground_truth(dataset).content
    json.dumps(content)
    with open(on_disk.json_path) as file:
        results = shaken(json.load(file), np.random.default_rng(0))
    expected = score(on_disk.json_path, *results)
    assert 0 < expected["AP"] < 1 and 0 < expected["mask_AP"] < 1
    assert score(content, *results) == expected
    assert score(coco_content(on_disk), *results) == expected
