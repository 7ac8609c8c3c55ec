"""Datumaro's json to COCO. Files that it wrote are in test_samples."""

import json

import numpy as np
import pytest

from mask_rcnn_jax.rle import compressed_rle
from tests.formats.converting import box, convert_set, objects_of, refuses, write_image


def shape(kind, group=0, label=0, **keys):
    return {"type": kind, "label_id": label, "group": group, "attributes": {}, **keys}


def polygon(*points, **keys):
    return shape("polygon", points=list(points), **keys)


def write(folder, shapes, path="a.png", size=(60, 80), labels=("cat", "dog"), **keys):
    write_image(folder / "images" / "default" / "a.png")
    (folder / "annotations").mkdir(exist_ok=True)
    categories = {"label": {"labels": [{"name": name} for name in labels]}}
    item = {"id": "a", "image": {"path": path, "size": size}, "annotations": shapes} | keys
    content = {"categories": categories, "items": [item]}
    (folder / "annotations" / "default.json").write_text(json.dumps(content))


def test_groups_are_objects_in_parts_and_masks_may_be_crowds(tmp_path):
    write(tmp_path, [
        polygon(0, 0, 10, 0, 10, 10, 0, 10, group=1),
        polygon(20, 0, 30, 0, 30, 10, 20, 10, group=1),
        polygon(20, 0, 30, 0, 30, 10, 20, 10, group=1, label=1),
        shape("mask", rle=compressed_rle(box(40, 40, 50, 50)), attributes={"is_crowd": True}),
        shape("mask", group=3, rle=compressed_rle(box(0, 40, 10, 50))),
        polygon(20, 40, 30, 40, 30, 50, 20, 50, group=3),
        shape("ellipse", points=[60, 10, 80, 20]),
        shape("label"),
    ])  # fmt: skip
    content, left_out = convert_set("datumaro", tmp_path)
    found = objects_of(content)
    assert [label for label, _ in found] == ["cat", "dog", "cat", "cat", "cat"] and not left_out
    assert [entry["iscrowd"] for entry in content["annotations"]] == [0, 0, 1, 0, 0]
    assert len(content["annotations"][0]["segmentation"]) == 2
    np.testing.assert_array_equal(found[3][1], box(0, 40, 10, 50) + box(20, 40, 30, 50))
    np.testing.assert_allclose(content["annotations"][4]["bbox"], [60, 10, 20, 10], atol=1e-6)


def test_boxes_and_lines_are_left_out_and_images_found_by_name(tmp_path):
    shapes = [shape("bbox", bbox=[10, 10, 20, 5]), shape("polyline", points=[1, 1, 2, 2])]
    write(tmp_path, shapes, "C:\\sets\\a.png")
    content, left_out = convert_set("datumaro", tmp_path)
    assert not content["annotations"] and len(left_out) == 2
    assert [entry["name"] for entry in content["categories"]] == ["cat", "dog"]
    (_, mask), = objects_of(convert_set("datumaro", tmp_path, boxes=True)[0])  # fmt: skip
    np.testing.assert_array_equal(mask, box(10, 10, 30, 15))


def test_images_of_subsets_may_have_the_same_name(tmp_path):
    write(tmp_path, [])
    write_image(tmp_path / "images" / "train" / "a.png")
    default = tmp_path / "annotations" / "default.json"
    (tmp_path / "annotations" / "train.json").write_text(default.read_text())
    content, _ = convert_set("datumaro", tmp_path)
    assert [e["file_name"] for e in content["images"]] == ["default/a.png", "train/a.png"]


@pytest.mark.parametrize("keys, words", [
    ({"shapes": [polygon(1, 2, 3)]}, r"annotation 1: \[1, 2, 3\], expected x, y, x, y"),
    ({"shapes": [polygon(1, 2, 3, None)]}, "a coordinate is None"),
    ({"shapes": [polygon(1, 2, label=2)]}, "label_id 2, expected 0 to 1"),
    ({"shapes": [polygon(1, 2, label=True)]}, "label_id True, expected"),
    ({"shapes": [polygon(1, 2, group=[1])]}, r"group \[1\], expected a number"),
    ({"shapes": [shape("bbox", bbox=[1, 2])]}, "a bbox of 1 points, expected 2"),
    ({"shapes": [shape("mask", rle="x")]}, "annotation 1: no RLE"),
    ({"shapes": [shape("mask", rle={"size": [6, 8], "counts": [48]})]}, "RLE of size"),
    ({"shapes": [shape(7)]}, "type 7, expected one"),
    ({"shapes": [], "size": [1]}, r"size \[1\], expected"),
    ({"shapes": [], "size": [80, 60]}, "drawn on 80 x 60"),
    ({"shapes": [], "image": None}, "item 'a': no path of its 'image'"),
    ({"shapes": [], "path": "b.png"}, "item 'a': no image 'b.png'"),
    ({"shapes": [], "labels": ["a", "a"]}, "'labels' are not different names"),
    ({"shapes": [], "labels": [None]}, "'labels' are not different names"),
])  # fmt: skip
def test_a_wrong_file_is_one_line(keys, words, tmp_path):
    write(tmp_path, **keys)
    refuses(words, "datumaro", tmp_path, boxes=True)


def test_another_json_is_refused(tmp_path):
    write(tmp_path, [])
    for content in ("[]", "7", '{"images": []}', '{"categories": {"label": 3}, "items": []}'):
        (tmp_path / "annotations" / "default.json").write_text(content)
        refuses("no 'label' in 'categories'", "datumaro", tmp_path)
    (tmp_path / "annotations" / "default.json").unlink()
    refuses("no json in 'annotations'", "datumaro", tmp_path)
