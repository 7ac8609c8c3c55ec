"""Configs of mmdetection become recipes, without being run: its default one is `coco_mmdet`."""

import re

import numpy as np
import pytest

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.formats import mmdet_backbones, mmdet_fields, mmdet_training
from mask_rcnn_jax.formats.mmdet_recipe import write_recipe
from mask_rcnn_jax.formats.python_config import read_config
from mask_rcnn_jax.recipe.entries import flatten
from tests.commands.command import ROOT, error_line, run_inside
from tests.weights.weight_writers import TorchFile

MODEL = """
mean = [123.675, 116.28, 103.53]
size = 256
extractor = dict(type='SingleRoIExtractor', out_channels=size, featmap_strides=[4, 8, 16, 32])
assigner = dict(type='MaxIoUAssigner', match_low_quality=True, ignore_iof_thr=-1)
sampler = dict(type='RandomSampler', neg_pos_ub=-1)
coder = dict(type='DeltaXYWHBBoxCoder', target_means=[.0, .0, .0, .0])
l1 = dict(type='L1Loss', loss_weight=1.0)
proposals = dict(max_per_img=1000, nms=dict(type='nms', iou_threshold=0.7), min_bbox_size=0)
model = dict(
    type='MaskRCNN',
    data_preprocessor=dict(
        type='DetDataPreprocessor', mean=mean, std=[58.395, 57.12, 57.375], bgr_to_rgb=True,
        pad_mask=True, pad_size_divisor=32),
    backbone=dict(
        type='ResNet', depth=50, num_stages=4, out_indices=(0, 1, 2, 3), frozen_stages=1,
        norm_cfg=dict(type='BN', requires_grad=True), norm_eval=True, style='pytorch',
        init_cfg=dict(type='Pretrained', checkpoint='torchvision://resnet50')),
    neck=dict(type='FPN', in_channels=[256, 512, 1024, 2048], out_channels=size, num_outs=5),
    rpn_head=dict(
        type='RPNHead', in_channels=size, feat_channels=size,
        anchor_generator=dict(
            type='AnchorGenerator', scales=[8], ratios=[0.5, 1.0, 2.0],
            strides=[4] + [8, 16, 32, 64]),
        bbox_coder=dict(target_stds=[1.0, 1.0, 1.0, 1.0], **coder),
        loss_cls=dict(type='CrossEntropyLoss', use_sigmoid=True, loss_weight=1.0),
        loss_bbox=l1),
    roi_head=dict(
        type='StandardRoIHead',
        bbox_roi_extractor=dict(
            roi_layer=dict(type='RoIAlign', output_size=7, sampling_ratio=0), **extractor),
        bbox_head=dict(
            type='Shared2FCBBoxHead', in_channels=size, fc_out_channels=1024, roi_feat_size=7,
            num_classes=80, bbox_coder=dict(target_stds=[0.1, 0.1, 0.2, 0.2], **coder),
            reg_class_agnostic=False,
            loss_cls=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
            loss_bbox=l1),
        mask_roi_extractor=dict(
            roi_layer=dict(type='RoIAlign', output_size=14, sampling_ratio=0), **extractor),
        mask_head=dict(
            type='FCNMaskHead', num_convs=4, in_channels=size, conv_out_channels=size,
            num_classes=80,
            loss_mask=dict(type='CrossEntropyLoss', use_mask=True, loss_weight=1.0))),
    train_cfg=dict(
        rpn=dict(
            assigner=dict(pos_iou_thr=0.7, neg_iou_thr=0.3, min_pos_iou=0.3, **assigner),
            sampler=dict(num=256, pos_fraction=0.5, add_gt_as_proposals=False, **sampler),
            allowed_border=-1, pos_weight=-1, debug=False),
        rpn_proposal=dict(nms_pre=2000, **proposals),
        rcnn=dict(
            assigner=dict(pos_iou_thr=0.5, neg_iou_thr=0.5, min_pos_iou=0.5, **assigner),
            sampler=dict(num=512, pos_fraction=0.25, add_gt_as_proposals=True, **sampler),
            mask_size=28, pos_weight=-1, debug=False)),
    test_cfg=dict(
        rpn=dict(nms_pre=1000, **proposals),
        rcnn=dict(
            score_thr=0.05, nms=dict(type='nms', iou_threshold=0.5), max_per_img=100,
            mask_thr_binary=0.5)))
"""
DATA = """
data_root = 'data/coco/'
backend_args = None
train_pipeline = [
    dict(type='LoadImageFromFile', backend_args=backend_args),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='Resize', scale=(1333, 800), keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs')]
test_pipeline = [dict(type='Resize', scale=(1333, 800), keep_ratio=True)]
train_dataloader = dict(
    batch_size=2, num_workers=16, persistent_workers=True,
    batch_sampler=dict(type='AspectRatioBatchSampler'),
    dataset=dict(
        type='CocoDataset', data_root=data_root, ann_file='annotations/instances_train2017.json',
        data_prefix=dict(img='train2017/'), filter_cfg=dict(filter_empty_gt=True, min_size=32),
        pipeline=train_pipeline, backend_args=backend_args))
val_dataloader = dict(
    batch_size=1, num_workers=2,
    dataset=dict(
        type='CocoDataset', data_root=data_root, ann_file='annotations/instances_val2017.json',
        data_prefix=dict(img='val2017/'), test_mode=True, pipeline=test_pipeline))
val_evaluator = dict(type='CocoMetric', ann_file=data_root + 'annotations/x.json')
"""
SCHEDULE = """
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=12, val_interval=1)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.001, by_epoch=False, begin=0, end=500),
    dict(type='MultiStepLR', begin=0, end=12, by_epoch=True, milestones=[8, 11], gamma=0.1)]
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='SGD', lr=0.02, momentum=0.9, weight_decay=0.0001))
auto_scale_lr = dict(enable=False, base_batch_size=16)
default_hooks = dict(checkpoint=dict(type='CheckpointHook', interval=1))
load_from = None
"""
FILES = {"model": MODEL, "data": DATA, "schedule": SCHEDULE}
DEFAULT = "_base_ = ['base/model.py', 'base/data.py', 'base/schedule.py']\n"
CAFFE = """model = dict(
    data_preprocessor=dict(
        mean=[103.53, 116.28, 123.675], std=[1.0, 1.0, 1.0], bgr_to_rgb=False),
    backbone=dict(norm_cfg=dict(requires_grad=False), style='caffe',
        init_cfg=dict(checkpoint='open-mmlab://detectron2/resnet50_caffe')))
"""


def write(folder, text=""):
    """A config of a user, and what it inherits from."""
    (folder / "base").mkdir(exist_ok=True)
    for name, content in FILES.items():
        (folder / "base" / f"{name}.py").write_text(content)
    path = folder / "mine.py"
    path.write_text(DEFAULT + text)
    return path


def recipe_of(folder, text=""):
    """The entries of the recipe for a config, and the notes."""
    notes = write_recipe(write(folder, text), folder / "recipe.py", 8)
    return flatten(load_config(folder / "recipe.py").to_dict()), notes


@pytest.mark.parametrize("variant, text", [("", ""), (":caffe", CAFFE)])
def test_the_default_configs_are_the_recipes(variant, text, tmp_path):
    found, notes = recipe_of(tmp_path, text)
    expected = flatten(load_config(f"coco_mmdet{variant}").to_dict())
    different = {name for name in found if found[name] != expected[name]}
    assert different == {"train.epochs"} and found["train.epochs"] == 12.0
    assert [note.partition(" = ")[0] for note in notes] == [
        "model.train_cfg.rpn.assigner.min_pos_iou"
    ]


PIPELINE = "train_dataloader = dict(dataset=dict(pipeline=[{}]))"
LSJ = (
    "dict(type='RandomResize', scale=(512, 640), ratio_range=(0.1, 2.0), keep_ratio=True), "
    "dict(type='RandomCrop', crop_type='absolute', crop_size=(512, 640))"
)


@pytest.mark.parametrize(
    "text, entries",
    [
        ("model = dict(backbone=dict(depth=101))", {"model.backbone.depth": 101}),
        (
            "model = dict(backbone=dict(type='ResNeXt', groups=32, base_width=4))",
            {"model.backbone.groups": 32, "model.backbone.width_per_group": 4},
        ),
        (
            "model = dict(backbone=dict(_delete_=True, type='ResNet', depth=18))",
            {"model.backbone.depth": 18, "model.backbone.frozen_stages": 0},
        ),
        (
            "model = dict(backbone=dict(norm_cfg=dict(type='SyncBN'), norm_eval=False))",
            {"model.backbone.norm": "sync_batch"},
        ),
        (
            "model = dict(roi_head=dict(bbox_head=dict(type='Shared4Conv1FCBBoxHead')))",
            {"model.box_head.num_convs": 4, "model.box_head.num_fcs": 1},
        ),
        (
            "model = dict(rpn_head=dict(anchor_generator=dict(scales=[2, 4], ratios=[4.0])))",
            {
                "model.anchors.sizes": (8.0, 16.0, 32.0, 64.0, 128.0),
                "model.anchors.aspect_ratios": ((0.5, 2.0), (1.0, 4.0)),
            },
        ),
        (
            "model = dict(test_cfg=dict(rcnn=dict(nms=dict(type='soft_nms'), max_per_img=300)))",
            {"eval.nms": "linear", "eval.detections_per_image": 300},
        ),
        (
            "model = dict(roi_head=dict(bbox_head=dict(loss_bbox=dict(\n"
            "    _delete_=True, type='SmoothL1Loss', beta=0.5, loss_weight=2.0))))",
            {"loss.box_beta": 0.5, "loss.box_reg_weight": 2.0},
        ),
        (
            "optim_wrapper = dict(type='AmpOptimWrapper', clip_grad=dict(max_norm=35))",
            {"train.precision": "float16", "optim.clip_norm": 35.0},
        ),
        (
            "train_cfg = dict(max_epochs=36)\n"
            "param_scheduler = [dict(type='MultiStepLR', milestones=[27, 33], by_epoch=True)]",
            {"train.epochs": 36.0, "optim.decay_at": (27 / 36, 33 / 36),
             "optim.warmup_until": 0.0},
        ),
        (
            "train_cfg = dict(_delete_=True, type='IterBasedTrainLoop', max_iters=1000)\n"
            "param_scheduler = [dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=100),\n"
            "    dict(type='CosineAnnealingLR', eta_min=0.002, by_epoch=False)]",
            {"train.steps": 1000, "optim.warmup_until": 0.1, "optim.schedule": "cosine",
             "optim.end_factor": 0.1},
        ),
        (
            "param_scheduler = [dict(type='LinearLR', start_factor=0.1, end=1),\n"
            "    dict(type='CosineAnnealingLR', begin=1, T_max=11, end=12, eta_min_ratio=0.05)]",
            {"optim.schedule": "cosine", "optim.end_factor": 0.05, "optim.warmup_until": 1 / 12},
        ),
        (
            "train_dataloader = dict(dataset=dict(ann_file='a.json'))\n"
            "param_scheduler = [dict(type='LinearLR', start_factor=0.2, by_epoch=False, end=9),\n"
            "    dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=9)]",
            {"optim.warmup_factor": 0.1},
        ),
        (
            "param_scheduler = [{{_base_.param_scheduler}}[0], _base_.param_scheduler[1]]\n"
            "_base_.optim_wrapper.optimizer.lr = 0.02 / 8",
            {"optim.learning_rate": 0.0025, "optim.decay_at": (8 / 12, 11 / 12)},
        ),
        (
            "auto_scale_lr = dict(enable=True, base_batch_size=32)",
            {"train.batch_size": 16, "optim.reference_batch": 32},
        ),
        (
            "data = dict(type='CocoDataset', ann_file='a.json', data_prefix=dict(img='images'))\n"
            "train_dataloader = dict(dataset=dict(_delete_=True, type='RepeatDataset', times=3,\n"
            "    dataset=data))",
            {"data.train_json": "a.json", "data.train_images": "images", "train.epochs": 36.0,
             "data.keep_empty": True},
        ),
        (
            PIPELINE.format("dict(type='RandomChoiceResize', scales=[(1333, 640), (1333, 800)])"),
            {"data.short_sides": (640, 800), "data.flip_probability": 0.0},
        ),
        (
            PIPELINE.format(
                "dict(type='RandomResize', scale=[(1333, 640), (1333, 800)], keep_ratio=True)"
            ),
            {"data.short_sides": tuple(range(640, 801))},
        ),
        (
            PIPELINE.format(LSJ),
            {"data.augment": ("scale_jitter", "fixed_size_crop"),
             "data.scale_jitter.size": (640, 512), "data.fixed_size_crop.size": (640, 512)},
        ),
        (
            PIPELINE.format("dict(type='LoadAnnotations', poly2mask=False)"),
            {"model.mask_targets.kind": "polygons", "data.max_vertices": 512},
        ),
        ("load_from = 'epoch_12.pth'", {"model.init_from": "epoch_12.pth"}),
        ("model = dict(backbone=dict(init_cfg=None))", {"model.init_from": ""}),
        ("load_from = '\\ud800'", {"model.init_from": "\ud800"}),
    ],
)  # fmt: skip
def test_a_field_sets_its_entry(text, entries, tmp_path):
    flat, _ = recipe_of(tmp_path, text)
    assert {name: flat[name] for name in entries} == entries


@pytest.mark.parametrize(
    "text, line, words",
    [
        ("model = dict(type='MaskRCNN'", 2, "no Python"),
        ("import os", 2, "import os: expected name = value"),
        ("model = dict(backbone=dict(depth=len('ab')))", 2, "len('ab'): expected a literal"),
        ("lr = __import__('os').system('true')", 2, "expected a literal, dict(..)"),
        ("lr = f'{1}'", 2, "expected a literal"),
        ("lr = nothing", 2, "nothing: expected a literal"),
        ("lr = 1 / 0", 2, "division by zero"),
        ("a = 'b/{{ _base_.size }}'", 2, "'b/{{ _base_.size }}': expected it without quotes"),
        ("a = {{_base_.nothing}}", 2, "_base_.nothing is not there"),
        ("with read_base():\n    from .a import *", 2, "mmengine's newer style"),
        ("\nmodel = dict(backbone=dict(type='HRNet'))", 3,
         "model.backbone.type is 'HRNet', expected 'ResNet' or 'ResNeXt' or 'SwinTransformer'"),
        ("model = dict(type='GridRCNN')", 2, "model.type is 'GridRCNN', expected 'MaskRCNN'"),
        ("model = dict(type='TopdownPoseEstimator')", 2, "a detector: configs of mmpose are not"),
        ("model = dict(neck=dict(norm_cfg=dict(type='GN')))", 2,
         "model.neck.norm_cfg.type is 'GN', expected no such field"),
        ("model = dict(backbone=dict(depth='50'))", 2, "depth is '50', expected a whole number"),
        ("model = dict(backbone=dict(frozen_stages=True))", 2, "frozen_stages is True, expected"),
        ("model = dict(roi_head=dict(mask_head=dict(twist=1)))", 2, "mask_head.twist is 1"),
        ("model = dict(roi_head=dict(bbox_head=dict(loss_bbox=dict(type='GIoULoss'))))", 2,
         "loss_bbox.type is 'GIoULoss', expected 'L1Loss' or 'SmoothL1Loss'"),
        ("model = dict(data_preprocessor=dict(mean=[1, 2]))", 2, "mean is [1, 2], expected three"),
        ("train_dataloader = dict(batch_size=0)", 2, "batch_size is 0, expected a number above 0"),
        (PIPELINE.format("dict(type='Resize', scale=(800, 800), keep_ratio=False)"), 2,
         "keep_ratio is False, expected True"),
        (PIPELINE.format("dict(type='RandomChoiceResize', scales=1.5)"), 2, "scales is 1.5, exp"),
        ("param_scheduler = [dict(type='PolyLR')]", 2, "type is 'PolyLR', expected 'LinearLR'"),
        ("param_scheduler = [dict(type='CosineAnnealingLR', begin=6, end=12, T_max=6)]", 2,
         "begin is 6, expected 0, or a step of the warm-up"),
        ("param_scheduler = [dict(type='CosineAnnealingLR', T_max=24)]", 2, "T_max is 24, exp"),
        ("param_scheduler = [dict(type='LinearLR', end=3, end_factor=0.5)]", 2,
         "end_factor is 0.5, expected 1"),
        ("param_scheduler = [dict(type='MultiStepLR', begin=3, milestones=[6])]", 2,
         "begin is 3, expected 0"),
    ],
)  # fmt: skip
def test_a_fault_is_one_line_with_its_place(text, line, words, tmp_path):
    path = write(tmp_path, text)
    with pytest.raises(ValueError) as error:
        write_recipe(path, tmp_path / "recipe.py", 8)
    message = str(error.value)
    assert message.startswith(f"{path}, line {line}: ") and words in message, message
    assert "\n" not in message and not list(tmp_path.glob("recipe*"))


@pytest.mark.parametrize(
    "text, words",
    [
        ("_base_ = 'none.py'", "_base_ names '.*none.py', which is no file"),
        ("_base_ = 'mmdet::_base_/models/mask-rcnn_r50_fpn.py'", "has no _base_"),
        ("_base_ = ['base/data.py', 'base/data.py']", "two files of _base_ have '"),
        ("_base_ = 'mine.py'", "more than 50 files"),
        ("_base_ = 'base/schedule.py'", "has no model.type, expected a config of mmdetection 3"),
        ("a = [1]\n" + "a = a + a\n" * 40, "line 1[0-9]: more than 262144 values"),
        ("a = 'ab' * 9\n" + "a = a * 9\n" * 40, "a \\* 9 is too large"),
        ("a = [1]\n" + "a = [a, a]\n" * 40, "more than 262144 values"),
        ("a = 9\n" + "a = a * a\n" * 40, "a \\* a is too large"),
        ("a = " + "[" * 150 + "]" * 150, "more than 262144 values, or 100 deep"),
        ("model = dict(type=[[0] * 60000] * 60000)", "more than 262144 values"),
        ("model = dict(type=['" + "a" * 60000 + "'] * 60000)", "more than 262144 values"),
        ("model = dict(type=0x" + "f" * 9000 + ")", "line 1: a number is too large"),
        ("_base_ = '" + "a" * 9000 + ".py'", "line 1: _base_ names '.*, which is no file"),
    ],
)
def test_a_config_that_cannot_be_read_is_named(text, words, tmp_path):
    path = write(tmp_path)
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        write_recipe(path, tmp_path / "recipe.py", 8)


def test_a_config_in_a_checkpoint_has_the_limits_of_a_file(tmp_path):
    with pytest.raises(ValueError, match="a.pth: no config in Python .*more than 1048576 char"):
        read_config(tmp_path / "a.pth", "a = 1\n" * 200_000)


def test_files_that_name_others_twice_come_to_an_end(tmp_path):
    for n in range(40):
        (tmp_path / f"{n}.py").write_text(f"_base_ = ['{n + 1}.py', '{n + 1}.py']")
    (tmp_path / "40.py").write_text("")
    with pytest.raises(ValueError, match="more than 50 files"):
        read_config(tmp_path / "0.py")


def test_what_has_no_counterpart_is_named(tmp_path):
    text = (
        "custom_hooks = [dict(type='EMAHook')]\n"
        "optim_wrapper = dict(optimizer=dict(nesterov=True))\n"
        "model = dict(backbone=dict(init_cfg=dict(checkpoint='open-mmlab://msra')))\n"
        "train_dataloader = dict(dataset=dict(pipeline=[dict(type='PhotoMetricDistortion')],\n"
        "    ann_file='mine.json'))\n"
        "anything_of_mine = dict(type='Whatever')\n"
    )
    path = write(tmp_path, text)
    notes = write_recipe(path, tmp_path / "recipe.py", 1)
    assert [re.split(" = |: ", note)[0] for note in notes] == [
        "model.backbone.init_cfg.checkpoint",
        "model.train_cfg.rpn.assigner.min_pos_iou",
        "train_dataloader.dataset.pipeline.0.type",
        "auto_scale_lr",
        "param_scheduler.0.end",
        "optim_wrapper.optimizer.nesterov",
        "custom_hooks.0.type",
    ]
    comments = (tmp_path / "recipe.py").read_text()
    assert comments.count("# Without counterpart: ") == len(notes)


def test_dicts_are_merged_as_mmengine_does(tmp_path):
    (tmp_path / "a.py").write_text("x = dict(a=1, b=dict(c=[1, 2], d=3))\ny = 5\nz = x['a'] + y\n")
    (tmp_path / "b.py").write_text("w = dict(e=1)\n")
    path = tmp_path / "c.py"
    path.write_text(
        "'''words'''\n_base_ = ['a.py', 'b.py']\n"
        "x = dict(b=dict(c=(0,)), f=dict(_delete_=True, g=-1))\ny = dict(h='i' 'j')\n"
        "w = dict(_delete_=True, k={'l': {{_base_.x.b.d}}, **dict(m=None)})\n"
    )
    assert read_config(path) == {
        "x": {"a": 1, "b": {"c": (0,), "d": 3}, "f": {"g": -1}},
        "y": {"h": "ij"},
        "z": 6,
        "w": {"k": {"l": 3, "m": None}},
    }


def test_every_field_has_a_row_in_the_documentation():
    page = (ROOT / "docs" / "mmdet_config.md").read_text()
    names = {*mmdet_fields.SAME, *mmdet_training.SAME, *mmdet_backbones.SAME}
    names |= {*mmdet_backbones.SAME_SWIN, *mmdet_backbones.SAME_CONVNEXT}
    names |= {name for same, _ in mmdet_fields.MASKS.values() for name in same}
    missing = {n for n in names if f"{n.rpartition('.')[2]}`" not in page}
    assert not missing


def test_the_command_takes_a_config_or_a_checkpoint(tmp_path, capsys):
    output, path = tmp_path / "new" / "recipe.py", write(tmp_path)
    assert run_inside("prepare", "mmdet_config", path, "--gpus=8", f"--output={output}") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{output}: train with --config {output}"
    assert not any("--gpus" in line for line in lines)
    assert lines[0].startswith("without counterpart: model.train_cfg.rpn.assigner.min_pos_iou")
    text = "".join(FILES.values())
    file = TorchFile()
    state = {"a": file.tensor(np.ones(1, np.float32))}
    file.write(tmp_path / "epoch_1.pth", {"meta": {"cfg": text}, "state_dict": state})
    before = output.read_text()
    assert (
        run_inside(
            "prepare", "mmdet_config", tmp_path / "epoch_1.pth", "--gpus=8", f"--output={output}"
        )
        == 0
    )
    assert output.read_text() == before
    capsys.readouterr()
    file = TorchFile()
    file.write(tmp_path / "last.pth", {"state_dict": {"a": file.tensor(np.ones(1, np.float32))}})
    code = run_inside("prepare", "mmdet_config", tmp_path / "last.pth", f"--output={output}")
    assert "last.pth holds no config of mmdetection" in error_line(code, capsys.readouterr().err)
