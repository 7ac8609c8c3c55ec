"""Build a model from a recipe's `model` section and initialize its variables."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from mask_rcnn_jax import parts
from mask_rcnn_jax.host import on_host
from mask_rcnn_jax.models.cascade import Cascade
from mask_rcnn_jax.models.convnext import ConvNeXt
from mask_rcnn_jax.models.dino import Dino
from mask_rcnn_jax.models.fpn import FPN
from mask_rcnn_jax.models.image_input import ImageInput
from mask_rcnn_jax.models.keypoints import KeypointHead
from mask_rcnn_jax.models.mask_heads import MeanMaskHead
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.models.mask_targets import MaskTargets
from mask_rcnn_jax.models.mobilenet import MobileNetV4
from mask_rcnn_jax.models.point_rend import PointRendHead
from mask_rcnn_jax.models.precision import Precision
from mask_rcnn_jax.models.prepared import PREPARED
from mask_rcnn_jax.models.protocols import PROTOCOLS, check_call
from mask_rcnn_jax.models.quantization import Quantization
from mask_rcnn_jax.models.regnet import RegNet
from mask_rcnn_jax.models.resnet import ResNet
from mask_rcnn_jax.models.roi_heads import BoxHead, MaskHead
from mask_rcnn_jax.models.rpn import RPN, RPNHead
from mask_rcnn_jax.models.sampling import RoISampling
from mask_rcnn_jax.models.simple_pyramid import SimplePyramid
from mask_rcnn_jax.models.swin import Swin
from mask_rcnn_jax.models.swin_v2 import SwinV2
from mask_rcnn_jax.models.vit import ViT
from mask_rcnn_jax.ops.anchors import AnchorGrid
from mask_rcnn_jax.ops.boxes import BoxCoder
from mask_rcnn_jax.ops.classifier import Classifier
from mask_rcnn_jax.ops.roi_align import RoIAlign
from mask_rcnn_jax.platforms import traced_for
from pallas_kernels import support

# GPUs round to tf32 unless float32 is requested.
PRECISIONS = {
    "float32": Precision(jnp.float32, "float32"),
    "tf32": Precision(jnp.float32, "tensorfloat32"),
    "bfloat16": Precision(jnp.bfloat16),
    "float16": Precision(jnp.float16),
}
AUTO_PRECISION = "auto"
FIRST_BFLOAT16 = 8, 0  # compute capability of the first NVIDIA GPUs with products in bfloat16
IMPLEMENTATIONS = {"auto": None, "xla": "xla", "pallas": "pallas"}
# For what runs once, on a CPU: optimizing it takes far longer than running it, and compiling it for
# a GPU three times as long as for a CPU.
QUICK = {"xla_backend_optimization_level": 0}
# Parts recomputed in the backward pass instead of kept in memory.
REMATS = {"none": (), "backbone": ("backbone",), "heads": ("heads",), "all": ("backbone", "heads")}


def no_head(**section: Any) -> None:
    """Return no module: the model lacks the task, whatever else its section says."""


# Sections whose `name` selects the builder, built in or `package.module:function`.
BUILDERS: dict[str, dict[str, Callable]] = {
    "backbone": {
        **{"resnet": ResNet, "regnet": RegNet, "vit": ViT, "convnext": ConvNeXt},
        **{"swin": Swin, "swin_v2": SwinV2, "dino": Dino, "mobilenetv4": MobileNetV4},
    },
    "fpn": {"fpn": FPN, "simple": SimplePyramid},
    "box_head": {"two_fc": BoxHead, "conv_fc": BoxHead},
    "mask_head": {
        **{"four_conv": MaskHead, "mean": MeanMaskHead, "pointrend": PointRendHead},
        "none": no_head,
    },
    "keypoint_head": {"none": no_head, "conv_deconv": KeypointHead},
}

# Their arguments that come later.
LATER = {"backbone": ("dtype", "remat")} | dict.fromkeys(
    ("fpn", "box_head", "mask_head", "keypoint_head"), ("num_classes", "dtype")
)


def _default(section: str) -> Any:
    return field(default_factory=lambda: name_part(section, {}))


@dataclass(frozen=True)
class ModelOptions:
    """The parts of a model, each a section.

    Attributes:
        num_classes: classes without background; 0: as annotated.
        init_from: a run's workdir, a weight file or a name of `prepare weights` to start from;
            'random': random weights, as '' where all layers learn.
        adapt_input: how `init_from` for red, green and blue takes the bands of
            `data.bands.names`: "mean" gives each the mean of the three, "repeat" the three in turn
            (timm's way), "names" to those named red, green and blue their own and the mean to the
            others, all times 3 / number of bands; with "none" there must be three.
    """

    num_classes: int = 0
    init_from: str = ""
    adapt_input: Literal["none", "mean", "repeat", "names"] = "none"
    input: ImageInput = ImageInput()
    anchors: AnchorGrid = AnchorGrid()
    box_coder: BoxCoder = BoxCoder()
    rpn: RPN = RPN()
    sampling: RoISampling = RoISampling()
    cascade: Cascade = field(default_factory=Cascade)
    roi_align: RoIAlign = RoIAlign()
    mask_targets: MaskTargets = MaskTargets()
    classifier: Classifier = Classifier()
    quantization: Quantization = Quantization()
    backbone: parts.Named = _default("backbone")
    fpn: parts.Named = _default("fpn")
    box_head: parts.Named = _default("box_head")
    mask_head: parts.Named = _default("mask_head")
    keypoint_head: parts.Named = _default("keypoint_head")

    def __post_init__(self):
        last, sizes = 1 + len(self.anchors.sizes), self.anchors.sizes
        if self.roi_align.max_level > last:
            found = f"roi_align.max_level is {self.roi_align.max_level}"
            raise ValueError(f"{found}, but anchors.sizes has {len(sizes)}, of P2 to P{last}")

    @classmethod
    def read(cls, section: Any, *, imports: bool = True) -> "ModelOptions":
        """Build the parts that a `model` section describes; missing sections use defaults.

        None as `mask_head` leaves the mask head out. imports: see `parts.named`. Raises ValueError,
        naming the entry, if one is unknown or has an invalid value.
        """
        if not parts.is_section(section):
            raise ValueError(f"model is {section!r}, expected a section with {sorted(PARTS)}")
        given = [name for name in BUILDERS if name in section]
        named = {name: name_part(name, section[name], imports=imports) for name in given}
        others = {name: value for name, value in section.items() if name not in named}
        return replace(parts.build(cls, others, "model"), **named)

    @property
    def weights(self) -> str:
        """What to start from; '' if the weights are random."""
        return "" if self.init_from == "random" else self.init_from

    @property
    def has_masks(self) -> bool:
        """Whether the model finds masks, not boxes alone."""
        return self.mask_head.name != "none"

    @property
    def has_keypoints(self) -> bool:
        """Whether the model finds keypoints."""
        return self.keypoint_head.name != "none"


# The sections of a model.
_NO_PARTS = ("num_classes", "init_from", "adapt_input")
PARTS = tuple(f.name for f in fields(ModelOptions) if f.name not in _NO_PARTS)


def name_part(section: str, entries: Any, *, imports: bool = True) -> parts.Named:
    """Find and check what a section of `BUILDERS` describes; None is short for the name "none"."""
    if parts.is_section(entries) and entries.get("name", "") == "none":
        entries = None  # what else it says is of no head
    where, later = f"model.{section}", LATER[section]
    return parts.named(entries, BUILDERS[section], where, later, imports=imports)


def named_section(section: str, name: str, **entries: Any) -> dict[str, Any]:
    """Return a section of `config.model` for the builder of that name: its defaults and entries."""
    return parts.to_section(name_part(section, {"name": name, **entries}))


def resolve_precision(
    precision: str, platform: str | None = None, capability: tuple[int, int] | None = None
) -> str:
    """Return the precision that "auto" stands for; others are returned as they are.

    "auto" is what the device computes fastest: bfloat16, but float16 on NVIDIA GPUs of compute
    capability 7.5 and below, which convert bfloat16 to float32, and float32 on CPUs.

    Args:
        platform: "cpu", "cuda" or another of JAX's; None: the one that JAX uses.
        capability: of the GPU; None: that of the one programs are made for.
    """
    if precision != AUTO_PRECISION:
        return precision
    platform = platform or jax.default_backend()
    if platform == "cpu":
        return "float32"
    is_cuda = platform in ("cuda", "gpu")
    is_old = is_cuda and (capability or support.compute_capability()) < FIRST_BFLOAT16
    return "float16" if is_old else "bfloat16"


def build_model(
    model: ModelOptions | parts.Section,
    *,
    precision: str = "float32",
    implementation: str = "auto",
    remat: str = "none",
    image_counts: tuple[int, ...] = (),
) -> MaskRCNN:
    """Build the model of a recipe.

    Args:
        model: a recipe's `model`, or such a section, see `ModelOptions.read`.
        precision: backbone and head precision, a key of `PRECISIONS`, or "auto", see
            `resolve_precision`.
        implementation: "xla", "pallas" for GPU kernels, or "auto" for kernels where supported.
        remat: parts to recompute in the backward pass: "none", "backbone" (every residual block),
            "heads" or "all". Changes memory and time, not results.
        image_counts: training images with each class, class 1 first, see `ops.classifier`.

    Raises:
        ValueError: `num_classes` is 0 (the commands set it from the annotations), or an entry is
            unknown or has an invalid value, or a part cannot be called as `models.protocols` says;
            the message names it.
    """
    _check_choice("train.remat", remat, REMATS)
    _check_choice("train.precision", precision, {**PRECISIONS, AUTO_PRECISION: None})
    _check_choice("train.implementation", implementation, IMPLEMENTATIONS)
    options = model if isinstance(model, ModelOptions) else ModelOptions.read(model)
    if options.num_classes < 1:
        raise ValueError(f"model.num_classes is {options.num_classes}, expected at least 1")
    computed = PRECISIONS[resolve_precision(precision)]
    given: dict[str, Any] = {"num_classes": options.num_classes, "dtype": computed.dtype}
    in_backbone, in_heads = (name in REMATS[remat] for name in ("backbone", "heads"))
    built = MaskRCNN(
        input=options.input,
        backbone=options.backbone.make(dtype=computed.dtype, remat=in_backbone),
        fpn=options.fpn.make(**given),
        anchors=options.anchors,
        box_coder=options.box_coder,
        rpn=options.rpn,
        rpn_head=_rpn_head(options, in_heads, computed.dtype, IMPLEMENTATIONS[implementation]),
        sampling=options.sampling,
        roi_align=options.roi_align,
        box_head=_head(options.box_head, in_heads, given),
        cascade=_cascade(options, in_heads, given),
        classifier=replace(options.classifier, image_counts=image_counts),
        mask_head=_head(options.mask_head, in_heads, given),
        mask_targets=options.mask_targets,
        keypoint_head=_head(options.keypoint_head, in_heads, given),
        precision=replace(computed, quantization=options.quantization),
        implementation=IMPLEMENTATIONS[implementation],
    )
    for section, protocol in PROTOCOLS.items():
        if (part := getattr(built, section)) is not None:
            check_call(part, getattr(options, section), protocol)
    return built


def _rpn_head(
    options: ModelOptions, recomputed: bool, dtype: Any, implementation: str | None
) -> RPNHead:
    rpn, per_cell = options.rpn, options.anchors.per_cell
    head = nn.remat(RPNHead) if recomputed else RPNHead
    is_dense = options.quantization.int8 or implementation == "xla"
    # Some losses read matched anchors that were not sampled, too.
    cells = 0 if is_dense else 2 * rpn.batch_size_per_image
    return head(per_cell, rpn.channels, dtype, rpn.num_convs, rpn.widths, cells, implementation)


def _head(head: parts.Named, recomputed: bool, given: Mapping[str, Any]) -> Any:
    """Build a head, or return None for the model without it."""
    if recomputed and head.builder in (BoxHead, MaskHead, MeanMaskHead, KeypointHead):
        head = replace(head, builder=_recomputed(head.builder))
    return head.make(**given)


def _cascade(options: ModelOptions, recomputed: bool, given: Mapping[str, Any]) -> Cascade:
    """Build the cascade, whose stages have heads like the box head, each with its own widths."""
    cascade, head = options.cascade, options.box_head
    stages = range(len(cascade.fg_iou_thresh))
    heads = []
    for i in stages:
        entries = dict(head.entries)
        if "widths" in entries or cascade.widths:
            entries["widths"] = cascade.head_widths(i)
        heads.append(_head(replace(head, entries=entries), recomputed, given))
    return cascade.clone(heads=tuple(heads))


def _recomputed(head: Any) -> type[nn.Module]:
    """Return a head that is recomputed in the backward pass."""

    class Recomputed(nn.remat(head, static_argnums=3)):  # type: ignore[misc]
        def __call__(self, features: jax.Array, valid: Any = None, train: bool = False) -> Any:
            # By position, for `static_argnums`; a task's classes take the place of `valid`.
            return super().__call__(features, valid, train)

    return Recomputed


def _check_choice(name: str, value: Any, choices: Mapping) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {list(choices)}")


def init_variables(model: MaskRCNN, seed: int, given: dict | None = None) -> dict:
    """Initialize `params` and `batch_stats`, numpy arrays that do not depend on the device.

    given: `abstract_variables` with arrays in the place of those that need no drawing. What is
    drawn does not depend on it. To compile a program that draws all of a ResNet-50's takes two
    cores ten seconds.
    """
    leaves, structure = jax.tree.flatten(abstract_variables(model) if given is None else given)
    left = [at for at, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]

    def draw(key: jax.Array) -> list[jax.Array]:
        drawn = jax.tree.leaves(_init(model, key))
        return [drawn[at] for at in left]

    if left:
        with on_host():
            program = jax.jit(draw, compiler_options=QUICK)
            found = jax.device_get(program(jax.random.key(seed)))
        for at, leaf in zip(left, found, strict=True):
            leaves[at] = leaf
    return jax.tree.unflatten(structure, leaves)


def abstract_variables(model: MaskRCNN) -> dict:
    """Return the shapes and dtypes of the model's variables without computing them."""
    return jax.eval_shape(lambda: _init(model, jax.random.key(0)))


def prepare_for_gpu(model: MaskRCNN, variables: dict) -> dict:
    """Return the variables with those of `models.prepared` in the place of the params that they
    were made of, numpy arrays, for predictions alone."""
    with on_host():
        prepare = jax.jit(partial(_prepare, model), compiler_options=QUICK)
        return jax.device_get(prepare(variables))


def abstract_prepared(model: MaskRCNN) -> dict:
    """Return shapes and dtypes of what `prepare_for_gpu` returns."""
    return jax.eval_shape(partial(_prepare, model), abstract_variables(model))


def _prepare(model: MaskRCNN, variables: dict) -> dict:
    apply = partial(model.apply, method="init_all", mutable=[PREPARED])
    found = apply(variables, *_inputs(model))[1].get(PREPARED, {})
    made = flatten_dict(found)
    params = {name: x for name, x in flatten_dict(variables["params"]).items() if name not in made}
    return {**variables, "params": unflatten_dict(params), PREPARED: found}


def _init(model: MaskRCNN, key: jax.Array) -> dict:
    with traced_for("tpu"):  # what is computed is not used, and these forms are the plainest
        variables = model.init(key, *_inputs(model), method="init_all")
    return {"batch_stats": {}, **variables}


def _inputs(model: MaskRCNN) -> tuple[jax.Array, jax.Array]:
    """Images and their sizes; only shapes matter."""
    images = jnp.zeros((1, 64, 64, model.input.channels), jnp.uint8)
    return images, jnp.full((1, 2), 64, jnp.int32)
