"""Files of the VGG Image Annotator to COCO, on files written by hand."""

import json

import cv2
import numpy as np
import pytest

from mask_rcnn_jax.annotations.segmentation import segmentation_to_mask
from mask_rcnn_jax.formats.coco_build import build_coco
from mask_rcnn_jax.formats.via import read_via

SIZE = (60, 80)
RECT = {"name": "rect", "x": 10, "y": 20, "width": 30, "height": 5}


def region(shape, **attributes):
    return {"shape_attributes": shape, "region_attributes": attributes}


def project(regions, filename="a.png", form="project"):
    """The content of a saved project, of exported annotations, or of VIA 1."""
    if form == "via 1":
        regions = {str(i): entry for i, entry in enumerate(regions)}
    entry = {"filename": filename, "size": 99, "regions": regions, "file_attributes": {}}
    metadata = {f"{filename}99": entry}
    return {"_via_settings": {}, "_via_img_metadata": metadata} if form == "project" else metadata


@pytest.fixture
def convert(tmp_path):
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((*SIZE, 3), np.uint8))

    def convert(content, image_dir=None, **options):
        path = tmp_path / "via.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        pictures, left_out = read_via(path, image_dir, **options)
        return build_coco(pictures, image_dir or tmp_path), left_out

    return convert


@pytest.mark.parametrize("form", ["project", "annotations", "via 1"])
def test_rectangles_and_polygons(form, convert, tmp_path):
    polygon = {"name": "polygon", "all_points_x": [0, 8, 0], "all_points_y": [0, 0, 8]}
    regions = [region(RECT, kind="dog"), region(polygon, kind="cat")]
    for image_dir in (None, tmp_path):
        content, left_out = convert(project(regions, form=form), image_dir)
        assert not left_out
        assert content["images"] == [{"id": 1, "file_name": "a.png", "height": 60, "width": 80}]
        assert [entry["name"] for entry in content["categories"]] == ["cat", "dog"]
        first, second = content["annotations"]
        assert (first["bbox"], first["area"], first["category_id"]) == ([10, 20, 30, 5], 150, 2)
        assert second["segmentation"] == [[0, 0, 8, 0, 0, 8]] and second["bbox"] == [0, 0, 8, 8]


@pytest.mark.parametrize(
    "shape, axes, turn",
    [
        ({"name": "circle", "cx": 40, "cy": 30, "r": 20}, (20, 20), 0.0),
        ({"name": "ellipse", "cx": 40, "cy": 30, "rx": 25, "ry": 8, "theta": 0.5}, (25, 8), 0.5),
        ({"name": "ellipse", "cx": 40, "cy": 30, "rx": 25, "ry": 8}, (25, 8), 0.0),
    ],
)
def test_round_regions(shape, axes, turn, convert):
    """`theta` turns clockwise on the screen, as the canvas of a browser draws it."""
    (entry,) = convert(project([region(shape, kind="x")]))[0]["annotations"]
    y, x = np.mgrid[:60, :80] + 0.5 - np.array([30, 40])[:, None, None]
    along = x * np.cos(turn) + y * np.sin(turn)
    across = y * np.cos(turn) - x * np.sin(turn)
    inside = (along / axes[0]) ** 2 + (across / axes[1]) ** 2 < 1
    mask = segmentation_to_mask(entry["segmentation"], *SIZE)
    assert np.sum(mask != inside) < 0.04 * inside.sum()


def test_the_class_of_a_region(convert):
    regions = [
        region(RECT, kind=" dog ", note="left"),
        region(RECT, kind={"dog": False, "cat": True}, note=""),
        region(RECT, kind=7),
    ]
    content, _ = convert(project(regions), attribute="kind")
    names = {entry["id"]: entry["name"] for entry in content["categories"]}
    assert [names[entry["category_id"]] for entry in content["annotations"]] == ["dog", "cat", "7"]
    content, _ = convert(project([region(RECT), region(RECT, kind="a")]), class_name="balloon")
    assert content["categories"] == [{"id": 1, "name": "balloon"}]
    assert len(content["annotations"]) == 2


@pytest.mark.parametrize("name", ["sub\\b c.png", "b c.png", "sub/b%20c.png"])
def test_pictures_are_found_by_base_name(name, convert, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.png").rename(tmp_path / "sub" / "b c.png")
    content, _ = convert(project([region(RECT, kind="x")], filename=name))
    assert content["images"][0]["file_name"] == "sub/b c.png"


def test_a_shape_of_no_name_has_no_area(convert):
    content, left_out = convert(project([region(RECT | {"name": ["rect"]}, kind="cat")]))
    assert not content["annotations"] and len(left_out) == 1


def test_what_has_no_area_is_left_out_and_named(convert):
    line = {"name": "polyline", "all_points_x": [0, 8, 0], "all_points_y": [0, 0, 8]}
    regions = [
        region({"name": "point", "cx": 1, "cy": 2}, kind="cat"),
        region(line, kind="cat"),
        region(RECT | {"width": 0}, kind="cat"),
        region({"name": "circle", "cx": 4, "cy": 4, "r": 0}, kind="cat"),
        region({"name": "polygon", "all_points_x": [1, 2], "all_points_y": [3, 4]}, kind="cat"),
    ]
    content, left_out = convert(project(regions))
    assert not content["annotations"] and len(content["images"]) == 1
    assert len(left_out) == 5
    assert left_out[0].endswith("via.json: a.png, region 1 (cat), a point without area")


BROKEN = RECT | {"width": "wide"}
POINTS = {"name": "polygon", "all_points_x": [0, 1, 2], "all_points_y": [0, 1]}


@pytest.mark.parametrize(
    "content, options, words",
    [
        ("{", {}, "cannot be read as JSON"),
        ("[]", {}, "not a VIA json"),
        ({}, {}, "not a VIA json"),
        ({"a": {"filename": 3, "regions": []}}, {}, "not a VIA json"),
        ({"a": {"filename": "a.png", "regions": [3]}}, {}, "a.png: a region has no shape_attrib"),
        ({"images": [], "annotations": []}, {}, "already a COCO json"),
        ({"project": {}, "metadata": {}}, {}, "a VIA 3 project, expected VIA 2"),
        (project([], filename="gone.png"), {"class_name": "a"}, "no image .*gone.png"),
        (project([region(RECT)]), {}, "no region has an attribute; --class_name"),
        (project([region(RECT, a="1", b="2")]), {}, r"one with --attribute: \['a', 'b'\]"),
        (project([region(RECT, a="")]), {}, "a.png, region 1: attribute 'a' must name exactly"),
        (project([region(RECT, a={"x": True, "y": True})]), {}, "must name exactly one class"),
        (project([region(RECT)]), {"attribute": "kind"}, "attribute 'kind' must name exactly"),
        (project([region(BROKEN, a="1")]), {}, "region 1: rect expects the numbers x, y, width"),
        (project([region({"name": "circle"}, a="1")]), {}, "circle expects the numbers cx, cy, r"),
        (project([region(POINTS, a="1")]), {}, "polygon expects the numbers all_points_x"),
        (project([region(RECT | {"x": float("inf")}, a="1")]), {}, "rect expects the numbers"),
        (project([region(RECT | {"x": 10**400}, a="1")]), {}, "rect expects the numbers"),
        (project([region(RECT | {"x": [1]}, a="1")]), {}, "rect expects the numbers"),
        (project([region(RECT | {"x": 1e9}, a="1")]), {}, "region 1: polygon has the coordinate 1"),
        (project([region(POINTS | {"all_points_y": [[1], [2], [3]]}, a="1")]), {}, "polygon exp"),
        (project([region(RECT, a="x" * 2000)]), {}, "region 1: label .* more than 1000"),
        (project(None), {}, "a.png: regions is None, expected a list"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_one_line(content, options, words, convert):
    with pytest.raises((ValueError, OSError), match=words) as error:
        convert(content, **options)
    assert "via.json" in str(error.value) and "\n" not in str(error.value)


def test_an_absent_file(tmp_path):
    with pytest.raises(OSError, match="no file .*via.json"):
        read_via(tmp_path / "via.json", None)


@pytest.mark.parametrize("name", ["../secret/b.png", "{root}/secret/b.png"])
def test_pictures_outside_the_folder_are_not_read(name, convert, tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "in").mkdir()
    for path in ("secret/b.png", "in/c.png"):
        cv2.imwrite(str(tmp_path / path), np.zeros((*SIZE, 3), np.uint8))
    content = project([region(RECT, kind="dog")], name.format(root=tmp_path))
    with pytest.raises(ValueError, match="via.json: no image '.*b.png' in .*/in"):
        convert(content, tmp_path / "in")
    cv2.imwrite(str(tmp_path / "in" / "b.png"), np.zeros((*SIZE, 3), np.uint8))
    found, _ = convert(content, tmp_path / "in")
    assert found["images"][0]["file_name"] == "b.png"


def test_a_name_in_the_other_case_or_with_another_ending(convert):
    found, _ = convert(project([region(RECT, kind="dog")], "A.PNG"))
    assert found["images"][0]["file_name"] == "a.png"
    with pytest.raises(ValueError, match="no image 'a.jpg' in .*, but 'a.png' is, with another"):
        convert(project([region(RECT, kind="dog")], "a.jpg"))


def test_a_region_without_a_shape_is_named(convert):
    _, (line,) = convert(project([region({}, kind="cat")]))
    assert line.endswith("region 1 (cat), a region without a shape")
