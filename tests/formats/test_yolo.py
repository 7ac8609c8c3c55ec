"""Labels of YOLO to COCO, in the folders that tools lay out."""

import numpy as np
import pytest

from tests.formats.converting import box, convert_set, objects_of, refuses, write_image

SQUARE = "1 0.125 0.25 0.5 0.25 0.5 0.5 0.125 0.5"  # x 10 to 40, y 15 to 30
NAMES = "names:\n  0: dog\n  1: cat\n"


def write(folder, images, labels, text=SQUARE, names=NAMES):
    write_image(folder / images / "a.png")
    write_image(folder / images / "empty.png")
    (folder / labels).mkdir(parents=True, exist_ok=True)
    (folder / labels / "a.txt").write_text(text)
    if names:
        (folder / "data.yaml").write_text(names)


@pytest.mark.parametrize("images, labels, source, image_dir", [
    ("images/train", "labels/train", "", None),
    ("images/train", "labels/train", "data.yaml", None),
    ("train/images", "train/labels", "", None),
    ("train/images", "train/labels", "train/labels", None),
    ("photos", "photos", "", None),
    ("photos", "labels", "", "photos"),
    ("photos", "texts", "texts", "photos"),
])  # fmt: skip
def test_labels_are_found_in_every_layout(images, labels, source, image_dir, tmp_path):
    write(tmp_path, images, labels)
    folder = tmp_path / image_dir if image_dir else None
    content, left_out = convert_set("yolo", tmp_path / source, folder)
    assert [entry["name"] for entry in content["categories"]] == ["dog", "cat"] and not left_out
    assert len(content["images"]) == 2  # one without labels shows nothing
    assert content["annotations"][0]["segmentation"] == [[10, 15, 40, 15, 40, 30, 10, 30]]
    (label, mask), = objects_of(content)  # fmt: skip
    assert label == "cat" and (mask == box(10, 15, 40, 30)).all()


@pytest.mark.parametrize("name", ["A.txt", "a.TXT"])
def test_labels_in_the_other_case_are_found(name, tmp_path):
    write(tmp_path, "images", "labels")
    (tmp_path / "labels" / "a.txt").rename(tmp_path / "labels" / name)
    content, _ = convert_set("yolo", tmp_path)
    assert len(content["annotations"]) == 1


@pytest.mark.parametrize("images, labels, rows", [
    ("images/train", "labels/train", "train: images/train\n"),
    ("train/images", "train/labels", "train: ../train/images\n"),
    ("set/images", "set/labels", "path: set\ntrain: images\n"),
])  # fmt: skip
def test_a_split_is_the_folder_that_data_yaml_names(images, labels, rows, tmp_path):
    write(tmp_path, images, labels, names=NAMES + rows)
    write(tmp_path, "other/images", "other/labels", names=None)
    content, _ = convert_set("yolo", tmp_path / "data.yaml", split="train")
    assert len(content["images"]) == 2 and len(content["annotations"]) == 1
    assert len(convert_set("yolo", tmp_path / "data.yaml")[0]["images"]) == 4
    refuses(
        "val is missing, expected the name of a folder", "yolo", tmp_path / "data.yaml", split="val"
    )
    refuses("is a folder, expected its data.yaml", "yolo", tmp_path, split="train")


@pytest.mark.parametrize("value", [
    "!!bool a", "!!timestamp a", "[a, b]", "a" * 9000,
    "[" * 100_000 + "]" * 100_000,  # of which PyYAML would read for hours
    "[&a0 [1], " + "".join(f"&a{n + 1} [*a{n}, *a{n}], " for n in range(40)) + "1]",
])  # fmt: skip
def test_a_data_yaml_with_anything_in_it_is_refused_in_one_line(value, tmp_path):
    write(tmp_path, "images", "labels", names=f"{NAMES}train: {value}\n")
    refuses("data.yaml: (train is|no 'names' of)", "yolo", tmp_path / "data.yaml", split="train")


def test_names_are_a_list_numbers_or_given(tmp_path):
    write(tmp_path, "images", "labels", names="names: [x, 'y z']\nnc: 2\n")
    assert [e["name"] for e in convert_set("yolo", tmp_path)[0]["categories"]] == ["x", "y z"]
    (tmp_path / "data.yaml").write_text("names: [7, 1.5]\n")
    assert [e["name"] for e in convert_set("yolo", tmp_path)[0]["categories"]] == ["7", "1.5"]
    (tmp_path / "data.yaml").unlink()
    content, _ = convert_set("yolo", tmp_path, classes=("b", "a"))
    assert objects_of(content)[0][0] == "a"
    refuses("no data.yaml names its classes", "yolo", tmp_path)


def test_boxes_are_objects_where_asked_and_empty_segments_are_left_out(tmp_path, caplog):
    text = "1 0.25 0.5 0.25 0.2\n\n1 0.1 0.1 0.1 0.2 0.1 0.3\n1\n"
    write(tmp_path, "images", "labels", text)
    content, left_out = convert_set("yolo", tmp_path)
    assert not content["annotations"] and len(left_out) == 3
    assert "a.txt: line 1 (cat), a box; --boxes" in left_out[0]
    negative = "1 images of which all objects are left out become negative examples: 'images/a.png'"
    assert f"{tmp_path}: {negative}" in caplog.text
    assert left_out[1].endswith("line 3 (cat), a polygon without area")
    (_, mask), = objects_of(convert_set("yolo", tmp_path, boxes=True)[0])  # fmt: skip
    np.testing.assert_array_equal(mask, box(10, 24, 30, 36))


@pytest.mark.parametrize("text, words", [
    ("2 0 0 0 1 1 1", "line 1: class '2', expected one of 0 to 1"),
    ("cat 0 0 0 1 1 1", "line 1: the class is 'cat', expected a finite number"),
    ("1.5 0 0 0 1 1 1", "class '1.5', expected"),
    (SQUARE + "\n1 0 0 0 x 1 1", "line 2: a coordinate is 'x'"),
    ("1 0 0 0 1 1 inf", "a coordinate is 'inf'"),
    ("1 0 0 0 1 1 1 0.9", "7 numbers after the class, expected x y x y"),
    ("1 0 0 0 600 400 600", "line 1: polygon has the coordinate"),  # in pixels
])  # fmt: skip
def test_a_wrong_line_is_named(text, words, tmp_path):
    write(tmp_path, "images", "labels", text)
    refuses(words, "yolo", tmp_path)


@pytest.mark.parametrize(
    "names", ["", "names: 7", "names: {a: b}", "[1", "names: [a, a]", "names: [[1]]", "!!x", "\x00",
              "- " * 5000, "names: &a [*a]", f"names: [0x{'f' * 9000}]"]
)  # fmt: skip
def test_a_wrong_list_of_names_is_one_line(names, tmp_path):
    write(tmp_path, "images", "labels")
    (tmp_path / "data.yaml").write_text(names)
    refuses(r"data.yaml: (no 'names' of|a name of 'names' occurs twice)", "yolo", tmp_path)


@pytest.mark.parametrize("names", ["names: [no, yes]", "names: {0: a, 1: On}"])
def test_names_that_yaml_reads_as_true_or_false_want_quotes(names, tmp_path):
    write(tmp_path, "images", "labels", names=names)
    refuses("data.yaml: 'names' has true, .* write class names in quotes", "yolo", tmp_path)


def test_labels_without_an_image_and_folders_without_labels_are_named(tmp_path):
    write(tmp_path, "images", "labels")
    (tmp_path / "labels" / "gone.txt").write_text(SQUARE)
    refuses("gone.txt has no image in .*; --images names its folder", "yolo", tmp_path)
    (tmp_path / "images" / "gone.psd").write_text("")
    refuses("gone.txt has no image but '.*gone.psd', whose kind is not read", "yolo", tmp_path)
    (tmp_path / "images" / "gone.psd").unlink()
    (tmp_path / "labels" / "gone.txt").unlink()
    (tmp_path / "labels" / "a.txt").write_bytes(b"\xff\xfe\xff")
    refuses("a.txt: not a text in UTF-8", "yolo", tmp_path)
    (tmp_path / "labels" / "a.txt").unlink()
    refuses("no labels in", "yolo", tmp_path)
    write(tmp_path, "images/more", "labels")
    write(tmp_path, "images", "labels")
    words = "a.txt may be of 'a.png' or 'more/a.png'"
    refuses(words, "yolo", tmp_path, tmp_path / "images")
    refuses("no file or folder", "yolo", tmp_path / "none")
