"""Model config entries that each source's weights depend on.

With other values the same weights compute something else: feature maps shift by a pixel, anchors
move, channels are swapped.
"""

import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from mask_rcnn_jax import parts
from mask_rcnn_jax.config import load_own
from mask_rcnn_jax.recipe.entries import flatten
from mask_rcnn_jax.weights.sources import SOURCES

INPUT = ("input.channel_order", "input.mean", "input.std")
BACKBONE = (
    *"backbone.stride_in backbone.padding backbone.pool_padding backbone.norm_eps".split(),
    *INPUT,
)
REGNET = ("backbone.norm_eps", *INPUT)
DINO = ("backbone.norm_eps", *INPUT)
HEADS = tuple(
    """
    input.pad_multiple anchors.sizes anchors.aspect_ratios anchors.center anchors.rounding
    anchors.stride box_coder.weights box_coder.inclusive roi_align.max_level
    roi_align.sampling_ratio roi_align.aligned roi_align.border roi_align.min_size
    box_head.roi_size mask_head.roi_size
    """.split()
)
DETECTOR = BACKBONE + HEADS
SWIN = ("backbone.windows",)
CASCADE = tuple(  # of models with one
    f"cascade.{name}" for name in ("fg_iou_thresh", "weight_factors", "box_weights", "mean_of")
)
SWINS = ("mmdetection_swin", "swin_detection")

ANTIALIAS = "data.antialias"
# Of our own files.
SAVED = (*(f"model.{name}" for name in dict.fromkeys(DETECTOR + CASCADE)), ANTIALIAS)

MMDETECTION_STYLES = (
    "the file does not say which of mmdetection's two kinds of backbone it has: style='pytorch' "
    "needs model.backbone.stride_in='3x3', model.input.channel_order='rgb' and "
    "model.input.std=(58.395, 57.12, 57.375), style='caffe' needs '1x1', 'bgr' and (1, 1, 1)"
)


# What a run that starts with weights cannot learn away, or only slowly: where the trunk strides,
# and the colors that it sees. Anchors and the like are the run's own.
TRUNK = ("model.backbone.stride_in", *(f"model.{name}" for name in INPUT))
# What the code of a system leaves no choice of; elsewhere a file may differ from its family.
FIXED = {
    **dict.fromkeys(
        ("torchvision", "torchvision_v2", "torchvision_old"), ("model.backbone.stride_in",)
    ),
    "nvidia_tf2": (
        *("model.backbone.stride_in", "model.backbone.padding", "model.input.channel_order"),
    ),
}


class Difference(NamedTuple):
    """An entry of a recipe that is another one in the model that weights belong to."""

    entry: str
    ours: Any
    theirs: Any
    title: str  # whose weights they are
    is_stated: bool  # by the file; or else it is what such files usually have

    def __str__(self) -> str:
        return f"{self.entry} is {self.ours!r}, {self.title} has {self.theirs!r}"


class Expected(NamedTuple):
    """The model a source's weights belong to."""

    recipe: str
    entries: tuple[str, ...]  # entries of `model` that matter
    ignored: tuple[str, ...] = ()  # entries among them that the source leaves open


# Detectron folds its batch norm, so any epsilon will do. ResNets from Facebook's collections come
# without a mean color. mmdetection has torchvision's and MSRA's backbones under the same names.
EXPECTED = {
    "torchvision": Expected("coco_torchvision", DETECTOR),
    "torchvision_v2": Expected("coco_torchvision:v2", DETECTOR),
    # Names before torchvision 0.13, used by the published COCO_V1 file, which torchvision runs
    # without an epsilon.
    "torchvision_old": Expected("coco_torchvision:coco_v1", DETECTOR),
    "torchvision_resnet": Expected("coco_torchvision", BACKBONE),
    "detectron2": Expected("coco_detectron2", DETECTOR),
    "detectron2_regnet": Expected("coco_detectron2:lsj_100ep_regnetx_4gf", REGNET + HEADS),
    "detectron2_vitdet": Expected(
        "coco_vitdet", ("backbone.window", "backbone.global_blocks", *INPUT, *HEADS)
    ),
    "mae": Expected("coco_vitdet", INPUT),
    "torchvision_regnet": Expected("coco_torchvision", REGNET),
    "timm_mobilenetv4": Expected("coco_torchvision", REGNET),
    "regnet": Expected("coco_detectron2:lsj_100ep_regnetx_4gf", REGNET),
    "torchvision_convnext": Expected("coco_convnext", INPUT),
    "convnext": Expected("coco_convnext", INPUT),
    "dinov3_convnext": Expected("coco_convnext", INPUT),
    "timm_convnext": Expected("coco_convnext", INPUT),
    **dict.fromkeys(("dinov3", "dinov3_meta"), Expected("coco_dino:vit_s", DINO)),
    **dict.fromkeys(("dinov2", "dinov2_meta"), Expected("coco_dino:v2_s", DINO)),
    "mmdetection_convnext": Expected("coco_convnext", (*INPUT, *HEADS)),
    **dict.fromkeys(
        ("torchvision_swin", "timm_swin", "swin", "transformers_swin", "mmpretrain_swin"),
        Expected("coco_swin", INPUT),
    ),
    "mmdetection_swin": Expected("coco_swin", (*SWIN, *INPUT, *HEADS)),
    "swin_detection": Expected("coco_swin", (*SWIN, *INPUT, *HEADS)),
    "detectron2_resnet": Expected("coco_detectron2", BACKBONE, ("input.mean",)),
    "detectron_msra": Expected(
        "coco_nvidia_pytorch", BACKBONE, ("input.mean", "backbone.norm_eps")
    ),
    "detectron2_msra": Expected("coco_detectron2", BACKBONE, ("input.mean",)),
    "maskrcnn_benchmark": Expected("coco_nvidia_pytorch", DETECTOR, ("backbone.norm_eps",)),
    "mmdetection": Expected(
        "coco_mmdet",
        DETECTOR,
        ("input.channel_order", "input.mean", "input.std", "backbone.stride_in"),
    ),
    "google_resnet": Expected("coco_nvidia_tf1", BACKBONE, ("backbone.norm_eps",)),
    "nvidia_rn50": Expected("coco", BACKBONE),
    "nvidia_tf2": Expected("coco", DETECTOR),
}


def mismatches(
    source: str, model: Mapping[str, Any], without: Sequence[str] = (), config: str = ""
) -> list[str]:
    """Describe each entry of a `model` section that differs from the source's own model; arguments
    as of `differences`."""
    lines = open_questions(source, config)
    return lines + [str(one) for one in differences(source, model, without, config)]


def open_questions(source: str, config: str) -> list[str]:
    """What cannot be compared, since the file does not say it."""
    is_open = source == "mmdetection" and not _mmdetection_entries(config)
    return [MMDETECTION_STYLES] if is_open else []


def differences(
    source: str,
    model: Mapping[str, Any],
    without: Sequence[str] = (),
    config: str = "",
    antialias: bool | None = None,
) -> list[Difference]:
    """Compare a recipe with the source's own model.

    Args:
        source: of `EXPECTED`.
        model: the recipe's `model` section. Entries that it lacks are not compared.
        without: nor are these, such as "backbone.norm_eps".
        config: text of the config in the file, which says what mmdetection leaves open.
        antialias: `data.antialias`; None does not compare it.
    """
    expected, ours = EXPECTED[source], flatten(model)
    said = _mmdetection_entries(config) if source.startswith("mmdetection") else {}
    theirs = flatten(parts.to_section(load_own(_recipe(source, ours)).model)) | said
    ignored = {*expected.ignored, *without} - said.keys()
    entries = expected.entries
    if ours.get("cascade.fg_iou_thresh"):
        recipe = "coco_swin:cascade_tiny" if source in SWINS else "coco_detectron2:cascade_1x"
        cascade = flatten(parts.to_section(load_own(recipe).model))
        theirs, entries = theirs | {name: cascade[name] for name in CASCADE}, entries + CASCADE
    pairs = {
        f"model.{name}": (ours[name], theirs[name])
        for name in entries
        if name in ours and name in theirs and name not in ignored
    }
    if antialias is not None and ANTIALIAS in said:
        pairs[ANTIALIAS] = antialias, said[ANTIALIAS]
    stated = {*(f"model.{name}" for name in said), *said, *FIXED.get(source, ())}
    if ours.get("backbone.depth", 50) < 50:  # has no convolution to stride in instead
        stated.discard("model.backbone.stride_in")
    return _differing(pairs, SOURCES[source].title, stated)


def differences_from(
    saved: Mapping[str, Any], model: Mapping[str, Any], antialias: bool | None, title: str
) -> list[Difference]:
    """Compare a recipe with what a run, or the manifest of exported weights, says of their model.

    saved: entries by their names in a recipe; those of `SAVED` are compared.
    """
    ours = {f"model.{name}": value for name, value in flatten(model).items()}
    if antialias is not None:
        ours[ANTIALIAS] = antialias
    pairs = {name: (ours[name], saved[name]) for name in SAVED if name in ours and name in saved}
    return _differing(pairs, title, pairs.keys())


def _differing(
    pairs: Mapping[str, tuple[Any, Any]], title: str, stated: Collection[str]
) -> list[Difference]:
    rounded = {name: (_rounded(our), _rounded(their)) for name, (our, their) in pairs.items()}
    return [
        Difference(name, our, their, title, name in stated)
        for name, (our, their) in rounded.items()
        if our != their
    ]


def advice(path: str | os.PathLike, stated: Sequence[Difference]) -> str:
    """Say how to set a recipe's entries to what weights, by their path or name, need."""
    flags = (f"--config.{one.entry}={shlex.quote(str(one.theirs))}" for one in stated)
    return (
        f"{path} holds weights of {stated[0].title}, which find something else with the recipe's "
        "values; set these entries, or go on with --accept_mismatch (accept_mismatch=True in "
        f"Python): {' '.join(flags)}"  # last, to be copied
    )


def _recipe(source: str, model: Mapping[str, Any]) -> str:
    """The recipe of a source's weights that fit a model; detectron2 has models with other inputs
    under the same names."""
    if source == "detectron2_vitdet":
        sizes = {24: ":l", 32: ":h"}
        return EXPECTED[source].recipe + sizes.get(model.get("backbone.depth", 0), "")
    if source == "detectron2" and model.get("backbone.groups", 1) > 1:
        return "coco_detectron2:x101_3x"
    if source == "detectron2" and model.get("backbone.norm") == "group":
        return "coco_detectron2:gn_3x"
    return EXPECTED[source].recipe


def _mmdetection_entries(config: str) -> dict[str, Any]:
    """Our entries for the backbone, the colors and the resizing that a config of mmdetection names;
    {} if it names no backbone of ours."""
    if not re.search(r"\btype='(?:ResNet|\w+\.ConvNeXt|SwinTransformer)'", config):
        return {}
    style = re.search(r"\bstyle='(\w+)'", config)
    rgb = re.search(r"\b(?:bgr_to_rgb|to_rgb)=(True|False)", config)
    is_caffe = style is not None and style[1] == "caffe"
    is_rgb = rgb[1] == "True" if rgb else not is_caffe
    said: dict[str, Any] = {"input.channel_order": "rgb" if is_rgb else "bgr"}
    if "type='ResNet'" in config:
        said["backbone.stride_in"] = "1x1" if is_caffe else "3x3"
    for name in ("mean", "std"):
        values = re.search(rf"\b{name}=\[([-\d., \n]+)\]", config)
        numbers = [float(v) for v in re.findall(r"\d+(?:\.\d*)?", values[1])] if values else []
        if len(numbers) == 3:  # in the order of the model's input; ours are of R, G, B
            said[f"input.{name}"] = tuple(numbers if is_rgb else numbers[::-1])
    if re.search(r"\btype='Resize'", config):  # which is cv2's, unless it says otherwise
        said[ANTIALIAS] = "backend='pillow'" in config
    return said


def _rounded(value):
    """Round floats to six digits and make lists tuples, so that a config equals its json."""
    if isinstance(value, list | tuple):
        return tuple(_rounded(item) for item in value)
    return float(f"{value:.6g}") if isinstance(value, float) else value
