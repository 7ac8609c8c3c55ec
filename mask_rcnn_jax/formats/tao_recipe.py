"""Recipes from specs of the TAO Toolkit's Mask R-CNN.

docs/tao_spec.md lists the counterpart of each field. A field that a spec leaves out keeps the value
of configs/coco_tao.py, except that a switch in a given block is off, as protobuf has it.
"""

import os
from collections.abc import Mapping
from typing import Any

from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.formats.recipe_file import Translated, write_translated
from mask_rcnn_jax.formats.tao_spec import MODES, Spec

LEVEL_STRIDES = (4, 8, 16, 32, 64, 128)  # of levels 2 to 7
ANCHOR_SCALE = 8
DEPTHS = (10, 18, 34, 50, 101, 152)
# Fields whose value is that of an entry.
SAME = {
    "seed": "train.seed",
    "num_steps_per_eval": "train.eval_every",
    "logging_frequency": "train.log_every",
    "momentum": "optim.momentum",
    "l2_weight_decay": "optim.weight_decay",
    "init_learning_rate": "optim.learning_rate",
    "eval_batch_size": "eval.batch_size",
    "eval_samples": "eval.max_images",
    "n_workers": "data.num_workers",
    "skip_crowd_during_training": "data.skip_crowd",
    "nlayers": "model.backbone.depth",
    "gt_mask_size": "data.mask_size",
    "rpn_positive_overlap": "model.rpn.fg_iou_thresh",
    "rpn_negative_overlap": "model.rpn.bg_iou_thresh",
    "rpn_batch_size_per_im": "model.rpn.batch_size_per_image",
    "rpn_fg_fraction": "model.rpn.positive_fraction",
    "batch_size_per_im": "model.sampling.batch_size_per_image",
    "fg_fraction": "model.sampling.positive_fraction",
    "fg_thresh": "model.sampling.fg_iou_thresh",
    "fast_rcnn_mlp_head_dim": "model.box_head.channels",
    "train_rpn_pre_nms_topn": "model.rpn.pre_nms_topk_train",
    "train_rpn_post_nms_topn": "model.rpn.post_nms_topk_train",
    "test_rpn_pre_nms_topn": "model.rpn.pre_nms_topk_test",
    "test_rpn_post_nms_topn": "model.rpn.post_nms_topk_test",
    "test_detections_per_image": "eval.detections_per_image",
    "test_nms": "eval.nms_thresh",
    "rpn_box_loss_weight": "loss.rpn_box_weight",
    "fast_rcnn_box_loss_weight": "loss.box_reg_weight",
}
# Fields with one possible value here.
FIXED = {"arch": "resnet", "min_level": 2}
# Fields without a counterpart, and why.
WITHOUT = {
    "skip_checkpoint_variables": "layers of another class count are initialized anew by themselves",
    "pruned_model_path": "pruned models cannot be read",
    "report_frequency": "metrics are logged every train.log_every steps",
    "global_gradient_clip_ratio": "optim.clip_norm clips, by the global norm itself",
    "l1_weight_decay": "there is no L1 decay",
    "prefetch_buffer_size": "nothing to set",
    "shuffle_buffer_size": "every epoch is shuffled as a whole",
    "num_classes": "classes are counted in the annotations",
}


def translate(spec: Spec, gpus: int) -> tuple[dict[str, Any], list[str]]:
    """The entries of a recipe for a spec, and a line for each field without a counterpart.

    gpus: number of GPUs that the spec is for; its batch sizes are per GPU.
    """
    values = spec.values
    entries = {entry: values[name] for name, entry in SAME.items() if name in values}
    entries |= _schedule(spec, gpus) | _data(values) | _model(spec)
    entries["train.precision"] = "float16" if values["use_amp"] else "float32"
    if values.get("visualize_images_summary") is False:
        entries["eval.pictures"] = 0
    loggers, dropped = _loggers(values)
    entries |= {"train.loggers": loggers} if loggers else {}
    notes = [f"{name}: {why}" for name, why in WITHOUT.items() if values.get(name)]
    notes += [f"{name}: a logger of your own takes it (docs/extending.md)" for name in dropped]
    if values.get("nlayers", DEPTHS[0]) not in DEPTHS:
        raise spec.fault("nlayers", f"one of {DEPTHS}")
    for name, value in FIXED.items():
        if values.get(name, value) != value:
            raise spec.fault(name, repr(value))
    depth, checkpoint = values.get("nlayers", 50), values.get("checkpoint") or ""
    public = "" if depth == 10 else f"resnet{depth}"  # by torchvision
    if checkpoint.endswith((".hdf5", ".tlt", ".etlt")):
        found, checkpoint = f"checkpoint: {show(checkpoint, 300)} cannot be read", ""
        notes.append(f"{found}; model.init_from is {public or 'to be set'}")
    entries["model.init_from"] = checkpoint or public
    thresholds = [values.get(n) for n in ("train_rpn_nms_threshold", "test_rpn_nms_thresh")]
    if None not in thresholds and thresholds[0] != thresholds[1]:
        notes.append("test_rpn_nms_thresh: model.rpn.nms_thresh is also that of training")
    if values.get("training_file_pattern"):
        pattern, name = values["training_file_pattern"], entries["data.train_json"]
        classes = (
            f" --json {show(values['val_json_file'], 1000)}" if values.get("val_json_file") else ""
        )
        command = (
            f"`prepare tfrecord --input {show(pattern, 1000)}{classes} --output {show(name, 1000)}`"
        )
        notes.append(f"training_file_pattern: {command} writes the annotations of its records")
    return entries, notes


def write_recipe(spec_path: str | os.PathLike, output: str | os.PathLike, gpus: int) -> list[str]:
    """Write a recipe for a spec, and return the notes of `translate`.

    Raises ValueError or OSError, naming the spec, for one that cannot be translated.
    """
    entries, notes = translate(Spec(spec_path), gpus)
    translated = Translated("a TAO spec", "tao_spec", "coco_tao", entries, notes)
    write_translated(translated, spec_path, output)
    return notes


def _loggers(values: Mapping[str, Any]) -> tuple[tuple[str, ...], list[str]]:
    """Names of the loggers that a spec switches on, and of their fields that are not read."""
    names, dropped = [], []
    for name in ("wandb", "clearml"):
        if (block := values.get(f"{name}_config")) is None:
            continue
        given = {field.name: value for field, value in block.ListFields()}
        is_on = name == "clearml" or given.pop("enabled", False)
        if is_on and given.get("mode") != MODES.index("DISABLED"):
            names.append(name)
            dropped += [f"{name}_config.{field}" for field in given]
    return tuple(names), dropped


def _schedule(spec: Spec, gpus: int) -> dict[str, Any]:
    """Batch and length of the run, and fractions of it."""
    values = spec.values
    entries: dict[str, Any] = {}
    if "train_batch_size" in values:
        batch = spec.positive("train_batch_size")
        entries |= {"train.batch_size": batch * gpus, "optim.reference_batch": batch * gpus}
    if values.get("num_epochs"):  # stronger than total_steps
        images = spec.positive("num_examples_per_epoch")
        steps = -(-values["num_epochs"] * images // spec.positive("train_batch_size"))
    else:
        steps = spec.positive("total_steps")
    entries |= {"train.steps": steps, "train.epochs": 0.0}
    if "num_steps_per_eval" in values:  # which also saves; save_checkpoints_steps is not read
        entries["train.checkpoint_every"] = spec.positive("num_steps_per_eval")
    if "warmup_steps" in values:
        entries["optim.warmup_until"] = values["warmup_steps"] / steps
    if "warmup_learning_rate" in values:
        peak = spec.positive("init_learning_rate")
        entries["optim.warmup_factor"] = values["warmup_learning_rate"] / peak
    if "learning_rate_steps" in values:
        decays = spec.numbers("learning_rate_steps", 'rising steps, such as "[60000, 80000]"')
        levels = spec.numbers("learning_rate_decay_levels", "a level for each of these steps")
        if list(decays) != sorted(decays) or len(decays) != len(levels):
            raise spec.fault("learning_rate_steps", "rising steps, and a decay level for each")
        if decays and values.get("warmup_steps", 0) > decays[0]:
            raise spec.fault("warmup_steps", "no more than the first of learning_rate_steps")
        entries["optim.decay_at"] = tuple(step / steps for step in decays)
        entries["optim.decay_levels"] = tuple(map(float, levels))
    return entries


def _data(values: Mapping[str, Any]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    if "augment_input_data" in values:
        entries["data.flip_probability"] = 0.5 if values["augment_input_data"] else 0.0
    if "data_config" in values:
        entries["data.max_instances"] = values.get("max_num_instances") or 200
    if pattern := values.get("training_file_pattern"):
        folder = os.path.dirname(pattern)
        entries |= {"data.source": "tfrecord", "data.train_images": pattern}
        entries["data.train_json"] = os.path.join(folder, "train.json")
    if pattern := values.get("validation_file_pattern"):
        entries |= {"data.source": "tfrecord", "data.val_images": pattern}
    if json_file := values.get("val_json_file"):
        entries["data.val_json"] = json_file
    return entries


def _model(spec: Spec) -> dict[str, Any]:
    values = spec.values
    entries: dict[str, Any] = {}
    if "image_size" in values:
        expected = '"(height, width)", multiples of 64'
        size = spec.numbers("image_size", expected)
        if len(size) != 2 or any(type(n) is not int or n < 64 or n % 64 for n in size):
            raise spec.fault("image_size", expected)
        entries["data.image_size"] = size
    if "freeze_bn" in values:
        entries["model.backbone.norm"] = "affine" if values["freeze_bn"] else "batch"
    if "freeze_blocks" in values:
        expected = 'blocks, 0 (the stem) to 4, such as "[0, 1]"'
        blocks = spec.numbers("freeze_blocks", expected) if values["freeze_blocks"] else ()
        if not set(blocks) <= set(range(5)):
            raise spec.fault("freeze_blocks", expected)
        stages = next(stage for stage in range(6) if stage not in blocks)  # frozen from the stem on
        entries["model.backbone.frozen_stages"] = stages
        if others := sorted(block for block in set(blocks) if block > stages):
            entries["optim.freeze"] = tuple(f"backbone/res{block + 1}_*" for block in others)
    if "rpn_min_size" in values:  # -1 keeps boxes of no size, as 0 does in TAO
        entries["model.rpn.min_size"] = values["rpn_min_size"] or -1.0
    if "train_rpn_nms_threshold" in values:
        entries["model.rpn.nms_thresh"] = values["train_rpn_nms_threshold"]
    if "bg_thresh_hi" in values:
        low, high = values.get("bg_thresh_lo", 0.0), values["bg_thresh_hi"]
        entries["model.sampling.bg_iou_range"] = (low, high)
    if "bbox_reg_weights" in values:
        weights = spec.numbers("bbox_reg_weights", "four numbers above 0")
        if len(weights) != 4 or min(weights) <= 0:
            raise spec.fault("bbox_reg_weights", "four numbers above 0")
        entries["model.box_coder.weights"] = tuple(map(float, weights))
    last = values.get("max_level", 6)
    if last not in (5, 6, 7):
        raise spec.fault("max_level", "5, 6 or 7")
    if last != 6:
        entries["model.roi_align.max_level"] = last
    if last != 6 or "anchor_scale" in values:
        scale = spec.positive("anchor_scale") if "anchor_scale" in values else ANCHOR_SCALE
        entries["model.anchors.sizes"] = tuple(float(scale * s) for s in LEVEL_STRIDES[: last - 1])
    if "aspect_ratios" in values:
        expected = 'pairs of numbers above 0, such as "[(1.0, 1.0), (1.4, 0.7)]"'
        ratios = spec.numbers("aspect_ratios", expected, pairs=True)
        count = values.get("num_scales", 1)
        if not ratios or min(map(min, ratios)) <= 0:
            raise spec.fault("aspect_ratios", expected)
        if not 1 <= count <= 16:
            raise spec.fault("num_scales", "1 to 16")
        scales = [2 ** (octave / count) for octave in range(count)]
        shapes = tuple((w * s, h * s) for s in scales for w, h in ratios)
        entries["model.anchors.aspect_ratios"] = shapes
    if "mrcnn_resolution" in values:
        side = spec.positive("mrcnn_resolution")
        if side % 4:
            raise spec.fault("mrcnn_resolution", "a multiple of 4")
        entries |= {"model.mask_head.roi_size": side // 2, "model.box_head.roi_size": side // 4}
    if "include_mask" in values:
        weight = values.get("mrcnn_weight_loss_mask", 1.0)
        entries["loss.mask_weight"] = weight if values["include_mask"] else 0.0
    return entries
