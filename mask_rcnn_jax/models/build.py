"""Build a model from a config, and initialize its variables."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from mask_rcnn_jax import parts
from mask_rcnn_jax.models.fpn import FPN
from mask_rcnn_jax.models.image_input import ImageInput
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.models.mask_targets import MaskTargets
from mask_rcnn_jax.models.resnet import ResNet
from mask_rcnn_jax.models.roi_heads import BoxHead, MaskHead
from mask_rcnn_jax.models.rpn import RPN, RPNHead
from mask_rcnn_jax.models.sampling import RoISampling
from mask_rcnn_jax.ops.anchors import AnchorGrid
from mask_rcnn_jax.ops.boxes import BoxCoder
from mask_rcnn_jax.ops.roi_align import RoIAlign

# The dtype of backbone and heads, and the precision of float32 matrix products. A GPU would round
# these to tf32 by default, so float32 has to be asked for.
PRECISIONS = {
    "float32": (jnp.float32, "float32"),
    "tf32": (jnp.float32, "tensorfloat32"),
    "bfloat16": (jnp.bfloat16, None),
    "float16": (jnp.float16, None),
}
IMPLEMENTATIONS = {"auto": None, "xla": "xla", "pallas": "pallas"}
# What the backward pass recomputes instead of keeping it in memory.
REMATS = {
    "none": (),
    "backbone": ("backbone",),
    "heads": ("heads",),
    "all": ("backbone", "heads"),
}
# Sections of `config.model` that are one part each.
PARTS = {
    "input": ImageInput,
    "fpn": FPN,
    "anchors": AnchorGrid,
    "box_coder": BoxCoder,
    "rpn": RPN,
    "sampling": RoISampling,
    "roi_align": RoIAlign,
    "mask_targets": MaskTargets,
}
# Sections whose `name` chooses the builder, ours or `package.module:function`.
BUILDERS = {
    "backbone": {"resnet": ResNet},
    "box_head": {"two_fc": BoxHead},
    "mask_head": {"four_conv": MaskHead},
}
GIVEN = ("num_classes", "dtype", "remat")  # arguments that do not come from the section


def default_sections() -> dict[str, dict[str, Any]]:
    """The sections of `config.model` with the defaults of our parts."""
    sections = {name: parts.defaults(part, GIVEN) for name, part in PARTS.items()}
    for section, builders in BUILDERS.items():
        (name, builder), *_ = builders.items()
        sections[section] = {"name": name, **parts.defaults(builder, GIVEN)}
    return sections


def describe(config: Mapping[str, Any]) -> dict[str, parts.Entry]:
    """The entries of every section of `config.model`, as "section.entry"."""
    sections = dict(PARTS)
    found = {}
    for section, builders in BUILDERS.items():
        name = config[section]["name"]
        sections[section] = parts.find(name, builders, f"model.{section}.name")
        found[f"{section}.name"] = parts.Entry(
            name, str, f"{' or '.join(builders)}, or package.module:function of your own."
        )
    for section, part in sections.items():
        entries = parts.entries(part, GIVEN)
        found |= {f"{section}.{name}": entry for name, entry in entries.items()}
    return found


def build_model(
    config: Mapping[str, Any],
    *,
    precision: str = "float32",
    implementation: str = "auto",
    remat: str = "none",
) -> MaskRCNN:
    """The model of a config's `model` section.

    Args:
        config: `num_classes` and a section per part; a part that is missing has its defaults.
        precision: of backbone and heads, a key of `PRECISIONS`.
        implementation: "xla", or "pallas" for GPU kernels, or "auto": kernels where supported.
        remat: what the backward pass recomputes: "none", "backbone" (every residual block), "heads"
            or "all". Changes memory and time, no number.

    Raises ValueError, naming the entry, for `num_classes` 0 (the commands set it from the
    annotations), an unknown entry and a value that is not allowed.
    """
    _check_choice("train.remat", remat, REMATS)
    _check_choice("train.precision", precision, PRECISIONS)
    _check_choice("train.implementation", implementation, IMPLEMENTATIONS)
    num_classes = config["num_classes"]
    if num_classes < 1:
        raise ValueError(f"model.num_classes is {num_classes}, expected at least 1")
    unknown = set(config) - {"num_classes", "init_from", *PARTS, *BUILDERS}
    if unknown:
        raise ValueError(f"model has no entry {min(unknown)!r}")
    dtype, matmul_precision = PRECISIONS[precision]
    made = {
        name: parts.build(part, config.get(name, {}), f"model.{name}", dtype=dtype)
        for name, part in PARTS.items()
    }
    maybe_remat = nn.remat if "heads" in REMATS[remat] else lambda module: module
    for section in BUILDERS:
        given = {"num_classes": num_classes, "dtype": dtype}
        if section == "backbone":
            given = {"dtype": dtype, "remat": "backbone" in REMATS[remat]}
        made[section] = _build_named(config.get(section, {}), section, maybe_remat, given)
    return MaskRCNN(
        **made,
        rpn_head=maybe_remat(RPNHead)(made["anchors"].per_cell, made["rpn"].channels, dtype),
        dtype=dtype,
        matmul_precision=matmul_precision,
        implementation=IMPLEMENTATIONS[implementation],
    )


def _build_named(section: Mapping[str, Any], where: str, maybe_remat, given: dict) -> nn.Module:
    """The backbone or a head by the `name` in its section."""
    ours = BUILDERS[where]
    options = dict(section)
    name = options.pop("name", next(iter(ours)))
    builder = parts.find(name, ours, f"model.{where}.name")
    if where != "backbone" and builder in ours.values():
        builder = maybe_remat(builder)
    return parts.build(builder, options, f"model.{where}", **given)


def _check_choice(name: str, value: Any, choices: Mapping) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {list(choices)}")


def init_variables(model: MaskRCNN, seed: int) -> dict:
    """Fresh `params` and `batch_stats`."""
    # Runs once and is mostly random numbers: optimizing it takes far longer than running it.
    quick = {"xla_backend_optimization_level": 0}
    return jax.jit(partial(_init, model), compiler_options=quick)(jax.random.key(seed))


def abstract_variables(model: MaskRCNN) -> dict:
    """Shapes and dtypes of the model's variables, without computing any."""
    return jax.eval_shape(lambda: _init(model, jax.random.key(0)))


def _init(model: MaskRCNN, key: jax.Array) -> dict:
    images = jnp.zeros((1, 64, 64, 3), jnp.uint8)  # only the shape counts
    sizes = jnp.full((1, 2), 64, jnp.int32)
    return {"batch_stats": {}, **model.init(key, images, sizes, method="init_all")}
