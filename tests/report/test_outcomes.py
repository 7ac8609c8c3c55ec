"""Counts at every score threshold, and the objects' sizes, of an example worked by hand."""

import numpy as np
import pytest

from mask_rcnn_jax.report.charts import found_histogram
from mask_rcnn_jax.report.outcomes import POSITIONS, last_positions, thresholds
from tests.report.report_case import ground_truth, results_of
from tests.report.test_analysis import KINDS, analysis_of


@pytest.fixture(params=KINDS)
def case(request):
    """Categories dog (3), bird (5) and cat (7)."""
    return analysis_of(ground_truth(), results_of(request.param), request.param)[0]


def remaining(counts, position):
    return counts[:, position:].sum(axis=1).tolist()


def test_counts_at_a_threshold(case):
    objects, found, false = case.counts
    assert objects.tolist() == [2, 0, 2]
    for percent, right, wrong in (
        (91, [0, 0, 0], [0, 0, 0]),
        (90, [0, 0, 1], [0, 0, 0]),
        (75, [1, 0, 1], [0, 0, 2]),
        (60, [1, 0, 1], [0, 1, 2]),
        (30, [1, 0, 1], [0, 1, 5]),
        (20, [1, 0, 2], [0, 1, 5]),
        (0, [1, 0, 2], [0, 1, 5]),
    ):
        assert remaining(found, percent) == right, percent
        assert remaining(false, percent) == wrong, percent


def test_counts_are_those_of_the_results_that_reach_the_threshold(case):
    """Scored anew without the others, by pycocotools."""
    for position in range(0, POSITIONS, 5):
        kept = [r for r in results_of(case.kind) if r["score"] >= case.limits[position]]
        alone, _ = analysis_of(ground_truth(), kept, case.kind)
        assert remaining(case.counts.found, position) == alone.counts.found.sum(axis=1).tolist()
        assert remaining(case.counts.false, position) == alone.counts.false.sum(axis=1).tolist()


def test_a_score_reaches_the_thresholds_up_to_its_own():
    limits = thresholds(0.0, 1.0)
    percents = np.arange(POSITIONS)
    np.testing.assert_array_equal(last_positions(percents / 100, limits), percents)
    assert last_positions([0.0049, 0.01, 1.0, -0.1, -np.inf], limits).tolist() == [
        0,
        1,
        100,
        -1,
        -1,
    ]
    assert thresholds(-1.0, 6.0)[[0, 50, 100]].tolist() == [-1, 2.5, 6]


def test_objects_have_their_size_shape_and_fate(case):
    order = np.argsort(case.shapes.sides)
    assert case.shapes.sides[order].tolist() == pytest.approx([20, 30, 40, 60])
    assert case.shapes.aspects.tolist() == pytest.approx([1] * 4)
    # The threshold is 0.75: the largest is found with 0.2, the dog of 40 not at all.
    assert case.shapes.found[order].tolist() == [True, True, False, False]


def test_images_to_browse_have_all_that_counts(case):
    assert [shown.image["id"] for shown in case.browsed] == [1, 2]
    first, second = case.browsed
    assert [(one.category, one.score) for one in first.objects] == [(0, -np.inf), (2, 0.9)]
    scores = [one.score for one in first.detections]
    assert scores == [0.9, 0.8, 0.3, 0.3, 0.3]
    assert [one.is_true for one in first.detections] == [True, False, False, False, False]
    # Without the crowd and what was found in it.
    assert [one.score for one in second.objects] == [0.75, 0.2]
    assert [one.score for one in second.detections] == [0.85, 0.75, 0.6, 0.2]


def test_bars_of_a_histogram():
    """Half powers of two from 2 to 8; what is outside goes into the outer bins."""
    values = np.array([0.0, 1.9, 2.0, 2.9, 4.0, 5.0, 5.6, 8.0, 99.0, np.inf])
    found = np.array([1, 0, 1, 1, 1, 0, 1, 1, 0, 0], bool)
    svg = found_histogram("Sizes", "pixels", values, found, (1, 3))
    told = [part.split("</title>")[0] for part in svg.split("<rect")[1:] if "<title>" in part]
    told = [part.split("<title>")[1] for part in told]
    assert told == [
        *["2 to 2.83: 2 found, 1 missed"] * 2,
        *["2.83 to 4: 1 found, 0 missed"] * 2,
        *["4 to 5.66: 2 found, 1 missed"] * 2,
        *["5.66 to 8: 1 found, 2 missed"] * 2,
    ]
