"""Early stopping: the rule by hand, and runs that it ends, interrupted or not."""

import math
import signal
from types import SimpleNamespace

import pytest

from mask_rcnn_jax import parts
from mask_rcnn_jax.annotations.keypoints import Keypoints
from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.recipe.options import TrainOptions
from mask_rcnn_jax.recipe.stopping import StopRule, ap, comparable, main_ap, measure
from mask_rcnn_jax.training import work
from mask_rcnn_jax.training.checks import check_evaluated
from tests.helpers import tiny_config
from tests.training.stubbed_run import kept, run, series, stubbed

__all__ = ["stubbed"]


def aps(*values: float | None) -> list[dict]:
    return [{"ap/box": 0.9, "ap/mask": value} for value in values]


@pytest.mark.parametrize(
    ("options", "values", "stalled"),
    [
        ({"patience": 0}, (0.5, 0.1, 0.1, 0.1), False),
        ({"patience": 2}, (), False),
        ({"patience": 2}, (0.5, 0.4), False),
        ({"patience": 2}, (0.5, 0.4, 0.5), True),
        ({"patience": 2}, (0.5, 0.4, 0.51), False),
        ({"patience": 2}, (0.1, 0.5, 0.4, 0.6, 0.2), False),
        ({"patience": 1}, (0.5, 0.5), True),
        # A slow rise counts once it adds up.
        ({"patience": 3, "min_improvement": 0.05}, (0.5, 0.52, 0.54, 0.56), False),
        ({"patience": 2, "min_improvement": 0.05}, (0.5, 0.52, 0.54), True),
        # APs of a set that has no object to score say nothing.
        ({"patience": 2}, (None, math.nan, -1.0, -1.0), False),
        ({"patience": 2}, (0.5, -1.0, 0.4, -1.0), False),
        ({"patience": 2}, (0.5, -1.0, 0.4, -1.0, 0.3), True),
        ({"patience": 2}, (None, 0.1), False),
    ],
)
def test_a_run_is_stalled_after_so_many_evaluations(options, values, stalled):
    assert StopRule(**options).is_stalled(aps(*values)) == stalled


def test_scores_of_all_detections_count_where_there_are_some():
    cut = {"ap/box": 0.07, "ap/mask": 0.06, "ap/box_at_1600": 0.9, "ap/mask_at_1600": 0.8}
    assert main_ap(cut) == 0.8 and ap(cut, "box") == 0.9
    assert main_ap({"ap/box": 0.07, "ap/box_at_300": 0.5, "ap/box_rare": 0.1}) == 0.5
    assert math.isnan(main_ap(cut | {"ap/mask_at_1600": None}))
    rule = StopRule(stop_at_box_ap=0.85, stop_at_mask_ap=0.75)
    assert rule.is_reached(cut) and not rule.is_reached(cut | {"ap/mask_at_1600": 0.7})
    worse = [cut | {"ap/mask": 0.06 + n, "ap/mask_at_1600": 0.8 - n} for n in (0, 0.01, 0.02)]
    assert StopRule(patience=2).is_stalled(worse)


def test_keypoints_come_before_masks():
    found = {"ap/box": 0.7, "ap/mask": 0.6, "ap/keypoints": 0.5}
    assert (main_ap(found), measure(found)) == (0.5, "ap/keypoints")
    rule = StopRule(stop_at_keypoints_ap=0.5, stop_at_box_ap=0.6)
    assert rule.is_reached(found) and not rule.is_reached(found | {"ap/keypoints": 0.4})
    assert rule.needs_evaluation() == {"stop_at_box_ap": 0.6, "stop_at_keypoints_ap": 0.5}
    rows = [found | {"ap/keypoints": value} for value in (0.5, 0.4, 0.4)]
    assert StopRule(patience=2).is_stalled(rows)


def test_boxes_count_where_there_are_no_masks():
    assert main_ap({"ap/box": 0.3}) == 0.3
    assert main_ap({"ap/box": 0.3, "ap/mask": 0.2}) == 0.2


@pytest.mark.parametrize(
    "options", [{"patience": -1}, {"min_improvement": -0.1}, {"min_improvement": math.nan}]
)
def test_values_without_meaning_are_refused(options):
    with pytest.raises(ValueError, match=f"^train.{next(iter(options))} is .*, expected at least"):
        parts.build(TrainOptions, options, "train")


LINE = "finished at step 12: 2 evaluations in a row improved nothing, the best AP is 0.5000, of "
PATIENT = {"steps": 40, "patience": 2}  # evaluations every three steps: .3, .5, .1, .4


def test_a_run_ends_with_one_line_and_stays_ended(stubbed, tmp_path, caplog):
    with caplog.at_level("INFO"):
        assert int(run(tmp_path, **PATIENT).step) == 12
    assert LINE + "step 6" in [record.getMessage() for record in caplog.records]
    with caplog.at_level("INFO"):
        assert int(run(tmp_path, **PATIENT).step) == 12
    assert f"nothing to do: {tmp_path} is finished at step 12" in caplog.text


@pytest.mark.slow
def test_more_patience_lets_it_go_on(stubbed, tmp_path):
    run(tmp_path, **PATIENT)
    assert int(run(tmp_path, steps=40, patience=5).step) == 21


@pytest.fixture
def dense(stubbed, monkeypatch):
    """Evaluations of images with many objects, of which COCO's AP says nothing."""
    make_stub = work.make_validation

    def make(recipe, *arguments):
        validate, limit = make_stub(recipe, *arguments), recipe.eval.detections_per_image

        def cut(state):
            metrics, images = validate(state)
            at_limit = {f"{name}_at_{limit}": value for name, value in metrics.items()}
            rising = 0.01 * int(state.step)
            return {"ap/box": rising, "ap/mask": rising, **at_limit}, images

        return cut

    monkeypatch.setattr(work, "make_validation", make)


@pytest.mark.slow
def test_many_objects_stop_by_the_score_of_all_detections(dense, tmp_path, caplog):
    def stop(step, metrics, images):
        if step == 7 and "loss/total" in metrics:
            signal.raise_signal(signal.SIGTERM)

    with caplog.at_level("INFO"):
        assert int(run(tmp_path / "whole", **PATIENT).step) == 12
    assert LINE + "step 6" in caplog.text
    assert "6" in kept(tmp_path / "whole")
    with pytest.raises(SystemExit):
        run(tmp_path / "cut", [stop], **PATIENT)
    assert int(run(tmp_path / "cut", **PATIENT).step) == 12
    assert series(tmp_path / "cut") == series(tmp_path / "whole")
    assert kept(tmp_path / "cut") == kept(tmp_path / "whole")


@pytest.mark.slow
def test_scores_of_another_number_of_detections_are_not_compared(dense, tmp_path, caplog):
    """.3 and .5 of 300 detections, then .1, .4, .3, .5, .1 and .4 of 200."""

    def stop(step, metrics, images):
        if step == 7 and "loss/total" in metrics:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit):
        run(tmp_path, [stop], scoring={"detections_per_image": 300}, **PATIENT)
    assert "eval." not in caplog.text
    with caplog.at_level("INFO"):
        assert int(run(tmp_path, scoring={"detections_per_image": 200}, **PATIENT).step) == 24
    assert "eval.detections_per_image was 300 and is 200 now: earlier APs" in caplog.text
    assert "improved nothing, the best AP is 0.5000, of step 18" in caplog.text
    assert {"6", "18", "24"} <= {*kept(tmp_path)}
    assert "15" not in kept(tmp_path)


def test_other_rules_of_scores_are_said(stubbed, tmp_path, caplog):
    run(tmp_path, steps=3)
    same = {"batch_size": 2, "engine": "pycocotools", "pictures": 0}
    run(tmp_path, steps=6, scoring=same)
    assert "earlier APs" not in caplog.text
    run(tmp_path, steps=9, scoring=same | {"max_images": 2, "nms_thresh": 0.7})
    assert "eval.max_images was 0 and is 2 now, and 1 more: earlier APs" in caplog.text


def test_what_is_comparable():
    coco = [{"ap/box": 0.1, "ap/mask": 0.1}, {"ap/box": 0.1, "ap/mask": None}]
    limited = [one | {"ap/box_at_300": 0.9, "ap/mask_at_300": 0.9} for one in coco]
    assert measure(coco[0]) == "ap/mask" and measure(limited[0]) == "ap/mask_at_300"
    assert measure({"ap/box": 0.1, "ap/box_at_300": 0.2}) == "ap/box_at_300"
    assert comparable([]) == []
    assert comparable([*coco, *limited]) == limited and comparable([*limited, *coco]) == coco
    patient = StopRule(patience=2)
    assert patient.is_stalled([*limited, *limited, coco[0], coco[0], coco[0]])
    assert not patient.is_stalled([*limited, coco[0], coco[0]])


@pytest.mark.parametrize("step", [pytest.param(7, marks=pytest.mark.slow), 9])
@pytest.mark.slow
def test_an_interrupted_run_counts_on(step, stubbed, tmp_path):
    def stop(step_, metrics, images):
        if step_ == step and "loss/total" in metrics:
            signal.raise_signal(signal.SIGTERM)

    run(tmp_path / "whole", **PATIENT)
    with pytest.raises(SystemExit):
        run(tmp_path / "cut", [stop], **PATIENT)
    assert int(run(tmp_path / "cut", **PATIENT).step) == 12
    assert series(tmp_path / "cut") == series(tmp_path / "whole")


def test_a_run_without_an_evaluation_cannot_wait_for_one(stubbed, tmp_path):
    from tests.training.test_without_validation import run as run_without

    with pytest.raises(ValueError, match="train.patience is 3, which needs an evaluation"):
        run_without(tmp_path, patience=3)


def test_a_mask_ap_that_is_not_measured_cannot_be_reached():
    masks, boxes = (SimpleNamespace(boxes_only=boxes_only) for boxes_only in (False, True))
    both = StopRule(stop_at_box_ap=0.3, stop_at_mask_ap=0.3)
    check_evaluated(both, masks, learns_masks=True, finds_keypoints=False)
    message = "^train.stop_at_mask_ap is 0.3, expected 0 where no masks"
    for val_set, learns_masks in ((masks, False), (boxes, True)):
        with pytest.raises(ValueError, match=message):
            check_evaluated(both, val_set, learns_masks=learns_masks, finds_keypoints=False)
    check_evaluated(StopRule(stop_at_box_ap=0.3), masks, learns_masks=False, finds_keypoints=False)


def test_a_keypoints_ap_that_is_not_measured_cannot_be_reached():
    rule = StopRule(stop_at_keypoints_ap=0.3)
    points = SimpleNamespace(boxes_only=True, keypoints=Keypoints(("nose",)))
    check_evaluated(rule, points, learns_masks=False, finds_keypoints=True)
    message = "^train.stop_at_keypoints_ap is 0.3, expected 0 without data.keypoints and"
    for val_set, finds in ((SimpleNamespace(boxes_only=True), True), (points, False)):
        with pytest.raises(ValueError, match=message):
            check_evaluated(rule, val_set, learns_masks=False, finds_keypoints=finds)


def test_a_recipe_without_a_weight_of_masks_learns_boxes_only():
    config = tiny_config()
    assert not as_recipe(config).learns_boxes_only
    config.loss.mask_weight = 0.0
    assert as_recipe(config).learns_boxes_only
