import json

import cv2
import numpy as np
import pytest

from mask_rcnn_jax.annotations.segmentation import segmentation_to_mask
from mask_rcnn_jax.data.coco import check_coco, decode_image, load_coco
from mask_rcnn_jax.formats.shapes import (
    CATEGORIES,
    compressed_rle,
    generate_image,
    mask_to_polygons,
    uncompressed_rle,
    write_shapes,
)

SMALL = {"train": 60, "val": 20}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    write_shapes(folder, **SMALL)
    return folder


def load(folder, split):
    return load_coco(folder / "annotations" / f"instances_{split}.json", folder / split)


def file_contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_sets_are_sound_and_of_the_asked_size(shapes):
    for split, count in SMALL.items():
        json_path = shapes / "annotations" / f"instances_{split}.json"
        assert check_coco(json_path, shapes / split) == []
        dataset = load(shapes, split)
        assert len(dataset.images) == count
        assert dict(zip(dataset.category_ids, dataset.class_names, strict=True)) == CATEGORIES
        assert {(image.height, image.width) for image in dataset.images} == {(128, 128)}


def test_variety(shapes):
    """Every kind of annotation that real sets hold, in 60 pictures."""
    content = json.loads((shapes / "annotations" / "instances_train.json").read_text())
    kinds = {"polygon": 0, "parts": 0, "compressed": 0, "uncompressed": 0}
    for entry in content["annotations"]:
        segmentation = entry["segmentation"]
        if isinstance(segmentation, list):
            kinds["polygon"] += 1
            kinds["parts"] += len(segmentation) > 1
        else:
            compressed = isinstance(segmentation["counts"], str)
            kinds["compressed" if compressed else "uncompressed"] += 1
            assert entry["iscrowd"] == (not compressed)
    assert all(kinds.values())
    per_image = [len(image.annotations) for image in load(shapes, "train").images]
    assert per_image.count(0) == 3 and 1 < np.mean(per_image) < 5
    assert {entry["category_id"] for entry in content["annotations"]} == set(CATEGORIES)


def test_objects_are_large_enough_to_learn(shapes):
    for image in load(shapes, "train").images:
        objects = [a for a in image.annotations if not a.iscrowd]
        for annotation in objects:
            assert 12 <= (annotation.box[2:] - annotation.box[:2]).min()
            assert annotation.area >= 120


def test_boxes_and_areas_are_those_of_the_masks(shapes):
    for image in load(shapes, "val").images:
        covered = np.zeros((image.height, image.width), int)
        for annotation in image.annotations:
            mask = segmentation_to_mask(annotation.segmentation, image.height, image.width)
            x, y, width, height = cv2.boundingRect(mask)
            np.testing.assert_array_equal(annotation.box, [x, y, x + width, y + height])
            assert annotation.area == mask.sum()
            covered += mask
        assert covered.max(initial=0) <= 1  # only the visible part belongs to an object


def test_masks_follow_the_painted_shapes(shapes):
    """Shapes are more colorful than the background on most of their pixels, not outside."""
    dataset = load(shapes, "val")
    for index, image in enumerate(dataset.images):
        pixels = decode_image(dataset.image_path(index)).astype(int)
        colorful = (pixels.max(axis=2) - pixels.min(axis=2)) > 85
        mask = np.zeros(colorful.shape, bool)
        for annotation in image.annotations:
            mask |= segmentation_to_mask(annotation.segmentation, 128, 128) > 0
        assert (colorful != mask).mean() < 0.04


def test_pictures_depend_on_their_arguments_alone(shapes, tmp_path):
    write_shapes(tmp_path / "again", **SMALL)
    assert file_contents(tmp_path / "again") == file_contents(shapes)
    write_shapes(tmp_path / "longer", train=61, val=20)
    ours, theirs = file_contents(shapes / "train"), file_contents(tmp_path / "longer" / "train")
    assert ours.items() <= theirs.items() and len(theirs) == 61
    other, _ = generate_image(1, "train", 0, (128, 128))
    assert (other != generate_image(0, "train", 0, (128, 128))[0]).any()
    assert (other != generate_image(1, "val", 0, (128, 128))[0]).any()


def test_second_call_leaves_the_files_alone(shapes):
    before = {path: path.stat().st_mtime_ns for path in shapes.rglob("*")}
    write_shapes(shapes, **SMALL)
    assert {path: path.stat().st_mtime_ns for path in shapes.rglob("*")} == before


def test_interrupted_run_is_completed(tmp_path):
    write_shapes(tmp_path, train=3, val=2)
    whole = file_contents(tmp_path)
    (tmp_path / "train" / "000001.jpg").unlink()
    (tmp_path / "annotations" / "instances_val.json").unlink()
    write_shapes(tmp_path, train=3, val=2)
    assert file_contents(tmp_path) == whole


@pytest.mark.parametrize("content", ["{}", "[]", "nonsense", '{"info": {"description": "mine"}}'])
def test_other_data_is_not_overwritten(tmp_path, content):
    path = tmp_path / "annotations" / "instances_train.json"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(ValueError, match="instances_train.json holds other data"):
        write_shapes(tmp_path, train=2, val=2)
    assert path.read_text() == content and not (tmp_path / "train").exists()


def test_size_is_height_and_width(tmp_path):
    paths = write_shapes(tmp_path, train=2, val=1, size=(128, 192))
    assert decode_image(tmp_path / "train" / "000001.jpg").shape == (128, 192, 3)
    assert check_coco(paths["train"], tmp_path / "train") == []


def test_polygons_trace_a_ragged_mask_exactly():
    mask = np.zeros((30, 40), np.uint8)
    mask[3:9, 4:20] = mask[9:15, 10:12] = mask[20:28, 30:40] = mask[21, 29] = 1
    polygons = mask_to_polygons(mask)
    assert len(polygons) == 2
    np.testing.assert_array_equal(segmentation_to_mask(polygons, 30, 40), mask)


def test_polygons_are_refused_where_there_is_a_hole():
    mask = np.zeros((30, 40), np.uint8)
    mask[3:19, 4:20] = 1
    mask[8, 9] = 0
    assert mask_to_polygons(mask) is None


def test_run_lengths_by_hand():
    mask = np.array([[0, 1, 1], [0, 1, 0]], np.uint8)
    assert uncompressed_rle(mask) == {"size": [2, 3], "counts": [2, 3, 1]}
    assert uncompressed_rle(1 - mask) == {"size": [2, 3], "counts": [0, 2, 3, 1]}
    assert segmentation_to_mask(compressed_rle(mask), 2, 3).tolist() == mask.tolist()
