"""Recipes from detectron2's configs in YAML, of R-CNNs with a ResNet, masks and keypoints.

docs/d2_config.md lists the counterpart of each field. What would change the model and has no
counterpart is an error with its line; other fields without one are named.
"""

import os
from typing import Any

from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.formats.d2_fields import DEFAULTS, FIXED, IGNORED, MASK, SAME, SWITCHED
from mask_rcnn_jax.formats.d2_heads import datasets, keypoint_head, mask_head, norm
from mask_rcnn_jax.formats.fields import Fields
from mask_rcnn_jax.formats.recipe_file import Translated, warmup_entries, write_translated
from mask_rcnn_jax.formats.yaml_config import read_config

BASE = "coco_detectron2"
# MODEL.WEIGHTS: its name here.
IMAGENET = {
    "detectron2://ImageNetPretrained/MSRA/R-50.pkl": "detectron2_msra_r50",
    "detectron2://ImageNetPretrained/FAIR/X-101-32x8d.pkl": "detectron2_fair_x101",
}


def write_recipe(config: str | os.PathLike, output: str | os.PathLike) -> list[str]:
    """Write a recipe for a config, and return a line for each field without a counterpart.

    Raises ValueError or OSError, naming the config, for one that cannot be translated.
    """
    path = os.fspath(config)
    if path.endswith(".py"):
        raise ValueError(
            f"{path} is a LazyConfig, which is Python to run; start from the recipe of its model "
            "(docs/from_others.md#from-detectron2) and set the entries that you changed, or, if it "
            "is of mmdetection, take `prepare mmdet_config`"
        )
    entries, notes = translate(read_config(path))
    translated = Translated("a config of detectron2", "d2_config", BASE, entries, notes)
    write_translated(translated, config, output)
    return notes


def translate(fields: Fields) -> tuple[dict[str, Any], list[str]]:
    """The entries of a recipe for a config, and a line for each field without a counterpart."""
    if not any(name.startswith("MODEL.") for name in fields.values):
        expected = "expected a config of detectron2 in YAML"
        raise ValueError(f"{fields.path} has no MODEL, {expected}")
    fields.values = DEFAULTS | fields.values
    notes: list[str] = []
    for block in SWITCHED:
        if fields.get(f"{block}.ENABLED", False) is not True:
            fields.ignore([block])
    fields.check(FIXED)
    entries = fields.same(SAME, BASE)
    fields.ignore(IGNORED)
    entries |= _backbone(fields) | _input(fields) | _anchors(fields) | _heads(fields, notes)
    entries |= _data(fields) | _solver(fields, notes) | mask_head(fields, BASE)
    entries |= keypoint_head(fields, notes) | datasets(fields, notes)
    text = str(fields.get("MODEL.WEIGHTS") or "")
    if text in IMAGENET:
        text = IMAGENET[text]
    elif "://" in text:
        zoo = "https://dl.fbaipublicfiles.com/detectron2/"
        address, text = text.replace("detectron2://", zoo), ""
        notes.append(f"MODEL.WEIGHTS: fetch {show(address, 300)} and set model.init_from")
    entries["model.init_from"] = text
    for name in fields.unread:
        if name.startswith("MODEL."):
            raise fields.fault(name, "no such field: it has no counterpart here")
        notes.append(f"{name} = {show(fields.values[name])}")
    return entries, notes


def _backbone(fields: Fields) -> dict[str, Any]:
    norms = {
        "backbone": norm(fields, "MODEL.RESNETS.NORM", "FrozenBN"),
        "fpn": norm(fields, "MODEL.FPN.NORM", ""),
        "box_head": norm(fields, "MODEL.ROI_BOX_HEAD.NORM", ""),
    }
    entries: dict[str, Any] = {f"model.{part}.norm": kind for part, kind in norms.items()}
    in_1x1 = fields.get("MODEL.RESNETS.STRIDE_IN_1X1", True)
    entries["model.backbone.stride_in"] = "1x1" if in_1x1 else "3x3"
    decay = fields.values.get("SOLVER.WEIGHT_DECAY", 1e-4)
    of_norms = fields.get("SOLVER.WEIGHT_DECAY_NORM", 0.0)
    of_biases = fields.get("SOLVER.WEIGHT_DECAY_BIAS")
    kinds = ["kernel", *(["kernel_bias"] if of_biases in (None, decay) else [])]
    if of_norms not in (0, decay):
        raise fields.fault("SOLVER.WEIGHT_DECAY_NORM", f"0 or {decay}")
    if of_biases not in (None, 0, decay):
        raise fields.fault("SOLVER.WEIGHT_DECAY_BIAS", f"null, 0 or {decay}")
    if of_norms and len(kinds) == 2:
        kinds = ["kernel", "bias", "scale"]
    elif of_norms:
        raise fields.fault("SOLVER.WEIGHT_DECAY_NORM", "0 where biases do not decay")
    return entries | {"optim.decay_on": tuple(kinds)}


def _input(fields: Fields) -> dict[str, Any]:
    is_rgb = fields.get("INPUT.FORMAT") == "RGB"
    entries: dict[str, Any] = {"model.input.channel_order": "rgb" if is_rgb else "bgr"}
    for name, key in (("MODEL.PIXEL_MEAN", "mean"), ("MODEL.PIXEL_STD", "std")):
        values = tuple(map(float, fields.numbers(name, "three numbers", 3)))
        entries[f"model.input.{key}"] = values if is_rgb else values[::-1]
    return entries


def _anchors(fields: Fields) -> dict[str, Any]:
    lists: dict[str, list[tuple]] = {}
    for name in ("SIZES", "ASPECT_RATIOS"):
        field = f"MODEL.ANCHOR_GENERATOR.{name}"
        value = fields.get(field)
        found = value if isinstance(value, list | tuple) and len(value) in (1, 5) else ()
        lists[name] = [tuple(level) for level in found if isinstance(level, list | tuple)]
        numbers = [number for level in lists[name] for number in level]
        is_right = all(type(n) in (int, float) and 0 < n < 1e6 for n in numbers)
        if not numbers or not is_right or len({len(level) for level in lists[name]}) > 1:
            raise fields.fault(field, "one list of numbers above 0, or five of the same length")
    sizes, ratios = lists["SIZES"] * (5 if len(lists["SIZES"]) == 1 else 1), lists["ASPECT_RATIOS"]
    scales = {tuple(round(size / level[0], 9) for size in level) for level in sizes}
    if len(scales) > 1:
        expected = "sizes with the same proportions on each level"
        raise fields.fault("MODEL.ANCHOR_GENERATOR.SIZES", expected)
    if len(set(ratios)) > 1:
        raise fields.fault("MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS", "one list for all levels")
    shapes = tuple(
        (scale * (1 / ratio) ** 0.5, scale * ratio**0.5)
        for scale in scales.pop()
        for ratio in ratios[0]
    )
    first = tuple(float(level[0]) for level in sizes)
    return {"model.anchors.sizes": first, "model.anchors.aspect_ratios": shapes}


def _heads(fields: Fields, notes: list[str]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    low, high = 0.3, 0.7
    if "MODEL.RPN.IOU_THRESHOLDS" in fields.values:
        low, high = fields.numbers("MODEL.RPN.IOU_THRESHOLDS", "two numbers", 2)
    entries |= {"model.rpn.bg_iou_thresh": float(low), "model.rpn.fg_iou_thresh": float(high)}
    threshold = 0.5
    if "MODEL.ROI_HEADS.IOU_THRESHOLDS" in fields.values:
        (threshold,) = fields.numbers("MODEL.ROI_HEADS.IOU_THRESHOLDS", "one number", 1)
    entries["model.sampling.fg_iou_thresh"] = float(threshold)
    entries["model.sampling.bg_iou_range"] = (0.0, float(threshold))
    convs = fields.values["MODEL.ROI_BOX_HEAD.NUM_CONV"]
    entries["model.box_head.name"] = "conv_fc" if convs else "two_fc"
    dims = fields.get("MODEL.RPN.CONV_DIMS", [-1])
    is_list = isinstance(dims, list | tuple) and all(type(dim) is int for dim in dims)
    if not is_list or not dims or len(set(dims)) > 1:
        raise fields.fault("MODEL.RPN.CONV_DIMS", "a list of equal numbers")
    entries["model.rpn.num_convs"] = len(dims)
    width = fields.values.get("MODEL.FPN.OUT_CHANNELS", 256) if dims[0] == -1 else dims[0]
    entries["model.rpn.channels"] = width
    tasks = ["KEYPOINT"] if fields.get("MODEL.KEYPOINT_ON") else []
    is_pointrend = fields.get(f"{MASK}.NAME") in ("PointRendMaskHead", "CoarseMaskHead")
    if not is_pointrend or not fields.get("MODEL.MASK_ON"):
        tasks.append("MASK")
    for name, default in (("POOLER_SAMPLING_RATIO", 0), ("POOLER_TYPE", "ROIAlignV2")):
        value = fields.get(f"MODEL.ROI_BOX_HEAD.{name}", default)
        for task in tasks:
            other = f"MODEL.ROI_{task}_HEAD.{name}"
            if fields.get(other, value) != value:
                raise fields.fault(other, f"{value!r}, as of ROI_BOX_HEAD")
        if name == "POOLER_TYPE":
            entries["model.roi_align.aligned"] = value == "ROIAlignV2"
    name = "MODEL.ROI_BOX_HEAD.TRAIN_ON_PRED_BOXES"
    if fields.get(name, False):
        notes.append(f"{name} = True: masks and keypoints learn on proposals")
    return entries | _coder_and_cascade(fields, threshold)


def _coder_and_cascade(fields: Fields, threshold: float) -> dict[str, Any]:
    weights: tuple[float, ...] = (10.0, 10.0, 5.0, 5.0)
    if "MODEL.ROI_BOX_HEAD.BBOX_REG_WEIGHTS" in fields.values:
        given = fields.numbers("MODEL.ROI_BOX_HEAD.BBOX_REG_WEIGHTS", "four numbers above 0", 4)
        weights = tuple(map(float, given))
    entries: dict[str, Any] = {"model.box_coder.weights": weights}
    block = "MODEL.ROI_BOX_CASCADE_HEAD"
    ious = fields.get(f"{block}.IOUS", (0.5, 0.6, 0.7))
    factors = fields.get(f"{block}.BBOX_REG_WEIGHTS", [[w * n for w in weights] for n in (1, 2, 3)])
    if fields.get("MODEL.ROI_HEADS.NAME") != "CascadeROIHeads":
        return entries
    is_list = isinstance(ious, list | tuple) and all(type(iou) in (int, float) for iou in ious)
    if not is_list or len(ious) < 2 or ious[0] != threshold:
        raise fields.fault(f"{block}.IOUS", f"numbers from {threshold} on, that of ROI_HEADS")
    try:
        shares = [{round(b / a, 9) for a, b in zip(weights, one, strict=True)} for one in factors]
    except (TypeError, ValueError):
        shares = []
    if len(shares) != len(ious) or any(len(one) > 1 for one in shares) or shares[0] != {1.0}:
        expected = "a list of four for each of IOUS, multiples of ROI_BOX_HEAD.BBOX_REG_WEIGHTS"
        raise fields.fault(f"{block}.BBOX_REG_WEIGHTS", expected)
    entries["model.cascade.fg_iou_thresh"] = tuple(map(float, ious[1:]))
    entries["model.cascade.weight_factors"] = tuple(one.pop() for one in shares[1:])
    return entries


def _data(fields: Fields) -> dict[str, Any]:
    filters = fields.get("DATALOADER.FILTER_EMPTY_ANNOTATIONS", True)
    entries: dict[str, Any] = {"data.keep_empty": not filters}
    sides = fields.values["INPUT.MIN_SIZE_TRAIN"]
    fields.values["INPUT.MIN_SIZE_TRAIN"] = [sides] if isinstance(sides, int) else sides
    sides = fields.numbers("INPUT.MIN_SIZE_TRAIN", "whole numbers")
    short, longest = fields.positive("INPUT.MIN_SIZE_TEST"), fields.get("INPUT.MAX_SIZE_TEST")
    if not sides or not all(type(s) is int and 0 < s <= short for s in sides):
        raise fields.fault("INPUT.MIN_SIZE_TRAIN", f"whole numbers up to MIN_SIZE_TEST {short}")
    if fields.get("INPUT.MAX_SIZE_TRAIN") != longest:
        raise fields.fault("INPUT.MAX_SIZE_TRAIN", f"MAX_SIZE_TEST, {longest}")
    if fields.get("INPUT.MIN_SIZE_TRAIN_SAMPLING", "choice") == "range":
        sides = tuple(range(min(sides), max(sides) + 1))
    entries["data.image_size"] = (short, longest)
    entries["data.short_sides"] = () if tuple(sides) == (short,) else tuple(sides)
    flip = fields.get("INPUT.RANDOM_FLIP", "horizontal")
    entries["data.flip_probability"] = 0.5 if flip == "horizontal" else 0.0
    if flip == "vertical":
        entries["data.augment"] = ("vertical_flip",)
    if fields.get("INPUT.MASK_FORMAT", "polygon") == "bitmask":
        entries |= {"model.mask_targets.kind": "crops", "data.max_vertices": 0}
    if fields.get("DATALOADER.SAMPLER_TRAIN") == "RepeatFactorTrainingSampler":
        repeats = float(fields.number("DATALOADER.REPEAT_THRESHOLD", 0.0))
        entries["data.repeat_threshold"] = repeats
    fields.get("DATALOADER.REPEAT_THRESHOLD")
    return entries


def _solver(fields: Fields, notes: list[str]) -> dict[str, Any]:
    steps, batch = fields.positive("SOLVER.MAX_ITER"), fields.positive("SOLVER.IMS_PER_BATCH")
    entries: dict[str, Any] = {"train.epochs": 0.0, "optim.reference_batch": batch}
    warm, factor = fields.number("SOLVER.WARMUP_ITERS"), fields.get("SOLVER.WARMUP_FACTOR", 1e-3)
    rate = fields.positive("SOLVER.BASE_LR")
    entries |= warmup_entries(warm / steps, float(factor), float(rate))
    gamma, at = fields.number("SOLVER.GAMMA"), fields.numbers("SOLVER.STEPS", "rising steps")
    if fields.get("SOLVER.LR_SCHEDULER_NAME", "WarmupMultiStepLR") == "WarmupCosineLR":
        last = fields.number("SOLVER.BASE_LR_END", 0.0) / fields.positive("SOLVER.BASE_LR")
        entries |= {"optim.schedule": "cosine", "optim.end_factor": float(last)}
    else:
        at = tuple(step for step in at if step < steps)
        if list(at) != sorted(at):
            raise fields.fault("SOLVER.STEPS", "rising steps")
        entries["optim.decay_at"] = tuple(step / steps for step in at)
        levels = tuple(round(gamma ** (n + 1), 12) for n in range(len(at)))
        entries["optim.decay_levels"] = levels
    fields.get("SOLVER.BASE_LR_END")
    if fields.get("SOLVER.AMP.ENABLED", False):
        entries["train.precision"] = "float16"
    if fields.get("SOLVER.CLIP_GRADIENTS.ENABLED", False):
        kind = fields.get("SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "value")
        value = float(fields.number("SOLVER.CLIP_GRADIENTS.CLIP_VALUE", 1.0))
        fields.check({"SOLVER.CLIP_GRADIENTS.NORM_TYPE": (2,)})
        entries["optim.clip_value" if kind == "value" else "optim.clip_norm"] = value
        if kind == "norm":
            text = "by the norm of each parameter there, of all together here"
            notes.append(f"SOLVER.CLIP_GRADIENTS: {text}")
    seed = fields.get("SEED", -1)
    if type(seed) is int and seed >= 0:
        entries["train.seed"] = seed
    return entries
