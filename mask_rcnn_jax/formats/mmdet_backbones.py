"""Backbones of configs of mmdetection 3, and how their parameters decay, as entries of a recipe."""

from typing import Any

from mask_rcnn_jax.annotations.segmentation import show
from mask_rcnn_jax.formats.fields import Fields
from mask_rcnn_jax.models.convnext import ConvNeXt
from mask_rcnn_jax.models.swin import NORMS as SWIN_NORMS

AT = "model.backbone"
OPTIMIZER = "optim_wrapper"
CUSTOM = f"{OPTIMIZER}.paramwise_cfg.custom_keys"
BY_LAYER = "LearningRateDecayOptimizerConstructor"
NORMS = {"BN": "batch", "SyncBN": "sync_batch", "GN": "group"}
RESNETS = ("ResNet", "ResNeXt")
CONVNEXTS = ("mmpretrain.ConvNeXt", "mmcls.ConvNeXt")
KINDS = (*RESNETS, "SwinTransformer", *CONVNEXTS)
SAME = {
    f"{AT}.depth": "model.backbone.depth",
    f"{AT}.groups": "model.backbone.groups",
    f"{AT}.base_width": "model.backbone.width_per_group",
}
RESNET: dict[str, tuple] = {
    f"{AT}.num_stages": (4,),
    f"{AT}.strides": ((1, 2, 2, 2),),
    f"{AT}.dilations": ((1, 1, 1, 1),),
    f"{AT}.deep_stem": (False,),
    f"{AT}.avg_down": (False,),
    f"{AT}.dcn": (None,),
    f"{AT}.plugins": (None,),
}
SAME_SWIN = {
    f"{AT}.embed_dims": "model.backbone.width",
    f"{AT}.drop_path_rate": "model.backbone.drop_path",
}
SWIN: dict[str, tuple] = {
    f"{AT}.patch_size": (4,),
    f"{AT}.strides": ((4, 2, 2, 2),),
    f"{AT}.mlp_ratio": (4,),
    f"{AT}.qkv_bias": (True,),
    f"{AT}.qk_scale": (None,),
    f"{AT}.patch_norm": (True,),
    f"{AT}.drop_rate": (0,),
    f"{AT}.attn_drop_rate": (0,),
    f"{AT}.use_abs_pos_embed": (False,),
    f"{AT}.act_cfg.type": ("GELU",),
    f"{AT}.norm_cfg.type": ("LN",),
}
SAME_CONVNEXT = {
    f"{AT}.drop_path_rate": "model.backbone.drop_path",
    f"{AT}.layer_scale_init_value": "model.backbone.layer_scale",
}
CONVNEXT: dict[str, tuple] = {
    f"{AT}.stem_patch_size": (4,),
    f"{AT}.gap_before_final_norm": (False,),
    f"{AT}.use_grn": (False,),
    f"{AT}.act_cfg.type": ("GELU",),
    f"{AT}.norm_cfg.type": ("LN2d",),
    f"{AT}.norm_cfg.eps": (1e-6,),
}
ARCHES = {
    "atto": ((2, 2, 6, 2), 40),
    "femto": ((2, 2, 6, 2), 48),
    "pico": ((2, 2, 6, 2), 64),
    "nano": ((2, 2, 8, 2), 80),
    "tiny": ((3, 3, 9, 3), 96),
    "small": ((3, 3, 27, 3), 96),
    "base": ((3, 3, 27, 3), 128),
    "large": ((3, 3, 27, 3), 192),
    "xlarge": ((3, 3, 27, 3), 256),
}
# Fields that follow from others, or change nothing.
IGNORED = (
    *("with_cp", "in_channels", "init_cfg", "zero_init_residual"),
    *("convert_weights", "pretrain_img_size", "linear_pw_conv"),
)


def backbone(fields: Fields, base: str, notes: list[str]) -> dict[str, Any]:
    """The entries of `model.backbone`, of layers that are frozen, and of the weights to start
    from. base: the recipe that they change."""
    kind = fields.get(f"{AT}.type", "ResNet")
    if kind not in KINDS:
        raise fields.fault(f"{AT}.type", " or ".join(map(repr, KINDS)))
    fields.check({f"{AT}.out_indices": ((0, 1, 2, 3),)})
    entries: dict[str, Any] = {"model.init_from": ""}
    for name in ("model.pretrained", f"{AT}.pretrained", f"{AT}.init_cfg.checkpoint"):
        if checkpoint := fields.get(name):
            entries |= start(name, checkpoint, notes)
    fields.ignore(f"{AT}.{name}" for name in IGNORED)
    if checkpoint := fields.get("load_from"):
        entries |= start("load_from", checkpoint, notes)
    if kind == "SwinTransformer":
        return entries | _swin(fields, notes)
    return entries | (_resnet(fields, base) if kind in RESNETS else _convnext(fields, notes))


def start(name: str, checkpoint: Any, notes: list[str]) -> dict[str, Any]:
    """`model.init_from` for a checkpoint, or a note where it has no counterpart."""
    text = str(checkpoint)
    known, _, weights = text.partition("://")
    if known == "torchvision" and weights in ("resnet18", "resnet34", "resnet50", "resnet101"):
        return {"model.init_from": weights}
    if text == "open-mmlab://detectron2/resnet50_caffe":
        return {"model.init_from": "detectron2_msra_r50"}
    if "://" in text:
        advice = "fetch it, or what docs/recipes.md has, and set model.init_from"
        notes.append(f"{name}: {show(text, 300)}; {advice}")
        return {}
    return {"model.init_from": text}


def _resnet(fields: Fields, base: str) -> dict[str, Any]:
    fields.check(RESNET)
    entries = fields.same(SAME, base)
    style = fields.get(f"{AT}.style", "pytorch")
    if style not in ("pytorch", "caffe"):
        raise fields.fault(f"{AT}.style", "'pytorch' or 'caffe'")
    entries["model.backbone.stride_in"] = "3x3" if style == "pytorch" else "1x1"
    frozen = fields.get(f"{AT}.frozen_stages", -1)
    if type(frozen) is not int or not -1 <= frozen <= 4:
        raise fields.fault(f"{AT}.frozen_stages", "-1 to 4")
    entries["model.backbone.frozen_stages"] = frozen + 1  # ours counts the stem
    kind = norm(fields, AT, "BN")
    learns = fields.get(f"{AT}.norm_cfg.requires_grad", True)
    is_still = fields.get(f"{AT}.norm_eval", True)
    if kind != "group" and is_still:
        kind = "affine" if learns else "frozen"
    elif not learns:
        raise fields.fault(f"{AT}.norm_cfg.requires_grad", "True without norm_eval")
    entries["model.backbone.norm"] = kind
    if f"{AT}.norm_cfg.eps" in fields.values:
        entries["model.backbone.norm_eps"] = fields.positive(f"{AT}.norm_cfg.eps")
    return entries


def norm(fields: Fields, part: str, default: str) -> str:
    """The norm of a part, by its `norm_cfg`."""
    kind = fields.get(f"{part}.norm_cfg.type", default)
    groups = fields.get(f"{part}.norm_cfg.num_groups", 32)
    if kind not in NORMS or (kind == "GN" and groups != 32):
        raise fields.fault(f"{part}.norm_cfg.type", "'BN', 'SyncBN' or 'GN' of 32 groups")
    return NORMS[kind]


def _swin(fields: Fields, notes: list[str]) -> dict[str, Any]:
    fields.check(SWIN)
    entries: dict[str, Any] = {"model.backbone.name": "swin", "model.backbone.drop_path": 0.1}
    entries |= fields.same(SAME_SWIN, "coco_swin")
    for name in ("depths", "num_heads"):
        if f"{AT}.{name}" in fields.values:
            entries[f"model.backbone.{name}"] = _four(fields, f"{AT}.{name}")
    window = fields.get(f"{AT}.window_size", 7)
    if type(window) is not int or not 2 <= window <= 100:
        raise fields.fault(f"{AT}.window_size", "a whole number from 2 on")
    entries["model.backbone.windows"] = (window,) * 4
    return entries | _freeze(fields, ("stem_*",), notes)


def _convnext(fields: Fields, notes: list[str]) -> dict[str, Any]:
    if f"{AT}.gap_before_final_norm" not in fields.values:
        raise fields.fault(f"{AT}.gap_before_final_norm", "False")
    fields.check(CONVNEXT)
    entries: dict[str, Any] = {"model.backbone.name": "convnext", "model.backbone.drop_path": 0.0}
    entries |= fields.same(SAME_CONVNEXT, "coco_convnext")
    name, arch = f"{AT}.arch", fields.get(f"{AT}.arch", "tiny")
    if f"{name}.depths" in fields.values:
        depths, channels = _four(fields, f"{name}.depths"), _four(fields, f"{name}.channels")
        width = channels[0]
        if channels != tuple(width * 2**stage for stage in range(4)):
            raise fields.fault(f"{name}.channels", "channels that double with each stage")
    elif not isinstance(arch, str) or arch not in ARCHES:
        raise fields.fault(name, f"one of {list(ARCHES)}, or dict(depths=[..], channels=[..])")
    else:
        depths, width = ARCHES[arch]
    if fields.get("custom_imports.imports") in (["mmpretrain.models"], ["mmcls.models"]):
        fields.ignore(["custom_imports"])
    entries |= {"model.backbone.depths": depths, "model.backbone.width": width}
    return entries | _freeze(fields, (), notes)


def _four(fields: Fields, name: str) -> tuple[int, ...]:
    values = fields.numbers(name, "four whole numbers above 0", 4)
    if not all(type(value) is int and 0 < value <= 100_000 for value in values):
        raise fields.fault(name, "four whole numbers above 0")
    return values


def _freeze(fields: Fields, stem: tuple[str, ...], notes: list[str]) -> dict[str, Any]:
    """`optim.freeze` for `frozen_stages`.

    stem: the layers of a stem that counts for itself, as a Swin transformer's does, whose stages
    end, not begin, with fewer cells; (): that of a ConvNeXt.
    """
    name = f"{AT}.frozen_stages"
    count = fields.get(name, -1 if stem else 0)
    if type(count) is not int or not -1 <= count <= 4:
        raise fields.fault(name, "-1 to 4")
    if count < (0 if stem else 1):
        return {}
    layers = [*stem, *(f"res{stage}_*" for stage in range(2, count + 2))]
    if stem:
        layers += [f"down{stage}_*" for stage in range(3, min(count, 3) + 3)]
        layers += [f"output{stage}_*" for stage in range(2, count + 2)]
    else:
        layers += ["stem_*", *(f"down{stage}_*" for stage in range(3, count + 2))]
    notes.append(f"{name} = {count}: optim.freeze; drop path goes on in them")
    return {"optim.freeze": tuple(f"backbone/{layer}" for layer in layers)}


def decay(fields: Fields, entries: dict[str, Any]) -> dict[str, Any]:
    """The entries that say what decays, and which layers learn more slowly.

    entries: those of the backbone.
    """
    name = entries.get("model.backbone.name", "resnet")
    at = f"{OPTIMIZER}.paramwise_cfg"
    constructor = fields.get(f"{OPTIMIZER}.constructor", "DefaultOptimWrapperConstructor")
    if constructor == BY_LAYER:
        if name != "convnext":
            raise fields.fault(f"{OPTIMIZER}.constructor", "no such one but of a ConvNeXt")
        depths, width = (entries[f"model.backbone.{key}"] for key in ("depths", "width"))
        count = ConvNeXt(depths=depths, width=width).num_layers
        fields.check({f"{at}.decay_type": ("layer_wise",), f"{at}.num_layers": (count,)})
        rate = float(fields.positive(f"{at}.decay_rate", 0.5))
        return {"optim.decay_on": ("kernel",), "optim.layer_decay": rate}
    if constructor != "DefaultOptimWrapperConstructor":
        raise fields.fault(f"{OPTIMIZER}.constructor", f"{BY_LAYER!r} of a ConvNeXt, or none")
    other = () if name == "resnet" else ("other",)
    kinds: tuple[str, ...] = ("kernel", "bias", "scale")
    if fields.get(f"{at}.norm_decay_mult", 1) == 0:
        kinds = ("kernel", "kernel_bias")
    found: dict[str, Any] = {"optim.decay_on": (*kinds, *other)} if other or len(kinds) < 3 else {}
    if name == "convnext":
        found["model.backbone.exempt_from_decay"] = ()
    if name == "swin":
        exempt: dict[str, tuple[str, ...]] = {
            "relative_position_bias_table": ("position_bias",),
            "norm": SWIN_NORMS,
            "absolute_pos_embed": (),  # it has none
        }
        of = [key for key in exempt if fields.values.get(f"{CUSTOM}.{key}.decay_mult") == 0]
        fields.ignore(f"{CUSTOM}.{key}.decay_mult" for key in of)
        names = tuple(layer for key in of for layer in exempt[key])
        found["model.backbone.exempt_from_decay"] = names
    return found
