"""Scores equal those of pycocotools alone, to the bit, on any file that it scores."""

import contextlib
import copy
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from mask_rcnn_jax.evaluation.coco import METRIC_NAMES, score

HEIGHT, WIDTH = 40, 60


def plain_pycocotools(gt, results, iou_type):
    """The twelve numbers of a script that calls pycocotools and nothing else."""
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = copy.deepcopy(gt)
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(copy.deepcopy(results)), iou_type)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats.tolist()


def ours(gt, results, iou_type):
    pair = (results, None) if iou_type == "bbox" else (None, results)
    prefix = "" if iou_type == "bbox" else "mask_"
    metrics = score(gt, *pair)
    return [metrics[prefix + name] for name in METRIC_NAMES]


def code_of(x, y, width, height):
    mask = np.zeros((HEIGHT, WIDTH), np.uint8, order="F")
    x1, y1, x2, y2 = (max(0, round(v)) for v in (x, y, x + width, y + height))
    mask[y1:y2, x1:x2] = 1
    code = coco_mask.encode(mask)
    return {"size": [HEIGHT, WIDTH], "counts": code["counts"].decode()}


def uncompressed(x, y, width, height):
    pixels = coco_mask.decode(code_of(x, y, width, height)).ravel("F")
    edges = np.flatnonzero(np.diff(pixels)) + 1
    runs = np.diff([0, *edges, pixels.size]).tolist()
    return {"size": [HEIGHT, WIDTH], "counts": [0, *runs] if pixels[0] else runs}


def polygons(x, y, width, height):
    return [[x, y, x + width, y, x + width, y + height, x, y + height]]


def in_parts(x, y, width, height):
    half = width / 2
    more = polygons(x + half, y, half, height)
    return [*polygons(x, y, half, height / 3), *more, [x, y, x + 5.5, y + 3]]  # the last is a line


SIDE = st.one_of(st.integers(0, 45), st.floats(0, 45, width=32))
BOX = st.tuples(st.integers(-5, 62), st.floats(-5, 42, width=32), SIDE, SIDE)
ANNOTATION_IDS = {
    "numbers": lambda n: n,  # 0 is the first: pycocotools takes a match with it for none
    "from one": lambda n: n + 1,
    "negative": lambda n: n - 2,
    "strings": lambda n: str(n),
    "fractions": lambda n: f"{n}.0",
}
IDS = {"numbers": (3, 20, 100), "strings": ("3", "20", "100"), "names": ("b", "a", "Z")}


@st.composite
def cases(draw):
    """Ground truth, and results of boxes and of masks."""
    image_ids, category_ids = (IDS[draw(st.sampled_from(sorted(IDS)))] for _ in range(2))
    new_id = ANNOTATION_IDS[draw(st.sampled_from(sorted(ANNOTATION_IDS)))]
    annotations, boxes, masks = [], [], []
    for n in range(draw(st.integers(1, 6))):
        place = {
            "image_id": draw(st.sampled_from(image_ids)),
            "category_id": draw(st.sampled_from(category_ids)),
        }
        box = list(draw(BOX))
        shape = draw(st.sampled_from([code_of, uncompressed, polygons, in_parts]))
        entry = place | {
            "id": new_id(n),
            "bbox": box,
            "area": draw(st.one_of(SIDE, st.sampled_from([31**2, 32**2, 1025, 96**2, 1e5]))),
            "iscrowd": draw(st.sampled_from([0, 0, 0, 1, False, True])),
            "segmentation": shape(*box),
        }
        annotations.append(entry)
        for _ in range(draw(st.integers(0, 2))):
            moved = [v + draw(st.sampled_from([0, 0, 0.5, 2])) for v in box]
            result = place | {"score": draw(st.sampled_from([0.25, 0.5, 0.5, 0.75, 1]))}
            boxes.append(result | {"bbox": moved})
            masks.append(result | {"segmentation": code_of(*moved)})
    size = {"height": HEIGHT, "width": WIDTH}
    gt = {
        "images": [{"id": i, "file_name": f"{i}.jpg", **size} for i in image_ids],
        "categories": [{"id": i, "name": f"class {i}"} for i in category_ids],
        "annotations": annotations,
    }
    return gt, boxes, masks


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(cases())
def test_any_file_scores_as_with_pycocotools(case):
    gt, boxes, masks = case
    if boxes:  # pycocotools cannot load an empty list
        assert ours(gt, boxes, "bbox") == plain_pycocotools(gt, boxes, "bbox")
        assert ours(gt, masks, "segm") == plain_pycocotools(gt, masks, "segm")


def one_object(**keys):
    box = [5, 5, 30, 30]
    entry = {"id": 1, "image_id": 1, "category_id": 1, "bbox": box, "area": 900, "iscrowd": 0}
    return {
        "images": [{"id": 1, "file_name": "a.jpg", "height": 40, "width": 60}],
        "categories": [{"id": 1, "name": "cat"}],
        "annotations": [entry | {"segmentation": polygons(*box)} | keys],
    }, [{"image_id": 1, "category_id": 1, "score": 0.5, "bbox": box}]


@pytest.mark.parametrize("shape", [polygons, in_parts])
def test_results_may_be_polygons_as_in_pycocotools(shape):
    gt, (box,) = one_object()
    for moved in ([5, 5, 30, 30], [6, 5, 28.5, 33], [0, 0, 10, 10]):
        result = box | {"bbox": moved, "segmentation": shape(*moved)}
        expected = plain_pycocotools(gt, [result], "segm")
        assert ours(gt, [result], "segm")[:3] == expected[:3]
        del result["bbox"]  # without which pycocotools fails
        assert ours(gt, [result], "segm")[:3] == expected[:3]


@pytest.mark.parametrize("annotation_id, ap", [(0, 0), ("0", 0), (1, 1), (-1, 1), ("x", 1)])
def test_a_match_with_annotation_0_is_a_mistake_as_in_pycocotools(annotation_id, ap):
    gt, results = one_object(id=annotation_id)
    assert score(gt, results, None)["AP"] == pytest.approx(ap)
    if annotation_id != "x":
        assert ours(gt, results, "bbox") == plain_pycocotools(gt, results, "bbox")


@pytest.mark.parametrize(
    "area, small, medium, large",
    [
        (0, 1, -1, -1),
        (31**2 + 1, 1, -1, -1),
        (32**2, 1, 1, -1),  # the ends belong to both
        (32**2 + 1, -1, 1, -1),
        (96**2, -1, 1, 1),
        (96**2 + 1, -1, -1, 1),
    ],
)
def test_small_medium_and_large_are_those_of_coco(area, small, medium, large):
    gt, results = one_object(area=area)
    metrics = score(gt, results, None)
    expected = {"APs": small, "APm": medium, "APl": large}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_boxes_alone_score_where_pycocotools_needs_no_more():
    """No file names, sizes, names of categories or masks, and a mask that nobody looks at."""
    gt, results = one_object(segmentation=[[1, 2]])
    gt["images"], gt["categories"] = [{"id": 1}], [{"id": 1}]
    more = {"image_id": 1, "category_id": 1, "iscrowd": 0}
    gt["annotations"].append(more | {"id": 7, "bbox": [50, 5, 0, 9], "area": 0})
    other = more | {"id": 8, "category_id": 5}  # a category that is not listed
    gt["annotations"].append(other | {"bbox": [90, 5, 9, 9], "area": 81})
    assert ours(gt, results, "bbox") == plain_pycocotools(gt, results, "bbox")
