"""`prepare repair`: what has one meaning is mended, the rest stays as it is and is named."""

import copy
import json
import random

import numpy as np
import pytest

from mask_rcnn_jax.data.coco import check_coco, load_coco
from mask_rcnn_jax.formats.repair import repaired
from tests.commands.command import error_line, run_inside
from tests.data.small_set import rectangle, write_coco

SIZES = [(64, 80), (48, 64)]
BOXES = [(5, 6, 20, 11), (30, 30, 20, 12), (41, 8, 9, 30), (2, 40, 33, 14)]
MASKS = [rectangle(*box) for box in BOXES]


@pytest.fixture
def sound(tmp_path):
    """A json without any problem, its content, and the folder of its images."""
    entries = [entry for entry in MASKS]
    path, images = write_coco(tmp_path, sizes=SIZES, annotations=entries)
    return path, json.loads(path.read_text()), images


def of_each(section, change):
    """A fault in each entry of a section."""
    return lambda content: [change(entry) for entry in content[section]]


def set_all(section, key, of):
    return of_each(section, lambda entry: entry.update({key: of(entry[key])}))


def points(polygons):
    return [[[x, y] for x, y in zip(p[::2], p[1::2], strict=True)] for p in polygons]


def of_numbers(content, folder):
    for entry, name in zip(content["images"], ("007.png", "8.png"), strict=True):
        (folder / entry["file_name"]).rename(folder / name)
        entry["file_name"] = float(name.removesuffix(".png"))


def strange_names(content, folder):
    (folder / "In").mkdir()
    (folder / "001.png").rename(folder / "In" / "Ä.PNG")
    content["images"][0]["file_name"] = "C:\\photos\\in\\ä.png"


def in_box_form(of):
    def change(content):
        for entry in content["annotations"]:
            entry["bbox"] = list(of(*entry["bbox"]))

    return change


def fractions(x, y, w, h):
    return x / 80, y / 64, w / 80, h / 64


# Name: (what is done to a sound json, and to its folder if it has two arguments, what is said).
FAULTS = {
    "flat polygons": (
        set_all("annotations", "segmentation", lambda s: s[0]), "4 flat polygons"),
    "polygons of points": (set_all("annotations", "segmentation", points), "4 polygons nested"),
    "one polygon of points": (
        set_all("annotations", "segmentation", lambda s: points(s)[0]), "4 polygons nested"),
    "polygons in lists of lists": (
        set_all("annotations", "segmentation", lambda s: [[s]]), "4 polygons nested"),
    "points that are objects": (
        set_all("annotations", "segmentation",
                lambda s: [[{"x": x, "y": y} for x, y in points(s)[0]]]), "4 polygons nested"),
    "a text": (set_all("annotations", "segmentation", json.dumps), "4 segmentations in a text"),
    "x1, y1, x2, y2": (
        in_box_form(lambda x, y, w, h: (x, y, x + w, y + h)), "4 boxes of the form x1, y1, x2"),
    "centers": (
        in_box_form(lambda x, y, w, h: (x + w / 2, y + h / 2, w, h)), "4 boxes of the form center"),
    "fractions": (in_box_form(fractions), "4 boxes of the form x, y, width, height as fractions"),
    "a dict of annotations": (
        lambda c: c.update(annotations={str(a["id"]): a for a in c["annotations"]}),
        "4 annotations of an object"),
    "a dict of images": (
        lambda c: c.update(images={"a": c["images"][0], "b": c["images"][1]}),
        "2 images of an object"),
    "ids like 1.0": (set_all("images", "id", float), "2 images with ids such as 1.0"),
    "references as texts": (set_all("annotations", "image_id", str), "4 image_id of another type"),
    "references as texts of floats": (
        set_all("annotations", "category_id", lambda i: f"{i}.0"), "4 category_id of another"),
    "a text among the ids": (
        lambda c: c["images"][0].update(id="1"), "1 ids of images of another type"),
    "annotations from 0": (set_all("annotations", "id", lambda i: i - 1), "1 annotations with the"),
    "all annotations with id 0": (set_all("annotations", "id", lambda i: 0), "4 annotations with"),
    "the same id": (set_all("annotations", "id", lambda i: 7), "3 annotations with the id of"),
    "no id": (of_each("annotations", lambda e: e.pop("id")), "4 annotations without a usable id"),
    "an image twice": (lambda c: c["images"].append(dict(c["images"][0])), "1 images that repeat"),
    "a class twice": (
        lambda c: c["categories"].append(dict(c["categories"][0])), "1 categories that repeat"),
    "an annotation twice": (
        lambda c: c["annotations"].append(dict(c["annotations"][0])), "1 annotations that repeat"),
    "no size": (of_each("images", lambda e: e.pop("height")), "2 image sizes, read from"),
    "sizes as texts": (set_all("images", "width", str), "2 image sizes, read from"),
    "no box": (of_each("annotations", lambda e: e.pop("bbox")), "4 annotations without bbox"),
    "an empty box": (set_all("annotations", "bbox", lambda b: []), "4 annotations without bbox"),
    "no area": (set_all("annotations", "area", lambda a: None), "4 annotations without area"),
    "no iscrowd": (
        of_each("annotations", lambda e: e.pop("iscrowd")), "4 annotations without iscrowd"),
    "numbers for names": (of_numbers, "2 numbers for file names"),
    "names of Windows in the other case": (strange_names, "1 file names"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_repaired_json_is_the_one_that_was_meant(fault, sound, tmp_path):
    path, content, images = sound
    meant = load_coco(path, images)
    change, words = FAULTS[fault]
    faulty = copy.deepcopy(content)
    change(faulty, images) if change.__code__.co_argcount == 2 else change(faulty)
    before = copy.deepcopy(faulty)
    fixed, done = repaired(faulty, images)
    assert any(line.startswith(words) for line in done), done
    assert faulty == before and repaired(fixed, images) == (fixed, [])
    written = tmp_path / "fixed.json"
    written.write_text(json.dumps(fixed))
    assert not check_coco(written, images)
    found = load_coco(written, images)
    for one, other in zip(found.images, meant.images, strict=True):
        assert (one.height, one.width) == (other.height, other.width)
        for a, b in zip(one.annotations, other.annotations, strict=True):
            np.testing.assert_allclose(a.box, b.box, atol=1e-4)
            assert (a.class_index, a.area, a.iscrowd) == (b.class_index, b.area, b.iscrowd)
            np.testing.assert_array_equal(a.segmentation[0], b.segmentation[0])
    ids = [entry["id"] for entry in fixed["annotations"]]
    assert len(set(ids)) == len(ids) and 0 not in ids


def test_a_json_without_problems_stays_as_it_is(sound, capsys):
    path, content, images = sound
    content["annotations"][0] |= {"attributes": {"occluded": True}, "keypoints": [1.5, 2]}
    content |= {"info": {"year": 2026}, "licenses": []}
    path.write_text(json.dumps(content))
    output = path.parent / "out" / "fixed.json"
    flags = ["--json", path, "--images", images, "--output", output]
    assert not run_inside("prepare", "repair", *flags)
    assert output.read_text() == path.read_text()
    assert capsys.readouterr().out == f"{output}: {path} with nothing to repair\n"


# Name: (what is done to a sound json, what is said to be left alone).
DOUBTS = {
    "an RLE of another length": (
        lambda c: c["annotations"][0].update(
            segmentation={"size": [64, 80], "counts": [100, 20, 40]}),
        "RLE covers 160 pixels"),
    "one id for two images": (lambda c: c["images"][1].update(id=1), "images: id 1 occurs 2"),
    "scaled boxes": (
        in_box_form(lambda *box: [side / 2 for side in box]), "width, height times 2"),
    "axes that are swapped in boxes or in masks": (
        in_box_form(lambda x, y, w, h: (y, x, h, w)), "they fit as y, x, height, width"),
    "corners with such axes": (
        in_box_form(lambda x, y, w, h: (y, x, y + h, x + w)), "they fit as y1, x1, y2, x2"),
    "the name of a file of another size": (
        lambda c: c["images"][0].update(file_name="x/001.PNG", width=60), "'x/001.PNG' is listed"),
    "some boxes in another form": (
        lambda c: c["annotations"][0].update(bbox=[5, 6, 25, 17]), "boxes do not fit"),
    "an outline in another one, which may be a hole": (
        lambda c: c["annotations"][0].update(
            segmentation=[points([[5, 6, 25, 6, 25, 17]]), points([[6, 7, 9, 7, 9, 9]])]),
        "polygon of points"),
    "another ending": (lambda c: c["images"][0].update(file_name="001.jpg"), "'001.png' is"),
    "a class that is not there": (
        lambda c: c["annotations"][0].update(category_id="9"), "category_id '9' is not in"),
    "no mask": (lambda c: c["annotations"][0].update(segmentation=[]), "lacks 'segmentation'"),
    "the name of another image's file": (
        lambda c: c["images"][0].update(file_name="x/002.png"), "'x/002.png' is listed but"),
}  # fmt: skip


@pytest.mark.parametrize("doubt", DOUBTS)
def test_what_may_mean_two_things_stays_and_is_named(doubt, sound, capsys):
    path, content, images = sound
    change, words = DOUBTS[doubt]
    change(content)
    path.write_text(json.dumps(content))
    output = path.parent / "fixed.json"
    flags = ["--json", path, "--images", images, "--output", output]
    assert not run_inside("prepare", "repair", *flags)
    said = capsys.readouterr().out
    assert json.loads(output.read_text()) == content
    assert "left alone: " in said and words in said and "repaired: " not in said


@pytest.mark.parametrize("of", [
    lambda x, y, w, h: (y, x, h, w), lambda x, y, w, h: (y, x, y + h, x + w),
])  # fmt: skip
def test_axes_are_those_of_the_boxes_where_turned_masks_would_leave_the_image(of, tmp_path):
    boxes = [*BOXES, (60, 8, 18, 10)]
    path, images = write_coco(tmp_path, SIZES, [rectangle(*box) for box in boxes])
    content = json.loads(path.read_text())
    faulty = copy.deepcopy(content)
    in_box_form(of)(faulty)
    fixed, (done,) = repaired(faulty, images)
    assert done.startswith("5 boxes of the form y") and fixed == content


def test_boxes_of_two_forms_stay_as_they_are(tmp_path):
    boxes = [(x, y, 20 + x, 15 + y) for x in range(2, 20, 3) for y in range(2, 20, 3)]
    path, images = write_coco(tmp_path, SIZES, [rectangle(*box) for box in boxes])
    content = json.loads(path.read_text())
    one = dict(content["annotations"][7])
    in_box_form(lambda x, y, w, h: (x, y, x + w, y + h))(content)
    assert repaired(content, images)[1] == [
        "36 boxes of the form x1, y1, x2, y2, now [x, y, width, height]"
    ]
    content["annotations"][7] = one
    assert repaired(content, images) == (content, [])


def test_a_file_of_another_folder_is_not_taken_where_that_of_the_name_is_there(sound):
    _, content, images = sound
    content["images"][0]["file_name"] = "train/001.png"
    assert repaired(content, images)[0]["images"][0]["file_name"] == "001.png"
    (images / "train").mkdir()
    assert repaired(content, images) == (content, [])


def test_an_image_turned_by_its_exif_entry_gets_no_size(sound):
    from PIL import Image

    _, content, images = sound
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (80, 64)).save(images / "001.jpg", exif=exif)
    content["images"][0] = {"id": 1, "file_name": "001.jpg"}
    assert repaired(content, images)[0]["images"][0] == {"id": 1, "file_name": "001.jpg"}


def test_a_size_that_contradicts_the_file_stays(sound):
    _, content, images = sound
    content["images"][0] |= {"height": 65, "width": None}
    assert repaired(content, images) == (content, [])


def test_check_names_the_repair(sound, capsys):
    path, content, images = sound
    set_all("annotations", "segmentation", lambda s: s[0])(content)
    path.write_text(json.dumps(content))
    assert run_inside("prepare", "check", "--json", path, "--images", images) == 2
    flags = f"--json {path} --images {images} --output FILE"
    words = f"`prepare repair {flags}` mends 4 flat polygons, now in a list\n"
    assert words in capsys.readouterr().out


def test_the_original_is_never_overwritten(sound, capsys):
    path, *_ = sound
    before, link = path.read_bytes(), path.parent / "link.json"
    link.symlink_to(path)
    code = run_inside("prepare", "repair", "--json", path, "--output", link)
    assert "expected another file" in error_line(code, capsys.readouterr().err)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [
    "[]", "{}", '{"images": 3, "annotations": [1, null, {}], "categories": [[]]}',
    '{"images": [{"id": []}, 1, {"id": 1, "file_name": true}], "annotations": '
    '[{"image_id": {}, "segmentation": [[]], "bbox": "x"}, {"image_id": 1, "segmentation": [[[[[[[1'
    ']]]]]]]}], "categories": [{}]}',
])  # fmt: skip
def test_anything_in_a_json_is_said_in_lines(content, tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text(content)
    flags = ["--json", path, "--images", tmp_path, "--output", tmp_path / "b.json"]
    code = run_inside("prepare", "repair", *flags)
    said = capsys.readouterr()
    assert "not a COCO json" in said.err if code else "left alone: " in said.out


VALUES = [
    *(None, True, 0, 1.0, 1.5, "1", "0", "", [], {}, [[]], [1, 2], float("nan"), 2**63, "a\0b"),
    *({"x": 1, "y": 2}, [1, 2, 3, 4, 5, 6], [[1, 2], [3, 4], [5, 9]], "[[1,1,5,5,9,1]]", 7.0),
    *({"size": [40, 60], "counts": "abc"}, [{"size": [64, 80], "counts": [9, 20, 5091]}]),
    *("\\x\\001.PNG", [5, 5, 3, 3], "9" * 30, [[[[[[[1, 2]]]]]]], -0.0, 1e308),
]


def mutated(content, rng):
    """The content with up to five sections, entries or values replaced."""
    for _ in range(rng.randint(1, 5)):
        section = rng.choice(["images", "categories", "annotations"])
        entries = content.get(section)
        if rng.random() < 0.1 or not isinstance(entries, list) or not entries:
            content[section] = copy.deepcopy(rng.choice(VALUES))
            continue
        if rng.random() < 0.2:
            entries.append(copy.deepcopy(rng.choice([*entries, *VALUES])))
        changed = entries if rng.random() < 0.3 else [rng.choice(entries)]
        keys = [key for entry in changed if isinstance(entry, dict) for key in entry]
        key, value = rng.choice(keys or ["id"]), rng.choice(VALUES)
        for entry in changed:
            if isinstance(entry, dict):
                entry[key] = copy.deepcopy(value)
    return content


def test_whatever_is_in_a_json_one_repair_is_enough(sound):
    _, content, images = sound
    for seed in range(300):
        faulty = mutated(copy.deepcopy(content), random.Random(seed))
        before = json.dumps(faulty)
        fixed, _ = repaired(faulty, images)
        again, done = repaired(fixed, images)
        assert (json.dumps(again), done) == (json.dumps(fixed), []), seed
        assert json.dumps(faulty) == before, seed
