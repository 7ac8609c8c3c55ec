"""Hostile annotations: training, checking and scoring agree about each of them."""

import bz2
import gzip
import json
import logging
import lzma
import re
from functools import partial

import numpy as np
import pytest

from mask_rcnn_jax.annotations.checks import MAX_STATED_PIXELS
from mask_rcnn_jax.annotations.ids import MAX_NAME
from mask_rcnn_jax.annotations.reader import read_ground_truth, read_json
from mask_rcnn_jax.data.coco import check_coco, load_coco
from mask_rcnn_jax.data.transforms import load_example
from mask_rcnn_jax.evaluation.coco import score
from tests.data.small_set import rectangle, write_coco
from tests.data.test_transforms import options

GOOD = rectangle(5, 5, 20, 10)
OTHER = rectangle(30, 12, 20, 20)
read = partial(read_ground_truth, scoring=True)
NAN, INF = float("nan"), float("inf")


def triangle(value):
    return {"segmentation": [[5, 5, 25, 5, value, 25]]}


def code(counts, size=(40, 60)):
    return {"segmentation": {"size": list(size), "counts": counts}}


# What is changed in an annotation on an image of 40 x 60, and what the message must say.
FAULTS = {
    "coordinate 1e6": (triangle(1e6), "coordinate 1000000.0, expected -6000 to 6000 (100 times"),
    "coordinate 1e9": (triangle(1e9), "coordinate 1000000000.0, expected"),
    "coordinate -1e9": (triangle(-1e9), "coordinate -1000000000.0, expected"),
    "coordinate 1e308": (triangle(1e308), "coordinate 1e+308, expected"),
    "coordinate of 400 digits": (triangle(10**400), "coordinate 1000"),
    "coordinate null": (triangle(None), "coordinate None, which is not a finite number"),
    "coordinate NaN": (triangle(NAN), "coordinate nan, which is not a finite number"),
    "coordinate Infinity": (triangle(-INF), "coordinate -inf, which is not a finite number"),
    "coordinate text": (triangle("9"), "coordinate '9', which is not a finite number"),
    "coordinate true": (triangle(True), "coordinate True, which is not a finite number"),
    "points": ({"segmentation": [[[5, 5], [9, 5], [9, 9]]]}, "points such as [5, 5], expected a"),
    "named points": ({"segmentation": [[{"x": 5, "y": 5}] * 3]}, "expected a flat list of numbers"),
    "points alone": ({"segmentation": [[5, 5], [9, 5], [9, 9]]}, "points or more in one flat list"),
    "code in a list": (
        {"segmentation": [{"size": [40, 60], "counts": [2400]}]},
        "expected the RLE itself, without a list around it",
    ),
    "coordinate list": (triangle([1, 2]), "coordinate [1, 2], which is not a finite number"),
    "two points": ({"segmentation": [[1, 2, 3, 4]]}, "polygon of 4 numbers"),
    "seven numbers": ({"segmentation": [[1, 2, 3, 4, 5, 6, 7]]}, "polygon of 7 numbers"),
    "flat list": ({"segmentation": [1, 2, 3, 4, 5, 6]}, "segmentation is a flat list"),
    "polygons of text": ({"segmentation": ["1,2,3,4,5,6"]}, "segmentation holds '1,2,3,4,5,6'"),
    "segmentation text": ({"segmentation": "1,2"}, "'1,2', neither polygons nor an RLE"),
    "segmentation empty": ({"segmentation": []}, "lacks 'segmentation'; loss.mask_weight=0"),
    "segmentation null": ({"segmentation": None}, "lacks 'segmentation'; loss.mask_weight=0"),
    "outline without end": (
        {"segmentation": [[-5000, 0, 5000, 1] * 300]},
        "outline of more than 2,000,000 pixels",
    ),
    "box tiny": ({"bbox": [5, 5, 1e-4, 1e-4]}, "too small for the polygons"),
    "box zero": ({"bbox": [5, 5, 0, 10]}, "has no area"),
    "box negative": ({"bbox": [5, 5, -3, 10]}, "has no area"),
    "box outside": ({"bbox": [65, 5, 3, 10]}, "lies outside the image"),
    "box 1e308": ({"bbox": [5, 5, 1e308, 10]}, "has the value 1e+308, expected -6000 to 6000"),
    "box text": ({"bbox": ["5", 5, 3, 10]}, "not a finite number"),
    "box true": ({"bbox": [True, 5, 3, 10]}, "not a finite number"),
    "box of 400 digits": ({"bbox": [5, 5, 10**400, 10]}, "has the value 1000"),
    "box object": ({"bbox": {"x": 5}}, "box {'x': 5}, expected [x, y, width, height]"),
    "area text": ({"area": "400"}, "area is '400', expected a number of pixels from 0 to 1e+10"),
    "area NaN": ({"area": NAN}, "area is nan"),
    "area negative": ({"area": -5}, "area is -5"),
    "area Infinity": ({"area": INF}, "area is inf"),
    "area 1e11": ({"area": 1e11}, "area is 100000000000.0"),
    "area true": ({"area": True}, "area is True"),
    "area object": ({"area": {}}, "area is {}"),
    "iscrowd text": ({"iscrowd": "0"}, "iscrowd is '0', expected 0 or 1"),
    "iscrowd 2": ({"iscrowd": 2}, "iscrowd is 2"),
    "iscrowd NaN": ({"iscrowd": NAN}, "iscrowd is nan"),
    "iscrowd null": ({"iscrowd": None}, "iscrowd is None"),
    "iscrowd list": ({"iscrowd": [0]}, "iscrowd is [0]"),
    "counts null": (code(None), "RLE counts cannot be read"),
    "counts object": (code({"a": 1}), "RLE counts cannot be read"),
    "counts of fractions": (code([1.5, 2398.5]), "a count is not a whole number"),
    "counts of text": (code(["0", "2400"]), "a count is not a whole number"),
    "counts 2^63": (code([2**63, 2**63, 2400]), "RLE counts cannot be read"),
    "counts that overflow": (code([2**62, 2**62, 2**62, 2**62, 2400]), "RLE covers"),
    "counts that end early": (code([10, 20]), "RLE covers 30 pixels"),
    "counts without end": (code("o" * 5000), "cannot be read"),
    "counts of odd letters": (code("\u00ff!~"), "RLE counts cannot be read"),
    "counts empty": (code(""), "cannot be read"),
    "size null": ({"segmentation": {"size": None, "counts": [0, 2400]}}, "RLE of size None"),
    "size text": ({"segmentation": {"size": ["40", "60"], "counts": [2400]}}, "RLE of size ['40'"),
    "size 10^9": (code([0, 10**18], (10**9, 10**9)), "RLE of size [1000000000, 1000000000]"),
    "no pixel": (code([2400]), "RLE has no pixel"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_and_costs_its_annotation_everywhere(name, tmp_path, caplog):
    change, words = FAULTS[name]
    files = write_coco(tmp_path, annotations=[GOOD, OTHER | change])
    (problem,) = check_coco(*files)
    assert words in problem and problem.startswith("annotation 2 of image 1: ")
    assert len(problem) < 400
    with pytest.raises(ValueError) as error:
        load_coco(*files)
    assert words in str(error.value) and str(files[0]) in str(error.value)

    with caplog.at_level(logging.WARNING):
        kept = load_coco(*files, bad_annotations="skip")
    assert "left out 1 of 2 annotations, first: annotation 2" in caplog.text
    assert len(kept.images[0].annotations) == 1
    (entry,) = read_ground_truth(files[0], skip_bad=True).usable("segm")
    assert entry["id"] == 1
    sound = write_coco(tmp_path, annotations=[GOOD])[0]
    results = perfect(GOOD)
    without = score(read(sound, skip_bad=True), *results)
    write_coco(tmp_path, annotations=[GOOD, OTHER | change])
    assert score(read(files[0], skip_bad=True), *results) == without
    assert without["AP"] == pytest.approx(1)


def perfect(entry):
    """Results of boxes and of masks that find the rectangle of an annotation."""
    result = {key: entry[key] for key in ("image_id", "category_id")} | {"score": 0.5}
    x, y, width, height = entry["bbox"]
    runs = [x * 40 + y, *[height, 40 - height] * width]
    runs[-1] = 2400 - sum(runs[:-1])
    mask = {"size": [40, 60], "counts": runs}
    return [result | {"bbox": entry["bbox"]}], [result | {"segmentation": mask}]


SOUND = {
    "null for box and area": {"bbox": None, "area": None},
    "crowd as false": {"iscrowd": False},
    "box larger than the image": {"bbox": [-10, -10, 500, 500]},
    "polygon far outside": {"segmentation": [[5, 5, 25, 5, 1500, 25, 5, 900]]},
    "annotation of a long id": {"id": "x" * MAX_NAME},
}


@pytest.mark.parametrize("name", SOUND)
def test_what_is_sound_is_used_everywhere(name, tmp_path):
    files = write_coco(tmp_path, annotations=[GOOD | SOUND[name]])
    assert check_coco(*files) == []
    dataset = load_coco(*files)
    (annotation,) = dataset.images[0].annotations
    assert np.isfinite(annotation.box).all() and annotation.area > 0 and not annotation.iscrowd
    assert load_example(dataset, 0, options()).targets.valid.sum() == 1
    for skip_bad in (False, True):
        truth = read(files[0], skip_bad=skip_bad)
        assert score(truth, *perfect(GOOD))["ARmax100"] >= 0


def test_null_box_and_area_are_those_of_the_mask(tmp_path):
    files = write_coco(tmp_path, annotations=[GOOD | {"bbox": None, "area": None}])
    (annotation,) = load_coco(*files).images[0].annotations
    assert annotation.box.tolist() == [5, 5, 25, 15] and annotation.area == 200
    metrics = score(files[0], *perfect(GOOD))
    assert metrics["AP"] == metrics["mask_AP"] == pytest.approx(1)


BAD_PARTS = [[1, 2], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, NAN], [1, 2, 3, 4, 5, 1e9], "x", None]


def test_a_bad_part_does_not_cost_the_object(tmp_path, caplog):
    good = GOOD["segmentation"]
    both = GOOD | {"segmentation": [BAD_PARTS[0], *good, *BAD_PARTS[1:]], "bbox": [4, 4, 30, 30]}
    files = write_coco(tmp_path, annotations=[both])
    assert check_coco(*files) == []
    for mode in ("error", "skip"):
        caplog.clear()
        (annotation,) = load_coco(*files, bad_annotations=mode).images[0].annotations
        assert [part.tolist() for part in annotation.segmentation] == good
        assert annotation.box.tolist() == [4, 4, 34, 34]  # that of the json
        assert "left out 6 polygons of annotations that have others" in caplog.text
    for skip_bad in (False, True):
        truth = read(files[0], skip_bad=skip_bad)
        assert score(truth, *perfect(GOOD))["mask_AP"] == pytest.approx(1)


def test_boxes_alone_are_enough_where_no_mask_is_learned(tmp_path):
    bare = {key: OTHER[key] for key in ("image_id", "category_id", "bbox")}
    bad = OTHER | triangle(1e9) | {"bbox": [1, 1, 3, 3]}
    no_box = {key: OTHER[key] for key in ("image_id", "category_id")}
    annotations = [GOOD, bare, bare | {"segmentation": []}, bad]
    files = write_coco(tmp_path, annotations=annotations)
    dataset = load_coco(*files, boxes_only=True)
    found = dataset.images[0].annotations
    assert [len(a.segmentation) for a in found] == [1, 0, 0, 0]
    assert [a.area for a in found] == [200, 400, 400, 400]
    targets = load_example(dataset, 0, options(max_instances=4)).targets
    assert targets.valid.sum() == 4
    assert targets.masks[0].any() and not targets.masks[1:].any()
    metrics = score(read(files[0], boxes_only=True), perfect(GOOD)[0], None)
    assert metrics["ARmax100"] == pytest.approx(0.25) and "mask_AP" not in metrics
    files = write_coco(tmp_path, annotations=[no_box])
    with pytest.raises(
        ValueError, match="annotation 1 of image 1: lacks 'segmentation' and 'bbox'"
    ):
        load_coco(*files, boxes_only=True)


def image(**keys):
    return {"images": [{"id": 1, "file_name": "001.png", "height": 40, "width": 60} | keys]}


def categories(**keys):
    return {"categories": [{"id": 3, "name": "cat"} | keys]}


FILE_PROBLEMS = {
    "id a list": (image(id=[1]), "images[0] has an id that is neither"),
    "id true": (image(id=True), "images[0] has an id that is neither"),
    "id 1.5": (image(id=1.5), "images[0] has an id that is neither"),
    "id NaN": (image(id=NAN), "images[0] has an id that is neither"),
    "id Infinity": (image(id=INF), "images[0] has an id that is neither"),
    "id 1e308": (image(id=1e308), "write such ids without, or as strings"),
    "id 2^63": (image(id=2**63), "is beyond 9223372036854775807; write such ids as strings"),
    "id with a NUL": (image(id="a\0"), "images[0] has an id that is neither"),
    "id without end": (image(id="x" * 10**5), "images[0] has an id that is neither"),
    "annotation of image true": (
        {"annotations": [GOOD | {"image_id": True}]},
        "annotations[0] has an id that is neither",
    ),
    "annotation id a list": (
        {"annotations": [GOOD | {"id": [1]}]},
        "annotations[0] has an id that is neither",
    ),
    "images by id": (
        {"images": {"1": {"id": 1, "file_name": "001.png", "height": 40, "width": 60}}},
        "key 'images' is an object, expected the list of its values",
    ),
    "images null": ({"images": 3}, "key 'images' is 3, expected a list"),
    "name a list": (categories(name=["cat"]), "categories[0] has name ['cat'], expected a string"),
    "name a number": (categories(name=3), "categories[0] has name 3, expected a string"),
    "name without end": (categories(name="x" * 5000), "expected a string of at most 1000 char"),
    "file name a number": (image(file_name=7), "images[0] has file_name 7, expected a string"),
    "file name without end": (image(file_name="x" * 5000), "a string of at most 4096 characters"),
    "height NaN": (image(height=NAN), "images[0] has height or width that is not a positive"),
    "height Infinity": (image(height=INF), "images[0] has height or width that is not a positive"),
    "height true": (image(height=True), "images[0] has height or width that is not a positive"),
    "height of 400 digits": (image(height=10**400), "images[0] has height or width that is not"),
    "too many pixels": (
        image(height=10**5, width=10**5),
        f"images[0] has 100000 x 100000 pixels, at most {MAX_STATED_PIXELS:,} are read",
    ),
    "ids of two kinds": (
        {"categories": [{"id": 3, "name": "cat"}, {"id": "3", "name": "dog"}]},
        "categories: some ids are numbers and some are strings",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILE_PROBLEMS)
def test_a_problem_of_the_file_is_one_line_everywhere(name, tmp_path):
    change, words = FILE_PROBLEMS[name]
    files = write_coco(tmp_path, **({"annotations": [GOOD]} | change))
    assert any(words in line and len(line) < 400 for line in check_coco(*files))
    for use in (lambda: load_coco(*files), lambda: score(read(files[0], skip_bad=True), [], None)):
        with pytest.raises(ValueError) as error:
            use()
        message = str(error.value)
        assert words in message and str(files[0]) in message
        assert "\n" not in message and len(message) < 600


@pytest.mark.parametrize("text, words", [
    ("[" * 10**5, "nested too deeply"),
    ('{"images": ' * 10**5, "nested too deeply"),
    ("9" * 5000, "cannot be read as JSON"),
    ("\x00", "cannot be read as JSON"),
    (b"\xff\xfe\x00\xd8", "cannot be read as JSON"),
])  # fmt: skip
def test_what_is_no_json_is_one_line(text, words, tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=words) as error:
        read_json(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_results_out_of_bounds_are_named(tmp_path):
    from mask_rcnn_jax.evaluation.coco import load_results

    result = {"image_id": 1, "category_id": 3, "score": 0.5, "bbox": [1, 1, 5, 5]}
    path = tmp_path / "results.json"
    for change, words in (
        ({"score": "0.5"}, "the score '0.5', expected a finite number"),
        ({"score": NAN}, "the score nan"),
        ({"score": INF}, "the score inf"),
        ({"score": 10**400}, "the score 1000"),
        ({"score": True}, "the score True"),
        ({"image_id": [1]}, "has 'image_id' [1], expected a number or a string"),
        ({"category_id": {}}, "has 'category_id' {}, expected a number or a string"),
        ({"bbox": [1, 1, 1e308, 5]}, "has the value 1e+308"),
        ({"bbox": [1, 1, True, 5]}, "not a finite number"),
    ):
        path.write_text(json.dumps([result, result | change]))
        with pytest.raises(ValueError) as error:
            load_results(path)
        assert f"{path}: entry 1 has" in str(error.value) and words in str(error.value)
    gt = {"images": [{"id": 1, "height": 4, "width": 6}], "annotations": [], "categories": []}
    masks = [result | code([2**63 - 1, 1], (4, 6))]
    with pytest.raises(ValueError, match="results: entry 0: RLE covers"):
        score(gt, None, masks)


NO_JSON = {
    "gzip": (gzip.compress(b"{}"), "it is compressed by gzip; gunzip it"),
    "bzip2": (bz2.compress(b"{}"), "it is compressed by bzip2"),
    "xz": (lzma.compress(b"{}"), "it is compressed by xz"),
    "zip": (b"PK\x03\x04" + bytes(30), "it is a zip archive"),
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid 1\n", "`git lfs pull`"),
    "XML": (b"\xef\xbb\xbf<?xml version='1.0'?>", "it is XML or HTML"),
    "HTML": (b"\n<!DOCTYPE html>", "it is XML or HTML"),
    "image": (b"\x89PNG\r\n\x1a\n" + bytes(9), "it is an image"),
    "empty": (b"", "it is empty"),
    "blank": (b" \n", "it is empty"),
    "JSON Lines": (b'{"image_id": 1}\n{"image_id": 2}\n', "it is JSON Lines, an object per line"),
    "half a JSON": (b'{"images": [', "line 1 column"),
}


@pytest.mark.parametrize("name", NO_JSON)
def test_a_file_that_is_no_json_is_named_by_what_it_is(name, tmp_path):
    content, words = NO_JSON[name]
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="a.json: cannot be read as JSON") as error:
        read_json(path)
    assert words in str(error.value)
    files = path, write_coco(tmp_path)[1]
    with pytest.raises(ValueError, match=re.escape(words)):
        load_coco(*files)
