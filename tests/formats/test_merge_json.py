"""COCO jsons joined into one."""

import json

import pytest

from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.formats.merge_json import merge_jsons, read_map
from tests.formats.converting import write_image

BOX = [[1, 1, 9, 1, 9, 9]]


def make(folder, names, classes, labels, **keys):
    """A json with one object per image, of one of the labels each."""
    for name in names:
        write_image(folder / name)
    ids = {name: 7 * n for n, (name) in enumerate(classes, start=1)}
    return {
        "images": [
            {"id": f"i{n}", "file_name": name, "height": 60, "width": 80, **keys}
            for n, name in enumerate(names)
        ],
        "categories": [{"id": ids[name], "name": name} for name in classes],
        "annotations": [
            {"id": n, "image_id": f"i{n}", "category_id": ids[label], "segmentation": BOX}
            for n, label in enumerate(labels)
        ],
    }


def merged(folder, *sets, **class_map):
    paths = []
    for number, (content, _) in enumerate(sets):
        paths.append(str(folder / f"{number}.json"))
        (folder / f"{number}.json").write_text(json.dumps(content))
    return merge_jsons(paths, [str(folder / place) for _, place in sets], class_map)


def labels_of(content):
    names = {entry["id"]: entry["name"] for entry in content["categories"]}
    files = {entry["id"]: entry["file_name"] for entry in content["images"]}
    return {files[e["image_id"]]: names[e["category_id"]] for e in content["annotations"]}


def test_classes_are_merged_by_name_and_images_found_from_one_folder(tmp_path):
    first = make(tmp_path / "a" / "x", ["1.png", "2.png"], ["dog", "cat"], ["dog", "cat"])
    second = make(tmp_path / "a" / "y", ["1.png"], ["bird", "Dog"], ["Dog"])
    content, folder = merged(tmp_path, (first, "a/x"), (second, "a/y"), Dog="dog")
    assert folder == tmp_path / "a"
    assert [(e["id"], e["name"]) for e in content["categories"]] == [
        (1, "dog"), (2, "cat"), (3, "bird"),
    ]  # fmt: skip
    assert labels_of(content) == {"x/1.png": "dog", "x/2.png": "cat", "y/1.png": "dog"}
    assert [entry["id"] for entry in content["annotations"]] == [1, 2, 3]
    (tmp_path / "out.json").write_text(json.dumps(content))
    assert len(load_coco(tmp_path / "out.json", folder).images) == 3


def test_one_folder_stays_as_it_is_and_classes_of_one_name_become_one(tmp_path):
    """As a set of Roboflow whose root has the name of a class, which cannot be trained on."""
    content = make(tmp_path, ["x/1.png"], ["dog", "cat"], ["cat"])
    content["categories"].insert(0, {"id": 0, "name": "cat"})
    found, folder = merged(tmp_path, (content, "."))
    assert folder == tmp_path and labels_of(found) == {"x/1.png": "cat"}
    assert [entry["name"] for entry in found["categories"]] == ["cat", "dog"]


def test_lists_of_classes_are_renumbered(tmp_path):
    first = make(tmp_path / "a", ["1.png"], ["dog"], ["dog"])
    second = make(tmp_path / "b", ["1.png"], ["cat", "dog"], ["cat"], neg_category_ids=[14])
    content, _ = merged(tmp_path, (first, "a"), (second, "b"))
    assert content["images"][1]["neg_category_ids"] == [1]


def test_what_cannot_be_joined_is_one_line(tmp_path):
    first = make(tmp_path / "a", ["1.png"], ["dog"], ["dog"])
    with pytest.raises(ValueError, match="--map has 'cat', expected one of .'dog'."):
        merged(tmp_path, (first, "a"), cat="dog")
    with pytest.raises(ValueError, match=r"image '1.png' in .* is there twice"):
        merged(tmp_path, (first, "a"), (first, "a"))
    with pytest.raises(ValueError, match="1.json: image 'b/1.png' is listed but not in"):
        merged(tmp_path, (first, "a"), (first, "b"))
    path = str(tmp_path / "0.json")
    for paths, folders in (([path, path], []), ([path], ["a", "b"])):
        with pytest.raises(ValueError, match="expected different jsons and a folder for each"):
            merge_jsons(paths, folders, {})
    assert read_map(["a=b", " c d = e "]) == {"a": "b", "c d": "e"}
    for pairs in (["a"], ["=b"], ["a="], ["a=b", "a=c"]):
        with pytest.raises(ValueError, match="--map (is|has)"):
            read_map(pairs)
