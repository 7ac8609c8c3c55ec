"""WebDataset's tars, with the jsons that others put into them."""

import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
from pycocotools import mask as maskUtils

from mask_rcnn_jax.annotations.segmentation import segmentation_to_mask
from mask_rcnn_jax.data.checking import inspect_coco
from mask_rcnn_jax.formats.coco_build import write_json
from mask_rcnn_jax.formats.convert import convert
from mask_rcnn_jax.formats.reading import Options
from tests.commands.command import check_done, run_captured
from tests.formats.converting import SIZE, box, objects_of, write_image
from tests.formats.samples import scene
from tests.tars.making import member, write_tar

SAMPLES = Path(__file__).parent / "samples"
NAMES = {"rfdetr": ["00000000", "00000001"], "webdataset": ["street one", "b"]}
OUTLINE = [10, 10, 40, 10, 40, 30, 10, 30]
CODE = maskUtils.encode(np.asfortranarray(box(5, 5, 20, 20)))
RLE = {"size": list(SIZE), "counts": CODE["counts"].decode()}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MASK_RCNN_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("source", ["", "*-00000{0..1}.tar"])
def test_what_others_packed_keeps_masks_polygons_and_names(kind, source, tmp_path):
    options = Options(tmp_path / "out.json")
    content, folder, left_out = convert("webdataset", SAMPLES / kind / source, None, options)
    assert (folder, left_out) == (SAMPLES / kind, [])
    write_json(tmp_path / "out.json", content)
    findings = inspect_coco(tmp_path / "out.json", folder)
    assert (findings.problems, findings.warnings) == ([], [])
    assert [entry["name"] for entry in content["categories"]] == list(scene.CLASSES)
    names = {entry["id"]: entry["name"] for entry in content["categories"]}
    found = content["images"], scene.objects().items(), NAMES[kind]
    for entry, (name, expected), key in zip(*found, strict=True):
        assert entry["file_name"].endswith(f".tar/{key}.png")
        size = entry["height"], entry["width"]
        assert size == scene.SIZES[name]
        shown = [one for one in content["annotations"] if one["image_id"] == entry["id"]]
        for one, (label, mask, polygon) in zip(shown, expected, strict=True):
            assert names[one["category_id"]] == label
            if polygon is None:
                np.testing.assert_array_equal(
                    segmentation_to_mask(one["segmentation"], *size), mask
                )
            else:
                assert one["segmentation"] == [polygon]


def pack(tmp_path, content, name="a", **more):
    """A tar of an image and its json, and other members by name."""
    write_image(tmp_path / "image.jpg")
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    members = {f"{name}.jpg": (tmp_path / "image.jpg").read_bytes(), f"{name}.json": text, **more}
    (tmp_path / "tars").mkdir(exist_ok=True)
    return write_tar(tmp_path / "tars" / "a.tar", *(member(n, c) for n, c in members.items()))


def converted(tar, **options):
    found = convert("webdataset", tar, None, Options(tar.parent / "out.json", **options))
    return found[0], found[2]


def annotated(*objects, **more):
    return {"annotations": list(objects), **more}


def test_sa_1b_has_one_class(tmp_path):
    """Its json, without its masks: https://github.com/facebookresearch/segment-anything#dataset"""
    image = {"image_id": 1, "width": SIZE[1], "height": SIZE[0], "file_name": "sa_1.jpg"}
    shape = {"id": 9, "segmentation": RLE, "bbox": [5, 5, 15, 15], "area": 225}
    shape |= {"predicted_iou": 0.9, "stability_score": 0.97, "point_coords": [[10.0, 10.0]]}
    tar = pack(tmp_path, annotated(shape | {"crop_box": [0, 0, 80, 60]}, image=image), "sa_1")
    content, left_out = converted(tar, class_name="object")
    assert content["images"][0]["file_name"] == "a.tar/sa_1.jpg" and not left_out
    ((label, mask),) = objects_of(content)
    assert label == "object"
    np.testing.assert_array_equal(mask, box(5, 5, 20, 20))
    with pytest.raises(ValueError, match="a.tar/sa_1.json: object 1: category None, expected a na"):
        converted(tar)


def test_objects_of_all_forms(tmp_path):
    other = [50, 10, 70, 10, 70, 30, 50, 30]
    named = {"categories": [{"id": 4, "name": "dog"}]}
    shapes = [
        {"category": "cat", "segmentation": [OUTLINE, other]},  # one object in two parts
        {"category_id": 4, "segmentation": [OUTLINE], "iscrowd": 1},
        {"category": "cat", "bbox": [1, 2, 30, 40]},
        {"category": "cat", "bbox": [1, 2, 30, 40], "segmentation": []},
        {"category": "cat", "segmentation": [[1, 1, 5, 1, 9, 1]]},
    ]
    tar = pack(tmp_path, annotated(*shapes, **named), "sub/a.b")
    content, left_out = converted(tar)
    assert content["images"][0]["file_name"] == "a.tar/sub/a.b.jpg"
    (cat, whole), (dog, crowd) = objects_of(content)
    assert (cat, dog) == ("cat", "dog")
    np.testing.assert_array_equal(whole, box(10, 10, 40, 30) | box(50, 10, 70, 30))
    np.testing.assert_array_equal(crowd, box(10, 10, 40, 30))
    assert [entry["iscrowd"] for entry in content["annotations"]] == [0, 1]
    assert len(left_out) == 3 and "--boxes makes objects of boxes" in left_out[0]
    content, _ = converted(tar, boxes=True)
    np.testing.assert_array_equal(objects_of(content)[2][1], box(1, 2, 31, 42))


def test_what_is_alone_is_left_out_and_said(tmp_path):
    good = annotated({"category": "cat", "segmentation": [OUTLINE]})
    alone = {"b.jpg": b"1", "c.json": b"{}", "a.seg.png": b"2", "a.txt": b"3"}
    content, left_out = converted(pack(tmp_path, good, **alone))
    assert len(content["images"]) == 1
    assert [line.partition(": ")[2] for line in left_out] == [
        *("'a.seg.png' has no json", "'b.jpg' has no json", "'c.json' has no image")
    ]


GOOD = {"category": "cat", "segmentation": [OUTLINE]}
FAULTS = {
    "img2dataset": ({"caption": "a cat", "url": "u", "width": 80}, "'annotations' is not a list"),
    "no json": (b"{", "cannot be read as JSON"),
    "a list": ([GOOD], "'annotations' is not a list of objects"),
    "numbers": (annotated(1), "'annotations' is not a list of objects"),
    "an id": (annotated({"category_id": 4}), "object 1: category_id 4 has no name; expected 'cat"),
    "a list id": (annotated({"category_id": [4]}), r"category_id \[4\] has no name"),
    "categories": (annotated(GOOD, categories=[{"id": 4}]), "category .* has no id or name"),
    "another size": (annotated(GOOD, width=640, height=480), "480 x 640 .*, but a.jpg is 60 x 80"),
    "text": (annotated(GOOD | {"segmentation": "x"}), "segmentation 'x', expected polygons or RLE"),
    "flat": (annotated(GOOD | {"segmentation": OUTLINE}), "segmentation: 10, expected x, y, x, y"),
    "odd": (annotated(GOOD | {"segmentation": [[1, 2, 3]]}), "segmentation: .1, 2, 3., expected x"),
    "nan": (annotated(GOOD | {"segmentation": [[1, 2, 3, "x"]]}), "is 'x', expected a finite numb"),
    "rle": (annotated(GOOD | {"segmentation": {"size": [9, 9]}}), "object 1: "),
    "box": (annotated({"category": "cat", "bbox": [1, 2]}), "expected .x, y, width, height."),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_tar_and_member(tmp_path, fault):
    content, words = FAULTS[fault]
    with pytest.raises(ValueError, match=words) as error:
        converted(pack(tmp_path, content), boxes=True)
    assert "/a.tar/a.json: " in str(error.value) and "\n" not in str(error.value)


def test_two_images_of_one_json_and_a_folder_of_images_are_refused(tmp_path):
    tar = pack(tmp_path, annotated(GOOD), **{"a.png": b"1"})
    with pytest.raises(ValueError, match="a.tar: 'a.jpg' and 'a.png' are both an image of a.json"):
        converted(tar)
    with pytest.raises(ValueError, match="--images photos: the images are in the tars"):
        convert("webdataset", tar, "photos", Options(tmp_path / "out.json"))
    with pytest.raises(FileNotFoundError, match="no file matches"):
        converted(tmp_path / "tars" / "b-*.tar")


def test_the_command_says_where_the_images_are(tmp_path):
    shutil.copytree(SAMPLES / "rfdetr", tmp_path / "shards")
    pattern, output = f"{tmp_path}/shards/train-*.tar", tmp_path / "train.json"
    command = ["--from", "webdataset", "--input", pattern, "--output", output]
    done = check_done(run_captured("prepare", "convert", *command))
    assert f"0 left out; the images are in {tmp_path}/shards" in done.stdout
    names = [entry["file_name"] for entry in json.loads(output.read_text())["images"]]
    assert all(cv2.imread(str(tmp_path / "shards" / name)) is None for name in names)
    done = check_done(
        run_captured("prepare", "check", "--json", output, "--images", tmp_path / "shards")
    )
    assert "no problem in 2 images, 4 annotations, 3 classes" in done.stdout
