"""Ids as other programs write them: 1.0 for 1, 0, twice the same, larger than 64 bits."""

import json

import pytest

from mask_rcnn_jax.annotations.reader import read_ground_truth
from mask_rcnn_jax.data.checking import inspect_coco
from mask_rcnn_jax.data.coco import check_coco, load_coco
from mask_rcnn_jax.evaluation.coco import score
from mask_rcnn_jax.formats.merge_json import merge_jsons
from tests.data.small_set import rectangle, write_coco

GOOD = rectangle(5, 5, 20, 10)


def as_floats(files):
    """The files with all ids as pandas writes them."""
    content = json.loads(files[0].read_text())
    for section in ("images", "categories", "annotations"):
        for entry in content[section]:
            for key in {"id", "image_id", "category_id"} & entry.keys():
                entry[key] = float(entry[key])
    content["images"][0]["neg_category_ids"] = [7.0]
    files[0].write_text(json.dumps(content))
    return files


def test_whole_numbers_with_a_decimal_point_are_ids(tmp_path):
    files = as_floats(write_coco(tmp_path, annotations=[GOOD, rectangle(30, 12, 20, 20)]))
    assert check_coco(*files) == []
    for class_ids in ("contiguous", "raw"):
        dataset = load_coco(*files, class_ids=class_ids)
        assert repr(dataset.images[0].id) == "1" and dataset.category_ids[-1] == 7
    content = read_ground_truth(files[0]).content
    assert repr(content["images"][0]["neg_category_ids"]) == "[7]"
    assert repr(content["annotations"][1]["id"]) == "2"
    results = [{"image_id": 1, "category_id": 3, "score": 1, "bbox": [5, 5, 20, 10]}]
    results.append(results[0] | {"bbox": [30, 12, 20, 20], "image_id": 1.0, "category_id": 3.0})
    assert score(files[0], results, None)["AP"] == pytest.approx(1)


@pytest.mark.parametrize("section", ["images", "categories", "annotations"])
@pytest.mark.parametrize("bad", [1.5, float("nan"), float("inf"), 2.0**60, 2**63, -(2**63) - 1])
def test_other_numbers_are_refused(bad, section, tmp_path):
    files = write_coco(tmp_path, annotations=[GOOD])
    content = json.loads(files[0].read_text())
    content[section][0]["id"] = bad
    files[0].write_text(json.dumps(content))
    assert any(f"{section}[0] has an id that is neither" in line for line in check_coco(*files))


def test_annotations_with_the_same_id_are_numbered_anew_by_merge(tmp_path):
    files = write_coco(tmp_path, annotations=[GOOD | {"id": 0}, GOOD | {"id": 0}])
    (problem,) = check_coco(*files)
    assert problem.startswith("annotations: id 0 occurs 2 times; `prepare merge`")
    content, _ = merge_jsons([str(files[0])], [str(files[1])], {})
    assert [entry["id"] for entry in content["annotations"]] == [1, 2]
    files[0].write_text(json.dumps(content))
    assert check_coco(*files) == []


def test_merge_of_one_json_numbers_an_annotation_0(tmp_path):
    files = write_coco(tmp_path, annotations=[GOOD | {"id": 0}])
    (warning,) = inspect_coco(*files).warnings
    assert "id 0" in warning and "`prepare merge` of this json alone" in warning
    content, _ = merge_jsons([str(files[0])], [str(files[1])], {})
    assert content["annotations"][0]["id"] == 1


@pytest.mark.parametrize(
    "second, words",
    [
        ("y/a.jpg", "which of them ('x/a.jpg', 'y/a.jpg') is meant is unknown"),
        ("x/a.jpg", "all of them are 'x/a.jpg': delete all but one"),
    ],
)
def test_images_with_the_same_id_are_no_matter_for_merge(second, words, tmp_path):
    size = {"height": 40, "width": 60}
    images = [{"id": 1, "file_name": name, **size} for name in ("x/a.jpg", second)]
    files = write_coco(tmp_path, annotations=[GOOD], images=images)
    with pytest.raises(ValueError, match="images: id 1 occurs 2 times") as error:
        merge_jsons([str(files[0])], [str(files[1])], {})
    assert words in str(error.value)


def test_annotations_with_ids_of_the_other_type_are_told_so(tmp_path):
    files = write_coco(tmp_path, annotations=[GOOD | {"image_id": "1", "category_id": "3.0"}])
    image, category = check_coco(*files)
    assert image.endswith("; it is a string, the ids there are numbers such as 1")
    assert category.endswith("; it is a string, the ids there are numbers such as 3")
    content = json.loads(files[0].read_text())
    content["images"][0]["id"], content["annotations"][0]["category_id"] = "1", 3
    content["annotations"][0]["image_id"] = 1
    files[0].write_text(json.dumps(content))
    (image,) = check_coco(*files)
    assert image.endswith("; it is a number, the ids there are strings such as '1'")
