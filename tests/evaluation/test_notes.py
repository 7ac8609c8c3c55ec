"""What is said about a ground truth beside its scores."""

import logging

import numpy as np
import pytest

from mask_rcnn_jax.annotations.reader import read_ground_truth
from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.evaluation import notes
from mask_rcnn_jax.evaluation.coco import load_results, score
from mask_rcnn_jax.recipe.options import EvalOptions
from mask_rcnn_jax.training import evaluator
from mask_rcnn_jax.training.encoding import Found
from tests.data.small_set import rectangle, write_coco

GOOD = rectangle(5, 5, 20, 10)
RESULT = {"image_id": 1, "category_id": 3, "score": 0.5, "bbox": [5, 5, 20, 10]}


def truth(folder, annotations, **options):
    files = write_coco(folder, annotations=annotations, **options)
    return read_ground_truth(files[0], scoring=True)


@pytest.mark.parametrize("zero", [0, "0", 0.0, "0.0"])
def test_an_annotation_0_is_named_with_its_remedy(zero, tmp_path):
    (line,) = notes.notes(truth(tmp_path, [GOOD | {"id": zero}]))
    assert "has the id 0" in line and "`prepare merge`" in line
    assert notes.notes(truth(tmp_path, [GOOD])) == []


def test_categories_and_images_may_have_the_id_0(tmp_path):
    images = [{"id": 0, "file_name": "001.png", "height": 40, "width": 60}]
    entry = GOOD | {"image_id": 0, "category_id": 0}
    gt = truth(tmp_path, [entry], images=images, categories=[{"id": 0, "name": "cat"}])
    assert notes.notes(gt) == []
    assert score(gt, [RESULT | {"image_id": 0, "category_id": 0}], None)["AP"] == pytest.approx(1)


def test_objects_beyond_the_caps_are_counted(tmp_path):
    sizes = [(40, 60)] * 2
    many = [GOOD] * 130 + [GOOD | {"image_id": 2, "category_id": 7}] * 70
    many += [GOOD | {"iscrowd": 1}] * 50
    gt = truth(tmp_path, many, sizes=sizes)
    (line,) = notes.notes(gt)
    assert line.endswith(
        "an image holds up to 130 objects of a class, COCO's rules score 100: 30 of 200 objects "
        "(15.0%) are beyond it and missed (a larger eval.detections_per_image adds AP@K, which "
        "scores K)"
    )
    (line,) = notes.notes(gt, scored=120)
    assert line.endswith("beyond it and missed (AP@120 and AR@120 score 120)")
    assert notes.notes(gt, [2]) == []
    (line,) = notes.notes(gt, [2], detections_per_image=50)
    assert "up to 70 objects, eval.detections_per_image allows 50: 20 of 70 objects (28.6" in line
    (line,) = notes.notes(gt, detections_per_image=100)
    assert line.count("30 of 200 objects") == 2
    assert notes.notes(gt, protocol="lvis") == []
    (line,) = notes.notes(truth(tmp_path, [GOOD] * 301), protocol="lvis")
    assert "LVIS scores 300: 1 of 301" in line


def test_crowds_alone_are_not_scored(tmp_path):
    (line,) = notes.notes(truth(tmp_path, [GOOD | {"iscrowd": 1}]))
    assert "all 1 annotations are crowds" in line


def test_a_set_without_anything_to_score_is_refused(tmp_path):
    with pytest.raises(ValueError, match="instances.json: no images, nothing to score"):
        notes.check_scorable(truth(tmp_path, [], images=[]))
    with pytest.raises(ValueError, match="no annotation in 1 images, nothing to score"):
        notes.check_scorable(truth(tmp_path, []))
    notes.check_scorable(truth(tmp_path, [GOOD]))
    sizes = [(40, 60)] * 2
    files = write_coco(tmp_path, sizes, annotations=[GOOD | {"image_id": 2}])
    dataset = load_coco(*files)
    evaluator.check_scorable(dataset, EvalOptions())
    with pytest.raises(ValueError, match="no annotation in 1 images"):
        evaluator.check_scorable(dataset, EvalOptions(max_images=1))


def test_a_training_says_it_once(tmp_path, caplog):
    files = write_coco(tmp_path, annotations=[GOOD | {"id": 0}, *[GOOD] * 4])
    dataset = load_coco(*files)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = Found([RESULT], None, None, [1])
            evaluator.score(dataset, found, EvalOptions(detections_per_image=3))
    assert caplog.text.count("has the id 0") == 1
    assert caplog.text.count("eval.detections_per_image allows 3: 2 of 5 objects") == 1


@pytest.mark.parametrize(
    "image_id, words",
    [
        ("1", "it is a string, the ids there are numbers such as 1"),
        ("001", "it looks like the file '001.png', whose id is 1"),
        ("001.png", "it looks like the file '001.png', whose id is 1"),
        (2, "it looks like the file 'b/002.png', whose id is 7"),
        ("b/002.png", "whose id is 7"),
        (55, "not among the 2 images of the ground truth"),
        (10**400, "not among the 2 images of the ground truth"),
        (float("inf"), "refers to image inf, which is not among the 2 images"),
    ],
)
def test_results_of_absent_images_say_what_is_likely(image_id, words, tmp_path):
    names = {1: "001.png", 7: "b/002.png"}
    size = {"height": 40, "width": 60}
    images = [{"id": n, "file_name": name, **size} for n, name in names.items()]
    gt = truth(tmp_path, [GOOD], images=images)
    with pytest.raises(ValueError, match="entry 0 refers to image") as error:
        score(gt, [RESULT | {"image_id": image_id}], None)
    assert words in str(error.value)


def test_a_number_among_strings_is_named(tmp_path):
    images = [{"id": "1", "file_name": "001.png", "height": 40, "width": 60}]
    gt = truth(tmp_path, [GOOD | {"image_id": "1"}], images=images)
    for number in (1, 1.0):
        with pytest.raises(ValueError, match="it is a number, the ids there are strings such as"):
            score(gt, [RESULT | {"image_id": number}], None)


def test_categories_of_results_say_what_is_likely():
    categories = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    hints = {"2": "it is a string", "dog": "the name of category 2", 0: "count from 0", 5: ""}
    for category_id, words in hints.items():
        found = notes.absent_category(category_id, categories)
        assert words in found and bool(found) == bool(words)


def test_results_within_an_object_say_where_they_may_be(tmp_path):
    path = tmp_path / "r.json"
    path.write_text('{"results": []}')
    with pytest.raises(ValueError, match=r"expected a json list .*its key 'results' may be meant"):
        load_results(path)
    path.write_text('{"images": [], "categories": [], "annotations": []}')
    with pytest.raises(ValueError, match=r"r.json: a ground truth, expected a json list"):
        load_results(path)


def test_boxes_of_results_in_another_form_are_named(tmp_path):
    gt = truth(tmp_path, [GOOD])  # 60 x 40 pixels
    boxes = np.array([[5, 5, 20, 10], [30, 12, 20, 20], [40, 25, 18.5, 15]])

    def said(boxes):
        results = [RESULT | {"bbox": box} for box in boxes.tolist()]
        return notes.box_form(results, gt)

    corners = np.hstack([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]])
    assert said(corners).startswith("all boxes of results seem to be x1, y1, x2, y2, expected x, y")
    assert "fractions of the image" in said(boxes / (60, 40, 60, 40))
    assert said(boxes) == said(boxes + 3) == said(corners[:2]) == said(corners[:0]) == ""
    large = np.array([[0, 0, 60, 40], [1, 1, 60, 40], [1, 0, 58, 40]])
    assert said(large) == ""
