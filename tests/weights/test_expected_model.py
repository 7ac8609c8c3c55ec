"""What a model must be for a system's weights to mean the same in it."""

import pytest

from mask_rcnn_jax.config import flatten, load_config
from mask_rcnn_jax.weights.expected_model import EXPECTED, mismatches
from mask_rcnn_jax.weights.sources import SOURCES


@pytest.mark.parametrize("source", EXPECTED)
def test_weights_fit_the_recipe_of_their_system(source):
    expected = EXPECTED[source]
    model = load_config(expected.recipe).model
    assert mismatches(source, model) == []
    assert {*expected.entries, *expected.ignored} <= flatten(model).keys()


def test_what_differs_is_said():
    model = {
        "backbone": {"stride_in": "3x3", "norm_eps": 1e-5, "other": 3},
        "input": {"std": [1, 1, 1]},
    }
    assert mismatches("detectron2_msra", model) == [
        "model.backbone.stride_in is '3x3', detectron2's copy of the MSRA ResNet has '1x1'"
    ]
    assert mismatches("torchvision_old", {"backbone": {"norm_eps": 1e-5}}) == [
        "model.backbone.norm_eps is 1e-05, torchvision's Mask R-CNN (old names) has 0.0"
    ]
    assert mismatches("torchvision", {"anchors": {"aspect_ratios": [[2**0.5, 0.5**0.5]]}}) == [
        "model.anchors.aspect_ratios is ((1.41421, 0.707107),), torchvision's Mask R-CNN has "
        "((1.41421, 0.707107), (1.0, 1.0), (0.707107, 1.41421))"
    ]


def test_every_source_has_a_recipe():
    assert EXPECTED.keys() == SOURCES.keys()


def test_an_entry_can_be_left_out():
    model = {"backbone": {"norm_eps": 1e-5}}
    assert mismatches("torchvision_old", model, without=["backbone.norm_eps"]) == []
