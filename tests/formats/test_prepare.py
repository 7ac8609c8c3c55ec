"""`prepare` through the real command line."""

import json
import subprocess
import sys

import cv2
import numpy as np
import pytest

from tests.commands.command import error_line, run_inside
from tests.data.small_set import rectangle


def prepare(*arguments):
    command = [sys.executable, "-m", "mask_rcnn_jax.prepare", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture
def prepare_inside(capsys):
    """The same in this process, which saves the imports."""

    def run(*arguments):
        code = run_inside("prepare", *arguments)
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, said.out, said.err)

    return run


def test_shapes_then_check(tmp_path, prepare_inside):
    arguments = ["shapes", "--data_dir", tmp_path, "--train=6", "--val=2"]
    for run in (prepare, prepare_inside):
        done = run(*arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert "instances_train.json: 6 images in" in done.stdout
    done = prepare_inside("check", "--data_dir", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "instances_train.json: no problem in 6 images" in done.stdout
    assert "instances_val.json: no problem in 2 images" in done.stdout


def test_check_prints_every_problem_and_fails(coco_files, prepare_inside):
    bad = rectangle(1, 1, 0, 5)
    json_path, image_dir = coco_files(
        sizes=[(40, 60)] * 2, annotations=[bad, rectangle(1, 1, 5, 5)]
    )
    content = json.loads(json_path.read_text())
    content["annotations"][1]["segmentation"] = [[1, 2]]
    json_path.write_text(json.dumps(content))
    (image_dir / "002.png").write_bytes(b"nothing")
    done = prepare_inside("check", "--json", json_path, "--images", image_dir)
    assert done.returncode == 2
    for words in ("annotation 1 of image 1: box", "annotation 2 of image 1: polygon", "002.png"):
        assert words in done.stdout
    assert done.stderr == "error: 3 problems found, see the lines above\n"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["bogus"], "expected one of shapes, cells, check, repair,"),
        (["coco2017"], "prepare coco2017 needs --data_dir"),
        (["tfds"], "prepare tfds needs --data_dir"),
        (["shapes"], "prepare shapes needs --data_dir"),
        (["check", "--json", "a.json"], "--json together with --images"),
        (["check", "--json", "a.json", "--images", "b"], "no annotation file 'a.json'"),
        (["check", "--data_dir", "nowhere"], "no json in nowhere"),
        (["check", "A", "B"], "prepare check got 'A B' without a flag, expected --data_dir --json"),
        (["check", "--json=a.json", "--val=9"], "check takes no --val, expected --data_dir"),
        (["stats", "--min_area", "0"], "prepare stats takes no --min_area, expected --json"),
        (["tao_spec", "--input=a"], "takes no --input, expected the path of one spec, --gpus"),
        (["convert", "a"], "prepare convert got 'a' without a flag, expected --from --input"),
        (["weights", "a", "b"], "prepare weights needs one name, or none to list all"),
        (["shapes", "--data_dir=x", "--val=0.2"], "--val is '0.2', expected a number of images"),
        (["convert", "--from=yolo", "--input=.", "--output=b", "--min_area=3"], "--split_parts"),
        (["repair", "--json", "a.json"], "prepare repair needs --json, --output, and --images"),
        (["repair", "--json", "a.json", "--output", "b"], "no annotation file 'a.json'"),
        (["convert", "--from", "yolo"], "prepare convert needs --from, --input and --output"),
        (["convert", "--from", "yolo", "--input", "no", "--output", "b"], "no file or folder 'no'"),
        (["convert", "--from", "bogus"], "value should be one of <labelme|via|yolo|voc|cvat|"),
        (["labelme", "--input", "a"], "prepare labelme needs --input and --output"),
        (["labelme", "--input", "nowhere", "--output", "a.json"], "no folder 'nowhere'"),
        (["via", "--input", "nowhere", "--output", "a.json"], "no file 'nowhere'"),
        (["split", "--json", "a", "--output", "b"], "prepare split needs --json, --val and"),
        (["split", "--json=a", "--output=b", "--val=3", "--folds=3"], "prepare split needs --json"),
        (["split", "--json", "a", "--json", "b", "--output", "c"], "--json is given 2 times"),
        (["check", "--json", "a", "--images", "b", "--images", "c"], "--images is given 2 times"),
        (["merge", "--json", "a.json"], "prepare merge needs --json for each set, and --output"),
        (["merge", "--json", "a", "--json", "a", "--output", "b"], "expected different jsons and"),
        (["merge", "--json", "a", "--output", "b", "--map", "x"], "--map is 'x', expected old=new"),
    ],
)
def test_mistake_is_one_line_with_exit_code_2(arguments, words, capsys):
    code, err = run_inside("prepare", *arguments), capsys.readouterr().err
    assert words in error_line(code, err) and err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["merge"], ["split", "--val=1"], ["split", "--folds=2"]])
def test_an_annotation_without_its_category_is_named(arguments, coco_files, tmp_path, capsys):
    json_path, _ = coco_files(sizes=[(40, 60)] * 2, annotations=[rectangle(1, 1, 5, 5)])
    content = json.loads(json_path.read_text())
    content["annotations"][0]["category_id"] = 9
    json_path.write_text(json.dumps(content))
    code = run_inside("prepare", *arguments, "--json", json_path, "--output", tmp_path / "out")
    words = f"{json_path}: annotation 1: category_id 9 is not in 'categories'"
    assert words in error_line(code, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_annotations_of_labelme_become_two_sound_sets(tmp_path, prepare_inside):
    """labelme's files, split in two, checked."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for k in range(6):
        cv2.imwrite(str(folder / f"{k}.png"), np.full((40, 60, 3), k, np.uint8))
        box = {"label": "cat", "shape_type": "rectangle", "points": [[5, 5], [20, 30]]}
        dot = {"label": "cat", "shape_type": "point", "points": [[5, 5]]}
        content = {"shapes": [box, dot][: k % 3], "imagePath": f"{k}.png"}
        (folder / f"{k}.json").write_text(json.dumps(content))
    (folder / "more.PSD").write_bytes(b"")
    done = prepare_inside("convert", "--from=labelme", "--input", folder, "--output", "o/a.json")
    assert f"{folder}: these files are not read: 1 .psd\n" in done.stdout
    for _ in range(2):  # the second finds the json of the first beside labelme's
        done = prepare_inside("labelme", "--input", folder, "--output", folder / "all.json")
        assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("left out: ") == 2
    assert done.stdout.endswith("all.json: 6 images, 2 of them without objects; cat 4\n")
    done = prepare_inside("split", "--json", folder / "all.json", "--val=2", "--output", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    parts = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("train", "val")]
    names = [{image["file_name"] for image in part["images"]} for part in parts]
    assert [len(part) for part in names] == [4, 2] and not names[0] & names[1]
    assert sum(len(part["annotations"]) for part in parts) == 4
    for part, name in zip(parts, ("train", "val"), strict=True):
        assert part["categories"] == [{"id": 1, "name": "cat"}]
        if part["annotations"]:
            done = prepare_inside("check", "--json", tmp_path / f"{name}.json", "--images", folder)
            assert (done.returncode, done.stderr) == (0, "")


def test_annotations_of_via(tmp_path, prepare_inside):
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((40, 60, 3), np.uint8))
    circle = {"name": "circle", "cx": 30, "cy": 20, "r": 10}
    entry = {"filename": "a.png", "regions": [{"shape_attributes": circle}]}
    (tmp_path / "via.json").write_text(json.dumps({"a.png1": entry}))
    arguments = ["via", "--input", tmp_path / "via.json", "--output", tmp_path / "new" / "all.json"]
    done = prepare_inside(*arguments)
    assert done.returncode == 2 and "--class_name assigns one class to all" in done.stderr
    done = prepare_inside(*arguments, "--class_name=balloon", "--images", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    done = prepare_inside("check", "--json", tmp_path / "new" / "all.json", "--images", tmp_path)
    assert "no problem in 1 images, 1 annotations, 1 classes" in done.stdout


def test_labels_of_another_format_become_a_sound_set(tmp_path, capsys):
    """Objects that are left out are named and counted, and the folder of the images is said."""
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((40, 60, 3), np.uint8))
    lines = ["0 0.1 0.1 0.5 0.1 0.5 0.5"] + ["1 0.5 0.5 0.2 0.2"] * 6
    (tmp_path / "a.txt").write_text("\n".join(lines))
    output = tmp_path / "new" / "all.json"
    arguments = ["convert", "--from=yolo", "--input", tmp_path, "--output", output]
    assert run_inside("prepare", *arguments, "--classes=cat,dog") == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    where = f"{tmp_path / 'a.txt'}: line 2 (dog), a box; --boxes makes objects of boxes"
    assert first == f"left out: 6 times, first: {where}"
    assert last == f"{output}: 1 objects, 2 classes, 6 left out; the images are in {tmp_path}"
    assert run_inside("prepare", "check", "--json", output, "--images", tmp_path) == 0
    assert "no problem in 1 images, 1 annotations, 2 classes" in capsys.readouterr().out


def test_folders_of_scenes_become_one_set_that_splits_by_scene(tmp_path, capsys):
    """Each folder is converted with the same classes, joined, split and checked."""
    for scene, labels in (("one", "ab"), ("two", "a"), ("three", "ba")):
        folder = tmp_path / "scenes" / scene
        folder.mkdir(parents=True)
        for number, label in enumerate(labels):
            cv2.imwrite(str(folder / f"{number}.png"), np.full((40, 60, 3), 9, np.uint8))
            box = {"label": label, "shape_type": "rectangle", "points": [[5, 5], [20, 30]]}
            content = {"shapes": [box], "imagePath": f"{number}.png"}
            (folder / f"{number}.json").write_text(json.dumps(content))
        arguments = ["--from=labelme", "--input", folder, "--output", tmp_path / f"{scene}.json"]
        assert run_inside("prepare", "convert", *arguments, "--classes=b,a") == 0
    flags = [f"--json={tmp_path}/{name}.json" for name in ("one", "two", "three")]
    flags += [f"--images={tmp_path}/scenes/{name}" for name in ("one", "two", "three")]
    assert run_inside("prepare", "merge", *flags, "--output", tmp_path / "all.json") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(f"5 objects, 2 classes, 0 left out; the images are in {tmp_path}/scenes")
    split = ["split", "--json", tmp_path / "all.json", "--output", tmp_path]
    assert run_inside("prepare", *split, "--val=2", "--group_by=folder") == 0
    assert run_inside("prepare", *split, "--folds=3", "--group_by=^(\\w+)/") == 0
    capsys.readouterr()
    for folder in (tmp_path, tmp_path / "fold1", tmp_path / "fold2", tmp_path / "fold3"):
        parts = [json.loads((folder / f"{name}.json").read_text()) for name in ("train", "val")]
        scenes = [{image["file_name"].split("/")[0] for image in e["images"]} for e in parts]
        assert scenes[0] | scenes[1] == {"one", "two", "three"} and not scenes[0] & scenes[1]
        assert [entry["name"] for entry in parts[0]["categories"]] == ["b", "a"]
    files = [f"--{n}_{k}={tmp_path}/{v}" for n in ("train", "val")
             for k, v in (("json", f"{n}.json"), ("images", "scenes"))]  # fmt: skip
    assert run_inside("prepare", "check", *files) == 0
    assert "no problem in 2 images" in capsys.readouterr().out


@pytest.mark.parametrize("val, count", [("2", 2), ("0.2", 2), (".25", 2), ("20%", 2), ("0.01", 1)])
def test_a_share_of_the_images_is_held_out(val, count, coco_files, tmp_path, capsys):
    json_path, _ = coco_files(sizes=[(40, 60)] * 10, annotations=[rectangle(1, 1, 5, 5)])
    output = tmp_path / "out"
    assert not run_inside("prepare", "split", "--json", json_path, "--val", val, "--output", output)
    assert len(json.loads((output / "val.json").read_text())["images"]) == count


@pytest.mark.parametrize("val", ["0", "-1", "1.0", "1.5", "0.0", "100%", "a", "nan"])
def test_what_is_neither_a_number_nor_a_share_is_named(val, coco_files, tmp_path, capsys):
    json_path, _ = coco_files(sizes=[(40, 60)] * 3, annotations=[rectangle(1, 1, 5, 5)])
    code = run_inside("prepare", "split", "--json", json_path, f"--val={val}", "--output", "b")
    said = error_line(code, capsys.readouterr().err)
    assert said.endswith(f"--val is {val!r}, expected a number of images, or a share such as 0.2")


def test_a_folder_for_a_file_and_a_file_for_a_folder_are_named(coco_files, tmp_path, capsys):
    json_path, images = coco_files(sizes=[(40, 60)] * 3, annotations=[rectangle(1, 1, 5, 5)])
    rows = [
        (["split", "--json", images, "--val=1", "--output=b"], f"{images} is a folder"),
        (["repair", "--json", json_path, "--output", images], f"{images} is a folder"),
        (["split", "--json", json_path, "--val=1", "--output", json_path], "is a file, expected"),
        (["repair", "--json", json_path, "--images", json_path, "--output=b"], "no image folder"),
    ]
    for arguments, words in rows:
        code = run_inside("prepare", *arguments)
        assert words in error_line(code, capsys.readouterr().err)
