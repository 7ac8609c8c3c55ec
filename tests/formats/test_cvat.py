"""CVAT's XML to COCO, on files as its documentation has them."""

import numpy as np
import pytest

from tests.formats.converting import box, convert_set, objects_of, refuses, write_image

TASK = """<task><labels>
<label><name>dog</name><type>any</type></label>
<label><name>cat</name></label>
<label><name>pose</name><type>skeleton</type></label>
<label><name>knee</name><parent>pose</parent></label>
</labels></task>"""
CAT = '<polygon label="cat" points="10.5,10;30,10;30,25.25"/>'


def write(folder, shapes, name="a.png", height=60, before="", task=TASK):
    write_image(folder / "images" / "a.png")
    image = f'<image id="0" name="{name}" width="80" height="{height}">{shapes}</image>'
    text = f"{before}<annotations><version>1.1</version><meta>{task}</meta>{image}</annotations>"
    (folder / "annotations.xml").write_text(text)


def test_polygons_keep_their_coordinates_and_classes_their_order(tmp_path):
    write(tmp_path, CAT + '<tag label="dog"/>')
    content, left_out = convert_set("cvat", tmp_path)
    assert [entry["name"] for entry in content["categories"]] == ["dog", "cat"] and not left_out
    assert content["annotations"][0]["segmentation"] == [[10.5, 10, 30, 10, 30, 25.25]]
    assert content["images"][0]["file_name"] == "images/a.png"


def test_frames_of_videos_are_named_without_an_ending(tmp_path):
    write(tmp_path, CAT, name="a")
    content, _ = convert_set("cvat", tmp_path)
    assert content["images"][0]["file_name"] == "images/a.png"
    write_image(tmp_path / "images" / "a.jpg")
    refuses("'a' may be 'images/a.jpg' and 'images/a.png'", "cvat", tmp_path)


def test_a_mask_follows_the_rows_of_its_box(tmp_path):
    """A triangle of 1, 2 and 3 pixels, and a polygon of the same group and class."""
    mask = '<mask label="cat" rle="0,1,2,2,1,3" left="7" top="50" width="3" height="3" {}/>'
    square = '<polygon label="{}" points="40,10;50,10;50,20;40,20" group_id="4"/>'
    write(tmp_path, mask.format('group_id="4"') + square.format("cat") + square.format("dog"))
    (_, joined), (label, alone) = objects_of(convert_set("cvat", tmp_path)[0])
    expected = box(40, 10, 50, 20)
    assert label == "dog" and (alone == expected).all()
    expected[50:53, 7:10] = np.tril(np.ones((3, 3), np.uint8))
    np.testing.assert_array_equal(joined, expected)


def test_the_mask_of_its_documentation_is_a_disk(tmp_path):
    runs = "3,5,7,7,5,9,3,11,2,11,2,12,1,12,1,26,1,12,1,12,2,11,3,9,5,7,7,5,3"
    write(tmp_path, f'<mask label="cat" rle="{runs}" left="7" top="8" width="13" height="15"/>')
    (_, mask), = objects_of(convert_set("cvat", tmp_path)[0])  # fmt: skip
    assert mask.sum() == mask[8:23, 7:20].sum()
    widths = [5, 7, 9, 11, 11, 12, 12, 13, 13, 12, 12, 11, 9, 7, 5]
    assert mask[8:23].sum(axis=1).tolist() == widths


def test_boxes_are_objects_where_asked_and_rotated_shapes_rotate(tmp_path):
    turned = '<box label="cat" xtl="20" ytl="20" xbr="60" ybr="40" rotation="90"/>'
    ellipse = '<ellipse label="dog" cx="40" cy="30" rx="20" ry="10" rotation="90.0"/>'
    line = '<polyline label="dog" points="1,1;9,9"/>'
    write(tmp_path, turned + ellipse + line)
    content, left_out = convert_set("cvat", tmp_path)
    assert [label for label, _ in objects_of(content)] == ["dog"]
    assert "shape 1 (cat), a box; --boxes" in left_out[0] and left_out[1].endswith("a polyline")
    (_, rectangle), (_, disk) = objects_of(convert_set("cvat", tmp_path, boxes=True)[0])
    np.testing.assert_array_equal(rectangle, box(30, 10, 50, 50))
    y, x = np.mgrid[:60, :80] + 0.5
    inside = ((x - 40) / 10) ** 2 + ((y - 30) / 20) ** 2 < 1
    assert np.sum(disk != inside) < 0.03 * inside.sum()


@pytest.mark.parametrize("shapes, words", [
    ('<polygon label="cat" points="1,2;3"/>', "shape 1: points '1,2;3', expected x,y;x,y"),
    ('<polygon label="cat" points="1,2;3,x;4,4"/>', "a coordinate is 'x', expected a finite"),
    ('<polygon label="cat" points="1,2;3,nan;4,4"/>', "a coordinate is 'nan'"),
    ('<polygon points="1,2;3,3;4,9"/>', "shape 1, a 'polygon', has no label"),
    ('<blob label="cat"/>', "<blob>, which is no shape"),
    ('<ellipse label="cat" cx="1"/>', "cy is None, expected a finite number"),
    ('<mask label="cat" rle="4,5" left="0" top="0" width="5" height="2"/>', "not have 5 x 2"),
    ('<mask label="cat" rle="-1,11" left="0" top="0" width="5" height="2"/>', "not have 5 x 2"),
    ('<mask label="cat" rle="a" left="0" top="0" width="5" height="2"/>', "rle 'a', expected runs"),
    ('<mask label="cat" rle="10" left="76" top="0" width="5" height="2"/>', "is not within 60"),
    ('<mask label="cat" rle="0" left="0" top="0" width="0" height="0"/>', "is not within 60"),
    ('<polygon label="cat" points="0,0;1e9,0;0,9"/>', "coordinate 1000000000"),
])  # fmt: skip
def test_a_wrong_shape_is_one_line(shapes, words, tmp_path):
    write(tmp_path, shapes)
    refuses(words, "cvat", tmp_path)


def test_a_wrong_file_is_one_line(tmp_path):
    write(tmp_path, CAT, name="gone.png")
    refuses("no image 'gone.png' in", "cvat", tmp_path)
    write(tmp_path, CAT, height=61)
    refuses(r"drawn on 61 x 80 \(height x width\), but a.png is 60 x 80", "cvat", tmp_path)
    for text, words in [
        ("<annotations/>", "<annotations>, expected an export as 'CVAT"),
        ("<annotation/>", "<annotation>, expected an export"),
        ("", "cannot be read as XML"),
        ("<a>", "cannot be read as XML"),
        ("<a>" * 60 + "</a>" * 60, "nested too deeply"),
        ("<?xml version='1.0' encoding='klingon'?><a/>", "cannot be read as XML"),
    ]:
        (tmp_path / "annotations.xml").write_text(text)
        refuses(words, "cvat", tmp_path)
    (tmp_path / "annotations.xml").unlink()
    refuses("No such file", "cvat", tmp_path)


def test_no_entity_grows_and_none_names_a_file(tmp_path):
    lines = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 10))
    laughs = f'<!DOCTYPE annotations [<!ENTITY a0 "ha">{lines}]>'
    outside = '<!DOCTYPE annotations [<!ENTITY a9 SYSTEM "file:///etc/passwd">]>'
    for before in (laughs, outside, '<!DOCTYPE annotations SYSTEM "http://localhost/x.dtd">'):
        write(tmp_path, CAT, before=before, task="&a9;")
        refuses("a document type, which is not read", "cvat", tmp_path)
    write(tmp_path, CAT, task="&a9;")
    refuses("cannot be read as XML .*undefined entity", "cvat", tmp_path)
