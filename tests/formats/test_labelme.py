"""labelme's files to COCO, on files written by hand."""

import base64
import json

import cv2
import numpy as np
import pytest
from PIL import Image

from mask_rcnn_jax.annotations.segmentation import segmentation_to_mask
from mask_rcnn_jax.data.coco import check_coco, load_coco
from mask_rcnn_jax.formats.coco_build import build_coco, read_image_size
from mask_rcnn_jax.formats.convert import convert as convert_any
from mask_rcnn_jax.formats.labelme import read_labelme
from mask_rcnn_jax.formats.reading import Options

SIZE = (60, 80)
CORNERS = [[30, 10], [10, 10], [10, 25], [30, 25]]


def shape(label, kind, points, **keys):
    return {"label": label, "shape_type": kind, "points": points, "group_id": None, **keys}


def write(folder, name, shapes, picture=True, **keys):
    """A picture and labelme's json beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    if picture:
        cv2.imwrite(str(folder / f"{name}.png"), np.zeros((*SIZE, 3), np.uint8))
    content = {
        "version": "5.5.0", "flags": {}, "shapes": shapes, "imagePath": f"{name}.png",
        "imageData": None, "imageHeight": SIZE[0], "imageWidth": SIZE[1],
    }  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps(content | keys))


def convert(folder, image_dir=None):
    """The COCO content and what was left out."""
    pictures, left_out = read_labelme(folder, image_dir, folder / "out.json")
    return build_coco(pictures, image_dir or folder), left_out


def mask_of(entry):
    return segmentation_to_mask(entry["segmentation"], *SIZE)


def png(mask):
    return base64.b64encode(cv2.imencode(".png", mask * 255)[1].tobytes()).decode()


def test_every_shape_with_area_becomes_an_object(tmp_path):
    corners = [[30, 10], [10, 10], [10, 25], [30, 25]]
    write(tmp_path, "a", [
        shape("cat", "polygon", corners),
        shape("dog", "rectangle", [[30, 25], [10, 10]]),  # drawn from its lower right corner
        shape("dog", "rectangle", corners),  # four corners, as later tools write them
        shape("cat", None, corners),
        shape("cat", "oriented_rectangle", corners),
    ])  # fmt: skip
    content, left_out = convert(tmp_path)
    assert not left_out
    assert content["categories"] == [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    assert [entry["category_id"] for entry in content["annotations"]] == [1, 2, 2, 1, 1]
    expected = np.zeros(SIZE, np.uint8)
    expected[10:25, 10:30] = 1
    for entry in content["annotations"]:
        np.testing.assert_array_equal(mask_of(entry), expected)
        assert (entry["bbox"], entry["area"]) == ([10, 10, 20, 15], 300)
    assert content["images"] == [{"id": 1, "file_name": "a.png", "height": 60, "width": 80}]


def test_a_circle_is_its_center_and_a_point_on_it(tmp_path):
    write(tmp_path, "a", [shape("ball", "circle", [[40, 30], [52, 46]])])  # radius 20
    (entry,) = convert(tmp_path)[0]["annotations"]
    y, x = np.mgrid[:60, :80] + 0.5
    inside = (x - 40) ** 2 + (y - 30) ** 2 < 20**2
    assert np.sum(mask_of(entry) != inside) < 0.02 * inside.sum()
    np.testing.assert_allclose(entry["bbox"], [20, 10, 40, 40], atol=1e-6)


def test_shapes_of_one_group_and_label_are_one_object(tmp_path):
    write(tmp_path, "a", [
        shape("cat", "rectangle", [[0, 0], [10, 10]], group_id=1),
        shape("dog", "rectangle", [[20, 0], [30, 10]], group_id=1),
        shape("cat", "rectangle", [[40, 20], [50, 30]], group_id=1),
        shape("cat", "rectangle", [[60, 40], [70, 50]], group_id=0),
    ])  # fmt: skip
    content, _ = convert(tmp_path)
    assert [entry["area"] for entry in content["annotations"]] == [200, 100, 100]
    both = content["annotations"][0]
    assert len(both["segmentation"]) == 2 and both["bbox"] == [0, 0, 50, 30]


def test_masks_are_moved_to_their_place_and_join_polygons(tmp_path):
    crop = np.zeros((10, 20), np.uint8)
    crop[2:8, 5:] = 1
    write(tmp_path, "a", [
        shape("cat", "mask", [[50, 40], [69, 49]], mask=png(crop), group_id=4),
        shape("cat", "rectangle", [[0, 0], [10, 10]], group_id=4),
        shape("cat", "mask", [[70, 55], [89, 64]], mask=png(np.ones_like(crop))),  # over the edge
    ])  # fmt: skip
    first, second = convert(tmp_path)[0]["annotations"]
    expected = np.zeros(SIZE, np.uint8)
    expected[40:50, 50:70] = crop
    expected[:10, :10] = 1
    np.testing.assert_array_equal(mask_of(first), expected)
    assert first["area"] == expected.sum() and second["area"] == 5 * 10
    json.dumps(first)


def test_what_has_no_area_is_left_out_and_named(tmp_path):
    write(tmp_path, "a", [
        shape("cat", "point", [[5, 5]]),
        shape("cat", "linestrip", [[5, 5], [8, 9], [10, 2]]),
        shape("cat", "polygon", [[5, 5], [8, 9]]),
        shape("cat", "rectangle", [[5, 5], [5, 9]]),
        shape("cat", "circle", [[5, 5], [5, 5]]),
        shape("cat", "polygon", []),
        shape("__ignore__", "rectangle", [[0, 0], [9, 9]]),
        shape("dog", "rectangle", [[0, 0], [9, 9]]),
    ])  # fmt: skip
    content, left_out = convert(tmp_path)
    assert [entry["name"] for entry in content["categories"]] == ["dog"]
    assert len(left_out) == 6
    assert left_out[0] == f"{tmp_path / 'a.json'}: shape 1 (cat), a point without area"


def test_folders_pictures_elsewhere_and_empty_pictures(tmp_path):
    """The result is what training takes; a picture without shapes stays as one."""
    box = shape("cat", "rectangle", [[0, 0], [9, 9]])
    write(
        tmp_path / "json" / "deep", "a", [box], picture=False, imagePath="..\\..\\pictures\\a.png"
    )
    write(tmp_path / "json", "b", [], picture=False, imagePath="../pictures/b.png")
    for name in "ab":
        write(tmp_path / "pictures", name, [])
    for path in (tmp_path / "pictures").glob("*.json"):
        path.unlink()
    with pytest.raises(OSError, match="is outside .*/json; --images names its folder .and 1 more"):
        convert(tmp_path / "json")
    for folder, image_dir in ((tmp_path, None), (tmp_path / "json", tmp_path / "pictures")):
        content, _ = convert(folder, image_dir)
        where = image_dir or folder
        (tmp_path / "out.json").write_text(json.dumps(content))
        assert check_coco(tmp_path / "out.json", where) == []
        images = load_coco(tmp_path / "out.json", where).images
        assert [len(image.annotations) for image in images] == [0, 1]
        (tmp_path / "out.json").unlink()
    assert [image.file_name for image in images] == ["b.png", "a.png"]


@pytest.mark.parametrize("name", ["../secret/a.png", "/{root}/secret/a.png", "link/a.png"])
def test_pictures_outside_the_folder_are_not_read(name, tmp_path):
    write(tmp_path / "secret", "a", [])
    name = name.replace("/{root}", tmp_path.as_posix())
    write(tmp_path / "json", "b", [], picture=False, imagePath=name)
    (tmp_path / "json" / "link").symlink_to(tmp_path / "secret", target_is_directory=True)
    words = "no image 'link/a.png' in" if name.startswith("link") else "is outside .*/json; --image"
    with pytest.raises(OSError, match=words):
        convert(tmp_path / "json")
    # As in other formats, a link to a file is followed.
    (tmp_path / "json" / "a.png").symlink_to(tmp_path / "secret" / "a.png")
    content, _ = convert(tmp_path / "json")
    assert content["images"][0]["file_name"] == "a.png"


def held(kind=".png", size=SIZE):
    picture = np.full((*size, 3), 90, np.uint8)
    return base64.b64encode(cv2.imencode(kind, picture)[1].tobytes()).decode()


def test_pictures_that_only_the_jsons_hold_are_written(tmp_path):
    boxes = [shape("cat", "rectangle", [[30, 25], [10, 10]])]
    names = {"a": "../img/b.jpg", "c": "D:\\x y\\b.png", "d": "../../.. /..", "e": "e.png"}
    for stem, name in names.items():
        data = held(".jpg") if stem == "a" else held()
        data = f"data:image/png;base64,{data}" if stem == "c" else data
        folder = tmp_path / "json" / stem
        write(folder, stem, boxes, picture=stem == "e", imagePath=name, imageData=data)
    for _ in range(2):  # what is there already is left
        options = Options(tmp_path / "new" / "out.json")
        content, image_dir, _ = convert_any("labelme", tmp_path / "json", None, options)
        written = sorted(path.name for path in (tmp_path / "new" / "out_images").iterdir())
        assert image_dir == tmp_path and written == ["b.jpg", "b.png", written[2]]
        (tmp_path / "out.json").write_text(json.dumps(content))
        assert check_coco(tmp_path / "out.json", tmp_path) == []
    assert content["images"][-1]["file_name"] == "json/e/e.png"  # it is there
    (tmp_path / "new" / "out_images" / "b.png").write_bytes(b"mine")
    with pytest.raises(ValueError, match="'imageData' would be written to .* another file"):
        convert_any("labelme", tmp_path / "json", None, options)


def test_pictures_of_the_same_name_in_jsons_stay_apart(tmp_path):
    for value, folder in enumerate(("", "x", "y")):
        picture = np.full((*SIZE, 3), value, np.uint8)
        data = base64.b64encode(cv2.imencode(".png", picture)[1].tobytes()).decode()
        write(tmp_path / folder, "a", [], picture=False, imageData=data)
    for _ in range(2):
        content, _ = convert(tmp_path)
        names = [entry["file_name"] for entry in content["images"]]
        assert [cv2.imread(str(tmp_path / name))[0, 0, 0] for name in names] == [0, 1, 2]


def test_pictures_in_jsons_are_written_into_the_folder_of_the_jsons(tmp_path, caplog):
    write(tmp_path, "a", [], picture=False, imageData=held())
    with caplog.at_level("INFO"):
        content, _ = convert(tmp_path)
    assert content["images"][0]["file_name"] == "out_images/a.png"
    assert f"1 images that only 'imageData' holds are written to {tmp_path}" in caplog.text


@pytest.mark.parametrize("data, words", [
    ("!", "'imageData' is not an image in base64"),
    (base64.b64encode(b"<html>").decode(), "'imageData': HTML, SVG or other XML, which is not"),
    (base64.b64encode(b"#!/bin/sh").decode(), "'imageData': truncated, damaged or not an image"),
    (held(size=(30, 40)), "drawn on 60 x 80 .* but a.png is 30 x 40"),
    ("", "no image 'a.png'"),
    (7, "no image 'a.png'"),
])  # fmt: skip
def test_what_is_no_picture_is_not_written(data, words, tmp_path):
    write(tmp_path, "a", [], picture=False, imageData=data)
    with pytest.raises((ValueError, OSError), match=words):
        convert(tmp_path)
    assert not list(tmp_path.glob("out_images/*")) or "drawn" in words


@pytest.mark.parametrize("name, file, within", [
    ("a.png", "pictures/day/a.png", "pictures"),
    ("../../day/a.png", "pictures/day/a.png", "pictures"),
    ("a%20b.png", "json/deep/a b.png", None),
    ("C:\\Users\\me\\a.png", "json/deep/a.png", None),
    ("C:\\Users\\me\\a.png", "json/a.png", None),
])  # fmt: skip
def test_pictures_are_found_by_base_name(name, file, within, tmp_path):
    write((tmp_path / file).parent, (tmp_path / file).stem, [])
    (tmp_path / file).with_suffix(".json").unlink()
    write(tmp_path / "json" / "deep", "one", [], picture=False, imagePath=name)
    content, _ = convert(tmp_path / "json", within and tmp_path / within)
    assert content["images"][0]["file_name"] == file.partition("/")[2]


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"imagePath": "gone.png"}, "no image"),
        ({"imageHeight": 80, "imageWidth": 60}, "drawn on 80 x 60 .* but a.png is 60 x 80"),
        ({"shapes": None}, "not a labelme file: it lacks 'shapes'"),
        ({"imagePath": None}, "it lacks 'imagePath'"),
        ({"shapes": [{"points": []}]}, "shape 1 has no label"),
        ({"shapes": [shape(" ", "polygon", CORNERS)]}, "shape 1 has no label"),
        ({"shapes": [shape(3, "polygon", CORNERS)]}, "shape 1 has the label 3, expected a text"),
        ({"imagePath": "a.jpg"}, "no image 'a.jpg' in .*, but 'a.png' is, with another ending"),
        ({"shapes": [shape("a", "polygon", [[1, 2], [3]])]}, r"not a list of \[x, y\]"),
        ({"shapes": [shape("a", "polygon", [[1, "b"]])]}, r"not a list of \[x, y\]"),
        ({"shapes": [shape("a", "polygon", [[1, float("nan")]])]}, r"not a list of \[x, y\]"),
        ({"shapes": [shape("a", "polygon", None)]}, r"not a list of \[x, y\]"),
        ({"shapes": [shape("a", "mask", [[0, 0], [1, 1]], mask="!")]}, "not a PNG in base64"),
        ({"shapes": [shape("a", "mask", [[0, 0], [1, 1]])]}, "not a PNG in base64"),
        ({"shapes": [shape("a", "mask", [[0, 0], [1, 1]], mask="AAAA")]}, "not a PNG in base64"),
        ({"shapes": [shape("a", "mask", [[0, 0], [1, 1]], mask="\u00e9")]}, "not a PNG in base64"),
        (
            {"shapes": [shape("a", "polygon", CORNERS, group_id=[1])]},
            r"group_id is \[1\], expected",
        ),
        ({"shapes": [shape("a", "polygon", [[0, 0], [1e9, 0], [0, 9]])]}, "coordinate 1000000000"),
        ({"shapes": [shape("a", "polygon", [[10**400, 1]])]}, r"not a list of \[x, y\]"),
        ({"shapes": [shape("x" * 2000, "polygon", CORNERS)]}, "shape 1: label .* more than 1000"),
    ],
)
def test_what_cannot_be_used_is_one_line(keys, words, tmp_path):
    write(tmp_path, "a", **({"shapes": []} | keys))
    with pytest.raises((ValueError, OSError), match=words) as error:
        convert(tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "{", "[]", "7", '{"images": [], "annotations": []}'])
def test_another_json_is_refused(content, tmp_path):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=r"a\.json: (cannot be read as|not a labelme file)"):
        convert(tmp_path)


def test_an_image_without_a_json_is_named(tmp_path):
    for name in "ab":
        write(tmp_path, name, [shape("cat", "rectangle", [[0, 0], [9, 9]])])
    (tmp_path / "b.json").unlink()
    for image_dir in (None, tmp_path):
        content, left_out = convert(tmp_path, image_dir)
        assert [image["file_name"] for image in content["images"]] == ["a.png"]
        assert left_out == [f"{tmp_path}: 'b.png', an image without a json"]


def test_absent_and_empty_folders_and_pictures_drawn_twice(tmp_path):
    with pytest.raises(OSError, match="no folder"):
        convert(tmp_path / "none")
    with pytest.raises(ValueError, match="holds no labelme json"):
        convert(tmp_path)
    for name in "ab":
        write(tmp_path, name, [], imagePath="a.png")
    with pytest.raises(ValueError, match="'a.png' is annotated 2 times"):
        convert(tmp_path)
    (tmp_path / "a.png").unlink()
    with pytest.raises(OSError, match="no image .*, which has 1 images, .* .and 1 more"):
        convert(tmp_path)


def test_pictures_that_exif_turns_and_damaged_ones_are_refused(tmp_path):
    picture, exif = Image.new("RGB", (80, 60)), Image.Exif()
    exif[0x0112] = 6
    picture.save(tmp_path / "turned.jpg", exif=exif)
    with pytest.raises(
        ValueError, match=r"a.json: .*turned.jpg: rotated by its EXIF .*orientation 6\)"
    ):
        read_image_size(tmp_path / "turned.jpg", "a.json")
    (tmp_path / "bad.jpg").write_bytes(b"no picture")
    with pytest.raises(ValueError, match="a.json: .*bad.jpg: damaged or not an image"):
        read_image_size(tmp_path / "bad.jpg", "a.json")
