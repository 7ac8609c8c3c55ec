import copy
import json
import re

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from mask_rcnn_jax.annotations.reader import read_ground_truth
from mask_rcnn_jax.evaluation.coco import (
    METRIC_NAMES,
    format_table,
    load_results,
    score,
    split_results,
    to_coco_results,
)
from mask_rcnn_jax.structures import Detections
from tests.helpers import shared


def square(x, y, side):
    return [[x, y, x + side, y, x + side, y + side, x, y + side]]


def ground_truth():
    """Two pictures of 100 x 120, categories 7 and 3, three objects of which one is a crowd."""
    boxes = [(1, 7, 10, 20, 30), (1, 3, 50, 40, 40), (2, 7, 5, 5, 60)]
    annotations = [
        {
            "id": i,
            "image_id": image_id,
            "category_id": category_id,
            "bbox": [x, y, side, side],
            "area": side * side,
            "iscrowd": 0,
            "segmentation": square(x, y, side),
        }
        for i, (image_id, category_id, x, y, side) in enumerate(boxes, start=1)
    ]
    crowd = np.zeros((100, 120), np.uint8, order="F")
    crowd[60:100, 80:120] = 1
    pixels = crowd.ravel("F")
    edges = [0, *(np.flatnonzero(pixels[1:] != pixels[:-1]) + 1), pixels.size]
    annotations.append(
        {
            "id": 4,
            "image_id": 2,
            "category_id": 3,
            "bbox": [80, 60, 40, 40],
            "area": 1600,
            "iscrowd": 1,
            "segmentation": {"size": [100, 120], "counts": np.diff(edges).tolist()},
        }
    )
    return {
        "images": [{"id": i, "height": 100, "width": 120, "file_name": f"{i}.jpg"} for i in (1, 2)],
        "categories": [{"id": 7, "name": "cat"}, {"id": 3, "name": "dog"}],
        "annotations": annotations,
    }


def perfect_results(gt):
    """What a faultless detector would say of the objects that are no crowd."""
    bbox_results, segm_results = [], []
    for annotation in gt["annotations"]:
        if annotation.get("iscrowd"):
            continue
        entry = {key: annotation[key] for key in ("image_id", "category_id")} | {"score": 0.9}
        code = coco_mask.merge(coco_mask.frPyObjects(annotation["segmentation"], 100, 120))
        code["counts"] = code["counts"].decode()
        bbox_results.append({**entry, "bbox": annotation["bbox"]})
        segm_results.append({**entry, "segmentation": code})
    return bbox_results, segm_results


def published_numbers(text, iou_type):
    """The twelve numbers that the published listing shows under one type."""
    section = re.search(rf"type={iou_type}\n(.*?)(?=\n-{{9}}|\Z)", text, re.DOTALL)[1]
    return [float(number) for number in re.findall(r"\] = (-?\d\.\d+)", section)]


def test_score_reproduces_the_published_numbers():
    folder = shared("data/eval_oracle")
    metrics = score(
        folder / "instances_val2014_100.json",
        load_results(folder / "instances_val2014_fakebbox100_results.json"),
        load_results(folder / "instances_val2014_fakesegm100_results.json"),
    )
    text = (folder / "val2014_fake_eval_res.txt").read_text()
    for prefix, iou_type in (("", "bbox"), ("mask_", "segm")):
        published = published_numbers(text, iou_type)
        assert len(published) == 12
        measured = [round(metrics[prefix + name], 3) for name in METRIC_NAMES]
        assert measured == published


def test_perfect_results_score_one_and_ignore_the_crowd():
    gt = ground_truth()
    bbox_results, segm_results = perfect_results(gt)
    # A detection inside the crowd region is neither right nor wrong.
    extra = {"image_id": 2, "category_id": 3, "score": 0.99}
    bbox_results.append({**extra, "bbox": [85, 65, 20, 20]})
    inside = np.zeros((100, 120), np.uint8, order="F")
    inside[65:85, 85:105] = 1
    code = coco_mask.encode(inside)
    segm_results.append({**extra, "segmentation": {**code, "counts": code["counts"].decode()}})
    metrics = score(gt, bbox_results, segm_results)
    assert metrics["AP"] == metrics["mask_AP"] == pytest.approx(1.0)
    assert metrics["APl"] == -1  # no large object
    assert metrics["per_category"] == {
        name: {"AP": pytest.approx(1.0), "mask_AP": pytest.approx(1.0)} for name in ("cat", "dog")
    }


def test_score_is_quiet_and_leaves_its_arguments_alone(capfd):
    gt = ground_truth()
    results = perfect_results(gt)
    before = copy.deepcopy((gt, results))
    score(gt, *results)
    assert (gt, results) == before
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_per_category_equals_the_score_of_that_category_alone():
    folder = shared("data/eval_oracle")
    gt = json.loads((folder / "instances_val2014_100.json").read_text())
    results = load_results(folder / "instances_val2014_fakebbox100_results.json")
    metrics = score(gt, results, None)
    for category in gt["categories"][:3]:
        alone = score({**gt, "categories": [category]}, results, None)
        assert metrics["per_category"][category["name"]]["AP"] == alone["AP"]
        assert 0 < alone["AP"] < 1


def test_empty_results_score_zero():
    metrics = score(ground_truth(), [], [])
    assert metrics["AP"] == metrics["ARmax100"] == metrics["mask_AP"] == metrics["mask_APs"] == 0
    assert metrics["mask_APl"] == -1
    assert metrics["per_category"]["cat"] == {"AP": 0, "mask_AP": 0}


def test_ground_truth_without_objects_scores_minus_one():
    gt = {**ground_truth(), "annotations": []}
    metrics = score(gt, perfect_results(ground_truth())[0], None)
    assert metrics["AP"] == metrics["per_category"]["cat"]["AP"] == -1


def test_one_type_alone_gives_only_its_numbers():
    gt = ground_truth()
    bbox_results, segm_results = perfect_results(gt)
    boxes, masks = score(gt, bbox_results, None), score(gt, None, segm_results)
    assert set(boxes) == {*METRIC_NAMES, "per_category"}
    assert set(masks) == {*(f"mask_{name}" for name in METRIC_NAMES), "per_category"}
    assert set(masks["per_category"]["cat"]) == {"mask_AP"}


@pytest.mark.parametrize("missing", ["id", "area", "iscrowd", "bbox"])
def test_annotations_may_lack_what_follows_from_the_rest(missing):
    gt = ground_truth()
    gt["annotations"] = gt["annotations"][:3]
    # A wrong area would show in APs: the square of 30 is small only if its area is right.
    results = perfect_results(gt)
    expected = score(gt, *results)
    for annotation in gt["annotations"]:
        del annotation[missing]
    assert score(gt, *results) == expected


def test_area_is_filled_from_the_box_without_segmentation():
    gt = ground_truth()
    bbox_results, _ = perfect_results(gt)
    expected = score(gt, bbox_results, None)
    for annotation in gt["annotations"]:
        del annotation["segmentation"], annotation["area"]
    assert score(gt, bbox_results, None) == expected


def test_string_ids_score_like_numbers():
    gt = ground_truth()
    for image in gt["images"]:
        image["id"] = f"picture {image['id']}"
    for annotation in gt["annotations"]:
        annotation["image_id"] = f"picture {annotation['image_id']}"
    metrics = score(gt, *perfect_results(gt), image_ids=["picture 1", "picture 2"])
    assert metrics["AP"] == metrics["mask_AP"] == pytest.approx(1.0)


def test_image_ids_restrict_the_score():
    gt = ground_truth()
    bbox_results = [r for r in perfect_results(gt)[0] if r["image_id"] == 1]
    assert score(gt, bbox_results, None)["ARmax100"] == pytest.approx(
        0.75
    )  # cat 1 of 2, dog 1 of 1
    assert score(gt, bbox_results, None, image_ids=[1])["ARmax100"] == pytest.approx(1.0)


def test_box_beside_a_mask_does_not_change_the_mask_score():
    gt = ground_truth()
    bbox_results, segm_results = perfect_results(gt)
    # The box's area is small, the mask's is not.
    both = [{**result, "bbox": [0, 0, 5, 5]} for result in segm_results]
    assert score(gt, None, both) == score(gt, None, segm_results)
    both = [{**b, **s} for b, s in zip(bbox_results, segm_results, strict=True)]
    assert score(gt, *split_results(both)) == score(gt, bbox_results, segm_results)


def test_categories_of_one_name_are_told_apart():
    gt = ground_truth()
    for category in gt["categories"]:
        category["name"] = "thing"
    assert set(score(gt, [], None)["per_category"]) == {"thing (7)", "thing (3)"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda gt: gt.pop("images"), "key 'images' is missing"),
        (lambda gt: gt.pop("annotations"), "key 'annotations' is missing"),
        (lambda gt: gt["annotations"][1].pop("category_id"), "annotations[1] lacks 'category_id'"),
        (lambda gt: gt["annotations"][1].update(image_id=9), "annotation 2: image_id 9 is not in"),
        (
            lambda gt: gt["images"][0].pop("width"),
            "annotation 1 of image 1: refers to an image without 'height' or",
        ),
        (
            lambda gt: gt["annotations"][1].pop("segmentation"),
            "annotation 2 of image 1: lacks 'segm",
        ),
        (
            lambda gt: gt["annotations"][1].update(segmentation=[[1, 2, 3, 4]]),
            "annotation 2 of image 1: polygon of 4",
        ),
        (lambda gt: gt["annotations"][3]["segmentation"].update(size=[9, 9]), "RLE of size"),
        (
            lambda gt: gt["annotations"][3]["segmentation"]["counts"].pop(),
            "annotation 4 of image 2: RLE covers",
        ),
        (
            lambda gt: gt["annotations"][1].update(bbox=[1, 2, float("nan"), 4]),
            "not a finite number",
        ),
        (
            lambda gt: gt["annotations"][1].update(bbox=[1, 2, -3, 4]),
            "annotation 2 of image 1: box",
        ),
    ],
)
def test_faulty_ground_truth_is_named(change, message, tmp_path):
    gt = ground_truth()
    change(gt)
    path = tmp_path / "gt.json"
    path.write_text(json.dumps(gt))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        score(path, [], [])
    assert str(path) in str(error.value)


def test_skip_bad_leaves_faulty_annotations_out():
    gt = ground_truth()
    results = perfect_results(gt)
    bad = {"image_id": 1, "category_id": 7, "bbox": [0, 0, 9, 9], "segmentation": [[1, 1, 2, 2]]}
    no_area = {**bad, "bbox": [0, 0, 0, 9], "segmentation": square(0, 0, 9)}
    more = {**gt, "annotations": [bad, no_area, *gt["annotations"]]}
    truth = read_ground_truth(more, scoring=True, skip_bad=True)
    assert score(truth, *results) == score(gt, *results)


def test_result_of_an_unknown_image_is_named():
    results = [{"image_id": 55, "category_id": 7, "bbox": [1, 1, 2, 2], "score": 0.5}]
    with pytest.raises(ValueError, match="entry 0 refers to image 55"):
        score(ground_truth(), results, None)


@pytest.mark.parametrize(
    ("segmentation", "message"),
    [
        ({"size": [50, 60], "counts": [3000]}, "RLE of size [50, 60]"),
        ({"size": [100, 120], "counts": [5, 10]}, "RLE covers 15 pixels"),
        ({"size": [100, 120], "counts": "5:"}, "RLE covers 15 pixels"),
        ({"size": [100, 120], "counts": "P"}, "cannot be read"),  # ends within a number
        ({"size": [100, 120], "counts": ""}, "cannot be read"),
        ({"counts": [12000]}, "RLE lacks 'size'"),
        ([[1, 1, 6, 1, 6]], "polygon of 5 numbers"),
        ([1, 1, 6, 1, 6, 6], "segmentation is a flat list"),
        ([[[1, 1], [6, 1], [6, 6]]], "polygon of points such as [1, 1]"),
        ([], "segmentation is empty"),
        ("1,2", "neither polygons nor an RLE"),
    ],
)
def test_faulty_result_mask_is_named(segmentation, message):
    result = {"image_id": 1, "category_id": 7, "score": 1, "segmentation": segmentation}
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        score(ground_truth(), None, [result])
    assert "entry 0" in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("{}", "expected a json list"),
        ("[3]", "entry 0 is not an object"),
        ('[{"image_id": 1, "category_id": 2, "bbox": [1, 2, 3, 4]}]', "entry 0 has no 'score'"),
        ('[{"image_id": 1, "category_id": 2, "score": 1}]', "neither 'bbox' nor"),
        (
            '[{"image_id": 1, "category_id": 2, "score": 1, "bbox": [1, 2]}]',
            "entry 0 has a 'bbox' that",
        ),
        (
            '[{"image_id": 1, "category_id": 2, "score": 1, "bbox": [1, 2, 3, 4]},'
            ' {"image_id": 1, "category_id": 2, "score": 1, "segmentation": {}}]',
            "entry 1 has no 'bbox'",
        ),
    ],
)
def test_faulty_results_file_is_named(content, message, tmp_path):
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_results(path)
    assert str(path) in str(error.value)


def test_missing_results_file_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match=r"nothing\.json"):
        load_results(tmp_path / "nothing.json")


def test_format_table_shows_both_types_side_by_side():
    gt = ground_truth()
    lines = format_table(score(gt, *perfect_results(gt))).splitlines()
    assert lines[0].split() == ["box", "mask"]
    assert [line.split()[0] for line in lines[1:13]] == list(METRIC_NAMES)
    assert lines[1].split()[-2:] == ["1.000", "1.000"]
    assert lines[14].split() == ["cat", "1.000", "1.000"]
    boxes = format_table(score(gt, perfect_results(gt)[0], None)).splitlines()
    assert boxes[0].split() == ["box"]
    assert boxes[1].split()[-1] == "1.000"


def detections(boxes, classes, scores, valid, masks=None):
    shape = np.shape(valid)
    return Detections(
        boxes=np.array(boxes, np.float32).reshape(*shape, 4),
        scores=np.array(scores, np.float32).reshape(shape),
        classes=np.array(classes, np.int32).reshape(shape),
        masks=np.ones((*shape, 28, 28), np.float32) if masks is None else masks,
        valid=np.array(valid),
    )


def test_to_coco_results_goes_back_to_original_pixels_and_ids():
    batch = detections(
        boxes=[
            [[20, 30, 60, 50], [0, 0, 999, 999]],  # the second is padding
            [[1, 1, 9, 9], [1, 1, 9, 9]],  # an image that fills the batch
            [[-8, 4, 40, 16], [80, 40, 160, 90]],  # both stick out of the picture
        ],
        classes=[[2, 0], [1, 1], [1, 2]],
        scores=[[0.75, 0], [1, 1], [0.5, 0.25]],
        valid=[[True, False], [True, True], [True, True]],
    )
    bbox_results, segm_results = to_coco_results(
        batch,
        scales=np.array([[0.5, 2.0], [1.0, 1.0], [0.4, 0.8]], np.float32),
        image_ids=[42, None, "b"],
        image_sizes_original=[(200, 100), (1, 1), (120, 150)],
        category_ids=[11, 90],
    )
    assert bbox_results == [
        {"image_id": 42, "category_id": 90, "score": 0.75, "bbox": [10.0, 60.0, 20.0, 40.0]},
        {"image_id": "b", "category_id": 11, "score": 0.5, "bbox": [0.0, 10.0, 50.0, 30.0]},
        {"image_id": "b", "category_id": 90, "score": 0.25, "bbox": [100.0, 100.0, 50.0, 20.0]},
    ]
    json.dumps([bbox_results, segm_results])  # nothing of numpy is left in it
    for box, mask in zip(bbox_results, segm_results, strict=True):
        assert {k: box[k] for k in ("image_id", "category_id", "score")} == {
            k: mask[k] for k in ("image_id", "category_id", "score")
        }
        assert isinstance(mask["segmentation"]["counts"], str)
        assert coco_mask.toBbox(mask["segmentation"]).tolist() == box["bbox"]  # masks are full
    assert segm_results[0]["segmentation"]["size"] == [200, 100]
    assert segm_results[1]["segmentation"]["size"] == [120, 150]


def test_mask_is_not_squeezed_where_its_box_is_clipped():
    masks = np.zeros((1, 1, 28, 28), np.float32)
    masks[..., :14] = 1  # the left half of the box lies outside the picture
    batch = detections([[[-20, 0, 20, 20]]], [[1]], [[1]], [[True]], masks)
    _, (result,) = to_coco_results(batch, np.ones((1, 2)), [1], [(20, 30)], [1])
    assert coco_mask.area(result["segmentation"]) == 0


def test_detections_of_a_perfect_model_score_one():
    gt = ground_truth()
    objects = [a for a in gt["annotations"] if not a["iscrowd"]]
    classes = {3: 1, 7: 2}
    boxes = [[a["bbox"][0], a["bbox"][1], *np.add(a["bbox"][:2], a["bbox"][2:])] for a in objects]
    batch = detections(
        boxes=[[boxes[0], boxes[1]], [boxes[2], [0, 0, 0, 0]]],
        classes=[[classes[a["category_id"]] for a in objects] + [0]],
        scores=[0.9, 0.8, 0.7, 0],
        valid=[[True, True], [True, False]],
    )
    results = to_coco_results(batch, np.ones((2, 2)), [1, 2], [(100, 120)] * 2, [3, 7])
    metrics = score(gt, *results)
    assert metrics["AP"] == metrics["mask_AP"] == pytest.approx(1.0)
