import json

import numpy as np
import pytest

from mask_rcnn_jax.data.coco import check_coco, load_coco
from mask_rcnn_jax.data.coco_categories import COCO_CATEGORIES
from mask_rcnn_jax.formats.shapes import uncompressed_rle
from tests.data.small_set import CATEGORIES, rectangle
from tests.helpers import shared

GOOD = rectangle(5, 5, 20, 10)
NAN = float("nan")


def test_classes_follow_the_original_ids(coco_files):
    files = coco_files(annotations=[GOOD, rectangle(1, 1, 5, 5, category_id=7)])
    dataset = load_coco(*files)
    assert dataset.class_names == ("cat", "dog")
    assert dataset.category_ids == (3, 7)
    assert [a.class_index for a in dataset.images[0].annotations] == [1, 2]


def test_raw_ids_are_the_classes(coco_files):
    files = coco_files(annotations=[GOOD, rectangle(1, 1, 5, 5, category_id=7)])
    dataset = load_coco(*files, class_ids="raw")
    unused = [f"unused {k}" for k in (1, 2, 4, 5, 6)]
    assert dataset.class_names == (*unused[:2], "cat", *unused[2:], "dog")
    assert dataset.category_ids == (1, 2, 3, 4, 5, 6, 7)
    assert [a.class_index for a in dataset.images[0].annotations] == [3, 7]


@pytest.mark.parametrize("category_id", [0, -3, "3", 3.5, True, 10**9])
def test_raw_ids_must_be_whole_numbers(coco_files, category_id):
    other = "4" if isinstance(category_id, str) else 4
    categories = [{"id": category_id, "name": "dog"}, {"id": other, "name": "cat"}]
    files = coco_files(categories=categories, annotations=[GOOD | {"category_id": other}])
    with pytest.raises(ValueError) as error:
        load_coco(*files, class_ids="raw")
    message = str(error.value)
    if type(category_id) in (int, str):  # the others are no ids at all
        assert f"category id {category_id!r} cannot be a class" in message
        assert "data.class_ids='raw' expects whole numbers from 1" in message
    assert str(files[0]) in message and "\n" not in message


def test_unknown_class_ids_are_refused(coco_files):
    with pytest.raises(ValueError, match="data.class_ids is 'sorted', expected 'contiguous' or"):
        load_coco(*coco_files(annotations=[GOOD]), class_ids="sorted")


def test_classes_follow_ids_that_are_strings(coco_files):
    categories = [{"id": name, "name": f"the {name}"} for name in ("b", "7", "a", "30")]
    files = coco_files(categories=categories, annotations=[GOOD | {"category_id": "a"}])
    assert load_coco(*files).category_ids == ("30", "7", "a", "b")


@pytest.mark.parametrize("split", ["train", "val"])
def test_coco_categories_are_those_of_coco(split):
    folder = shared("data/coco_mini")
    files = folder / f"annotations/instances_{split}2017.json", folder / f"{split}2017"
    dataset = load_coco(*files)
    assert COCO_CATEGORIES == tuple(zip(dataset.category_ids, dataset.class_names, strict=True))
    raw = load_coco(*files, class_ids="raw")
    assert raw.category_ids == tuple(range(1, 91))
    names = dict(COCO_CATEGORIES)
    assert raw.class_names == tuple(names.get(k, f"unused {k}") for k in range(1, 91))
    for ours, theirs in zip(dataset.images, raw.images, strict=True):
        assert [dataset.category_ids[a.class_index - 1] for a in ours.annotations] == [
            a.class_index for a in theirs.annotations
        ]


def test_coco_has_eighty_categories_of_ninety_ids():
    ids, names = zip(*COCO_CATEGORIES, strict=True)
    assert list(ids) == sorted(set(ids)) and len(set(names)) == 80
    assert set(range(1, 91)) - set(ids) == {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}


def test_boxes_become_corners_clipped_to_the_image(coco_files):
    dataset = load_coco(*coco_files(annotations=[GOOD, rectangle(-4, 30, 100, 100)]))
    boxes = [a.box for a in dataset.images[0].annotations]
    np.testing.assert_array_equal(boxes, [[5, 5, 25, 15], [0, 30, 60, 40]])
    assert boxes[0].dtype == np.float32


def test_missing_id_area_iscrowd_and_box_are_filled_in(coco_files):
    bare = {key: GOOD[key] for key in ("image_id", "category_id", "segmentation")}
    mask = np.zeros((40, 60), np.uint8)
    mask[10:14, 20:30] = 1
    rle = bare | {"segmentation": uncompressed_rle(mask)}
    files = coco_files(annotations=[bare, rle])
    content = json.loads(files[0].read_text())
    for entry in content["annotations"]:
        del entry["id"]
    files[0].write_text(json.dumps(content))
    first, second = load_coco(*files).images[0].annotations
    assert (first.area, first.iscrowd, second.area) == (200, False, 40)
    np.testing.assert_array_equal(first.box, [5, 5, 25, 15])
    np.testing.assert_array_equal(second.box, [20, 10, 30, 14])


def test_crowds_are_marked(coco_files):
    crowd = rectangle(1, 1, 9, 9, iscrowd=1, segmentation=uncompressed_rle(np.eye(40, 60)))
    dataset = load_coco(*coco_files(annotations=[GOOD, crowd]))
    assert [a.iscrowd for a in dataset.images[0].annotations] == [False, True]


def test_images_without_objects_are_kept(coco_files):
    dataset = load_coco(*coco_files(sizes=[(40, 60), (30, 20)], annotations=[GOOD]))
    assert [len(image.annotations) for image in dataset.images] == [1, 0]


FILE_FAULTS = {
    "results list": ({}, [], "a list (detection results?)"),
    "no images": ({"images": None}, [GOOD], "key 'images' is missing"),
    "no categories": ({"categories": None}, [GOOD], "key 'categories' is missing"),
    "no annotations key": ({"annotations": None}, [], "key 'annotations' is missing"),
    "image without width": (
        {"images": [{"id": 1, "file_name": "001.png", "height": 40}]},
        [GOOD],
        "images[0] lacks 'width'",
    ),
    "image of no size": (
        {"images": [{"id": 1, "file_name": "001.png", "height": 40, "width": 0}]},
        [GOOD],
        "images[0] has height or width",
    ),
    "category without name": ({"categories": [{"id": 3}]}, [GOOD], "categories[0] lacks 'name'"),
    "entry that is no object": ({"categories": ["cat"]}, [GOOD], "categories[0] is not an object"),
    "annotation without image": ({"annotations": [{"category_id": 3}]}, [], "lacks 'image_id'"),
    "image without id": (
        {"images": [{"id": None, "file_name": "001.png", "height": 40, "width": 60}]},
        [GOOD],
        "has an id that is neither",
    ),
    "duplicate image": (
        {"images": 2 * [{"id": 1, "file_name": "001.png", "height": 40, "width": 60}]},
        [GOOD],
        "images: id 1 occurs 2 times",
    ),
    "duplicate category": ({"categories": 2 * CATEGORIES}, [GOOD], "categories: id 7 occurs 2"),
    "duplicate name": (
        {"categories": [{"id": 3, "name": "cat"}, {"id": 4, "name": "cat"}]},
        [GOOD],
        "name 'cat' occurs 2 times",
    ),
    "duplicate annotation": (
        {"annotations": 3 * [GOOD | {"id": 9}]},
        [],
        "annotations: id 9 occurs 3 times",
    ),
    "unknown category": ({}, [GOOD | {"category_id": 5}], "annotation 1: category_id 5 is not in"),
    "unknown image": ({}, [GOOD | {"image_id": 8}], "annotation 1: image_id 8 is not in 'images'"),
    "no images listed": ({"images": [], "annotations": []}, [], "'images' is empty"),
    "absent image": (
        {"images": [{"id": 1, "file_name": "gone.png", "height": 40, "width": 60}]},
        [GOOD],
        "image 'gone.png' is listed but not in",
    ),
    "no annotations": ({}, [], "'annotations' is empty"),
}


@pytest.mark.parametrize("name", FILE_FAULTS)
@pytest.mark.parametrize("mode", ["error", "skip"])
def test_fault_of_the_file_always_stops(coco_files, name, mode):
    replace, annotations, words = FILE_FAULTS[name]
    json_path, image_dir = coco_files(**({"annotations": annotations} | replace))
    if name == "results list":
        json_path.write_text("[]")
    with pytest.raises(ValueError) as error:
        load_coco(json_path, image_dir, bad_annotations=mode)
    assert words in str(error.value) and str(json_path) in str(error.value)
    assert "\n" not in str(error.value)
    assert any(words in line for line in check_coco(json_path, image_dir))


ANNOTATION_FAULTS = {
    "zero width": (GOOD | {"bbox": [5, 5, 0, 10]}, "has no area"),
    "negative height": (GOOD | {"bbox": [5, 5, 10, -3]}, "has no area"),
    "nan": (GOOD | {"bbox": [5, NAN, 10, 10]}, "not a finite number"),
    "text": (GOOD | {"bbox": [5, "6", 10, 10]}, "not a finite number"),
    "three numbers": (GOOD | {"bbox": [5, 6, 10]}, "expected [x, y, width, height]"),
    "right of the image": (rectangle(60, 5, 9, 9), "outside the image of 40 x 60"),
    "above the image": (rectangle(5, -9, 9, 9), "outside the image"),
    "no segmentation": (
        {k: v for k, v in GOOD.items() if k != "segmentation"},
        "lacks 'segmentation'",
    ),
    "two points": (GOOD | {"segmentation": [[1, 2, 3, 4]]}, "polygon of 4 numbers"),
    "rle size": (
        GOOD | {"segmentation": {"size": [60, 40], "counts": [0, 2400]}},
        "RLE of size [60, 40], expected [40, 60]",
    ),
    "rle counts": (
        GOOD | {"segmentation": {"size": [40, 60], "counts": [0, 2399]}},
        "RLE covers 2399 pixels",
    ),
    "no box, no area": (
        {k: v for k, v in GOOD.items() if k != "bbox"} | {"segmentation": [[5, 5, 9, 5, 7, 5]]},
        "has no area",
    ),
}


@pytest.mark.parametrize("name", ANNOTATION_FAULTS)
def test_fault_of_an_annotation_stops_or_is_left_out(coco_files, caplog, name):
    bad, words = ANNOTATION_FAULTS[name]
    files = coco_files(annotations=[GOOD, bad, GOOD, bad])
    with pytest.raises(ValueError) as error:
        load_coco(*files)
    message = str(error.value)
    assert "annotation 2 of image 1: " in message and words in message
    assert "first of 2 faulty annotations" in message and "data.bad_annotations=skip" in message
    assert "prepare check" in message and "\n" not in message

    dataset = load_coco(*files, bad_annotations="skip")
    assert len(dataset.images[0].annotations) == 2
    assert caplog.text.count("left out 2 of 4 annotations") == 1
    assert sum(words in line for line in check_coco(*files)) == 2


def test_unreadable_json_is_named(coco_files, tmp_path):
    json_path, image_dir = coco_files(annotations=[GOOD])
    with pytest.raises(FileNotFoundError, match="no annotation file"):
        load_coco(tmp_path / "other.json", image_dir)
    json_path.write_text(json_path.read_text()[:-20])
    with pytest.raises(ValueError, match="instances.json: cannot be read as JSON"):
        load_coco(json_path, image_dir)


def test_missing_image_folder_is_named(coco_files, tmp_path):
    json_path, _ = coco_files(annotations=[GOOD])
    with pytest.raises(ValueError, match="no image folder '.*nowhere'"):
        load_coco(json_path, tmp_path / "nowhere")


def test_absent_images_are_counted_and_subfolders_searched(coco_files):
    sizes = [(40, 60)] * 4
    json_path, image_dir = coco_files(sizes=sizes, annotations=[GOOD])
    content = json.loads(json_path.read_text())
    (image_dir / "part").mkdir()
    (image_dir / "001.png").rename(image_dir / "part" / "001.png")
    content["images"][0]["file_name"] = "part/001.png"
    json_path.write_text(json.dumps(content))
    assert len(load_coco(json_path, image_dir).images) == 4
    (image_dir / "002.png").unlink()
    (image_dir / "part" / "001.png").unlink()
    with pytest.raises(ValueError, match="'part/001.png' is listed but not .*and 1 more problem"):
        load_coco(json_path, image_dir)


def test_annotations_may_be_absent_where_they_are_not_needed(coco_files):
    dataset = load_coco(*coco_files(), require_annotations=False)
    assert dataset.images[0].annotations == ()


def test_unknown_mode_is_refused(coco_files):
    with pytest.raises(ValueError, match="data.bad_annotations is 'drop', expected"):
        load_coco(*coco_files(annotations=[GOOD]), bad_annotations="drop")


def test_check_finds_everything_at_once(coco_files):
    bad = GOOD | {"bbox": [1, 1, 0, 0]}
    json_path, image_dir = coco_files(sizes=[(40, 60)] * 3, annotations=[bad, bad])
    truncated = (image_dir / "002.png").read_bytes()[:-30]
    (image_dir / "002.png").write_bytes(truncated)
    (image_dir / "003.png").unlink()
    content = json.loads(json_path.read_text())
    content["images"][0]["width"] = 61
    json_path.write_text(json.dumps(content))
    problems = check_coco(json_path, image_dir)
    assert len(problems) == 5
    for words in (
        "003.png' is listed",
        "annotation 1",
        "annotation 2",
        "40 x 61",
        "002.png: trunc",
    ):
        assert sum(words in line for line in problems) == 1


@pytest.mark.parametrize(
    "json_path, image_dir, images, annotations, crowds, classes",
    [
        ("coco_mini/annotations/instances_train2017.json", "train2017", 80, 705, 6, 80),
        ("coco_mini/annotations/instances_val2017.json", "val2017", 80, 815, 11, 80),
        ("coco128/annotations/instances_train2017.json", "train2017", 128, 939, 10, 80),
        ("nuclei/annotations/instances_train.json", "train", 160, 4479, 0, 1),
        ("nuclei/annotations/instances_train_rle.json", "train", 160, 4479, 0, 1),
        ("pennfudan/annotations/instances_val.json", "val", 50, 126, 0, 1),
    ],
)
def test_real_sets_are_sound(json_path, image_dir, images, annotations, crowds, classes):
    path = shared("data/" + json_path)
    folder = path.parent.parent / image_dir
    assert check_coco(path, folder) == []
    dataset = load_coco(path, folder)
    found = [a for image in dataset.images for a in image.annotations]
    assert (len(dataset.images), len(found), len(dataset.class_names)) == (
        images,
        annotations,
        classes,
    )
    assert sum(a.iscrowd for a in found) == crowds
