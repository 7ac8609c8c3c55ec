"""Configs of mmdetection 2 in the form of mmdetection 3."""

from typing import Any

from mask_rcnn_jax.formats.fields import Place
from mask_rcnn_jax.formats.python_config import Block

# Transforms of mmdetection 2 that are done elsewhere.
GONE = ("Normalize", "Pad", "DefaultFormatBundle", "Collect", "ImageToTensor")
# Swin's own repository has other names than mmdetection.
SWIN = {"embed_dim": "embed_dims", "ape": "use_abs_pos_embed", "use_checkpoint": "with_cp"}
SILENT = ("data.test", "evaluation", "checkpoint_config", "log_config", "dist_params", "workflow")


def upgraded(config: Block) -> Block:
    """Return a config of mmdetection 2 in the form of 3; others as they are.

    What has no place there keeps its name. Values keep the places that they have in the files.
    """
    model, data = config.get("model"), config.get("data")
    if not isinstance(model, Block) or not isinstance(data, Block):
        return config
    if not isinstance(data.get("train"), Block):
        return config
    new = _copy(config)
    model, data = new["model"], new["data"]
    for name in ("train_cfg", "test_cfg"):  # of the first versions
        if isinstance(new.get(name), Block) and "rcnn" in new[name]:
            _put(model, name, *_take(new, name))
    model.setdefault("data_preprocessor", Block({"type": "DetDataPreprocessor"}))
    _swin(model)
    for side, name in (("train_cfg", "rpn_proposal"), ("test_cfg", "rpn")):
        if isinstance(model.get(side), Block) and isinstance(model[side].get(name), Block):
            _proposals(model[side][name])
    _data(new, model["data_preprocessor"])
    _optimizer(new)
    _schedule(new)
    for name in ("data", "optimizer_config", "lr_config", "runner", "fp16"):
        if not new.get(name):
            new.pop(name, None)
    hooks = new.get("custom_hooks")
    if isinstance(hooks, list) and hooks == [{"type": "NumClassCheckHook"}]:
        del new["custom_hooks"]
    return new


def _copy(value: Any) -> Any:
    """A copy whose dicts and lists may be changed."""
    if isinstance(value, Block):
        return Block({key: _copy(one) for key, one in value.items()}, value.places)
    return [_copy(one) for one in value] if isinstance(value, list | tuple) else value


def _take(block: Block, name: str, default: Any = None) -> tuple[Any, Place | None]:
    """Remove a value from a dict, and return it with its place."""
    return block.pop(name, default), block.places.get(name)


def _put(block: Block, name: str, value: Any, place: Place | None) -> None:
    block[name] = value
    if place:
        block.places[name] = place


def _rename(block: Any, old: str, other: Block, new: str) -> None:
    """Move a value, where it is given, to another dict, or to another name of the same."""
    if isinstance(block, Block) and old in block:
        _put(other, new, *_take(block, old))


def _block(parent: Block, name: str) -> Block:
    """The dict below a name, which is made where there is none."""
    if not isinstance(parent.get(name), Block):
        parent[name] = Block()
    return parent[name]


def _swin(model: Block) -> None:
    backbone = model.get("backbone")
    if isinstance(backbone, Block) and backbone.keys() & SWIN.keys():
        backbone.setdefault("drop_path_rate", 0.2)
        for old, name in SWIN.items():
            _rename(backbone, old, backbone, name)
        frozen = backbone.get("frozen_stages")
        if isinstance(frozen, int) and frozen > 0:  # 1 is the patches alone, as 0 is
            backbone["frozen_stages"] = frozen - 1


def _proposals(config: Block) -> None:
    """The limits of proposals, which have had three names."""
    for old in ("nms_post", "max_num"):
        if "max_per_img" not in config:
            _rename(config, old, config, "max_per_img")
        config.pop(old, None)
    if "nms_thr" in config:
        config["nms"] = Block({"type": "nms"})
        _rename(config, "nms_thr", config["nms"], "iou_threshold")


def _data(new: Block, preprocessor: Block) -> None:
    data = new["data"]
    loaders = {"train": _block(new, "train_dataloader"), "val": _block(new, "val_dataloader")}
    _rename(data, "samples_per_gpu", loaders["train"], "batch_size")
    _rename(data, "workers_per_gpu", loaders["train"], "num_workers")
    for side, loader in loaders.items():
        _rename(data, side, loader, "dataset")
        dataset: Any = loader.get("dataset")
        wrapped = dataset
        while isinstance(wrapped, Block):
            dataset, wrapped = wrapped, wrapped.get("dataset")
        if not isinstance(dataset, Block):
            continue
        _rename(dataset, "img_prefix", _block(dataset, "data_prefix"), "img")
        _rename(dataset, "classes", _block(dataset, "metainfo"), "classes")
        if side == "train":
            filters = _block(dataset, "filter_cfg")
            filters["filter_empty_gt"] = True
            _rename(dataset, "filter_empty_gt", filters, "filter_empty_gt")
        if isinstance(dataset.get("pipeline"), list):
            dataset["pipeline"] = _pipeline(dataset["pipeline"], preprocessor)


def _pipeline(steps: list, preprocessor: Block) -> list:
    """The transforms that are left; what normalizes and pads goes into the preprocessor."""
    left = []
    for step in steps:
        kind = step.get("type") if isinstance(step, Block) else None
        if kind == "Normalize":
            for old, name in (("mean", "mean"), ("std", "std"), ("to_rgb", "bgr_to_rgb")):
                _rename(step, old, preprocessor, name)
            preprocessor.setdefault("bgr_to_rgb", True)
        elif kind == "Pad":
            _rename(step, "size_divisor", preprocessor, "pad_size_divisor")
        elif kind == "MultiScaleFlipAug" and isinstance(step.get("transforms"), list):
            for one in step["transforms"]:
                if isinstance(one, Block) and one.get("type") == "Resize":
                    _rename(step, "img_scale", one, "img_scale")
                elif isinstance(one, Block) and one.get("type") == "RandomFlip":
                    one["flip_ratio"] = 0.0
            left += _pipeline(step["transforms"], preprocessor)
        elif kind == "AutoAugment" and isinstance(step.get("policies"), list):
            lists = [
                _pipeline(policy, preprocessor) if isinstance(policy, list) else policy
                for policy in step["policies"]
            ]
            left.append(Block({"type": "RandomChoice", "transforms": lists}, step.places))
        elif kind not in GONE:
            if kind == "Resize":
                _resize(step)
            elif kind == "RandomFlip":
                _rename(step, "flip_ratio", step, "prob")
            left.append(step)
    return left


def _resize(step: Block) -> None:
    mode = step.pop("multiscale_mode", "range")
    step.pop("override", None)
    step.setdefault("keep_ratio", True)
    scales = step.get("img_scale")
    several = isinstance(scales, list) and len(scales) > 1 and isinstance(scales[0], list)
    if isinstance(scales, list) and len(scales) == 1:
        step["img_scale"] = scales[0]
    name = "scales" if several and mode == "value" else "scale"
    if name == "scales":
        step["type"] = "RandomChoiceResize"
    elif several or "ratio_range" in step:
        step["type"] = "RandomResize"
    _rename(step, "img_scale", step, name)


def _optimizer(new: Block) -> None:
    wrapper = _block(new, "optim_wrapper")
    wrapper["type"] = "OptimWrapper"
    _rename(new, "optimizer", wrapper, "optimizer")
    optimizer, config = wrapper.get("optimizer"), new.get("optimizer_config")
    _rename(optimizer, "paramwise_cfg", wrapper, "paramwise_cfg")
    _rename(optimizer, "constructor", wrapper, "constructor")
    is_half = isinstance(new.get("fp16"), Block)
    _rename(new.get("fp16"), "loss_scale", wrapper, "loss_scale")
    if isinstance(config, Block):
        _rename(config, "grad_clip", wrapper, "clip_grad")
        is_half = config.pop("use_fp16", False) is True or is_half
        if config.get("update_interval") == 1:
            del config["update_interval"]
        for name in ("type", "coalesce", "bucket_size_mb"):  # how gradients are shared
            config.pop(name, None)
    if is_half:
        wrapper["type"] = "AmpOptimWrapper"


def _schedule(new: Block) -> None:
    loop, runner = Block({"type": "EpochBasedTrainLoop"}), new.get("runner")
    _rename(new, "total_epochs", loop, "max_epochs")
    for name in ("max_epochs", "max_iters"):
        _rename(runner, name, loop, name)
    if isinstance(runner, Block):
        runner.pop("type", None)
    if "max_iters" in loop:
        loop["type"] = "IterBasedTrainLoop"
    new["train_cfg"] = loop
    config = new.get("lr_config")
    if not isinstance(config, Block):
        return
    by_epoch = config.pop("by_epoch", "max_iters" not in loop)
    schedulers = []
    if config.get("warmup") == "linear":
        del config["warmup"]
        warm = Block({"type": "LinearLR", "begin": 0, "start_factor": 0.1})
        warm["by_epoch"] = config.pop("warmup_by_epoch", False)
        _rename(config, "warmup_ratio", warm, "start_factor")
        _rename(config, "warmup_iters", warm, "end")
        schedulers.append(warm)
    elif config.get("warmup") is None:
        for name in ("warmup", "warmup_ratio", "warmup_iters", "warmup_by_epoch"):
            config.pop(name, None)
    policy, place = _take(config, "policy")
    kind = {"step": "MultiStepLR", "CosineAnnealing": "CosineAnnealingLR"}.get(policy, policy)
    main = Block({"type": kind, "by_epoch": by_epoch}, {"type": place} if place else {})
    names = {"step": "milestones", "gamma": "gamma"}
    if policy == "CosineAnnealing":
        names = {"min_lr": "eta_min", "min_lr_ratio": "eta_min_ratio"}
    for old, name in names.items():
        _rename(config, old, main, name)
    new["param_scheduler"] = [*schedulers, main]
