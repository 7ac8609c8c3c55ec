"""Recipes from configs of mmdetection 3's Mask R-CNN and Faster R-CNN.

docs/mmdet_config.md lists the counterpart of each field. What would change the model and has no
counterpart is an error with its line; other fields without one are named.
"""

import os
from typing import Any

from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.formats.fields import Fields, Place
from mask_rcnn_jax.formats.mmdet_training import data, schedule
from mask_rcnn_jax.formats.python_config import Block, read_config
from mask_rcnn_jax.formats.recipe_file import Translated, write_translated

BASE = "coco_mmdet"
DETECTORS = ("MaskRCNN", "FasterRCNN")
HEADS: dict[str, dict[str, Any]] = {
    "Shared2FCBBoxHead": {"name": "two_fc"},
    "Shared4Conv1FCBBoxHead": {"name": "conv_fc", "num_convs": 4, "num_fcs": 1},
}
NORMS = {"SyncBN": "sync_batch", "GN": "group"}
BOX, MASK = "model.roi_head.bbox_head", "model.roi_head.mask_head"
RPN_TRAIN, RPN_TEST = "model.train_cfg.rpn", "model.test_cfg.rpn"
RCNN_TRAIN, RCNN_TEST = "model.train_cfg.rcnn", "model.test_cfg.rcnn"
PROPOSALS = "model.train_cfg.rpn_proposal"
# Fields whose value is that of an entry.
SAME = {
    "model.backbone.depth": "model.backbone.depth",
    "model.backbone.groups": "model.backbone.groups",
    "model.backbone.base_width": "model.backbone.width_per_group",
    "model.neck.out_channels": "model.fpn.channels",
    "model.rpn_head.feat_channels": "model.rpn.channels",
    "model.rpn_head.num_convs": "model.rpn.num_convs",
    "model.rpn_head.loss_bbox.loss_weight": "loss.rpn_box_weight",
    "model.data_preprocessor.pad_size_divisor": "model.input.pad_multiple",
    f"{BOX}.fc_out_channels": "model.box_head.channels",
    f"{BOX}.conv_out_channels": "model.box_head.conv_channels",
    f"{BOX}.reg_class_agnostic": "model.box_head.class_agnostic",
    f"{BOX}.loss_bbox.loss_weight": "loss.box_reg_weight",
    f"{MASK}.num_convs": "model.mask_head.num_convs",
    f"{MASK}.conv_out_channels": "model.mask_head.channels",
    f"{MASK}.loss_mask.loss_weight": "loss.mask_weight",
    f"{RPN_TRAIN}.assigner.pos_iou_thr": "model.rpn.fg_iou_thresh",
    f"{RPN_TRAIN}.assigner.neg_iou_thr": "model.rpn.bg_iou_thresh",
    f"{RPN_TRAIN}.sampler.num": "model.rpn.batch_size_per_image",
    f"{RPN_TRAIN}.sampler.pos_fraction": "model.rpn.positive_fraction",
    f"{RPN_TRAIN}.allowed_border": "model.rpn.straddle_thresh",
    f"{PROPOSALS}.nms_pre": "model.rpn.pre_nms_topk_train",
    f"{PROPOSALS}.max_per_img": "model.rpn.post_nms_topk_train",
    f"{PROPOSALS}.nms.iou_threshold": "model.rpn.nms_thresh",
    f"{PROPOSALS}.min_bbox_size": "model.rpn.min_size",
    f"{RPN_TEST}.nms_pre": "model.rpn.pre_nms_topk_test",
    f"{RPN_TEST}.max_per_img": "model.rpn.post_nms_topk_test",
    f"{RCNN_TRAIN}.assigner.pos_iou_thr": "model.sampling.fg_iou_thresh",
    f"{RCNN_TRAIN}.sampler.num": "model.sampling.batch_size_per_image",
    f"{RCNN_TRAIN}.sampler.pos_fraction": "model.sampling.positive_fraction",
    f"{RCNN_TEST}.score_thr": "eval.score_threshold",
    f"{RCNN_TEST}.nms.iou_threshold": "eval.nms_thresh",
    f"{RCNN_TEST}.max_per_img": "eval.detections_per_image",
}
# Fields with possible values here.
FIXED: dict[str, tuple] = {
    "model.type": DETECTORS,
    "model.data_preprocessor.type": ("DetDataPreprocessor",),
    "model.backbone.type": ("ResNet", "ResNeXt"),
    "model.backbone.num_stages": (4,),
    "model.backbone.out_indices": ((0, 1, 2, 3),),
    "model.backbone.strides": ((1, 2, 2, 2),),
    "model.backbone.dilations": ((1, 1, 1, 1),),
    "model.backbone.deep_stem": (False,),
    "model.backbone.avg_down": (False,),
    "model.backbone.dcn": (None,),
    "model.backbone.plugins": (None,),
    "model.neck.type": ("FPN",),
    "model.neck.num_outs": (5,),
    "model.neck.start_level": (0,),
    "model.neck.norm_cfg": (None,),
    "model.neck.add_extra_convs": (False,),
    "model.rpn_head.type": ("RPNHead",),
    "model.rpn_head.anchor_generator.type": ("AnchorGenerator",),
    "model.rpn_head.anchor_generator.strides": ((4, 8, 16, 32, 64),),
    "model.rpn_head.bbox_coder.type": ("DeltaXYWHBBoxCoder",),
    "model.rpn_head.bbox_coder.target_means": ((0, 0, 0, 0),),
    "model.rpn_head.bbox_coder.target_stds": ((1, 1, 1, 1),),
    "model.rpn_head.loss_cls.type": ("CrossEntropyLoss",),
    "model.rpn_head.loss_cls.use_sigmoid": (True,),
    "model.rpn_head.loss_cls.loss_weight": (1,),
    "model.roi_head.type": ("StandardRoIHead",),
    "model.roi_head.shared_head": (None,),
    f"{BOX}.type": tuple(HEADS),
    f"{BOX}.roi_feat_size": (7,),
    f"{BOX}.norm_cfg": (None,),
    f"{BOX}.bbox_coder.type": ("DeltaXYWHBBoxCoder",),
    f"{BOX}.bbox_coder.target_means": ((0, 0, 0, 0),),
    f"{BOX}.loss_cls.type": ("CrossEntropyLoss",),
    f"{BOX}.loss_cls.use_sigmoid": (False,),
    f"{BOX}.loss_cls.loss_weight": (1,),
    f"{MASK}.type": ("FCNMaskHead",),
    f"{MASK}.class_agnostic": (False,),
    f"{MASK}.norm_cfg": (None,),
    f"{MASK}.roi_feat_size": (14,),
    f"{MASK}.loss_mask.type": ("CrossEntropyLoss",),
    f"{MASK}.loss_mask.use_mask": (True,),
    f"{RPN_TRAIN}.assigner.type": ("MaxIoUAssigner",),
    f"{RPN_TRAIN}.assigner.match_low_quality": (True,),
    f"{RPN_TRAIN}.sampler.type": ("RandomSampler",),
    f"{RPN_TRAIN}.sampler.add_gt_as_proposals": (False,),
    f"{PROPOSALS}.nms.type": ("nms",),
    f"{RPN_TEST}.nms.type": ("nms",),
    f"{RCNN_TRAIN}.assigner.type": ("MaxIoUAssigner",),
    f"{RCNN_TRAIN}.sampler.type": ("RandomSampler",),
    f"{RCNN_TRAIN}.sampler.add_gt_as_proposals": (True,),
    f"{RCNN_TRAIN}.mask_size": (28,),
    f"{RCNN_TEST}.nms.type": ("nms", "soft_nms"),
    f"{RCNN_TEST}.mask_thr_binary": (0.5,),
    **{f"{m}_cfg.{s}.{n}": (-1,) for m, s in (("model.train", "rpn"), ("model.train", "rcnn"))
       for n in ("pos_weight", "assigner.ignore_iof_thr", "sampler.neg_pos_ub")},
}  # fmt: skip
for _kind, _size in (("bbox", 7), ("mask", 14)):
    _extractor = f"model.roi_head.{_kind}_roi_extractor"
    FIXED |= {
        f"{_extractor}.type": ("SingleRoIExtractor",),
        f"{_extractor}.roi_layer.type": ("RoIAlign",),
        f"{_extractor}.roi_layer.output_size": (_size,),
        f"{_extractor}.featmap_strides": ((4, 8, 16, 32),),
    }
# What mmengine reads beside `model`; other names are variables.
READ = (
    *("train_dataloader", "val_dataloader", "train_cfg", "optim_wrapper", "param_scheduler"),
    *("auto_scale_lr", "custom_hooks", "custom_imports", "randomness"),
)
# Fields that follow from others, or change nothing.
IGNORED = (
    *("model.backbone.with_cp", "model.backbone.zero_init_residual", "model.backbone.in_channels"),
    *("model.neck.in_channels", "model.rpn_head.in_channels", "model.neck.init_cfg"),
    *(f"{head}.{name}" for head in (BOX, MASK) for name in ("in_channels", "num_classes")),
    *(f"model.roi_head.{kind}_roi_extractor.out_channels" for kind in ("bbox", "mask")),
    *(f"model.data_preprocessor.{name}" for name in ("pad_mask", "mask_pad_value", "pad_value")),
    *(f"{train}.debug" for train in (RPN_TRAIN, RCNN_TRAIN)),
    *("default_scope", "default_hooks", "env_cfg", "vis_backends", "visualizer", "log_processor"),
    *("log_level", "resume", "tta_model", "tta_pipeline", "val_cfg", "test_cfg", "work_dir"),
    *("val_evaluator", "test_evaluator", "test_dataloader", "launcher", "metainfo", "find_unused"),
    *("model.data_preprocessor.batch_augments", "randomness.deterministic"),
)


def write_recipe(
    config: str | os.PathLike, output: str | os.PathLike, gpus: int, text: str | None = None
) -> list[str]:
    """Write a recipe for a config, and return a line for each field without a counterpart.

    gpus: number of GPUs that the config is for; its batch size is per GPU.
    text: the config, where `config` only names it.

    Raises ValueError or OSError, naming the config, for one that cannot be translated.
    """
    fields = flat(os.fspath(config), read_config(config, text))
    entries, notes = translate(fields, gpus)
    translated = Translated("a config of mmdetection", "mmdet_config", BASE, entries, notes)
    write_translated(translated, config, output)
    return notes


def flat(path: str, config: Block) -> Fields:
    """The values of a config by dotted names; items of lists of dicts have numbers."""
    values: dict[str, Any] = {}
    places: dict[str, Place] = {}

    def add(name: str, value: Any, place: Place) -> None:
        if isinstance(value, Block) and (value or not name):
            for key, one in value.items():
                add(f"{name}.{key}" if name else str(key), one, value.places.get(key, place))
        elif isinstance(value, list | tuple) and any(isinstance(one, Block) for one in value):
            for index, one in enumerate(value):
                add(f"{name}.{index}", one, place)
        else:
            values[name], places[name] = value, place

    add("", config, Place(path, 1))
    return Fields(path, values, places)


def translate(fields: Fields, gpus: int) -> tuple[dict[str, Any], list[str]]:
    """The entries of a recipe for a config, and a line for each field without a counterpart."""
    if "model.type" not in fields.values:
        expected = "expected a config of mmdetection 3 with model = dict(type='MaskRCNN', ..)"
        raise ValueError(f"{fields.path} has no model.type, {expected}")
    notes: list[str] = []
    fields.check(FIXED)
    entries = fields.same(SAME, BASE)
    fields.ignore(IGNORED)
    entries |= _backbone(fields, notes) | _input(fields) | _anchors(fields) | _heads(fields)
    entries |= _losses(fields) | _proposals(fields, notes)
    entries |= data(fields, gpus, notes)
    entries |= schedule(fields, gpus, notes)
    for name in fields.unread:
        if name.startswith("model."):
            raise fields.fault(name, "no such field: it has no counterpart here")
        if name.partition(".")[0] in READ:
            notes.append(f"{name} = {show(fields.values[name])}")
    return entries, notes


def _backbone(fields: Fields, notes: list[str]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    style = fields.get("model.backbone.style", "pytorch")
    if style not in ("pytorch", "caffe"):
        raise fields.fault("model.backbone.style", "'pytorch' or 'caffe'")
    entries["model.backbone.stride_in"] = "3x3" if style == "pytorch" else "1x1"
    frozen = fields.get("model.backbone.frozen_stages", -1)
    if type(frozen) is not int or not -1 <= frozen <= 4:
        raise fields.fault("model.backbone.frozen_stages", "-1 to 4")
    entries["model.backbone.frozen_stages"] = frozen + 1  # ours counts the stem
    kind = fields.get("model.backbone.norm_cfg.type", "BN")
    learns = fields.get("model.backbone.norm_cfg.requires_grad", True)
    is_still = fields.get("model.backbone.norm_eval", True)
    groups = fields.get("model.backbone.norm_cfg.num_groups", 32)
    if kind not in ("BN", *NORMS) or (kind == "GN" and groups != 32):
        raise fields.fault("model.backbone.norm_cfg.type", "'BN', 'SyncBN' or 'GN' of 32 groups")
    norm = "group" if kind == "GN" else NORMS.get(kind, "batch")
    if kind != "GN" and is_still:
        norm = "affine" if learns else "frozen"
    elif not learns:
        raise fields.fault("model.backbone.norm_cfg.requires_grad", "True without norm_eval")
    entries["model.backbone.norm"] = norm
    if "model.backbone.norm_cfg.eps" in fields.values:
        entries["model.backbone.norm_eps"] = fields.positive("model.backbone.norm_cfg.eps")
    for name in ("pretrained", "model.pretrained", "model.backbone.init_cfg.checkpoint"):
        if checkpoint := fields.get(name):
            entries |= start(name, checkpoint, notes)
    fields.ignore(["model.backbone.init_cfg"])
    if checkpoint := fields.get("load_from"):
        entries |= start("load_from", checkpoint, notes)
    return entries


def start(name: str, checkpoint: Any, notes: list[str]) -> dict[str, Any]:
    """`model.init_from` for a checkpoint, or a note where it has no counterpart."""
    text = str(checkpoint)
    known, _, weights = text.partition("://")
    if known == "torchvision" and weights in ("resnet18", "resnet34", "resnet50", "resnet101"):
        return {"model.init_from": weights}
    if "://" in text:
        advice = "fetch it, or what docs/recipes.md has, and set model.init_from"
        notes.append(f"{name}: {show(text, 300)}; {advice}")
        return {}
    return {"model.init_from": text}


def _input(fields: Fields) -> dict[str, Any]:
    name = "model.data_preprocessor"
    is_rgb = fields.get(f"{name}.bgr_to_rgb", False)
    fields.check({f"{name}.bgr_to_rgb": (True, False), f"{name}.rgb_to_bgr": (False,)})
    entries: dict[str, Any] = {"model.input.channel_order": "rgb" if is_rgb else "bgr"}
    for key in ("mean", "std"):
        values = tuple(map(float, fields.numbers(f"{name}.{key}", "three numbers", 3)))
        entries[f"model.input.{key}"] = values if is_rgb else values[::-1]
    return entries


def _anchors(fields: Fields) -> dict[str, Any]:
    name = "model.rpn_head.anchor_generator"
    fields.check({f"{name}.center_offset": (0,), f"{name}.scale_major": (True,)})
    expected = "a list of numbers above 0"
    scales = fields.numbers(f"{name}.scales", expected)
    ratios = fields.numbers(f"{name}.ratios", expected)
    for key, values in (("scales", scales), ("ratios", ratios)):
        if not 1 <= len(values) <= 16 or min(values) <= 0:
            raise fields.fault(f"{name}.{key}", f"1 to 16 {expected[10:]}")
    first = scales[0]
    shapes = tuple(
        (scale / first * (1 / ratio) ** 0.5, scale / first * ratio**0.5)
        for ratio in ratios
        for scale in scales
    )
    sizes = tuple(float(first * stride) for stride in (4, 8, 16, 32, 64))
    return {"model.anchors.sizes": sizes, "model.anchors.aspect_ratios": shapes}


def _heads(fields: Fields) -> dict[str, Any]:
    kind = fields.get(f"{BOX}.type")
    entries: dict[str, Any] = {f"model.box_head.{k}": v for k, v in HEADS.get(kind, {}).items()}
    stds = fields.numbers(f"{BOX}.bbox_coder.target_stds", "four numbers above 0", 4)
    if min(stds) <= 0:
        raise fields.fault(f"{BOX}.bbox_coder.target_stds", "four numbers above 0")
    entries["model.box_coder.weights"] = tuple(round(1 / std, 12) for std in stds)
    align = "model.roi_head.bbox_roi_extractor.roi_layer"
    for key, entry, default in (
        ("sampling_ratio", "sampling_ratio", 0),
        ("aligned", "aligned", True),
    ):
        value = fields.get(f"{align}.{key}", default)
        other = f"{align.replace('bbox_roi', 'mask_roi')}.{key}"
        if fields.get(other, value) != value:
            raise fields.fault(other, f"{value!r}, as of the box head")
        entries[f"model.roi_align.{entry}"] = value
    if fields.values["model.type"] == "FasterRCNN":
        if fields.named(MASK):
            raise fields.fault("model.type", "'MaskRCNN' with a mask_head")
        entries["model.mask_head.name"] = "none"
    elif not fields.named(MASK):
        raise fields.fault("model.type", "'FasterRCNN' without a mask_head")
    return entries


def _losses(fields: Fields) -> dict[str, Any]:
    entries = {}
    for name, entry in (("model.rpn_head", "rpn_box_beta"), (BOX, "box_beta")):
        kind = fields.get(f"{name}.loss_bbox.type", "L1Loss")
        if kind not in ("L1Loss", "SmoothL1Loss"):
            raise fields.fault(f"{name}.loss_bbox.type", "'L1Loss' or 'SmoothL1Loss'")
        beta = float(fields.number(f"{name}.loss_bbox.beta", 1.0))
        entries[f"loss.{entry}"] = beta if kind == "SmoothL1Loss" else 0.0
    return entries


def _proposals(fields: Fields, notes: list[str]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name in ("nms.iou_threshold", "min_bbox_size"):
        test, train = fields.get(f"{RPN_TEST}.{name}"), fields.values.get(f"{PROPOSALS}.{name}")
        if test != train:
            notes.append(f"{RPN_TEST}.{name} = {show(test)}: it is {show(train)}, as in training")
    name = f"{RCNN_TRAIN}.assigner"
    low, high = fields.get(f"{name}.neg_iou_thr", 0.5), fields.values.get(f"{name}.pos_iou_thr")
    if type(low) not in (int, float) or not 0 <= low <= 1:
        raise fields.fault(f"{name}.neg_iou_thr", "a number from 0 to 1")
    entries["model.sampling.bg_iou_range"] = (0.0, float(low))
    if fields.get(f"{name}.match_low_quality") and fields.values.get(f"{name}.min_pos_iou") != high:
        raise fields.fault(f"{name}.min_pos_iou", f"{high}, that of pos_iou_thr")
    lowest = fields.get(f"{RPN_TRAIN}.assigner.min_pos_iou", 0.0)
    if lowest:
        text = "an object whose best anchor has a lower IoU gets that one, too"
        notes.append(f"{RPN_TRAIN}.assigner.min_pos_iou = {show(lowest)}: {text}")
    fields.get(f"{name}.min_pos_iou")
    if fields.get(f"{RCNN_TEST}.nms.type") == "soft_nms":
        method = fields.get(f"{RCNN_TEST}.nms.method", "linear")
        if method not in ("linear", "gaussian"):
            raise fields.fault(f"{RCNN_TEST}.nms.method", "'linear' or 'gaussian'")
        entries["eval.nms"] = method
        entries |= fields.same(
            {
                f"{RCNN_TEST}.nms.sigma": "eval.soft_sigma",
                f"{RCNN_TEST}.nms.min_score": "eval.soft_min_score",
            },
            BASE,
        )
    return entries
