"""Supervisely's jsons to COCO, on files as its documentation has them."""

import base64
import io
import json
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.formats.converting import box, convert_set, objects_of, refuses, write_image


def write(folder, shapes, dataset="ds", size=(60, 80), name="a.png"):
    write_image(folder / dataset / "img" / "a.png")
    (folder / dataset / "ann").mkdir(exist_ok=True)
    content = {"size": {"height": size[0], "width": size[1]}, "objects": shapes}
    (folder / dataset / "ann" / f"{name}.json").write_text(json.dumps(content))


def shape(kind, exterior=(), interior=(), label="cat", **keys):
    points = {"exterior": list(exterior), "interior": list(interior)}
    return {"classTitle": label, "geometryType": kind, "points": points, **keys}


def corners(x1, y1, x2, y2):
    return [[x1, y1], [x2, y1], [x2, y2], [x1, y2]]


def bitmap(crop, origin=(5, 7), mode="P"):
    """As Supervisely's SDK writes it."""
    image, file = Image.fromarray(crop), io.BytesIO()
    if mode == "P":
        image.putpalette([0, 0, 0, 255, 255, 255])
        image.save(file, "PNG", transparency=0)
    else:
        Image.fromarray(np.dstack([crop * 200] * 4)).save(file, "PNG")
    data = base64.b64encode(zlib.compress(file.getvalue())).decode()
    return {"data": data, "origin": list(origin)}


@pytest.mark.parametrize("mode", ["P", "RGBA"])
def test_polygons_have_holes_and_masks_a_place(mode, tmp_path):
    crop = np.eye(9, 12, dtype=np.uint8)
    write(tmp_path, [
        shape("polygon", corners(10, 10, 40.5, 30)),
        shape("polygon", corners(10, 10, 40, 30), [corners(20, 15, 30, 25), [[1, 1]]], "dog"),
        shape("bitmap", bitmap=bitmap(crop, mode=mode)),
        shape("rectangle", [[50, 40], [60, 50]]),
        shape("point", [[3, 3]]),
        shape("polygon", [[3, 3], [4, 4]], [corners(20, 15, 30, 25)]),
    ])  # fmt: skip
    content, left_out = convert_set("supervisely", tmp_path)
    assert content["annotations"][0]["segmentation"] == [[10, 10, 40.5, 10, 40.5, 30, 10, 30]]
    (_, _), (label, hollow), (_, mask) = objects_of(content)
    assert label == "dog"
    np.testing.assert_array_equal(hollow, box(10, 10, 40, 30) - box(20, 15, 30, 25))
    expected = box(0, 0, 0, 0)
    expected[7:16, 5:17] = crop
    np.testing.assert_array_equal(mask, expected)
    assert content["images"][0]["file_name"] == "ds/img/a.png" and len(left_out) == 3
    found = objects_of(convert_set("supervisely", tmp_path, boxes=True)[0])
    np.testing.assert_array_equal(found[3][1], box(50, 40, 60, 50))


def test_images_of_one_name_in_two_datasets(tmp_path):
    for dataset in ("one", "two"):
        write(tmp_path, [shape("polygon", corners(1, 1, 9, 9))], dataset)
    content, _ = convert_set("supervisely", tmp_path)
    assert [e["file_name"] for e in content["images"]] == ["one/img/a.png", "two/img/a.png"]


OUTSIDE = bitmap(np.ones((9, 9), np.uint8), (75, 0))


@pytest.mark.parametrize("keys, words", [
    ({"shapes": [7]}, "'objects' is not a list of objects"),
    ({"shapes": [{"geometryType": "polygon"}]}, "object 1: classTitle None, expected a class"),
    ({"shapes": [shape("polygon", [[1]])]}, r"object 1: exterior is not a list of \[x, y\]"),
    ({"shapes": [shape("polygon", corners(0, 0, "x", 9))]}, "a coordinate is 'x'"),
    ({"shapes": [shape("polygon", corners(0, 0, 9, 9), [7])]}, "a hole is not a list of"),
    ({"shapes": [shape("rectangle", [[1, 1]])]}, "a rectangle of 1 points, expected 2"),
    ({"shapes": [shape("bitmap")]}, "a bitmap without zipped 'data' and 'origin'"),
    ({"shapes": [shape("bitmap", bitmap={"data": "AAAA", "origin": [0, 0]})]}, "without zipped"),
    ({"shapes": [shape("bitmap", bitmap=OUTSIDE)]}, "its bitmap is not within 60 x 80"),
    ({"shapes": [], "size": (80, 60)}, "drawn on 80 x 60"),
    ({"shapes": [], "size": (None, 60)}, "height is None, expected a finite number"),
    ({"shapes": [], "name": "b.png"}, "no image 'b.png' in"),
])  # fmt: skip
def test_a_wrong_file_is_one_line(keys, words, tmp_path):
    write(tmp_path, **keys)
    refuses(words, "supervisely", tmp_path, boxes=True)
