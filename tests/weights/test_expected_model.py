"""What a model must be for a system's weights to mean the same in it."""

import pytest

from mask_rcnn_jax import parts
from mask_rcnn_jax.config import load_own, load_tree
from mask_rcnn_jax.recipe.entries import flatten
from mask_rcnn_jax.weights.expected_model import (
    EXPECTED,
    MMDETECTION_STYLES,
    differences,
    mismatches,
)
from mask_rcnn_jax.weights.sources import SOURCES


@pytest.mark.parametrize("source", EXPECTED)
def test_weights_fit_the_recipe_of_their_system(source):
    expected = EXPECTED[source]
    model = load_tree(expected.recipe).model
    assert mismatches(source, model) == ([MMDETECTION_STYLES] if source == "mmdetection" else [])
    assert {*expected.entries, *expected.ignored} <= flatten(model).keys()


def test_nothing_in_the_current_folder_stands_for_a_recipe(tmp_path, monkeypatch):
    for name in ("coco_detectron2", "coco_torchvision", "finetune"):
        (tmp_path / name).write_text("raise RuntimeError('it ran')")
    monkeypatch.chdir(tmp_path)
    model = parts.to_section(load_own("coco_detectron2:cascade_1x").model)
    assert differences("detectron2", model) == []


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


@pytest.mark.parametrize("recipe", ["coco_detectron2:cascade_3x", "coco_vitdet:cascade_l"])
def test_the_stages_of_a_cascade_are_compared(recipe):
    source = "detectron2_vitdet" if "vitdet" in recipe else "detectron2"
    model = load_tree(recipe).model
    assert mismatches(source, model) == []
    model.cascade.update(fg_iou_thresh=(0.5, 0.7), weight_factors=(5.0, 9.0))
    lines = mismatches(source, model)
    assert lines[0].startswith("model.cascade.fg_iou_thresh is (0.5, 0.7), ")
    assert lines[1].startswith("model.cascade.weight_factors is (5.0, 9.0), ")
    assert lines[1].endswith(" has (2.0, 3.0)") and len(lines) == 2
    model.cascade.fg_iou_thresh = ()  # without stages the factors mean nothing
    assert mismatches(source, model) == []


def test_masks_of_another_size_are_a_difference():
    lines = mismatches("torchvision", {"mask_head": {"roi_size": 28}})
    assert lines == ["model.mask_head.roi_size is 28, torchvision's Mask R-CNN has 14"]


def test_every_source_has_a_recipe():
    assert EXPECTED.keys() == SOURCES.keys()


def test_an_entry_can_be_left_out():
    model = {"backbone": {"norm_eps": 1e-5}}
    assert mismatches("torchvision_old", model, without=["backbone.norm_eps"]) == []


PYTORCH_STYLE = """
model = dict(
    type='MaskRCNN',
    data_preprocessor=dict(
        type='DetDataPreprocessor',
        mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], bgr_to_rgb=True),
    backbone=dict(type='ResNet', depth=50, style='pytorch'),
    rpn_head=dict(bbox_coder=dict(target_means=[0.0, 0.0, 0.0, 0.0])))
"""
CAFFE_STYLE = """
model = dict(backbone=dict(type='ResNet', style='caffe'))
img_norm_cfg = dict(
    mean=[103.53, 116.28, 123.675], std=[1.0, 1.0, 1.0], to_rgb=False)
"""


@pytest.mark.parametrize(
    "config, differing",
    [
        (PYTORCH_STYLE, ["backbone.stride_in", "input.channel_order", "input.std"]),
        (CAFFE_STYLE, []),
    ],
)
def test_the_style_of_mmdetection_is_taken_from_the_files_config(config, differing):
    """detectron2's recipe is that of the caffe style: BGR, a standard deviation of 1, and strides
    in the first convolution."""
    model = load_tree("coco_detectron2").model
    lines = mismatches("mmdetection", model, config=config)
    assert [line.split(" is ")[0] for line in lines] == [f"model.{name}" for name in differing]
    torchvision = load_tree("coco_torchvision").model
    said = " ".join(mismatches("mmdetection", torchvision, config=config))
    assert ("stride_in" in said) == (config is CAFFE_STYLE)


@pytest.mark.parametrize(
    "resize, expected",
    [("", []), ("dict(type='Resize')", [True]), ("dict(type='Resize', backend='pillow')", [False])],
)
def test_the_resizing_of_mmdetection_is_taken_from_the_files_config(resize, expected):
    """OpenCV samples, Pillow averages."""
    model = load_tree("coco_mmdet").model
    for antialias in (True, False):
        found = differences(
            "mmdetection", model, config=PYTORCH_STYLE + resize, antialias=antialias
        )
        assert [one.entry for one in found] == ["data.antialias"] * ([antialias] == expected)


def test_the_colors_of_a_convnext_of_mmdetection_are_stated():
    config = PYTORCH_STYLE.replace("type='ResNet'", "type='mmpretrain.ConvNeXt'")
    model = load_tree("coco_convnext").model
    assert differences("mmdetection_convnext", model, config=config) == []
    model.input.update(channel_order="bgr", std=(1.0, 1.0, 1.0))
    found = differences("mmdetection_convnext", model, config=config)
    assert [one.entry for one in found] == ["model.input.channel_order", "model.input.std"]
    assert all(one.is_stated for one in found)


def test_what_a_file_states_is_told_from_what_is_usual():
    model = load_tree("coco_detectron2").model
    stated = {one.entry: one.is_stated for one in differences("torchvision", model)}
    assert stated["model.backbone.stride_in"] and not stated["model.anchors.rounding"]
    assert not stated["model.input.channel_order"]
    assert not any(one.is_stated for one in differences("torchvision_resnet", model))
