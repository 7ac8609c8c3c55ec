"""Build a model from a config and initialize its variables."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from mask_rcnn_jax import parts
from mask_rcnn_jax.host import on_host
from mask_rcnn_jax.models.cascade import Cascade
from mask_rcnn_jax.models.convnext import ConvNeXt
from mask_rcnn_jax.models.fpn import FPN
from mask_rcnn_jax.models.image_input import ImageInput
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN, Precision
from mask_rcnn_jax.models.mask_targets import MaskTargets
from mask_rcnn_jax.models.quantization import Quantization
from mask_rcnn_jax.models.regnet import RegNet
from mask_rcnn_jax.models.resnet import ResNet
from mask_rcnn_jax.models.roi_heads import BoxHead, MaskHead
from mask_rcnn_jax.models.rpn import RPN, RPNHead
from mask_rcnn_jax.models.sampling import RoISampling
from mask_rcnn_jax.models.simple_pyramid import SimplePyramid
from mask_rcnn_jax.models.vit import ViT
from mask_rcnn_jax.ops.anchors import AnchorGrid
from mask_rcnn_jax.ops.boxes import BoxCoder
from mask_rcnn_jax.ops.classifier import Classifier
from mask_rcnn_jax.ops.roi_align import RoIAlign

# GPUs round to tf32 unless float32 is requested.
PRECISIONS = {
    "float32": Precision(jnp.float32, "float32"),
    "tf32": Precision(jnp.float32, "tensorfloat32"),
    "bfloat16": Precision(jnp.bfloat16),
    "float16": Precision(jnp.float16),
}
AUTO_PRECISION = "auto"
IMPLEMENTATIONS = {"auto": None, "xla": "xla", "pallas": "pallas"}
# Parts recomputed in the backward pass instead of kept in memory.
REMATS = {"none": (), "backbone": ("backbone",), "heads": ("heads",), "all": ("backbone", "heads")}
# `config.model` sections that map to one part each.
PARTS = {
    "input": ImageInput,
    "anchors": AnchorGrid,
    "box_coder": BoxCoder,
    "rpn": RPN,
    "sampling": RoISampling,
    "cascade": Cascade,
    "roi_align": RoIAlign,
    "mask_targets": MaskTargets,
    "classifier": Classifier,
    "quantization": Quantization,
}


def no_head(**section: Any) -> None:
    """Return no module: the model has boxes only, whatever else its section says."""


# Sections whose `name` selects the builder, built in or `package.module:function`.
BUILDERS: dict[str, dict[str, Callable]] = {
    "backbone": {"resnet": ResNet, "regnet": RegNet, "vit": ViT, "convnext": ConvNeXt},
    "fpn": {"fpn": FPN, "simple": SimplePyramid},
    "box_head": {"two_fc": BoxHead, "conv_fc": BoxHead},
    "mask_head": {"four_conv": MaskHead, "none": no_head},
}
# Arguments from outside the section, if not the number of classes and the dtype.
GIVEN = {"backbone": ("dtype", "remat"), "cascade": ("heads",), "classifier": ("image_counts",)}


def default_sections() -> dict[str, dict[str, Any]]:
    """Return the sections of `config.model` with each part's defaults."""
    sections = {name: parts.defaults(part, _given(name)) for name, part in PARTS.items()}
    for section, builders in BUILDERS.items():
        sections[section] = named_section(section, next(iter(builders)))
    return sections


def named_section(section: str, name: str, **entries: Any) -> dict[str, Any]:
    """Return a section of `config.model` for the builder of that name: its defaults and entries."""
    return {"name": name, **parts.defaults(BUILDERS[section][name], _given(section)), **entries}


def describe(config: parts.Section) -> dict[str, parts.Entry]:
    """Return the entries in every section of `config.model`, by "section.entry"."""
    sections: dict[str, Callable] = dict(PARTS)
    found = {}
    for section, builders in BUILDERS.items():
        name = config[section].get("name", next(iter(builders)))
        sections[section] = parts.find(name, builders, f"model.{section}.name")
        meaning = f"{' or '.join(builders)}, or package.module:function for your own."
        found[f"{section}.name"] = parts.Entry(name, str, meaning)
    for section, part in sections.items():
        entries = parts.entries(part, _given(section))
        found |= {f"{section}.{name}": entry for name, entry in entries.items()}
    return found


def resolve_precision(precision: str, platform: str | None = None) -> str:
    """Return the precision that "auto" stands for; others are returned as they are.

    platform: "cpu", "cuda" or another of JAX's; None: the one that JAX uses. "auto" is bfloat16,
        but float32 on a CPU, where XLA computes bfloat16 products no faster.
    """
    if precision != AUTO_PRECISION:
        return precision
    return "float32" if (platform or jax.default_backend()) == "cpu" else "bfloat16"


def _given(section: str) -> tuple[str, ...]:
    return GIVEN.get(section, ("num_classes", "dtype"))


def build_model(
    config: parts.Section,
    *,
    precision: str = "float32",
    implementation: str = "auto",
    remat: str = "none",
    image_counts: tuple[int, ...] = (),
) -> MaskRCNN:
    """Build the model for a config's `model` section.

    Args:
        config: `num_classes` and a section per part; missing sections use defaults. None as
            `mask_head` leaves the mask head out.
        precision: backbone and head precision, a key of `PRECISIONS`, or "auto", see
            `resolve_precision`.
        implementation: "xla", "pallas" for GPU kernels, or "auto" for kernels where supported.
        remat: parts to recompute in the backward pass: "none", "backbone" (every residual block),
            "heads" or "all". Changes memory and time, not results.
        image_counts: training images with each class, class 1 first, see `ops.classifier`.

    Raises:
        ValueError: `num_classes` is 0 (the commands set it from the annotations), or an entry is
            unknown or has an invalid value; the message names it.
    """
    _check_choice("train.remat", remat, REMATS)
    _check_choice("train.precision", precision, {**PRECISIONS, AUTO_PRECISION: None})
    _check_choice("train.implementation", implementation, IMPLEMENTATIONS)
    num_classes = config["num_classes"]
    if num_classes < 1:
        raise ValueError(f"model.num_classes is {num_classes}, expected at least 1")
    unknown = set(config) - {"num_classes", "init_from", *PARTS, *BUILDERS}
    if unknown:
        raise ValueError(f"model has no entry {min(unknown)!r}")
    computed = PRECISIONS[resolve_precision(precision)]
    dtype = computed.dtype
    given: dict[str, Any] = dict(dtype=dtype, image_counts=image_counts)
    built = {
        name: parts.build(part, config.get(name, {}), f"model.{name}", **given)
        for name, part in PARTS.items()
    }
    remat_heads = "heads" in REMATS[remat]
    for section in BUILDERS:
        given = {"num_classes": num_classes, "dtype": dtype}
        if section == "backbone":
            given = {"dtype": dtype, "remat": "backbone" in REMATS[remat]}
        entries = config.get(section, {})
        built[section] = _build_named(entries, section, remat_heads, given)
        if section == "box_head":
            cascade = built["cascade"]
            stages = len(cascade.fg_iou_thresh)
            if stages and not getattr(built[section], "class_agnostic", True):
                expected = "expected True with model.cascade.fg_iou_thresh"
                raise ValueError(f"model.box_head.class_agnostic is False, {expected}")
            heads = []
            for i in range(stages):
                if "widths" in entries or cascade.widths:
                    entries = {**entries, "widths": cascade.head_widths(i)}
                heads.append(_build_named(entries, section, remat_heads, given))
            built["cascade"] = cascade.clone(heads=tuple(heads))
    rpn, quantization = built["rpn"], built.pop("quantization")
    names = ("channels", "num_convs", "widths")
    rpn_options: dict[str, Any] = {name: getattr(rpn, name) for name in names}
    rpn_head = nn.remat(RPNHead) if remat_heads else RPNHead
    return MaskRCNN(
        **built,
        rpn_head=rpn_head(built["anchors"].per_cell, dtype=dtype, **rpn_options),
        precision=replace(computed, quantization=quantization),
        implementation=IMPLEMENTATIONS[implementation],
    )


def _build_named(
    config: parts.Section | None, section: str, remat_heads: bool, given: dict
) -> nn.Module | None:
    """Build the backbone or a head from the `name` in its section; None is short for "none"."""
    builders, options = BUILDERS[section], {"name": "none"} if config is None else dict(config)
    name = options.pop("name", next(iter(builders)))
    builder = parts.find(name, builders, f"model.{section}.name")
    if remat_heads and builder in (BoxHead, MaskHead):
        builder = _recomputed(builder)
    try:
        return parts.build(builder, options, f"model.{section}", **given)
    except parts.UnknownEntry as error:
        advice = "a recipe that changes the name replaces the whole section"
        raise ValueError(f"{error}; {advice} (models.build.named_section)") from error


def _recomputed(head: type[nn.Module]) -> type[nn.Module]:
    """Return a head that is recomputed in the backward pass."""

    class Recomputed(nn.remat(head, static_argnums=3)):  # type: ignore[misc]
        def __call__(self, features: jax.Array, valid: Any = None, train: bool = False) -> Any:
            # By position, for `static_argnums`; a mask head's classes take the place of `valid`.
            return super().__call__(features, valid, train)

    return Recomputed


def _check_choice(name: str, value: Any, choices: Mapping) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {list(choices)}")


def init_variables(model: MaskRCNN, seed: int) -> dict:
    """Initialize `params` and `batch_stats`, numpy arrays that do not depend on the device."""
    # Runs once, mostly to draw random numbers: optimizing it takes far longer than running it, and
    # compiling it for a GPU three times as long as for a CPU.
    quick = {"xla_backend_optimization_level": 0}
    with on_host():
        draw = jax.jit(partial(_init, model), compiler_options=quick)
        return jax.device_get(draw(jax.random.key(seed)))


def abstract_variables(model: MaskRCNN) -> dict:
    """Return the shapes and dtypes of the model's variables without computing them."""
    return jax.eval_shape(lambda: _init(model, jax.random.key(0)))


def _init(model: MaskRCNN, key: jax.Array) -> dict:
    images = jnp.zeros((1, 64, 64, 3), jnp.uint8)  # only the shape matters
    sizes = jnp.full((1, 2), 64, jnp.int32)
    return {"batch_stats": {}, **model.init(key, images, sizes, method="init_all")}
