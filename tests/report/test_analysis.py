"""What a report shows of an evaluation, against numbers worked by hand and pycocotools' own."""

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from mask_rcnn_jax.evaluation import coco
from mask_rcnn_jax.report.analysis import DEFAULT_THRESHOLD, analyze, best_threshold
from mask_rcnn_jax.report.errors import MAX_PER_IMAGE, MAX_SHOWN
from tests.helpers import shared
from tests.report.report_case import CROWD, ground_truth, results_of, square_results

KINDS = ["box", "mask"]


def analysis_of(gt, results, kind="box"):
    """The analysis of results of one kind, and pycocotools' metrics without their prefix."""
    found = []
    pair = (results, None) if kind == "box" else (None, results)
    metrics = coco.score(gt, *pair, callback=lambda evaluation: found.append(analyze(evaluation)))
    prefix = "" if kind == "box" else "mask_"
    return found[0], {name.removeprefix(prefix): value for name, value in metrics.items()}


@pytest.fixture(params=KINDS)
def case(request):
    """The analysis of the worked example: categories dog (3), bird (5) and cat (7)."""
    return analysis_of(ground_truth(), results_of(request.param), request.param)[0]


def test_threshold_is_that_of_the_best_f1(case):
    """Right of 4 objects, surest first: R W W R W W W W R; 2 * 2 / (4 + 4) is the best."""
    assert case.threshold == 0.75
    assert (case.num_true, case.num_false, case.num_objects) == (2, 2, 4)


def test_confusion(case):
    assert case.categories == ["dog", "bird", "cat"]
    assert case.confusion.tolist() == [
        # dog, bird, cat, missed
        [1, 0, 1, 0],
        [0, 0, 0, 0],
        [0, 0, 1, 1],
        [0, 0, 1, 0],
    ]


def test_misses(case):
    told = [(miss.name, miss.image["id"], miss.note, miss.box) for miss in case.misses]
    assert told == [
        ("dog", 1, "nothing found", (50, 40, 40, 40)),
        ("cat", 2, "found with score 0.20", (5, 5, 60, 60)),
    ]
    assert [miss.cost for miss in case.misses] == pytest.approx([1, 0.8])


def test_false_positives(case):
    told = [
        (error.name, error.image["id"], error.note, error.box) for error in case.false_positives
    ]
    overlap = 20 * 10 / (60 * 60 + 20 * 20 - 20 * 10)
    assert told == [
        ("cat", 2, f"IoU {overlap:.2f} with the nearest cat", (55, 10, 20, 20)),
        ("cat", 1, "no cat there", (50, 40, 40, 40)),
    ]
    assert [error.cost for error in case.false_positives] == pytest.approx([0.85, 0.8])


def test_an_error_holds_the_instances_of_its_image(case):
    miss = case.misses[0]
    assert [(shape.name, shape.score, shape.is_error) for shape in miss.truth] == [
        ("dog", None, True),
        ("cat", None, False),
    ]
    # Detections below the threshold are not shown.
    assert [(shape.name, shape.score, shape.is_error) for shape in miss.detections] == [
        ("cat", 0.9, False),
        ("cat", 0.8, False),
    ]
    assert all(
        (shape.mask is None) == (case.kind == "box") for shape in miss.truth + miss.detections
    )
    assert "dog (crowd)" in [shape.name for shape in case.misses[1].truth]


def test_objects_by_category_and_size(case):
    # all, small (< 32 x 32), medium, large; the crowd counts nowhere
    assert case.objects.tolist() == [[2, 1, 1, 0], [0, 0, 0, 0], [2, 1, 1, 0]]


def test_histogram_counts_every_detection_that_counts(case):
    assert case.histogram_range == (0, 1)
    edges = np.linspace(0, 1, case.histogram.shape[1] + 1)
    true, false = (
        [value for low, n in zip(edges, row, strict=False) for value in [low] * n]
        for row in case.histogram
    )
    assert true == pytest.approx([0.2, 0.72, 0.88])
    assert false == pytest.approx([0.28, 0.28, 0.28, 0.6, 0.8, 0.84])


def test_scores_that_are_no_probabilities_have_their_own_range():
    results = [{**result, "score": 10 * result["score"] - 3} for result in results_of("box")]
    found, _ = analysis_of(ground_truth(), results)
    assert found.histogram_range == (-1, pytest.approx(6))
    assert found.histogram.sum() == 9


@pytest.mark.parametrize("kind, name", [("box", "bbox"), ("mask", "segm")])
def test_numbers_are_those_of_pycocotools(kind, name):
    folder = shared("data/eval_oracle")
    results = coco.load_results(folder / f"instances_val2014_fake{name}100_results.json")
    found, metrics = analysis_of(folder / "instances_val2014_100.json", results, kind)
    names = [name for name in coco.METRIC_NAMES if name not in ("ARmax1", "ARmax10")]
    assert found.stats == {name.replace("max100", ""): metrics[name] for name in names}
    expected = [
        aps["AP" if kind == "box" else "mask_AP"] for aps in metrics["per_category"].values()
    ]
    assert found.category_ap[:, 0].tolist() == pytest.approx(expected)
    with_truth = found.category_ap[:, 0] >= 0
    for column, name in enumerate(("AP", "AP50", "AP75")):
        assert found.category_ap[with_truth, column].mean() == pytest.approx(metrics[name])
    assert found.precision[0].mean() == pytest.approx(metrics["AP50"])
    assert found.precision.mean() == pytest.approx(metrics["AP"])
    # Every object is in one row of the matrix, every detection that counts in one column.
    assert (found.confusion[:-1].sum(axis=1) == found.objects[:, 0]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("truth", [True, False])
@pytest.mark.parametrize("some", [True, False])
def test_nothing_to_find_and_nothing_found(kind, truth, some):
    gt = ground_truth() if truth else {**ground_truth(), "annotations": []}
    found, _ = analysis_of(gt, results_of(kind) if some else [], kind)
    assert (found.precision is None) == (not truth)
    if not (truth and some):
        assert found.threshold == DEFAULT_THRESHOLD
        assert found.num_true == 0
        assert len(found.misses) == found.num_objects == (4 if truth else 0)
        # The one in the crowd is false where there is no crowd. Two of each picture are shown.
        assert found.num_false == (6 if some else 0)
        assert len(found.false_positives) == (4 if some else 0)
        assert found.confusion[:, -1].sum() == found.num_objects
        assert found.confusion[-1].sum() == found.num_false
    assert found.category_ap[1].tolist() == [-1, -1, -1]


@pytest.mark.parametrize(
    "scores, is_true, num_objects, expected",
    [
        ([0.3, 0.9, 0.6], [True, True, False], 2, 0.3),  # 2/3, 2/4, 4/5
        ([0.9, 0.8], [True, True], 5, 0.8),
        ([0.5, 0.5, 0.4], [True, False, False], 1, 0.5),  # 2/3 for the two together, 2/4
        ([0.9, 0.8, 0.8, 0.8], [True, True, False, False], 2, 0.9),  # 2/3, not 4/4 of 0.8 alone
        ([0.9], [False], 3, DEFAULT_THRESHOLD),
        ([], [], 0, DEFAULT_THRESHOLD),
    ],
)
def test_best_threshold(scores, is_true, num_objects, expected):
    assert best_threshold(np.array(scores), np.array(is_true, bool), num_objects) == expected


def test_errors_shown_are_the_costliest_and_few_per_image():
    images = [{"id": i, "height": 100, "width": 120, "file_name": f"{i}"} for i in range(20)]
    gt = {"images": images, "categories": [{"id": 1, "name": "cat"}], "annotations": []}
    results = [
        {
            "image_id": i,
            "category_id": 1,
            "score": 0.99 - 0.01 * i - 0.001 * j,
            "bbox": [9 * j, 0, 9, 9],
        }
        for i in range(20)
        for j in range(4)
    ]
    found, _ = analysis_of(gt, results)
    assert found.num_false == 80
    shown = [(error.image["id"], error.box[0] // 9) for error in found.false_positives]
    assert shown == [
        (i, j) for i in range(MAX_SHOWN // MAX_PER_IMAGE) for j in range(MAX_PER_IMAGE)
    ]


def test_of_equal_costs_the_larger_object_comes_first():
    gt = ground_truth()
    found, _ = analysis_of(gt, [])
    assert [miss.box[2] for miss in found.misses] == [60, 40, 30, 20]


def test_crowd_detections_are_no_errors():
    crowd = coco_mask.toBbox(coco_mask.frPyObjects(CROWD["segmentation"], 100, 120)).tolist()
    results = square_results("box", [(2, 3, *crowd[:3], 0.99)])
    found, _ = analysis_of(ground_truth(), results)
    assert found.num_false == 0 and not found.histogram.any()
