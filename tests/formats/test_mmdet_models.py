"""Configs of mmdetection with other trunks and heads, and of mmdetection 2, become recipes."""

import pytest

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.formats.mmdet_recipe import write_recipe
from mask_rcnn_jax.models.build import build_model
from mask_rcnn_jax.models.swin import NORMS
from mask_rcnn_jax.recipe.entries import flatten
from tests.formats.test_mmdet_config import FILES, write

SWIN = """
model = dict(
    backbone=dict(
        _delete_=True, type='SwinTransformer', embed_dims=96, depths=[2, 2, 6, 2],
        num_heads=[3, 6, 12, 24], window_size=7, mlp_ratio=4, qkv_bias=True, qk_scale=None,
        drop_rate=0., attn_drop_rate=0., drop_path_rate=0.2, patch_norm=True,
        out_indices=(0, 1, 2, 3), with_cp=False, convert_weights=True,
        init_cfg=dict(type='Pretrained', checkpoint='swin_tiny.pth')),
    neck=dict(in_channels=[96, 192, 384, 768]))
"""
ADAMW = """
optimizer = dict(_delete_=True, type='AdamW', lr=0.0001, betas=(0.9, 0.999), weight_decay=0.05)
"""
KEYS = """
none = dict(decay_mult=0.)
optim_wrapper = dict(optimizer=optimizer, paramwise_cfg=dict(custom_keys={
    'absolute_pos_embed': none, 'relative_position_bias_table': none, 'norm': none}))
"""
LONG = """
train_cfg = dict(max_epochs=36)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.001, by_epoch=False, end=500),
    dict(type='MultiStepLR', by_epoch=True, milestones=[27, 33])]
"""
SIDES = [(1333, side) for side in range(480, 801, 32)]
CHOICE = f"""
resize = dict(type='RandomChoiceResize', scales={SIDES}, keep_ratio=True)
crop = dict(type='RandomCrop', crop_size=(384, 600), crop_type='absolute_range')
train_dataloader = dict(dataset=dict(pipeline=[
    dict(type='RandomFlip', prob=0.5),
    dict(type='RandomChoice', transforms=[[resize], [resize, crop, resize]])]))
"""
CONVNEXT = """
custom_imports = dict(imports=['mmpretrain.models'], allow_failed_imports=False)
model = dict(backbone=dict(
    _delete_=True, type='mmpretrain.ConvNeXt', arch='tiny', out_indices=[0, 1, 2, 3],
    drop_path_rate=0.4, layer_scale_init_value=1.0, gap_before_final_norm=False))
"""
BY_LAYER = """
optim_wrapper = dict(
    constructor='LearningRateDecayOptimizerConstructor', optimizer=optimizer,
    paramwise_cfg=dict(decay_rate=0.95, decay_type='layer_wise', num_layers=6))
"""
CASCADE = """
norm = dict(type='SyncBN', requires_grad=True)
entropy = dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0)
head = dict(
    type='ConvFCBBoxHead', num_shared_convs=4, num_shared_fcs=1, in_channels=256,
    conv_out_channels=256, fc_out_channels=1024, roi_feat_size=7, num_classes=80,
    reg_class_agnostic=False, reg_decoded_bbox=True, norm_cfg=norm, loss_cls=entropy,
    loss_bbox=dict(type='GIoULoss', loss_weight=10.0))
coder = dict(type='DeltaXYWHBBoxCoder', target_means=[0., 0., 0., 0.])
assigner = dict(type='MaxIoUAssigner', match_low_quality=False, ignore_iof_thr=-1)
sampler = dict(
    type='RandomSampler', num=512, pos_fraction=0.25, neg_pos_ub=-1, add_gt_as_proposals=True)
last = dict(sampler=sampler, mask_size=28, pos_weight=-1, debug=False)
model = dict(
    type='CascadeRCNN',
    rpn_head=dict(loss_bbox=dict(_delete_=True, type='SmoothL1Loss', beta=1.0 / 9.0)),
    roi_head=dict(
        type='CascadeRoIHead', num_stages=3, stage_loss_weights=[1, 0.5, 0.25],
        bbox_head=[
            dict(bbox_coder=dict(target_stds=[0.1, 0.1, 0.2, 0.2], **coder), **head),
            dict(bbox_coder=dict(target_stds=[0.05, 0.05, 0.1, 0.1], **coder), **head),
            dict(bbox_coder=dict(target_stds=[0.033, 0.033, 0.067, 0.067], **coder), **head)]),
    train_cfg=dict(
        rpn=dict(allowed_border=0), rpn_proposal=dict(max_per_img=2000),
        rcnn=[
            dict(assigner=dict(pos_iou_thr=0.5, neg_iou_thr=0.5, min_pos_iou=0.5, **assigner),
                **last),
            dict(assigner=dict(pos_iou_thr=0.6, neg_iou_thr=0.6, min_pos_iou=0.6, **assigner),
                **last),
            dict(assigner=dict(pos_iou_thr=0.7, neg_iou_thr=0.7, min_pos_iou=0.7, **assigner),
                **last)]))
"""
POINTREND = """
mask_loss = dict(type='CrossEntropyLoss', use_mask=True, loss_weight=1.0)
point_head = dict(
    type='MaskPointHead', num_fcs=3, in_channels=256, fc_channels=256, num_classes=80,
    coarse_pred_each_layer=True, loss_point=mask_loss)
model = dict(
    type='PointRend',
    roi_head=dict(
        type='PointRendRoIHead',
        mask_roi_extractor=dict(
            type='GenericRoIExtractor', aggregation='concat', featmap_strides=[4],
            roi_layer=dict(_delete_=True, type='SimpleRoIAlign', output_size=14)),
        mask_head=dict(
            _delete_=True, type='CoarseMaskHead', num_fcs=2, in_channels=256,
            conv_out_channels=256, fc_out_channels=1024, num_classes=80, loss_mask=mask_loss),
        point_head=point_head),
    train_cfg=dict(rcnn=dict(
        mask_size=7, num_points=14 * 14, oversample_ratio=3, importance_sample_ratio=0.75)),
    test_cfg=dict(rcnn=dict(
        subdivision_steps=5, subdivision_num_points=28 * 28, scale_factor=2)))
"""
# The same Swin cascade in mmdetection 2's words.
OLD_TRAINING = f"""
norm_cfg = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], to_rgb=True)
pad = [dict(type='Normalize', **norm_cfg), dict(type='Pad', size_divisor=32)]
collect = dict(type='Collect', keys=['img'])
resize = dict(type='Resize', img_scale={[(side, 1333) for _, side in SIDES]},
    multiscale_mode='value', keep_ratio=True)
crop = dict(type='RandomCrop', crop_type='absolute_range', crop_size=(384, 600))
train_pipeline = [
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='RandomFlip', flip_ratio=0.5),
    dict(type='AutoAugment', policies=[[resize], [resize, crop, resize]])] + pad + [collect]
transforms = [dict(type='Resize', keep_ratio=True), dict(type='RandomFlip')] + pad
test_pipeline = [dict(
    type='MultiScaleFlipAug', img_scale=(1333, 800), flip=False, transforms=transforms)]
root = 'data/coco/'
data = dict(
    samples_per_gpu=2, workers_per_gpu=16,
    train=dict(
        type='CocoDataset', ann_file=root + 'annotations/instances_train2017.json',
        img_prefix=root + 'train2017/', pipeline=train_pipeline),
    val=dict(
        type='CocoDataset', ann_file=root + 'annotations/instances_val2017.json',
        img_prefix=root + 'val2017/', pipeline=test_pipeline))
none = dict(decay_mult=0.)
optimizer = dict(
    type='AdamW', lr=0.0001, betas=(0.9, 0.999), weight_decay=0.05,
    paramwise_cfg=dict(custom_keys={{
        'absolute_pos_embed': none, 'relative_position_bias_table': none, 'norm': none}}))
optimizer_config = dict(type='DistOptimizerHook', update_interval=1, grad_clip=None, use_fp16=True)
lr_config = dict(
    policy='step', warmup='linear', warmup_iters=500, warmup_ratio=0.001, step=[27, 33])
runner = dict(type='EpochBasedRunnerAmp', max_epochs=36)
evaluation = dict(metric=['bbox', 'segm'])
custom_hooks = [dict(type='NumClassCheckHook')]
"""
OLD_SWIN = SWIN.replace("with_cp=False, convert_weights=True", "use_checkpoint=False, ape=False")
OLD_SWIN = OLD_SWIN.replace("embed_dims", "embed_dim")
# What does not follow from the model: how long an epoch is, and what a GPU computes with.
OF_RUNS = {"train.epochs", "train.steps", "train.precision", "model.init_from"}


def differing(path, folder, variant):
    """What a recipe has for a config and a recipe of ours has otherwise, and the notes."""
    notes = write_recipe(path, folder / "recipe.py", 8)
    config = load_config(folder / "recipe.py", {"model.num_classes": 3})
    build_model(config.model)
    found, expected = (flatten(one.to_dict()) for one in (config, load_config(variant)))
    different = {n for n in found | expected if found.get(n) != expected.get(n)}
    return different - OF_RUNS - {"model.num_classes"}, notes


@pytest.mark.parametrize(
    "text, variant, different",
    [
        (SWIN + ADAMW + KEYS + LONG + CHOICE, "coco_swin", set()),
        (
            SWIN.replace("[2, 2, 6, 2]", "[2, 2, 18, 2]") + ADAMW + KEYS + LONG + CHOICE,
            "coco_swin:small",
            set(),
        ),
        (
            CONVNEXT + ADAMW + BY_LAYER + LONG + CHOICE,
            "coco_convnext",
            {  # of mmdetection and of detectron2
                *("data.max_vertices", "model.mask_targets.kind", "optim.warmup_until"),
                *("loss.rpn_box_average", "loss.rpn_cls_average", "model.box_head.fc_init"),
                *("model.fpn.init", "model.mask_head.predictor_init", "train.checkpoint_every"),
                "train.eval_every",
            },
        ),
    ],
)
def test_configs_are_the_recipes_of_their_systems(text, variant, different, tmp_path):
    found, _ = differing(write(tmp_path, text), tmp_path, variant)
    assert found == different


def test_pointrend_has_the_mask_head_of_detectron2(tmp_path):
    found, _ = differing(write(tmp_path, POINTREND), tmp_path, "coco_mmdet")
    assert all(name.startswith("model.mask_head.") for name in found)
    config = load_config(tmp_path / "recipe.py")
    assert config.model.mask_head == load_config("coco_detectron2:pointrend").model.mask_head


def test_a_cascade_of_mmdetection_2_is_the_recipe_of_the_paper(tmp_path):
    files = FILES["model"], OLD_SWIN, CASCADE, OLD_TRAINING
    for n, text in enumerate(files):
        (tmp_path / f"{n}.py").write_text(f"_base_ = '{n - 1}.py'\n" * (n > 0) + text)
    mine = tmp_path / "mine.py"
    stats = "model = dict(data_preprocessor=dict(_delete_=True, type='DetDataPreprocessor'))\n"
    mine.write_text("_base_ = '3.py'\n" + stats)
    found, notes = differing(mine, tmp_path, "coco_swin:cascade_tiny")
    assert not found
    assert [note.partition(" = ")[0] for note in notes] == [
        "model.roi_head.stage_loss_weights",
        "model.roi_head.bbox_head.loss_bbox.type",
        "model.train_cfg.rpn.assigner.min_pos_iou",
        "train_dataloader.dataset.pipeline.2.type",
    ]


@pytest.mark.parametrize("words", ["warmup=None, warmup_iters=500, ", ""])
def test_mmdetection_2_may_have_no_warm_up(words, tmp_path):
    old = "warmup='linear', warmup_iters=500, warmup_ratio=0.001, "
    text = OLD_TRAINING.replace(old, words)
    (tmp_path / "mine.py").write_text(FILES["model"] + text)
    notes = write_recipe(tmp_path / "mine.py", tmp_path / "recipe.py", 8)
    assert load_config(tmp_path / "recipe.py").optim.warmup_until == 0
    assert not any("warmup" in note for note in notes)


@pytest.mark.parametrize(
    "text, entries",
    [
        # Without custom_keys all decays, as it does without exceptions.
        (SWIN, {"model.backbone.exempt_from_decay": (),
                "optim.decay_on": ("kernel", "bias", "scale", "other")}),
        (SWIN + "keys = dict(norm=dict(decay_mult=0))\n"
         "optim_wrapper = dict(paramwise_cfg=dict(custom_keys=keys))",
         {"model.backbone.exempt_from_decay": NORMS}),
        (SWIN.replace("with_cp=False", "frozen_stages=1"),
         {"optim.freeze": ("backbone/stem_*", "backbone/res2_*", "backbone/down3_*",
                           "backbone/output2_*")}),
        (SWIN.replace("window_size=7", "window_size=12"), {"model.backbone.windows": (12,) * 4}),
        (SWIN.replace(" drop_path_rate=0.2,", ""), {"model.backbone.drop_path": 0.1}),
        (CONVNEXT.replace("'tiny'", "dict(depths=[2, 2, 2, 2], channels=[8, 16, 32, 64])"),
         {"model.backbone.depths": (2, 2, 2, 2), "model.backbone.width": 8,
          "model.backbone.exempt_from_decay": ()}),
        (CONVNEXT.replace("gap", "frozen_stages=2, gap"),
         {"optim.freeze": ("backbone/res2_*", "backbone/res3_*", "backbone/stem_*",
                           "backbone/down3_*")}),
        (CASCADE, {"model.mask_head.name": "mean", "model.mask_head.heads": 3,
                   "model.cascade.fg_iou_thresh": (0.6, 0.7), "loss.box_reg_weight": 1.0}),
        (POINTREND.replace("subdivision_steps=5", "subdivision_steps=4"),
         {"model.mask_head.name": "pointrend", "model.mask_head.subdivisions": 4}),
    ],
)  # fmt: skip
def test_a_field_sets_its_entry(text, entries, tmp_path):
    write_recipe(write(tmp_path, text), tmp_path / "recipe.py", 8)
    flat = flatten(load_config(tmp_path / "recipe.py").to_dict())
    assert {name: flat[name] for name in entries} == entries


@pytest.mark.parametrize(
    "text, words",
    [
        (SWIN.replace("patch_norm=True", "patch_norm=False"), "patch_norm is False, expected True"),
        (SWIN.replace("qk_scale=None", "use_abs_pos_embed=True"), "pos_embed is True, expected"),
        (SWIN.replace("[2, 2, 6, 2]", "[2, 2, 6]"), "depths is [2, 2, 6], expected four whole"),
        (SWIN.replace("window_size=7", "twist=7"), "backbone.twist is 7, expected no such field"),
        (SWIN + ADAMW + BY_LAYER, "constructor is 'LearningRateDecayOptimizerConstructor', exp"),
        (CONVNEXT.replace("'tiny'", "'huge'"), "arch is 'huge', expected one of ['atto',"),
        (CONVNEXT.replace(" gap_before_final_norm=False", ""), "final_norm is left out, exp"),
        (CONVNEXT.replace("'tiny'", "'small'") + ADAMW + BY_LAYER, "num_layers is 6, expected 12"),
        (CASCADE.replace("num_stages=3", "num_stages=2"), "num_stages is 2, expected the"),
        (CASCADE.replace("num_stages=3", "num_stages=4"), "num_stages is 4, expected the"),
        (CASCADE.replace("neg_iou_thr=0.6", "neg_iou_thr=0.3"), "neg_iou_thr is 0.3, expected 0.6"),
        (CASCADE.replace("0.1, 0.1], **coder), **head", "0.1, 0.1], **coder), fc=2, **head"),
         "bbox_head.1.fc is 2, expected None, as in the first stage"),
        (CASCADE.replace("'GIoULoss'", "'L1Loss'"), "reg_decoded_bbox is True, expected False"),
        (POINTREND.replace("num_fcs=3", "num_fcs='3'"), "point_head.num_fcs is '3', expected a wh"),
        (POINTREND.replace("mask_size=7", "mask_size=14"), "mask_size is 14, expected 7"),
        (POINTREND.replace("28 * 28", "195"), "num_points is 195, expected at least 196"),
        (POINTREND.replace("steps=5", "steps=0"), "subdivision_steps is 0, expected at least 1"),
        (POINTREND.replace("point_head=point_head", ""), "point_head.type is left out, exp"),
        (POINTREND.replace("'PointRend'", "'MaskRCNN'"), "head.type is 'PointRendRoIHead', exp"),
        (CHOICE.replace("[resize]", "[crop]"), "RandomChoice', expected lists of transforms, of"),
    ],
)  # fmt: skip
def test_a_fault_is_one_line(text, words, tmp_path):
    path = write(tmp_path, text)
    with pytest.raises(ValueError) as error:
        write_recipe(path, tmp_path / "recipe.py", 8)
    message = str(error.value)
    assert words in message and "\n" not in message, message
    assert not list(tmp_path.glob("recipe*"))
