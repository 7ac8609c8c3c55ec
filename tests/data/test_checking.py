"""What is legal in a COCO json and ruins a run: warnings, repaired names, two sets compared."""

import json
import os
import shutil

import pytest

from mask_rcnn_jax.data.checking import compare_sets, inspect_coco, summarize
from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.images.file_names import find_by_name
from tests.commands.command import error_line, run_inside
from tests.data.small_set import rectangle, write_coco

GOOD = rectangle(5, 5, 20, 10)


def warnings_of(files):
    found = inspect_coco(*files)
    assert not found.problems
    return found.warnings


def test_a_sound_set_has_no_warning(coco_files):
    assert warnings_of(coco_files(annotations=[GOOD])) == []


def test_a_set_of_crowds_alone(coco_files, caplog):
    other = rectangle(30, 12, 20, 20, iscrowd=1)
    files = coco_files(annotations=[GOOD | {"iscrowd": 1}, other])
    (warning,) = warnings_of(files)
    assert warning.startswith("all 2 annotations are crowds")
    load_coco(*files)
    assert f"{files[0]}: all 2 annotations are crowds" in caplog.text
    assert warnings_of(coco_files(annotations=[GOOD | {"iscrowd": 1}, GOOD])) == []


def test_repeated_annotations_are_counted(coco_files):
    other = rectangle(30, 12, 20, 20)
    changed = {"category_id": 7}, {"bbox": [5, 5, 20, 11]}, {"iscrowd": 1}
    different = [GOOD, other, *(GOOD | change for change in changed)]
    assert warnings_of(coco_files(annotations=different)) == []
    area = GOOD | {"area": 7, "id": "x", "bbox": [5.0, 5.0, 20.0, 10.0]}
    (warning,) = warnings_of(coco_files(annotations=[GOOD, other, area, GOOD]))
    assert warning == (
        "2 annotations repeat another of the same image, class, box and mask, such as annotation "
        "'x' that of annotation 1"
    )
    bare = {"image_id": 1, "category_id": 3, "segmentation": GOOD["segmentation"]}
    (warning,) = warnings_of(coco_files(annotations=[bare, bare]))
    assert warning.startswith("1 annotations repeat another")


@pytest.mark.parametrize("other", ["Cat", "cat ", " cat", "CAT"])
def test_classes_that_differ_in_case_or_blanks(coco_files, other):
    categories = [{"id": 3, "name": "cat"}, {"id": 4, "name": other}, {"id": 5, "name": "dog"}]
    (warning,) = warnings_of(coco_files(annotations=[GOOD], categories=categories))
    assert warning.startswith(
        f"2 classes differ from others in case or blanks only, such as 'cat', {other!r}; `prepare"
    )


@pytest.mark.parametrize("many, few, said", [(21, 2, True), (20, 2, False), (11, 1, True)])
def test_a_class_of_few_objects_beside_one_of_many(coco_files, many, few, said):
    """A name that was misspelled once."""
    found = [rectangle(i % 30, i // 30, 9, 9) for i in range(many + few)]
    found = [one | {"category_id": 4 if i < few else 3} for i, one in enumerate(found)]
    categories = [{"id": 3, "name": "Person"}, {"id": 4, "name": "persn x"}, {"id": 5, "name": "x"}]
    text = f"1 classes have few objects, where another has {many}: 'persn x' ({few})"
    assert warnings_of(coco_files(annotations=found, categories=categories)) == [text] * said


def test_classes_that_differ_in_how_accents_are_written(coco_files):
    categories = [{"id": 3, "name": "caf\u00e9"}, {"id": 4, "name": "cafe\u0301"}]
    (warning,) = warnings_of(coco_files(annotations=[GOOD], categories=categories))
    assert warning.startswith("2 classes differ")


def test_a_file_of_two_images(tmp_path):
    files = write_coco(tmp_path, [(40, 60)] * 2, annotations=[GOOD])
    content = json.loads(files[0].read_text())
    content["images"][1]["file_name"] = content["images"][0]["file_name"]
    files[0].write_text(json.dumps(content))
    (warning,) = warnings_of(files)
    assert warning.startswith("1 files are listed as several images")
    assert warning.endswith("first: '001.png'")


def test_a_root_category_without_objects(coco_files):
    root = {"id": 0, "name": "objects", "supercategory": "none"}
    cat = {"id": 3, "name": "cat", "supercategory": "objects"}
    (warning,) = warnings_of(coco_files(annotations=[GOOD], categories=[root, cat]))
    assert warning.startswith("category 'objects' has no objects and is the supercategory")
    used = [GOOD, GOOD | {"category_id": 0}]
    assert warnings_of(coco_files(annotations=used, categories=[root, cat])) == []


def test_an_annotation_0_and_a_bad_part(coco_files):
    bad = GOOD | {"id": 0, "segmentation": [*GOOD["segmentation"], [1, 2, 3]]}
    part, zero = warnings_of(coco_files(annotations=[bad]))
    assert part == (
        "annotation 0 of image 1: a part is left out, polygon of 3 numbers, expected x, y of three "
        "points or more"
    )
    assert zero.startswith("an annotation has the id 0: pycocotools, and so this package, counts")


NAMES = {
    "images/ab-my%20photo.jpg": "ab-my photo.jpg",
    "..\\..\\media\\upload\\4\\x.png": "sub/x.png",
    "/data/upload/3/y.jpg": "y.jpg",
    "/data/local-files/?d=images/z.jpg": "z.jpg",
    "train/twice.jpg": "train/twice.jpg",  # of two the one in the folder that is named
    "100%.jpg": "100%.jpg",
    "images/0a1b2c3d-a%20b.jpg": "a b.jpg",
}


def test_names_of_annotation_tools_are_found(tmp_path):
    for path in [*NAMES.values(), "val/twice.jpg"]:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("")
    assert find_by_name(list(NAMES), str(tmp_path)) == NAMES
    unclear = ["gone.jpg", "other/twice.jpg", "a/y.jpg", "b/y.jpg"]
    assert find_by_name(unclear, str(tmp_path)) == {}


def test_by_name_fills_in_sizes(tmp_path, capsys):
    sizes = [(40, 60)] * 5
    json_path, image_dir = write_coco(tmp_path, sizes, annotations=[GOOD])
    content = json.loads(json_path.read_text())
    one, two, three, four, _ = content["images"]
    del one["height"], one["width"]
    two["height"], three["width"], four["height"] = None, "60", float("nan")
    content["images"][0]["file_name"] = "q/001.PNG"
    json_path.write_text(json.dumps(content))
    arguments = "--json", json_path, "--images", image_dir, "--by_name", "--output"
    assert run_inside("prepare", "check", *arguments, tmp_path / "new.json") == 0
    assert "1 of 5 images found by name, 4 sizes filled in" in capsys.readouterr().out
    # Which size a side that differs from the file's means is not known.
    two["height"], two["width"] = 50, None
    json_path.write_text(json.dumps(content))
    assert run_inside("prepare", "check", *arguments, tmp_path / "new.json") == 2
    assert "images[1] lacks 'width'" in capsys.readouterr().out
    (image_dir / "001.png").write_bytes(b"")
    assert run_inside("prepare", "check", *arguments, tmp_path / "new.json") == 2
    assert "images[0] lacks 'height', 'width'" in capsys.readouterr().out


def test_names_in_the_other_case_are_found_if_unique(tmp_path):
    for path in (
        "img_1.jpg",
        "sub/13.jpg",
        "a/x.png",
        "b/X.PNG",
        "E/y.png",
        "f/y.png",
        "e\u0301.png",
    ):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("")
    found = {
        "IMG_1.JPG": "img_1.jpg",
        "C:\\Users\\Me\\13.JPG": "sub/13.jpg",
        "A/X.png ": "a/x.png",
        "q/e/Y.png": "E/y.png",
        "\u00e9.png": "e\u0301.png",  # as macOS writes it
    }
    assert find_by_name([*found, "x.PnG", "img_1.jpeg"], str(tmp_path)) == found


@pytest.mark.parametrize("files, name, found", [
    (("0010.jpg", "d2/0010.jpg"), "0a1b2c3d-0010.jpg", None),  # no folder is named
    (("d1/0010.jpg", "D2/0010.JPG"), "d1/0a1b2c3d-0010.jpg", None),
    (("d2/0010.jpg",), "upload/0a1b2c3d-0010.jpg", "d2/0010.jpg"),
    (("d2/a.png", "D1/A.PNG"), "d1\\a.png", None),  # the name is in one, the folder in the other
    (("d1/a.png", "D1/A.PNG"), "x/d1\\a.png", "d1/a.png"),
    (("d2/a.png",), "d1\\a.png", "d2/a.png"),
])  # fmt: skip
def test_a_name_that_may_be_several_files_is_left_alone(files, name, found, tmp_path):
    for path in files:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    assert find_by_name([name], str(tmp_path)) == ({name: found} if found else {})


def test_an_absent_image_is_suggested_by_case_or_ending(tmp_path, capsys):
    (tmp_path / "gone").mkdir()
    json_path, image_dir = write_coco(tmp_path, [(40, 60)] * 4, annotations=[GOOD])
    content = json.loads(json_path.read_text())
    for entry, name in zip(
        content["images"], ("C:\\Q\\001.PNG", "002.jpeg", "003.png", "z/4.png"), strict=True
    ):
        entry["file_name"] = name
    json_path.write_text(json.dumps(content))
    case, ending, folder = inspect_coco(json_path, image_dir).problems
    assert "001.PNG' is listed but not in" in case
    assert ", but '001.png' is; `prepare check --by_name` writes" in case
    assert ending.endswith(", but '002.png' is, with another ending")
    assert folder.endswith(f"image 'z/4.png' is listed but not in {image_dir}")
    with pytest.raises(ValueError, match="but '001.png' is; `prepare check --by_name`"):
        load_coco(json_path, image_dir)


@pytest.mark.parametrize("folders", [("images",), ("images", "masks"), ("deep/a", "deep/b")])
def test_the_folder_above_that_of_the_images_is_noticed(folders, tmp_path):
    """Also where label images have the names of the images."""
    json_path, image_dir = write_coco(tmp_path, [(40, 60)] * 2, annotations=[GOOD])
    for folder in folders:
        shutil.copytree(image_dir, tmp_path / "given" / folder)
    found = inspect_coco(json_path, tmp_path / "given")
    assert len(found.problems) == 2
    (line,) = found.warnings
    places = " and in ".join(str(tmp_path / "given" / folder) for folder in folders)
    assert line == f"all images are in {places}; --images names their folder"


def test_several_similar_files_are_named_without_advice(tmp_path):
    json_path, image_dir = write_coco(tmp_path, annotations=[GOOD])
    (image_dir / "001.png").rename(image_dir / "a.png")
    (image_dir / "A.PNG").write_text("")
    content = json.loads(json_path.read_text())
    content["images"][0]["file_name"] = "a.Png"
    json_path.write_text(json.dumps(content))
    (problem,) = inspect_coco(json_path, image_dir).problems
    assert problem.endswith(", but 'A.PNG' and 'a.png' are")


def test_by_name_writes_a_json_that_can_be_used(tmp_path, capsys):
    json_path, image_dir = write_coco(tmp_path, annotations=[GOOD])
    (image_dir / "001.png").rename(image_dir / "my photo.png")
    content = json.loads(json_path.read_text())
    content["images"][0]["file_name"] = "images\\my%20photo.png"
    json_path.write_text(json.dumps(content))
    arguments = ["check", "--json", json_path, "--images", image_dir]
    assert run_inside("prepare", *arguments) == 2
    said = capsys.readouterr().out
    assert "warning: 1 of 1 absent images are in" in said and "as 'my photo.png'" in said
    assert "check --by_name --output FILE" in said
    code = run_inside("prepare", *arguments, "--by_name")
    assert "--by_name needs --json, --images and --output" in error_line(
        code, capsys.readouterr().err
    )
    fixed = tmp_path / "fixed.json"
    assert run_inside("prepare", *arguments, "--by_name", "--output", fixed) == 0
    said = capsys.readouterr().out
    assert "with 1 of 1 images found by name" in said and "no problem in 1 images" in said
    assert load_coco(fixed, image_dir).images[0].file_name == "my photo.png"


def test_two_sets_are_compared(tmp_path, capsys):
    (tmp_path / "annotations").mkdir()
    dog = GOOD | {"category_id": 7}
    for name, annotations, count in (("train", [GOOD, dog], 2), ("val", [GOOD], 3)):
        (tmp_path / name).mkdir()
        path, images = write_coco(tmp_path / name, [(40, 60)] * count, annotations)
        shutil.copy(path, tmp_path / "annotations" / f"instances_{name}.json")
        for image in images.iterdir():
            image.rename(tmp_path / name / image.name)
    assert run_inside("prepare", "check", "--data_dir", tmp_path) == 0
    said = capsys.readouterr().out
    assert "warning: 1 classes have objects in train and none in val: 'dog'" in said
    assert (
        "warning: 2 images of val are in train, too, such as '001.png', which is '001.png'" in said
    )
    files = [
        f"--{split}_{kind}={tmp_path / path}"
        for split in ("train", "val")
        for kind, path in (("json", f"annotations/instances_{split}.json"), ("images", split))
    ]
    assert run_inside("prepare", "check", *files) == 0
    assert capsys.readouterr().out == said


def test_sets_without_a_common_image_or_a_lonely_class_have_no_warning(tmp_path):
    train = inspect_coco(*write_coco(tmp_path, annotations=[GOOD]))
    val = inspect_coco(*write_coco(tmp_path, sizes=[(30, 60)], annotations=[GOOD]))
    assert compare_sets(train, val) == []


def test_many_equal_faults_are_one_line(coco_files, capsys):
    bad = [GOOD | {"bbox": [n % 7, 5, 0, 10]} for n in range(5000)]
    content = {"id": 9, "file_name": "gone.png", "height": 4, "width": 4}
    images = [{"id": 1, "file_name": "001.png", "height": 40, "width": 60}, content]
    json_path, image_dir = coco_files(annotations=[*bad, GOOD], images=images)
    assert run_inside("prepare", "check", "--json", json_path, "--images", image_dir) == 2
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith(f"{json_path}: 5000 times, first: annotation 1 of image 1: box [0,")
    assert len(inspect_coco(json_path, image_dir).problems) == 5001


def test_lines_are_equal_but_for_names_and_numbers():
    lines = [f"image '{n}.png' is listed but not in /a/b" for n in range(6)]
    other = [f"/data/{n}.jpg: truncated" for n in "ab"]
    assert summarize([*lines, *other]) == [f"6 times, first: {lines[0]}", *other]


@pytest.mark.parametrize("kind", ["pipe", "folder", "link to itself", "device"])
def test_what_is_no_regular_file_is_named_and_never_opened(kind, coco_files):
    json_path, image_dir = coco_files(annotations=[GOOD])
    path = image_dir / "001.png"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path if kind == "link to itself" else "/dev/zero")
    words = f"image '001.png' in {image_dir} is not a regular file"
    assert inspect_coco(json_path, image_dir).problems == [words]
    with pytest.raises(ValueError, match="001.png' in .* is not a regular file"):
        load_coco(json_path, image_dir)


def test_a_json_that_is_a_pipe_is_not_opened(coco_files):
    json_path, image_dir = coco_files(annotations=[GOOD])
    json_path.unlink()
    os.mkfifo(json_path)
    with pytest.raises(OSError, match="instances.json is not a regular file"):
        load_coco(json_path, image_dir)
