"""What a model must be for a system's weights to mean the same in it."""

import pytest

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.weights.expected_model import RECIPES, recipe_mismatches
from mask_rcnn_jax.weights.sources import SOURCES


@pytest.mark.parametrize(
    ("source", "config"),
    [
        ("torchvision", "coco_torchvision"),
        ("torchvision_old", "coco_torchvision:coco_v1"),
        ("torchvision_resnet", "coco_torchvision"),
        ("detectron2", "coco_detectron2"),
        ("detectron2_resnet", "coco_detectron2"),
        ("detectron2_msra", "coco_detectron2"),
        ("detectron_msra", "coco_nvidia_pytorch"),
        ("maskrcnn_benchmark", "coco_nvidia_pytorch"),
        ("mmdetection", "coco_detectron2"),
        ("google_resnet", "coco_nvidia_tf1"),
        ("nvidia_rn50", "coco"),
        ("nvidia_tf2", "coco"),
    ],
)
def test_weights_fit_the_recipe_of_their_system(source, config):
    stem, _, variant = config.partition(":")
    model = load_config(f"configs/{stem}.py{':' if variant else ''}{variant}").model
    assert recipe_mismatches(source, model) == []
    assert RECIPES[source].keys() <= set(model.keys())


def test_what_differs_is_said():
    model = {"stride_in": "3x3", "norm_eps": 1e-5, "pixel_std": [1, 1, 1], "other": 3}
    assert recipe_mismatches("detectron2_msra", model) == [
        "model.stride_in is '3x3', detectron2's copy of the MSRA ResNet has '1x1'"
    ]
    assert recipe_mismatches("torchvision_old", {"norm_eps": 1e-5}) == [
        "model.norm_eps is 1e-05, torchvision's Mask R-CNN (old names) has 0.0"
    ]
    assert recipe_mismatches("torchvision", {"anchor_shapes": [[2**0.5, 0.5**0.5]]}) == [
        "model.anchor_shapes is ((1.41421, 0.707107),), torchvision's Mask R-CNN has "
        "((1.41421, 0.707107), (1.0, 1.0), (0.707107, 1.41421))"
    ]


def test_every_source_has_a_recipe():
    assert RECIPES.keys() == SOURCES.keys()
