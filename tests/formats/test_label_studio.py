"""Label Studio's export to COCO, on files as its documentation has them."""

import json

import numpy as np
import pytest

from mask_rcnn_jax.formats.label_studio import unpack
from tests.formats.converting import box, convert_set, objects_of, refuses, write_image

NAME = "0a1b2c3d-my%20photo.png"


def region(kind, value, label="cat", **keys):
    entry = {"type": kind, "value": value | ({kind: [label]} if label else {}), "id": "r"}
    entry |= {"original_width": 80, "original_height": 60, "image_rotation": 0}
    return entry | keys


def square(x1, y1, x2, y2, **keys):
    corners = (x1, y1), (x2, y1), (x2, y2), (x1, y2)
    points = [[x / 0.8, y / 0.6] for x, y in corners]
    return region("polygonlabels", {"points": points}, **keys)


def write(folder, regions, image=f"/data/upload/3/{NAME}", file="my photo.png", **task):
    write_image(folder / "media" / file)
    annotation = {"id": 1, "was_cancelled": False, "result": regions}
    content = {"id": 5, "annotations": [annotation], "data": {"image": image}} | task
    (folder / "export.json").write_text(json.dumps([content]))


def convert(folder, **options):
    return convert_set("labelstudio", folder / "export.json", folder / "media", **options)


def packed(values):
    """Bytes as rle-pack writes them: repeated values in runs, and up to four others in a row."""
    bits = f"{len(values):032b}{7:05b}" + "".join(f"{n - 1:04b}" for n in (2, 2, 2, 14))
    start = 0
    while start < len(values):
        alike = next(iter(np.flatnonzero(np.diff(values[start : start + 2**14]))), 2**14 - 1) + 1
        part = values[start : start + (alike if alike > 1 else 4)]
        bits += f"{int(alike > 1)}"
        bits += f"{start % 3:02b}{len(part) - 1:02b}" if alike < 5 else f"11{len(part) - 1:014b}"
        bits += "".join(f"{value:08b}" for value in (part[:1] if alike > 1 else part))
        start += len(part)
    bits += "0" * (-len(bits) % 8)
    return [int(bits[place : place + 8], 2) for place in range(0, len(bits), 8)]


def brush(mask, **keys):
    values = np.repeat(mask.ravel() * 255, 4).tolist()
    return region("brushlabels", {"format": "rle", "rle": packed(values)}, **keys)


@pytest.mark.parametrize("image, file", [
    (f"/data/upload/3/{NAME}", "my photo.png"),
    (f"/data/upload/3/{NAME}", "0a1b2c3d-my photo.png"),
    (f"/data/upload/3/{NAME}", NAME),
    ("..\\..\\media\\upload\\4\\photo.png", "photo.png"),
    ("/data/local-files/?d=sets/one/photo.png", "one/photo.png"),
    ("https://example.org/x/photo.png?width=8", "photo.png"),
    ("s3://bucket/sets/photo.png", "photo.png"),
])  # fmt: skip
def test_images_are_found_by_every_name_of_a_task(image, file, tmp_path):
    write(tmp_path, [square(8, 6, 40, 30)], image, file)
    content, left_out = convert(tmp_path)
    assert content["images"][0]["file_name"] == file and not left_out
    (label, mask), = objects_of(content)  # fmt: skip
    assert label == "cat" and (mask == box(8, 6, 40, 30)).all()


def test_names_that_may_be_several_images_or_none_are_refused(tmp_path):
    write(tmp_path, [], "photo.png", "one/photo.png")
    write(tmp_path, [], "/data/upload/1/photo.png", "two/photo.png")
    source, folder = tmp_path / "export.json", tmp_path / "media"
    words = "task 5: '/data/upload/1/photo.png' may be 'one/photo.png' and 'two/photo.png'"
    refuses(words, "labelstudio", source, folder)
    write(tmp_path, [], "gone.png")
    refuses("no image 'gone.png' in", "labelstudio", source, folder)


def test_a_task_of_two_images_is_refused(tmp_path):
    """Regions say which of them they are on, not by the names of its data."""
    data = {"image": f"/data/upload/3/{NAME}", "image2": "/data/upload/3/b.png"}
    write(tmp_path, [square(8, 6, 40, 30, to_name="img2")], data=data)
    source, folder = tmp_path / "export.json", tmp_path / "media"
    refuses("task 5: 2 images in its 'data', expected one", "labelstudio", source, folder)
    both = [square(8 + n, 6, 40, 30, to_name=name) for n, name in enumerate(data)]
    write(tmp_path, both, data=data)
    refuses("task 5: 2 images in its 'data', expected one", "labelstudio", source, folder)


@pytest.mark.parametrize("data, to_name, found", [
    ({"image": "a.png", "image2": "b.png"}, "image2", "b.png"),
    ({"image": "/data/upload/3/0a1b2c3d-a.png", "name": "a.png"}, "img", "a.png"),
    ({"left": "a.png", "right": "b.png"}, "left", "a.png"),
])  # fmt: skip
def test_a_task_may_name_other_images_than_that_with_regions(data, to_name, found, tmp_path):
    write_image(tmp_path / "media" / "b.png")
    write(tmp_path, [square(8, 6, 40, 30, to_name=to_name)], file="a.png", data=data)
    assert [image["file_name"] for image in convert(tmp_path)[0]["images"]] == [found]


def test_brushes_keep_every_pixel(tmp_path):
    mask = box(3, 5, 33, 50)
    mask[10:20, 10:20] = 0
    mask[::7] = 0
    write(tmp_path, [brush(mask), brush(mask * 0)])
    content, left_out = convert(tmp_path)
    (_, found), = objects_of(content)  # fmt: skip
    np.testing.assert_array_equal(found, mask)
    assert len(left_out) == 1 and left_out[0].endswith("region 2 (cat), a mask without a pixel")


def test_rectangles_rotate_about_their_corner_and_ellipses_about_their_center(tmp_path):
    sides = {"x": 50, "y": 50, "width": 25, "height": 50 / 3, "rotation": 180}  # 20 x 10 at 40, 30
    radii = {"x": 50, "y": 50, "radiusX": 25, "radiusY": 50 / 3, "rotation": 90}
    write(tmp_path, [region("rectanglelabels", sides), region("ellipselabels", radii, "dog")])
    content, left_out = convert(tmp_path)
    assert [label for label, _ in objects_of(content)] == ["dog"]
    assert left_out[0].endswith("region 1 (cat), a box; --boxes makes objects of boxes")
    (_, rectangle), (_, disk) = objects_of(convert(tmp_path, boxes=True)[0])
    np.testing.assert_array_equal(rectangle, box(20, 20, 40, 30))
    y, x = np.mgrid[:60, :80] + 0.5
    inside = ((x - 40) / 10) ** 2 + ((y - 30) / 20) ** 2 < 1
    assert np.sum(disk != inside) < 0.03 * inside.sum()


def test_classes_of_a_tag_of_their_own_and_what_has_none(tmp_path):
    label = {"type": "labels", "id": "r", "value": {"labels": ["dog"]}}
    alone = region("polygon", square(8, 6, 40, 30)["value"], None)
    two = region("polygonlabels", {"points": [[1, 1]], "polygonlabels": ["a", "b"]}, None)
    turned = square(1, 1, 9, 9, image_rotation=90)
    write(tmp_path, [alone, label, two, turned])
    content, left_out = convert(tmp_path)
    assert [name for name, _ in objects_of(content)] == ["dog"]
    assert [line.rpartition("(")[2] for line in left_out] == [
        "['a', 'b']), a polygon without exactly one class",
        "cat), drawn on a rotated image",
    ]


@pytest.mark.parametrize("kind, value", [
    ("keypointlabels", {"x": 10, "y": 10, "width": 1}),
    ("bitmasklabels", {"imageDataURL": "data:image/png;base64,AAAA"}),
    ("vectorlabels", {"vertices": [{"id": "a", "x": 1, "y": 1, "prevPointId": None}]}),
    ("ocrlabels", {}),
])  # fmt: skip
def test_regions_of_other_kinds_are_left_out_and_named(kind, value, tmp_path):
    write(tmp_path, [region(kind, value, "eye")])
    content, left_out = convert(tmp_path)
    shape = kind.removesuffix("labels")
    assert not content["annotations"] and len(left_out) == 1
    assert left_out[0].endswith(f"region 1 (eye), a '{shape}'")


def test_what_is_no_region_is_not_left_out(tmp_path):
    about = {"text": ["AB"], "rating": 3} | square(8, 6, 40, 30)["value"]
    others = [
        {"type": "relation", "from_id": "r", "to_id": "s", "direction": "right"},
        {"type": "choices", "id": "c", "value": {"choices": ["blurred"]}},
        *({"type": kind, "id": "r", "value": about} for kind in ("textarea", "rating")),
    ]
    write(tmp_path, [square(8, 6, 40, 30), *others])
    content, left_out = convert(tmp_path)
    assert [name for name, _ in objects_of(content)] == ["cat"] and not left_out


def test_one_annotation_of_a_task_is_read(tmp_path):
    def annotation(x, **keys):
        return {"result": [square(x, 0, x + 10, 10)], "was_cancelled": False} | keys

    several = [annotation(0, was_cancelled=True), annotation(10), annotation(20)]
    write(tmp_path, [], annotations=several)
    content, left_out = convert(tmp_path)
    assert objects_of(content)[0][1][0, 10] and "1 further annotations" in left_out[0]
    write(tmp_path, [], annotations=[*several, annotation(30, ground_truth=True)])
    assert objects_of(convert(tmp_path)[0])[0][1][0, 30]
    empty = annotation(0) | {"result": [{"type": "choices", "value": {"choices": ["blurred"]}}]}
    write(tmp_path, [], annotations=[empty, annotation(40)])
    content, left_out = convert(tmp_path)
    assert objects_of(content)[0][1][0, 40] and "1 further annotations" in left_out[0]
    write(tmp_path, [], annotations=[annotation(40), empty | {"ground_truth": True}])
    assert not convert(tmp_path)[0]["annotations"]
    write(tmp_path, [], annotations=[])
    refuses("no annotated image", "labelstudio", tmp_path / "export.json", tmp_path / "media")


@pytest.mark.parametrize("regions, words", [
    ([7], "task 5: 'result' is not a list of objects"),
    ([{"type": "polygonlabels"}], "region 1: no type and value"),
    ([region("polygonlabels", {"points": [[1]]})], r"region 1: points are not a list of \[x, y\]"),
    ([region("polygonlabels", {"points": [[1, "b"]]})], "a coordinate is 'b'"),
    ([region("rectanglelabels", {"x": 1})], "y is None, expected a finite number"),
    ([square(0, 0, 9, 9, original_width=60)], "drawn on 60 x 60 .*, but my photo.png is 60 x 80"),
    ([region("brushlabels", {"rle": [1]})], "a brush without a list of bytes"),
    ([region("brushlabels", {"rle": [256], "format": "rle"})], "a brush without a list of bytes"),
    ([region("brushlabels", {"rle": [1], "format": "rle"})], "rle ends too early"),
    ([region("brushlabels", {"rle": packed([0] * 8), "format": "rle"})], "has 8 values of 8 bits"),
    ([region("brushlabels", {"rle": [0] * 99999, "format": "rle"})], "has 99999 bytes for 19200"),
    ([square(0, 0, 1e9, 9)], "region 1: polygon has the coordinate"),
])  # fmt: skip
def test_a_wrong_region_is_one_line(regions, words, tmp_path):
    write(tmp_path, regions)
    refuses(words, "labelstudio", tmp_path / "export.json", tmp_path / "media", boxes=True)


@pytest.mark.parametrize("content, words", [
    ("{}", "'tasks' is not a list"), ("[]", "expected tasks"), ("{", "cannot be read as JSON"),
    ('[{"image": "a.png", "label": []}]', "exported as JSON, not as JSON-MIN"),
    ('[{"annotations": [{"result": []}], "data": {}}]', "task 1: 0 images in its 'data'"),
    ('[{"annotations": 3, "data": {}}]', "task 1: 'annotations' is not a list of objects"),
])  # fmt: skip
def test_another_json_is_refused(content, words, tmp_path):
    (tmp_path / "export.json").write_text(content)
    refuses(words, "labelstudio", tmp_path / "export.json")


def test_runs_end_where_they_must():
    values = [0, 0, 0, 0, 1, 2, 3, 4, 9, 9]
    data = bytes(packed(values))

    def found(data, expected):
        runs = [np.resize(values, count) for count, values in unpack(data, expected)]
        return np.concatenate(runs).tolist()

    assert found(data, 10) == values
    for length in range(len(data) - 1):
        with pytest.raises(ValueError, match="ends too early|values of"):
            found(data[:length], 10)
    with pytest.raises(ValueError, match="has 10 values"):
        found(data, 9)
