"""Recipes from configs of mmdetection's Mask R-CNN, Faster R-CNN, Cascade R-CNN and PointRend.

docs/mmdet_config.md lists the counterpart of each field. What would change the model and has no
counterpart is an error with its line; other fields without one are named.
"""

import os
from typing import Any

from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.formats.fields import Fields, Place
from mask_rcnn_jax.formats.mmdet_backbones import backbone, decay
from mask_rcnn_jax.formats.mmdet_fields import (
    BOX,
    FIXED,
    IGNORED,
    PROPOSALS,
    RCNN_TEST,
    RCNN_TRAIN,
    READ,
    RPN_TEST,
    RPN_TRAIN,
    SAME,
)
from mask_rcnn_jax.formats.mmdet_heads import heads, unstack
from mask_rcnn_jax.formats.mmdet_old import SILENT, upgraded
from mask_rcnn_jax.formats.mmdet_training import data, schedule
from mask_rcnn_jax.formats.python_config import Block, read_config
from mask_rcnn_jax.formats.recipe_file import Translated, write_translated

BASE = "coco_mmdet"
IOU_LOSSES = ("IoULoss", "GIoULoss", "DIoULoss", "CIoULoss")


def write_recipe(
    config: str | os.PathLike, output: str | os.PathLike, gpus: int, text: str | None = None
) -> list[str]:
    """Write a recipe for a config, and return a line for each field without a counterpart.

    gpus: number of GPUs that the config is for; its batch size is per GPU.
    text: the config, where `config` only names it.

    Raises ValueError or OSError, naming the config, for one that cannot be translated.
    """
    if text is None and os.fspath(config).endswith((".yaml", ".yml")):
        other = "`prepare d2_config` reads those of detectron2"
        raise ValueError(f"{config}: expected a config of mmdetection in Python; {other}")
    fields = flat(os.fspath(config), upgraded(read_config(config, text)))
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
        elif isinstance(value, list | tuple) and any(map(_has_fields, value)):
            for index, one in enumerate(value):
                add(f"{name}.{index}", one, place)
        else:
            values[name], places[name] = value, place

    add("", config, Place(path, 1))
    return Fields(path, values, places)


def _has_fields(value: Any) -> bool:
    """Whether a value is a dict, or a list with one."""
    is_list = isinstance(value, list | tuple)
    return isinstance(value, Block) or (is_list and any(map(_has_fields, value)))


def translate(fields: Fields, gpus: int) -> tuple[dict[str, Any], list[str]]:
    """The entries of a recipe for a config, and a line for each field without a counterpart."""
    if "model.type" not in fields.values:
        expected = "expected a config of mmdetection 3 with model = dict(type='MaskRCNN', ..)"
        raise ValueError(f"{fields.path} has no model.type, {expected}")
    if str(fields.values["model.type"]).endswith("PoseEstimator"):
        text = "a detector: configs of mmpose are not read, `coco_keypoints` is Keypoint R-CNN"
        raise fields.fault("model.type", text)
    notes: list[str] = []
    stages = unstack(fields)
    fields.check(FIXED)
    entries = fields.same(SAME, BASE)
    fields.ignore((*IGNORED, *SILENT))
    entries |= backbone(fields, BASE, notes) | _input(fields) | _anchors(fields)
    entries |= heads(fields, stages, notes) | _losses(fields, bool(stages), notes)
    entries |= _proposals(fields, notes)
    entries |= data(fields, gpus, notes)
    entries |= schedule(fields, gpus, notes) | decay(fields, entries)
    for name in fields.unread:
        if name.startswith("model."):
            raise fields.fault(name, "no such field: it has no counterpart here")
        if name.partition(".")[0] in READ:
            notes.append(f"{name} = {show(fields.values[name])}")
    return entries, notes


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


def _losses(fields: Fields, is_cascade: bool, notes: list[str]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, entry in (("model.rpn_head", "rpn_box_beta"), (BOX, "box_beta")):
        kind = fields.get(f"{name}.loss_bbox.type", "L1Loss")
        is_of_boxes = is_cascade and name == BOX and kind in IOU_LOSSES
        fields.check({f"{name}.reg_decoded_bbox": (is_of_boxes,)})
        if is_of_boxes:
            text = "an L1 loss of deltas; detections are the same"
            notes.append(f"{name}.loss_bbox.type = {show(kind)}: {text}")
            fields.ignore([f"{name}.loss_bbox"])
            entries |= {"loss.box_reg_weight": 1.0, "loss.box_beta": 0.0}
            continue
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
