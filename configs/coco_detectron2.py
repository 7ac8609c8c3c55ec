"""Mask R-CNN R-50-FPN on COCO 2017, detectron2's recipe (mask_rcnn_R_50_FPN_1x and 3x).

    python -m mask_rcnn_jax.train --config configs/coco_detectron2.py:3x --workdir runs/d2_3x
    python -m mask_rcnn_jax.infer --config configs/coco_detectron2.py \\
        --weights weights/model_final_f10217.pkl --input photo.jpg --output out

Not measured here. detectron2 publishes box AP 38.6 and mask AP 35.2 (1x), 41.0 and 37.2 (3x).
These, cascades and PointRend start from its R-50.pkl.

`:lsj_100ep`, `:lsj_200ep` and `:lsj_400ep` are its new baselines from random weights, published box
and mask AP 44.6 / 40.3, 46.3 / 41.7 and 47.4 / 42.5; with `_r101` 46.4 / 41.6, 48.0 / 43.1 and
48.9 / 43.7, with `_regnetx_4gf` 46.0 / 41.3, 48.1 / 43.1 and 48.6 / 43.5, with `_regnety_4gf`
46.1 / 41.6, 47.8 / 43.0 and 48.2 / 43.3. They are trained in bfloat16 instead of float16;
`sync_batch` weighs every image or RoI the same, as detectron2's NaiveSyncBatchNorm does in mode
"N".
`:x101_3x` (ResNeXt-101-32x8d, 44.3 / 39.5) and `:gn_3x` (group norm, 42.6 / 38.6) are models of
its zoo with 3x schedules. The ImageNet weights of `:gn_3x` cannot be read here: name others as
model.init_from. `:cascade_1x` and `:cascade_3x` have three box heads in a row (42.1 / 36.4 and
44.3 / 38.5).
`:pointrend_1x`, `:pointrend` (3x) and `:pointrend_x101` (3x) have PointRend's mask head, with masks
of 224 x 224 cells: mask AP 36.2, 38.3 and 41.1.

Deliberate differences: RoIAlign uses at most 16 x 16 points per bin, exceeded only by boxes longer
than 112 cells on their level; objects with more than 512 polygon vertices use mask crops; training
uses at most 100 objects per image; detection considers the best 4096 scores over all classes; batch
norm in the heads stores the unbiased variance, on several GPUs theirs the biased one; biases of
squeeze-and-excitation start at zero. PointRend learns from 112 x 112 crops of objects, theirs from
whole masks, and on proposals, theirs on the boxes that the box head makes of them.
"""

from typing import Any

from ml_collections import ConfigDict

from mask_rcnn_jax.configs import base
from mask_rcnn_jax.models.build import named_section

# variant: what it is, and the box and mask AP published for COCO val2017, in percent
SYSTEMS = {
    "": ("detectron2 mask_rcnn_R_50_FPN_1x", 38.6, 35.2),
    "3x": ("detectron2 mask_rcnn_R_50_FPN_3x", 41.0, 37.2),
    "lsj_100ep": ("detectron2 mask_rcnn_R_50_FPN_100ep_LSJ", 44.6, 40.3),
    "lsj_200ep": ("detectron2 mask_rcnn_R_50_FPN_200ep_LSJ", 46.3, 41.7),
    "lsj_400ep": ("detectron2 mask_rcnn_R_50_FPN_400ep_LSJ", 47.4, 42.5),
    "lsj_100ep_r101": ("detectron2 mask_rcnn_R_101_FPN_100ep_LSJ", 46.4, 41.6),
    "lsj_200ep_r101": ("detectron2 mask_rcnn_R_101_FPN_200ep_LSJ", 48.0, 43.1),
    "lsj_400ep_r101": ("detectron2 mask_rcnn_R_101_FPN_400ep_LSJ", 48.9, 43.7),
    "lsj_100ep_regnetx_4gf": ("detectron2 mask_rcnn_regnetx_4gf_dds_FPN_100ep_LSJ", 46.0, 41.3),
    "lsj_200ep_regnetx_4gf": ("detectron2 mask_rcnn_regnetx_4gf_dds_FPN_200ep_LSJ", 48.1, 43.1),
    "lsj_400ep_regnetx_4gf": ("detectron2 mask_rcnn_regnetx_4gf_dds_FPN_400ep_LSJ", 48.6, 43.5),
    "lsj_100ep_regnety_4gf": ("detectron2 mask_rcnn_regnety_4gf_dds_FPN_100ep_LSJ", 46.1, 41.6),
    "lsj_200ep_regnety_4gf": ("detectron2 mask_rcnn_regnety_4gf_dds_FPN_200ep_LSJ", 47.8, 43.0),
    "lsj_400ep_regnety_4gf": ("detectron2 mask_rcnn_regnety_4gf_dds_FPN_400ep_LSJ", 48.2, 43.3),
    "x101_3x": ("detectron2 mask_rcnn_X_101_32x8d_FPN_3x", 44.3, 39.5),
    "gn_3x": ("detectron2 mask_rcnn_R_50_FPN_3x_gn", 42.6, 38.6),
    "cascade_1x": ("detectron2 cascade_mask_rcnn_R_50_FPN_1x", 42.1, 36.4),
    "cascade_3x": ("detectron2 cascade_mask_rcnn_R_50_FPN_3x", 44.3, 38.5),
    "pointrend_1x": ("detectron2 PointRend pointrend_rcnn_R_50_FPN_1x_coco", None, 36.2),
    "pointrend": ("detectron2 PointRend pointrend_rcnn_R_50_FPN_3x_coco", None, 38.3),
    "pointrend_x101": ("detectron2 PointRend pointrend_rcnn_X_101_32x8d_FPN_3x_coco", None, 41.1),
}

IMAGENET_STD = (58.395, 57.12, 57.375)
# variant: steps, decay steps
SCHEDULES = {"1x": (90_000, (60_000, 80_000)), "3x": (270_000, (210_000, 250_000))}
LSJ_TRUNKS: dict[str, dict[str, Any]] = {
    "": dict(depth=50),
    "_r101": dict(depth=101),
    "_regnetx_4gf": dict(
        name="regnet", depth=23, initial_width=96, slope=38.65, multiplier=2.43, group_width=40
    ),
    "_regnety_4gf": dict(
        name="regnet", depth=22, initial_width=96, slope=31.41, multiplier=2.24, group_width=64,
        se_ratio=0.25,
    ),
}  # fmt: skip
LSJ = {f"lsj_{n}ep{trunk}": (n, trunk) for trunk in LSJ_TRUNKS for n in (100, 200, 400)}
LSJ_STEPS, LSJ_DECAYS, LSJ_WARMUP = 184_375, (163_889, 177_546), 500  # of 100 epochs
ZOO = ("x101_3x", "gn_3x", "cascade_1x", "cascade_3x")
POINTREND = ("pointrend_1x", "pointrend", "pointrend_x101")
X101 = "detectron2_fair_x101"
INIT_FROM = {"x101_3x": X101, "pointrend_x101": X101, "gn_3x": ""}
VARIANTS = (*SCHEDULES, *LSJ, *ZOO, *POINTREND)


def get_config(variant: str = "1x") -> ConfigDict:
    if variant not in VARIANTS:
        own = "coco_mmdet, a recipe of its own, or " if variant == "mmdetection" else ""
        raise ValueError(f"coco_detectron2:{variant}: expected {own}one of {list(VARIANTS)}")
    steps, decays = SCHEDULES["1x" if variant.endswith("1x") else "3x"]
    config = base.get_config()
    config.data.update(resize_rounding="round", antialias=True, max_vertices=512, keep_empty=False)
    config.data.short_sides = (640, 672, 704, 736, 768, 800)
    config.model.update(
        init_from=INIT_FROM.get(variant, "detectron2_msra_r50"),
        input=dict(channel_order="bgr", std=(1.0, 1.0, 1.0)),
        backbone=dict(stride_in="1x1"),
        roi_align=dict(sampling_ratio=0, max_sampling_ratio=16, aligned=True, min_size=0.0),
        mask_head=dict(predictor_init="normal"),
        mask_targets=dict(kind="polygons"),
    )
    config.loss.update(
        rpn_cls_average="budget", rpn_box_average="budget", rpn_box_beta=0.0, box_beta=0.0
    )
    config.optim.update(warmup_until=1000 / steps, decay_at=tuple(step / steps for step in decays))
    config.train.update(steps=steps, checkpoint_every=5000)
    config.eval.paste = "continuous"
    if variant in LSJ:
        _make_lsj(config, *LSJ[variant])
    elif variant in POINTREND:
        config.model.mask_head = named_section("mask_head", "pointrend")
        config.model.mask_targets.kind = "crops"
        config.data.max_vertices = 0
    if variant in ("x101_3x", "pointrend_x101"):
        config.model.backbone.update(depth=101, groups=32, width_per_group=8, stride_in="3x3")
        config.model.input.std = IMAGENET_STD
    elif variant == "gn_3x":
        config.model.backbone.update(stride_in="3x3")
        _set_norms(config, "group")
    elif variant.startswith("cascade"):
        config.model.box_head.class_agnostic = True
        config.model.cascade.fg_iou_thresh = (0.6, 0.7)
        config.model.rpn.post_nms_topk_train = 2000
    return config


def _make_lsj(config: ConfigDict, epochs: int, trunk: str) -> None:
    if "regnet" in trunk:
        config.model.backbone = named_section("backbone", "regnet")
        config.model.input.std = IMAGENET_STD
    config.model.init_from = ""
    config.model.backbone.update(frozen_stages=0, **LSJ_TRUNKS[trunk])
    config.model.rpn.num_convs = 2
    _set_norms(config, "sync_batch")
    config.data.update(short_sides=(), augment=("scale_jitter", "fixed_size_crop"))
    config.optim.update(learning_rate=0.1, reference_batch=64, weight_decay=4e-5)
    config.optim.update(warmup_until=LSJ_WARMUP / LSJ_STEPS, warmup_factor=0.067)
    config.optim.decay_at = tuple(step / LSJ_STEPS for step in LSJ_DECAYS)
    steps = LSJ_STEPS * epochs // 100
    config.train.update(batch_size=64, steps=steps, precision="auto")


def _set_norms(config: ConfigDict, norm: str) -> None:
    """Norm in trunk, FPN and heads, which does not decay, and a box head of convolutions."""
    config.model.update(
        backbone=dict(norm=norm),
        fpn=dict(norm=norm),
        box_head=dict(name="conv_fc", num_convs=4, num_fcs=1, norm=norm),
        mask_head=dict(norm=norm),
    )
    config.optim.decay_on = ("kernel", "kernel_bias")
