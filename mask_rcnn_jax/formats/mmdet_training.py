"""Data and schedule of a config of mmdetection 3, as entries of a recipe."""

import os
from typing import Any

from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.formats.fields import Fields
from mask_rcnn_jax.formats.recipe_file import warmup_entries

BASE = "coco_mmdet"
SAME = {
    "optim_wrapper.optimizer.momentum": "optim.momentum",
    "optim_wrapper.optimizer.weight_decay": "optim.weight_decay",
    "optim_wrapper.accumulative_counts": "optim.accumulate_steps",
    "train_dataloader.num_workers": "data.num_workers",
    "val_dataloader.batch_size": "eval.batch_size",
    "randomness.seed": "train.seed",
}
FIXED: dict[str, tuple] = {
    "optim_wrapper.type": ("OptimWrapper", "AmpOptimWrapper"),
    "optim_wrapper.optimizer.type": ("SGD", "AdamW"),
    "optim_wrapper.clip_grad": (None,),
    "optim_wrapper.clip_grad.norm_type": (2,),
    "train_cfg.type": ("EpochBasedTrainLoop", "IterBasedTrainLoop"),
    "train_dataloader.batch_sampler": (None,),
    "train_dataloader.batch_sampler.type": ("AspectRatioBatchSampler",),
    "val_dataloader.dataset.type": ("CocoDataset", "CityscapesDataset", "LVISV1Dataset"),
}
# Fields that follow from others, or change nothing.
IGNORED = (
    *(f"{kind}_dataloader.{name}" for kind in ("train", "val") for name in
      ("persistent_workers", "drop_last", "pin_memory", "sampler", "batch_sampler", "collate_fn",
       "prefetch_factor", "num_workers")),
    *(f"val_dataloader.dataset.{name}" for name in
      ("test_mode", "backend_args", "file_client_args", "metainfo", "filter_cfg", "indices")),
    *("train_cfg.val_begin", "train_cfg.dynamic_intervals"),
)  # fmt: skip
SILENT = ("LoadImageFromFile", "PackDetInputs", "FilterAnnotations", "Pad", "LoadImageFromNDArray")
COCO_IMAGES = 117_266  # of train2017, with objects


def data(fields: Fields, gpus: int, notes: list[str]) -> dict[str, Any]:
    """The entries of `data`, and the batch."""
    fields.check(FIXED)
    entries = fields.same(SAME, BASE)
    fields.ignore(IGNORED)
    if fields.get("val_dataloader.dataset.type") == "LVISV1Dataset":
        entries["eval.protocol"] = "lvis"
    place, repeats = _dataset(fields, notes)
    fields.values["repeats"] = repeats
    for side, name in (("train", place), ("val", "val_dataloader.dataset")):
        entries |= _files(fields, side, name)
    if place:
        entries["data.keep_empty"] = not fields.get(f"{place}.filter_cfg.filter_empty_gt", False)
        fields.ignore([f"{place}.filter_cfg.min_size"])
        entries |= _pipeline(fields, f"{place}.pipeline", notes)
    entries |= _test_size(fields, entries)
    if "train_dataloader.batch_size" in fields.values:
        batch = fields.positive("train_dataloader.batch_size") * gpus
        batch *= entries.get("optim.accumulate_steps", 1)
        base = fields.get("auto_scale_lr.base_batch_size", batch)
        scales = fields.get("auto_scale_lr.enable", False)
        entries |= {"train.batch_size": batch, "optim.reference_batch": base if scales else batch}
        if base != batch and not scales:
            text = f"the learning rate is for {base} images, the batch is of {batch}"
            notes.append(f"auto_scale_lr: {text}; --gpus says for how many GPUs")
    return entries


def _dataset(fields: Fields, notes: list[str]) -> tuple[str, int]:
    """The name of the training set below its wrappers, and how often it comes in an epoch."""
    name, repeats = "train_dataloader.dataset", 1
    if not fields.named(name):
        return "", 1
    while (kind := fields.get(f"{name}.type")) in ("RepeatDataset", "ClassBalancedDataset"):
        if kind == "RepeatDataset":
            repeats *= fields.positive(f"{name}.times")
        else:
            text = "set data.repeat_threshold"
            notes.append(f"{name}.oversample_thr = {fields.get(f'{name}.oversample_thr')}: {text}")
        name += ".dataset"
    if kind not in FIXED["val_dataloader.dataset.type"]:
        raise fields.fault(f"{name}.type", "'CocoDataset', also in a RepeatDataset")
    return name, repeats


def _files(fields: Fields, side: str, name: str) -> dict[str, Any]:
    """The json and the folder of a set."""
    entries: dict[str, Any] = {}
    root = str(fields.get(f"{name}.data_root") or "")
    fields.ignore([f"{name}.metainfo", f"{name}.backend_args", f"{name}.type"])
    for key, entry in (("ann_file", "json"), ("data_prefix.img", "images")):
        if value := fields.get(f"{name}.{key}"):
            if not isinstance(value, str):
                raise fields.fault(f"{name}.{key}", "a text")
            entries[f"data.{side}_{entry}"] = os.path.join(root, value).rstrip("/")
    return entries


def _pipeline(fields: Fields, name: str, notes: list[str]) -> dict[str, Any]:
    """The entries of the transforms of training images."""
    entries: dict[str, Any] = {"data.flip_probability": 0.0}
    if not fields.named(name):
        return {}
    for index in range(len(fields.named(name))):
        step = f"{name}.{index}"
        kind = fields.get(f"{step}.type")
        if kind == "LoadAnnotations":
            if fields.get(f"{step}.poly2mask", True) is False:
                entries |= {"model.mask_targets.kind": "polygons", "data.max_vertices": 512}
        elif kind == "RandomFlip" and fields.get(f"{step}.direction", "horizontal") == "horizontal":
            entries["data.flip_probability"] = float(fields.number(f"{step}.prob"))
        elif kind in ("Resize", "RandomChoiceResize", "RandomResize"):
            entries |= _resize(fields, step, kind)
        elif kind == "RandomChoice":
            entries |= _choice(fields, step, notes)
        elif kind == "RandomCrop" and "data.augment" in entries:
            size = _side_pair(fields.get(f"{step}.crop_size"))
            if fields.get(f"{step}.crop_type", "absolute") not in ("absolute", "absolute_range"):
                raise fields.fault(f"{step}.crop_type", "'absolute' or 'absolute_range'")
            if not size:
                raise fields.fault(f"{step}.crop_size", "(width, height)")
            entries["data.augment"] = ("scale_jitter", "fixed_size_crop")
            entries["data.fixed_size_crop.size"] = size[::-1]
        elif kind is not None and kind not in SILENT:
            notes.append(f"{step}.type = {show(kind)}: an augmentation that is not translated")
        fields.ignore([step])
    if entries.get("data.augment") == ("scale_jitter",):
        raise fields.fault(f"{name}.0.type", "RandomCrop behind RandomResize with a ratio_range")
    return entries


def _choice(fields: Fields, step: str, notes: list[str]) -> dict[str, Any]:
    """The entries of a choice among lists of transforms: of the first one that only resizes."""
    lists: dict[str, list[str]] = {}
    for name in fields.named(f"{step}.transforms"):
        place, _, key = name.rpartition(".")
        if key == "type":
            lists.setdefault(place.rpartition(".")[0], []).append(place)
    for steps in lists.values():
        kind = fields.get(f"{steps[0]}.type")
        if len(steps) == 1 and kind in ("Resize", "RandomChoiceResize"):
            if len(lists) > 1:
                text = f"one list of {len(lists)}, the one that only resizes, is for all images"
                notes.append(f"{step}.type = 'RandomChoice': {text}")
            return _resize(fields, steps[0], kind)
    raise fields.fault(f"{step}.type", "lists of transforms, of which one only resizes")


def _resize(fields: Fields, step: str, kind: str) -> dict[str, Any]:
    """The entries of a transform that resizes."""
    fields.check({f"{step}.keep_ratio": (True,), f"{step}.resize_type": ("Resize",)})
    if fields.get(f"{step}.keep_ratio", kind == "RandomChoiceResize") is not True:
        raise fields.fault(f"{step}.keep_ratio", "True")
    name = f"{step}.scales" if kind == "RandomChoiceResize" else f"{step}.scale"
    value = fields.get(name)
    one = _side_pair(value)
    several = value if isinstance(value, list | tuple) else []
    pairs = [one] if one else [_side_pair(pair) for pair in several]
    expected = "(longest side, short side), or a list of them with one longest side"
    if not pairs or None in pairs:
        raise fields.fault(name, expected)
    sizes = [(min(pair), max(pair)) for pair in pairs if pair]
    ratios = fields.get(f"{step}.ratio_range")
    if kind == "RandomResize" and ratios is not None:
        if not one or not _side_pair(ratios, (int, float)):
            raise fields.fault(f"{step}.ratio_range", "(lowest, highest) with one scale")
        scales = tuple(map(float, ratios))
        size = one[::-1]
        jitter = {"data.scale_jitter.size": size, "data.scale_jitter.scales": scales}
        return {"data.augment": ("scale_jitter",), **jitter}
    if len({longest for _, longest in sizes}) > 1:
        raise fields.fault(name, expected)
    shorts = sorted({short for short, _ in sizes})
    if kind == "RandomResize" and len(shorts) == 2:
        shorts = list(range(shorts[0], shorts[1] + 1))  # drawn from all between
    entries: dict[str, Any] = {"data.image_size": (shorts[-1], sizes[0][1])}
    return entries | {"data.short_sides": tuple(shorts) if len(shorts) > 1 else ()}


def _side_pair(value: Any, kinds: tuple[type, ...] = (int,)) -> tuple[Any, Any] | None:
    """A pair of numbers above 0 and below 100,000, or None."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    is_pair = all(type(side) in kinds and 0 < side < 100_000 for side in value)
    return (value[0], value[1]) if is_pair else None


def _test_size(fields: Fields, entries: dict[str, Any]) -> dict[str, Any]:
    """The size of evaluation, which is `data.image_size`."""
    name = "val_dataloader.dataset.pipeline"
    found: dict[str, Any] = {}
    for index in range(len(fields.named(name))):
        step = f"{name}.{index}"
        if fields.get(f"{step}.type") == "Resize":
            found = _resize(fields, step, "Resize")
            size, largest = found["data.image_size"], entries.get("data.image_size")
            sides = entries.get("data.short_sides", ())
            if largest and size != largest:
                if size[1] != largest[1] or size[0] < largest[0]:
                    expected = f"{largest[::-1]}, the largest of training"
                    raise fields.fault(f"{step}.scale", expected)
                found["data.short_sides"] = sides or (largest[0],)
            elif largest:
                found["data.short_sides"] = sides
        fields.ignore([step])
    return found


def schedule(fields: Fields, gpus: int, notes: list[str]) -> dict[str, Any]:
    """The entries of `optim`, and the length of the run."""
    entries: dict[str, Any] = {}
    if fields.get("optim_wrapper.type") == "AmpOptimWrapper":
        half = fields.get("optim_wrapper.dtype", "float16")
        entries["train.precision"] = "bfloat16" if half == "bfloat16" else "float16"
        scale = fields.get("optim_wrapper.loss_scale", "dynamic")
        if type(scale) in (int, float) and scale > 0:
            entries["optim.loss_scale"] = float(scale)
    kind = fields.get("optim_wrapper.optimizer.type")
    if kind:
        entries["optim.name"] = kind.lower()
        entries["optim.learning_rate"] = float(fields.positive("optim_wrapper.optimizer.lr"))
    if "optim_wrapper.optimizer.betas" in fields.values:
        betas = fields.numbers("optim_wrapper.optimizer.betas", "two numbers", 2)
        entries["optim.betas"] = tuple(map(float, betas))
    if "optim_wrapper.clip_grad.max_norm" in fields.values:
        entries["optim.clip_norm"] = float(fields.number("optim_wrapper.clip_grad.max_norm"))
    return entries | _length(fields, gpus, notes)


def _length(fields: Fields, gpus: int, notes: list[str]) -> dict[str, Any]:
    """The entries of `train_cfg` and `param_scheduler`."""
    entries: dict[str, Any] = {}
    epochs, steps = fields.get("train_cfg.max_epochs"), fields.get("train_cfg.max_iters")
    fields.get("train_cfg.val_interval")
    total = "train_cfg.max_epochs" if epochs else "train_cfg.max_iters"
    if epochs is None and steps is None:
        return entries
    length = fields.positive(total)
    per_epoch = 0
    if epochs:
        entries["train.epochs"] = float(length * fields.values["repeats"])
        images = _coco_images(fields)
        batch = fields.values.get("train_dataloader.batch_size", 0) * gpus
        per_epoch = -(-images * fields.values["repeats"] // batch) if batch else 0
    else:
        entries |= {"train.steps": length, "train.epochs": 0.0}
    entries["optim.warmup_until"] = 0.0
    decays: list[tuple[float, float]] = []
    for index in range(len(fields.named("param_scheduler"))):
        name = f"param_scheduler.{index}"
        kind = fields.get(f"{name}.type")
        if kind is None:
            continue
        is_epochs = fields.get(f"{name}.by_epoch", True) is True
        unit = length if is_epochs == bool(epochs) else length * per_epoch if epochs else 0
        if kind == "LinearLR" and fields.number(f"{name}.begin", 0) == 0:
            fields.check({f"{name}.end_factor": (1,)})
            factor = float(fields.number(f"{name}.start_factor", 1 / 3))
            end = fields.positive(f"{name}.end")
            rate = fields.positive("optim_wrapper.optimizer.lr")
            if unit:
                entries |= warmup_entries(end / unit, factor, float(rate))
            else:
                entries.pop("optim.warmup_until", None)
                entries["optim.warmup_factor"] = factor
                text = "the number of images is not known; set optim.warmup_until, a fraction"
                notes.append(f"{name}.end = {end}: {text}")
        elif kind == "MultiStepLR" and unit:
            fields.check({f"{name}.begin": (0,)})
            gamma = fields.number(f"{name}.gamma", 0.1)
            milestones = fields.numbers(f"{name}.milestones", "a list of numbers")
            decays += [(step / unit, gamma) for step in milestones]
        elif kind == "CosineAnnealingLR":
            entries |= _cosine(fields, name, unit, entries.get("optim.warmup_until", 0.0))
        else:
            expected = "'LinearLR' from step 0, 'MultiStepLR' or 'CosineAnnealingLR'"
            raise fields.fault(f"{name}.type", expected)
        fields.ignore([name])
    return entries | _levels(fields, decays, "optim.schedule" in entries)


def _cosine(fields: Fields, name: str, unit: float, warmup: float) -> dict[str, Any]:
    """The entries of a cosine, which takes the whole run here, but for the warm-up.

    unit: what its numbers are fractions of; 0 if not known. warmup: its end, as a fraction.
    """
    begin, last = (fields.number(f"{name}.{key}", 0) for key in ("begin", "T_max"))
    if unit and begin > warmup * unit * (1 + 1e-9):
        raise fields.fault(f"{name}.begin", "0, or a step of the warm-up")
    if unit and last and last not in (unit, unit - begin):
        raise fields.fault(f"{name}.T_max", f"{unit}, the length of the run")
    rate = fields.positive("optim_wrapper.optimizer.lr", 1)
    ratio = fields.number(f"{name}.eta_min_ratio", fields.number(f"{name}.eta_min", 0) / rate)
    return {"optim.schedule": "cosine", "optim.end_factor": float(ratio)}


def _levels(fields: Fields, decays: list[tuple[float, float]], is_cosine: bool) -> dict[str, Any]:
    """The steps down, as fractions of the run and of the rate; none behind its end."""
    levels, level = [], 1.0
    for _, gamma in decays:
        level *= gamma
        levels.append(level)
    kept = [(at, lev) for (at, _), lev in zip(decays, levels, strict=True) if at < 1]
    if [at for at, _ in kept] != sorted(at for at, _ in kept):
        raise ValueError(f"{fields.path}: param_scheduler has milestones that do not rise")
    if is_cosine and not kept:
        return {}
    found = {"optim.decay_at": tuple(at for at, _ in kept)}
    return found | {"optim.decay_levels": tuple(round(lev, 12) for _, lev in kept)}


def _coco_images(fields: Fields) -> int:
    """Images with objects of COCO, if the set is COCO; 0 if not known."""
    files = [name for name in fields.values if name.startswith("train_dataloader.dataset")]
    files = [str(fields.values[name]) for name in files if name.endswith(".ann_file")]
    is_coco = any(os.path.basename(file) == "instances_train2017.json" for file in files)
    return COCO_IMAGES if is_coco else 0
