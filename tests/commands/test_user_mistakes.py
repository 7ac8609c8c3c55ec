"""What new users bring and try, and what they get: a line that helps, or what they wanted.

Each row is of a walk through the commands with files as other tools write them. Faulty values,
flags and configs are in test_bad_input.py, other formats in tests/formats.
"""

import io
import json

import cv2
import numpy as np
import pytest

import mask_rcnn_jax as mrcnn
from tests.commands.command import RECIPE, error_line, run_inside
from tests.data.small_set import rectangle, write_coco

BOX = rectangle(5, 5, 20, 20)
ROOT_CLASS = {"id": 0, "name": "objects", "supercategory": "none"}
CLASSES = [{"id": 1, "name": "cat", "supercategory": "objects"}]
SAME_NAME = [{"id": 0, "name": "cat", "supercategory": "none"}, *CLASSES]


def coco(folder, annotations=(BOX,), names=(), **replace):
    """A json of images of 64 x 80, whose `file_name`s are replaced by `names`."""
    paths = write_coco(folder, sizes=[(64, 80)] * 2, annotations=annotations, **replace)
    content = json.loads(paths[0].read_text())
    for image, name in zip(content["images"], names, strict=False):
        image["file_name"] = name
    paths[0].write_text(json.dumps(content))
    return paths


# What a json of another tool is like, what `prepare check` says, and with which exit code.
JSONS = {
    "Roboflow: a root class of its own": (
        {"annotations": [BOX | {"category_id": 1}], "categories": [ROOT_CLASS, *CLASSES]},
        0,
        ["objects", "no objects"],
    ),
    "Roboflow: a root class named like a class": (
        {"annotations": [BOX | {"category_id": 1}], "categories": SAME_NAME},
        2,
        ["'cat' occurs 2 times", "prepare merge"],
    ),
    "CVAT: rectangles without outlines": (
        {"annotations": [BOX | {"segmentation": []}]},
        2,
        ["annotation 1", "lacks 'segmentation'", "loss.mask_weight=0 trains on boxes"],
    ),
    "CVAT: all masks are crowds": (
        {"annotations": [BOX | {"iscrowd": 1}]},
        0,
        ["iscrowd", "crowd"],
    ),
    "Label Studio: blanks as %20": (
        {"names": ["images/0%201.png"]},
        2,
        ["0%201.png", "is listed but not in"],
    ),
    "Label Studio: paths of Windows": (
        {"names": ["..\\..\\media\\upload\\4\\001.png", "images\\002.png"]},
        2,
        ["001.png", "--by_name"],
    ),
    "boxes without masks": (
        {"annotations": [{k: v for k, v in BOX.items() if k != "segmentation"}]},
        2,
        ["lacks 'segmentation'"],
    ),
    "a part of two points beside a sound one": (
        {"annotations": [BOX | {"segmentation": [*BOX["segmentation"], [1, 1, 2, 2]]}]},
        0,
        ["annotation 1", "a part is left out", "three points"],
    ),
}


@pytest.mark.parametrize("name", JSONS)
def test_jsons_of_other_tools(name, tmp_path, capsys):
    how, code, words = JSONS[name]
    path, images = coco(tmp_path, **how)
    assert (run_inside("prepare", "check", "--json", path, "--images", images) or 0) == code
    said = "".join(capsys.readouterr())
    assert "Traceback" not in said
    for word in words:
        assert word in said, said


@pytest.mark.parametrize(
    "name", ["images/{}", "..\\media\\upload\\4\\{}", "/data/upload/3/{}", "0{}"]
)
def test_paths_of_label_studio_are_repaired(name, tmp_path, capsys):
    """Whatever folder a name has in front of it; a name that nobody has is named."""
    path, images = coco(tmp_path, names=[name.format("001.png")])
    fixed = tmp_path / "fixed.json"
    flags = ["--json", path, "--images", images, "--by_name", "--output", fixed]
    code = run_inside("prepare", "check", *flags)
    if name == "0{}":
        assert code == 2 and "0001.png" in "".join(capsys.readouterr())
        return
    assert not code
    assert [i["file_name"] for i in json.loads(fixed.read_text())["images"]] == [
        "001.png",
        "002.png",
    ]


def test_a_root_class_named_like_a_class_is_merged(tmp_path):
    how, *_ = JSONS["Roboflow: a root class named like a class"]
    path, _ = coco(tmp_path, **how)
    merged = tmp_path / "merged.json"
    flags = ["--json", path, "--images", tmp_path / "images", "--output", merged]
    assert not run_inside("prepare", "merge", *flags)
    assert [c["name"] for c in json.loads(merged.read_text())["categories"]] == ["cat"]


def labelme(folder, label: str):
    folder.mkdir(parents=True)
    cv2.imwrite(str(folder / f"{label}.png"), np.zeros((40, 60, 3), np.uint8))
    points = [[5, 5], [20, 5], [20, 30]]
    shape = {"label": label, "points": points, "shape_type": "polygon"}
    content = {"shapes": [shape], "imagePath": f"{label}.png", "imageHeight": 40, "imageWidth": 60}
    (folder / f"{label}.json").write_text(json.dumps(content))


def test_folders_of_different_classes_become_one_set(tmp_path):
    """Converted one by one, their classes do not agree; `merge` and `--classes` help."""
    for label in ("cat", "dog"):
        labelme(tmp_path / "photos" / label, label)
        made = ["--input", tmp_path / "photos" / label, "--output", tmp_path / f"{label}.json"]
        assert not run_inside("prepare", "convert", "--from=labelme", *made)
        fixed = ["--classes=dog,cat", "--output", tmp_path / f"fixed_{label}.json"]
        assert not run_inside("prepare", "convert", "--from=labelme", *made[:2], *fixed)
    flags = [f for label in ("cat", "dog") for f in ("--json", tmp_path / f"{label}.json",
             "--images", tmp_path / "photos" / label)]  # fmt: skip
    assert not run_inside("prepare", "merge", *flags, "--output", tmp_path / "all.json")
    merged = json.loads((tmp_path / "all.json").read_text())
    assert [c["name"] for c in merged["categories"]] == ["cat", "dog"]
    assert sorted(i["file_name"] for i in merged["images"]) == ["cat/cat.png", "dog/dog.png"]
    fixed = [json.loads((tmp_path / f"fixed_{n}.json").read_text()) for n in ("cat", "dog")]
    assert fixed[0]["categories"] == fixed[1]["categories"]


# Command, and what its one line says; WORKDIR is the folder of a run, HERE an empty folder.
COMMANDS = {
    "a format as an action": ("prepare yolo --input=HERE", ["prepare convert --from yolo"]),
    "LVIS as an action": ("prepare lvis --json=HERE", ["expected one of"]),
    "an unknown format": (
        "prepare convert --from=tflite --input=HERE --output=x.json",
        ["tflite", "labelme", "yolo"],
    ),
    "an unknown export format": (
        "export --workdir=WORKDIR --format=tflite --output=HERE/out",
        ["tflite", "stablehlo", "onnx"],
    ),
    "the quickstart without its data": (
        "train --config=quickstart --workdir=HERE/run",
        ["prepare shapes"],
    ),
    "no such file": (
        "infer --workdir=WORKDIR --input=HERE/photo.jpg --output=out",
        ["photo.jpg: does not exist"],
    ),  # fmt: skip
    "no such camera": ("infer --workdir=WORKDIR --input=77 --output=out", ["77: does not exist"]),
    "no such device": (
        "infer --workdir=WORKDIR --input=/dev/video77 --output=out",
        ["/dev/video77: does not exist"],
    ),
    "a flag that is an entry": (
        "train --config=quickstart --workdir=HERE/run --batch_size=4",
        ["did you mean --config.train.batch_size"],
    ),
    "training on crowds alone": (
        "train --config=finetune --workdir=HERE/run --config.data.train_json=CROWDS "
        "--config.data.train_images=IMAGES --config.data.val_json= --config.model.init_from=random",
        ["instances.json", "no image has an object to train on", "crowds"],
    ),
    "a misspelled command": ("__main__ inferr", ["'inferr'", "'infer'"]),
    "an empty folder": ("infer --workdir=WORKDIR --input=HERE --output=out", ["no images"]),
    "weights of no known format": (
        "infer --config=quickstart --weights=RECIPE --input=RECIPE --output=out",
        ["quickstart.py"],
    ),
    "a recipe that is not there": ("train --config=cocoo --workdir=HERE/run", ["cocoo", "coco"]),
    "a pattern without quotes": (
        "infer --workdir=WORKDIR --input a.jpg b.jpg c.jpg --output=out",
        ["'b.jpg'", "--input 'photos/*.jpg'"],
    ),
    "an entry without dashes": (
        "train --config=quickstart --workdir=HERE/run config.train.steps=3",
        ["did you mean --config.train.steps=3?"],
    ),
    "a flag without dashes": (
        "evaluate --workdir=WORKDIR tile=64",
        ["did you mean --tile=64?"],
    ),
    "a value of a switch": ("infer --input=a.jpg --output=out --track yes", ["'yes'", "its flag"]),
    "a list with a blank": (
        "export --workdir=WORKDIR --output=HERE/out --format=onnx --picture_size 640 480",
        ["'480'"],
    ),
    "a mistake in the first of two lists": (
        "infer --workdir=WORKDIR --input=RECIPE --output=out --save=mask --save=csv",
        ["--save has 'mask', expected some of masks"],
    ),
    "a port that has no flag": ("serve --workdir=WORKDIR 8080", ["'8080'"]),
    "a workdir on the web": (
        "train --config=quickstart --workdir=https://host/run",
        ["--workdir is 'https://host/run', an address, expected a path or the address of a store"],
    ),
    "an output on a hub": (
        "infer --workdir=WORKDIR --input=RECIPE --output=hf://owner/name",
        ["--output is 'hf://owner/name', an address"],
    ),
    "a store that is none": (
        "train --config=quickstart --workdir=nothing://bucket/run",
        ["--workdir is 'nothing://bucket/run', an address"],
    ),
    "data in a bucket": (
        "prepare shapes --data_dir=s3://bucket/shapes",
        ["--data_dir is 's3://bucket/shapes', an address, expected a path"],
    ),
    "standard input": ("infer --workdir=WORKDIR --input=- --output=out", ["-: ", "no image"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_of_a_new_user(name, untrained, tmp_path, capsys, monkeypatch):
    line, words = COMMANDS[name]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    places = {"WORKDIR": untrained.workdir, "HERE": tmp_path / "here", "RECIPE": RECIPE}
    places["CROWDS"], places["IMAGES"] = coco(tmp_path, annotations=[BOX | {"iscrowd": 1}] * 2)
    for place, path in places.items():
        line = line.replace(place, str(path))
    said = error_line(run_inside(*line.split()), capsys.readouterr().err)
    for word in words:
        assert word in said, said
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_has_no_paths(flag, capsys):
    assert not run_inside("train", flag)
    said = capsys.readouterr().out
    assert (
        "--workdir" in said and "site-packages" not in said and str(RECIPE.parents[1]) not in said
    )


def test_a_recipe_is_loaded_from_anywhere(tmp_path, monkeypatch):
    """Also where the user's own folder is called configs."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").touch()
    own = tmp_path / "own.py"
    own.write_text("from mask_rcnn_jax.configs.finetune import get_config\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert mrcnn.load_config("own.py").train == mrcnn.load_config("finetune").train
