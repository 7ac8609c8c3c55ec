"""What holds for all formats: classes in a given order, and nothing that `check` refuses."""

import pytest

from mask_rcnn_jax.formats.convert import READERS, read_classes
from tests.formats.converting import convert_set, objects_of, refuses
from tests.formats.test_labelme import shape, write

CAT = shape("cat", "rectangle", [[10, 10], [30, 20]])
DOG = shape("dog", "rectangle", [[40, 10], [50, 20]])


def names_of(content):
    return [(entry["id"], entry["name"]) for entry in content["categories"]]


def test_listed_classes_keep_their_order_and_others_are_an_error_or_left_out(tmp_path):
    write(tmp_path, "a", [CAT, DOG, DOG])
    content, left_out = convert_set("labelme", tmp_path, classes=("mouse", "dog", "cat"))
    assert names_of(content) == [(1, "mouse"), (2, "dog"), (3, "cat")] and not left_out
    assert [label for label, _ in objects_of(content)] == ["cat", "dog", "dog"]
    words = "objects of other classes: 'dog' .2.; add them to --classes, or leave them out with"
    refuses(words, "labelme", tmp_path, classes=("cat",))
    skip = {"other_classes": "skip"}
    content, left_out = convert_set("labelme", tmp_path, classes=("cat",), **skip)
    assert [label for label, _ in objects_of(content)] == ["cat"] and names_of(content) == [
        (1, "cat")
    ]
    assert left_out == [f"{tmp_path}: 2 objects (dog), not in --classes"]


def test_what_cannot_be_trained_on_is_left_out_and_named(tmp_path):
    outside = shape("cat", "rectangle", [[100, 70], [120, 90]])
    beyond = shape("cat", "rectangle", [[-10, -10], [20, 20]])
    write(tmp_path, "a", [outside, beyond])
    content, left_out = convert_set("labelme", tmp_path)
    assert [entry["bbox"] for entry in content["annotations"]] == [[-10, -10, 30, 30]]
    (line,) = left_out
    assert line.startswith("a.png: an object (cat), box [100") and "outside the image" in line


@pytest.mark.parametrize("kind", READERS)
def test_absent_and_empty_places_are_one_line(kind, tmp_path):
    refuses("no file or folder", kind, tmp_path / "none", class_name="x")
    (tmp_path / "empty").mkdir()
    words = "holds no|expected|no [*]_gt|No such file|no (data|masks|file|XML|json)|cannot be read"
    refuses(words, kind, tmp_path / "empty", class_name="x")


def test_classes_are_names_or_lines_of_a_file(tmp_path):
    assert read_classes(None) == () and read_classes("a, b c") == ("a", "b c")
    path = tmp_path / "classes.txt"
    path.write_text("one\n\n two \r\n")
    assert read_classes(str(path)) == ("one", "two")
    for text in ("a,,b", "a,a", " ", "x" * 2000):
        with pytest.raises(ValueError, match="--classes: .* is empty, too long or there twice"):
            read_classes(text)
    with pytest.raises(OSError, match="no file 'gone.txt', expected a class per line"):
        read_classes("gone.txt")
    path.write_bytes(b"\xff\xff")
    with pytest.raises(ValueError, match="not a text in UTF-8"):
        read_classes(str(path))
