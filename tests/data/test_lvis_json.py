"""LVIS's json: file names in URLs, what images were searched for, and what is refused."""

import json
import pickle

import numpy as np
import pytest

from mask_rcnn_jax.annotations.lvis import file_name_in
from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.data import coco
from mask_rcnn_jax.data.checking import inspect_coco
from mask_rcnn_jax.data.coco import CocoDataset, for_workers, load_coco
from mask_rcnn_jax.data.ground_truth import ground_truth
from mask_rcnn_jax.data.merge import merge, with_classes
from mask_rcnn_jax.data.packed import LABELS
from mask_rcnn_jax.evaluation.coco import load_results, score
from mask_rcnn_jax.evaluation.options import Scoring
from mask_rcnn_jax.ops.classifier import Classifier
from mask_rcnn_jax.training.setup import image_counts
from tests.data.small_set import rectangle, write_coco
from tests.helpers import tiny_config

CATEGORIES = [
    {"id": 8, "name": "zebra", "frequency": "f"},
    {"id": 3, "name": "cat", "frequency": "r"},
    {"id": 7, "name": "dog", "frequency": "c"},
]
OBJECTS = [
    rectangle(5, 5, 20, 10),
    rectangle(1, 1, 9, 9, category_id=7),
    rectangle(2, 8, 9, 9, category_id=7),
    rectangle(4, 4, 9, 9, category_id=7, image_id=3),
]
KEYS = ("neg_category_ids", "not_exhaustive_category_ids")


def write_lvis(folder, changes=(), categories=CATEGORIES):
    """Three images, of which the first lies in another folder; no image has a `file_name`."""
    sizes = [(40, 60), (60, 40), (33, 47)]
    json_path, _ = write_coco(folder, sizes, OBJECTS, categories=categories)
    content = json.loads(json_path.read_text())
    labels = [([8], []), ([3, 8], [8]), ([], [7])]
    for entry, (absent, partial) in zip(content["images"], labels, strict=True):
        name = entry.pop("file_name")
        split = "train2017" if entry["id"] == 1 else "val2017"
        (folder / split).mkdir(exist_ok=True)
        (folder / "images" / name).rename(folder / split / name)
        entry["coco_url"] = f"http://images.cocodataset.org/{split}/{name}"
        entry |= dict(zip(KEYS, (absent, partial), strict=True))
    for image, key, value in changes:
        if value is None:
            del content["images"][image][key]
        else:
            content["images"][image][key] = value
    json_path.write_text(json.dumps(content))
    return json_path, folder


@pytest.mark.parametrize("way", ["stream", "whole"])
def test_images_are_found_by_their_urls(tmp_path, monkeypatch, way):
    files = write_lvis(tmp_path)
    if way == "whole":
        monkeypatch.setattr(coco, "_load_stream", lambda request: None)
    dataset = load_coco(*files)
    names = [record.file_name for record in dataset.images]
    assert names == ["train2017/001.png", "val2017/002.png", "val2017/003.png"]
    for index in range(3):
        assert (dataset.decode(index) == index + 1).all()
    images = dataset.images
    assert dataset.class_names == ("cat", "dog", "zebra") and images.has_labels
    lists = [[images.labels(name, k) for name in LABELS] for k in range(3)]
    assert lists == [[[3], []], [[1, 3], [3]], [[], [2]]]
    assert [images.frequency(k) for k in range(4)] == [None, "r", "c", "f"]
    copy = pickle.loads(pickle.dumps(for_workers(dataset)))
    assert copy.images.labels("absent", 1) == [1, 3]


def test_both_ways_of_loading_agree_with_coco_labels(tmp_path, monkeypatch):
    files = write_lvis(tmp_path)
    request = coco._Request(str(files[0]), str(files[1]), False, True, "raw", False)
    one, *rest = coco._load_stream(request)
    other, *others = coco._load_any(request)
    assert rest == others and one.arrays._arrays.keys() == other.arrays._arrays.keys()
    for name, array in one.arrays._arrays.items():
        np.testing.assert_array_equal(array, other.arrays[name], err_msg=name)
    assert one.labels("absent", 1) == [3, 8] and one.frequency(4) is None  # raw ids


def test_a_file_name_wins_and_other_sets_have_no_labels(tmp_path):
    files = write_coco(tmp_path, annotations=[OBJECTS[0]])
    content = json.loads(files[0].read_text())
    content["images"][0]["coco_url"] = "http://images.cocodataset.org/train2017/9.jpg"
    files[0].write_text(json.dumps(content))
    dataset = load_coco(*files)
    assert dataset.images[0].file_name == "001.png" and not dataset.images.has_labels
    plain = set(dataset.images.arrays._arrays)
    assert not {*LABELS, "frequencies"} & plain
    assert not {"coco_url", *KEYS} & set(ground_truth(merge([dataset], {})).content["images"][0])


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://images.cocodataset.org/train2017/000000391895.jpg", "train2017/000000391895.jpg"),
        ("val2017/1.jpg", "val2017/1.jpg"),
        ("1.jpg", None),
        ("http://host/train2017/", None),
        ("http://host/../1.jpg", None),
        ("http://host/a/..", None),
        ("", None),
        (7, None),
        (None, None),
    ],
)
def test_names_in_urls(url, name):
    assert file_name_in(url) == name


BAD = {
    "url without folder": ((1, "coco_url", "1.jpg"), "images[1] lacks 'file_name', and its coco_u"),
    "url a number": ((0, "coco_url", 5), "images[0] lacks 'file_name', and its coco_url 5 does"),
    "url up": ((2, "coco_url", "http://a/../b"), "does not end in folder/name"),
    "no url": ((2, "coco_url", None), "images[2] lacks 'file_name'"),
    "long url": ((0, "coco_url", "a/" + "b" * 9000), "a string of at most 4096 characters"),
    "gone": ((1, "coco_url", "http://a/b/gone.jpg"), "image 'b/gone.jpg' is listed but not in"),
    "absent a number": ((0, KEYS[0], 3), "images[0] has neg_category_ids 3, expected a list"),
    "absent text": ((0, KEYS[0], "3"), "images[0] has neg_category_ids '3', expected a list"),
    "absent true": ((0, KEYS[0], [True]), "images[0] has neg_category_ids [True], expected a list"),
    "absent a list": ((0, KEYS[0], [[3]]), "images[0] has neg_category_ids [[3]], expected a list"),
    "absent 3.5": ((0, KEYS[0], [3.5]), "images[0] has neg_category_ids [3.5], expected a list"),
    "unknown": ((1, KEYS[0], [3, 99]), "images[1] has 99 in neg_category_ids, which is not in"),
    "partial": ((2, KEYS[1], {"a": 1}), "images[2] has not_exhaustive_category_ids {'a': 1}, exp"),
    "unknown partial": ((2, KEYS[1], ["x"]), "images[2] has 'x' in not_exhaustive_category_ids"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_named(name, tmp_path):
    change, words = BAD[name]
    files = write_lvis(tmp_path, [change])
    with pytest.raises(ValueError) as error:
        load_coco(*files)
    message = str(error.value)
    assert words in message and str(files[0]) in message and "\n" not in message
    assert any(words in problem for problem in inspect_coco(*files).problems)
    if name not in ("no url", "gone"):
        if "url" not in name:
            with pytest.raises(ValueError, match="images"):
                score(files[0], [], None)


def test_a_sound_set_has_no_problems(tmp_path):
    assert inspect_coco(*write_lvis(tmp_path)).problems == []


def test_lists_may_be_absent_or_empty_in_training(tmp_path):
    changes = [(0, KEYS[0], None), (0, KEYS[1], None), (2, KEYS[1], None)]
    categories = [{k: v for k, v in entry.items() if k != "frequency"} for entry in CATEGORIES]
    dataset = load_coco(*write_lvis(tmp_path, changes, categories))
    lists = [[dataset.images.labels(name, k) for name in LABELS] for k in range(3)]
    assert lists == [[[], []], [[1, 3], [3]], [[], []]]
    assert dataset.images.frequency(1) is None


def test_merged_classes_keep_their_labels_and_are_scored(tmp_path):
    """The class "dog" becomes "cat", which is rare; both together are common."""
    files = write_lvis(tmp_path)
    dataset = load_coco(*files)
    categories = [{"id": 30, "name": "zebra"}, {"id": 20, "name": "cat"}]
    merged = with_classes(dataset, categories, {"dog": "cat"})
    assert type(merged) is not CocoDataset
    content = ground_truth(merged).content
    assert [entry[KEYS[0]] for entry in content["images"]] == [[30], [30], []]
    assert [entry[KEYS[1]] for entry in content["images"]] == [[], [30], [20]]
    assert [entry["frequency"] for entry in content["categories"]] == ["f", "c"]
    found = {"image_id": 1, "category_id": 20, "score": 0.5, "bbox": [5, 5, 20, 10]}
    metrics = score(ground_truth(merged), [found], None, rules=Scoring(protocol="lvis"))
    assert metrics["APc"] == metrics["AP"] > 0 and metrics["APr"] == metrics["APf"] == -1


@pytest.mark.parametrize(
    ("image", "labels", "merged"),
    [
        (1, ([7], []), ([], [])),  # not searched for the other one
        (1, ([3, 7], []), ([20], [])),
        (2, ([3], []), ([], [])),  # has a dog
        (2, ([], []), ([], [20])),  # has a dog, may have cats
        (2, ([3], [7]), ([], [20])),
    ],
)
def test_a_class_of_two_is_absent_if_both_are_and_exhaustive_if_both_are(
    tmp_path, image, labels, merged
):
    changes = [(image, *change) for change in zip(KEYS, labels, strict=True)]
    categories = [{"id": 30, "name": "zebra"}, {"id": 20, "name": "cat"}]
    dataset = with_classes(load_coco(*write_lvis(tmp_path, changes)), categories, {"dog": "cat"})
    entry = ground_truth(dataset).content["images"][image]
    assert tuple(entry[key] for key in KEYS) == merged


def test_a_class_without_a_category_in_the_set_has_no_frequency(tmp_path):
    categories = [{"id": k, "name": name} for k, name in enumerate(("cat", "dog", "zebra", "yak"))]
    merged = with_classes(load_coco(*write_lvis(tmp_path)), categories, {})
    content = ground_truth(merged).content
    assert [entry.get("frequency") for entry in content["categories"]] == ["r", "c", "f", None]
    with pytest.raises(ValueError, match=r"categories\[3\] has frequency None, expected"):
        score(ground_truth(merged), [], None, rules=Scoring(protocol="lvis"))


def test_two_sets_keep_labels_only_if_both_have_them(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    first, second = (load_coco(*write_lvis(folder)) for folder in folders[:2])
    plain = load_coco(*write_coco(folders[2], annotations=[OBJECTS[0]]))
    both = merge([first, second], {})
    assert [both.images.labels("absent", k) for k in range(6)] == 2 * [[3], [1, 3], []]
    assert not merge([first, plain], {}).images.has_labels


def test_images_are_counted_for_the_federated_loss_alone(tmp_path):
    dataset, data = load_coco(*write_lvis(tmp_path)), as_recipe(tiny_config()).data
    assert image_counts(Classifier(), data, dataset) == ()
    federated = Classifier(kind="sigmoid", federated_classes=5)
    assert image_counts(federated, data, dataset) == (1, 2, 0)


def test_results_of_the_set_are_scored_from_its_file(tmp_path):
    files = write_lvis(tmp_path)
    keys = ("image_id", "category_id", "bbox")
    results = [{"score": 0.5} | {key: entry[key] for key in keys} for entry in OBJECTS]
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results))
    metrics = score(files[0], load_results(path), None, rules=Scoring(protocol="lvis"))
    assert [metrics[name] for name in ("AP", "APr", "APc")] == pytest.approx([1, 1, 1])
    assert metrics["APf"] == -1 and metrics["per_category"]["zebra"] == {"AP": -1}
