"""Layer names of the systems whose weights can be read, next to ours.

A row is a pair of templates: a system's layer name and our path. `{stage}` is a number equal on
both sides, `{stage-1}` that number minus one, `[...]` an optional part. The `parts` of a source
append array names ("weight", "bias", ...) to layer names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Rows = tuple[tuple[str, str], ...]

# Ranges of the numbers in templates, inclusive.
RANGES = {"stage": (2, 5), "block": (0, 99), "conv": (1, 3)}
RANGES |= {"level": (2, 5), "fcn": (1, 8), "fc": (1, 2), "rpn": (2, 8), "cascade": (1, 9)}
TORCH_PARTS = {".weight": "kernel", ".bias": "bias"}
TF_PARTS = {"/kernel": "kernel", "/bias": "bias"}


def _norm_parts(scale: str, bias: str, mean: str, var: str) -> dict[str, str]:
    return {scale: "scale", bias: "bias", mean: "mean", var: "var"}


TORCH_NORM_PARTS = _norm_parts(".weight", ".bias", ".running_mean", ".running_var")
TF_NORM_PARTS = _norm_parts("/gamma", "/beta", "/moving_mean", "/moving_variance")
# The classifier, optimizer slots and counters.
_TF_UNUSED = r".*dense.*|(?!.*/(kernel|gamma|beta|moving_mean|moving_variance)$).*"


@dataclass(frozen=True)
class Source:
    """Names and layout of one system's weights.

    Attributes:
        layout: "torch" (OIHW, Linear [out, in], box head input flattened C, H, W) or "tf" (HWIO,
            [in, out], flattened H, W, C as ours).
        background: position of the background class, "first" or "last"; with "last", boxes and
            masks have no slot for it.
        deltas: box regression order, "xy" (dx, dy, dw, dh) or "yx" (dy, dx, dh, dw).
        has_eps: whether batch norm adds an epsilon to the variance.
        tables: rows of arrays that are no kernels, biases or norms, and have our layout.
    """

    title: str
    signs: tuple[str, ...]  # every file of this source has one of these names
    rows: Rows
    parts: Mapping[str, str] = field(default_factory=lambda: TORCH_PARTS)
    norm_parts: Mapping[str, str] = field(default_factory=lambda: TORCH_NORM_PARTS)
    unused: str = r".*\.num_batches_tracked"  # names without a counterpart in our model
    layout: str = "torch"
    background: str = "first"
    deltas: str = "xy"
    has_eps: bool = True
    tables: Rows = ()


def _torch_resnet(prefix: str, stem: str = "") -> Rows:
    """Return the rows of torchvision's ResNet, whose names others adopted."""
    block = prefix + "layer{stage-1}.{block}."
    return (
        (f"{prefix}{stem}conv1", "backbone/stem_conv"),
        (f"{prefix}{stem}bn1", "backbone/stem_norm"),
        (block + "conv{conv}", "backbone/res{stage}_{block}/conv{conv}"),
        (block + "bn{conv}", "backbone/res{stage}_{block}/norm{conv}"),
        (block + "downsample.0", "backbone/res{stage}_{block}/shortcut"),
        (block + "downsample.1", "backbone/res{stage}_{block}/shortcut_norm"),
    )


def _detectron2_resnet(prefix: str) -> Rows:
    block = prefix + "res{stage}.{block}."
    return (
        (prefix + "stem.conv1", "backbone/stem_conv"),
        (prefix + "stem.conv1.norm", "backbone/stem_norm"),
        (block + "conv{conv}", "backbone/res{stage}_{block}/conv{conv}"),
        (block + "conv{conv}.norm", "backbone/res{stage}_{block}/norm{conv}"),
        (block + "shortcut", "backbone/res{stage}_{block}/shortcut"),
        (block + "shortcut.norm", "backbone/res{stage}_{block}/shortcut_norm"),
    )


def _vit(prefix: str) -> tuple[Rows, Rows]:
    """Return the rows and tables of MAE's vision transformer, whose names others adopted."""
    theirs, ours = prefix + "blocks.{block}.", "backbone/block{block}/"
    layers = ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    rows = [(theirs + name, ours + name.replace("mlp.", "").replace(".", "/")) for name in layers]
    tables = [(f"{theirs}attn.{name}", f"{ours}attn/{name}") for name in ("rel_pos_h", "rel_pos_w")]
    return (
        ((prefix + "patch_embed.proj", "backbone/patch_embed"), *rows),
        ((prefix + "pos_embed", "backbone/pos_embed"), *tables),
    )


def _detectron2_box_head(stage: str, ours: str) -> Rows:
    """Return the rows of a box head; stage: its number in a cascade, or ""."""
    number = f".{stage}." if stage else "."
    head, predictor = f"roi_heads.box_head{number}", f"roi_heads.box_predictor{number}"
    return (
        (head + "conv{fcn}", ours + "/conv{fcn}"),
        (head + "conv{fcn}.norm", ours + "/norm{fcn}"),
        (head + "fc{fc}", ours + "/fc{fc}"),
        (predictor + "cls_score", ours + "/cls_score"),
        (predictor + "bbox_pred", ours + "/bbox_pred"),
    )


def _simple_pyramid() -> Rows:
    rows = [
        ("simfp_2.0", "up2_first"),
        ("simfp_2.1", "up2_norm"),
        ("simfp_2.3", "up2_second"),
        ("simfp_3.0", "up3_first"),
    ]
    for level, first in {2: 4, 3: 1, 4: 0, 5: 1}.items():
        for number, name in ((first, "fpn_lateral"), (first + 1, "fpn_output")):
            rows.append((f"simfp_{level}.{number}", f"{name}{level}"))
            rows.append((f"simfp_{level}.{number}.norm", f"{name}{level}_norm"))
    return tuple((f"backbone.{theirs}", f"fpn/{ours}") for theirs, ours in rows)


def _google_resnet50() -> Rows:
    """Return rows numbered in creation order: a stage's first block creates its shortcut first."""
    layers = [("stem_conv", "stem_norm")]
    for stage, blocks in zip((2, 3, 4, 5), (3, 4, 6, 3), strict=True):
        layers.append((f"res{stage}_0/shortcut", f"res{stage}_0/shortcut_norm"))
        for path in (f"res{stage}_{block}" for block in range(blocks)):
            layers += [(f"{path}/conv{i}", f"{path}/norm{i}") for i in (1, 2, 3)]
    rows = []
    for index, (conv, norm) in enumerate(layers):
        number = f"_{index}" if index else ""
        rows.append((f"[resnet50/]conv2d{number}", f"backbone/{conv}"))
        rows.append((f"[resnet50/]batch_normalization{number}", f"backbone/{norm}"))
    return tuple(rows)


_TORCHVISION_PREDICTORS: Rows = (
    ("rpn.head.cls_logits", "rpn_head/objectness_logits"),
    ("rpn.head.bbox_pred", "rpn_head/anchor_deltas"),
    ("roi_heads.box_predictor.cls_score", "box_head/cls_score"),
    ("roi_heads.box_predictor.bbox_pred", "box_head/bbox_pred"),
    ("roi_heads.mask_predictor.conv5_mask", "mask_head/mask_deconv"),
    ("roi_heads.mask_predictor.mask_fcn_logits", "mask_head/mask_predictor"),
)
_TORCHVISION_HEADS: Rows = (
    ("roi_heads.box_head.fc{fc+5}", "box_head/fc{fc}"),
    *_TORCHVISION_PREDICTORS,
)
_TORCHVISION: Rows = (
    *_torch_resnet("backbone.body."),
    ("backbone.fpn.inner_blocks.{level-2}.0", "fpn/fpn_lateral{level}"),
    ("backbone.fpn.layer_blocks.{level-2}.0", "fpn/fpn_output{level}"),
    ("rpn.head.conv.0.0", "rpn_head/conv"),
    ("roi_heads.mask_head.{fcn-1}.0", "mask_head/mask_fcn{fcn}"),
    *_TORCHVISION_HEADS,
)
_TORCHVISION_V2: Rows = (
    *_torch_resnet("backbone.body."),
    ("backbone.fpn.inner_blocks.{level-2}.0", "fpn/fpn_lateral{level}"),
    ("backbone.fpn.inner_blocks.{level-2}.1", "fpn/fpn_lateral{level}_norm"),
    ("backbone.fpn.layer_blocks.{level-2}.0", "fpn/fpn_output{level}"),
    ("backbone.fpn.layer_blocks.{level-2}.1", "fpn/fpn_output{level}_norm"),
    ("rpn.head.conv.0.0", "rpn_head/conv"),
    ("rpn.head.conv.{rpn-1}.0", "rpn_head/conv{rpn}"),
    ("roi_heads.box_head.{fcn-1}.0", "box_head/conv{fcn}"),
    ("roi_heads.box_head.{fcn-1}.1", "box_head/norm{fcn}"),
    ("roi_heads.box_head.5", "box_head/fc1"),
    ("roi_heads.mask_head.{fcn-1}.0", "mask_head/mask_fcn{fcn}"),
    ("roi_heads.mask_head.{fcn-1}.1", "mask_head/mask_fcn{fcn}_norm"),
    *_TORCHVISION_PREDICTORS,
)
_TORCHVISION_OLD: Rows = (
    *_torch_resnet("backbone.body."),
    ("backbone.fpn.inner_blocks.{level-2}", "fpn/fpn_lateral{level}"),
    ("backbone.fpn.layer_blocks.{level-2}", "fpn/fpn_output{level}"),
    ("rpn.head.conv", "rpn_head/conv"),
    ("roi_heads.mask_head.mask_fcn{fcn}", "mask_head/mask_fcn{fcn}"),
    *_TORCHVISION_HEADS,
)
_DETECTRON2_HEADS: Rows = (
    ("proposal_generator.rpn_head.conv", "rpn_head/conv"),
    ("proposal_generator.rpn_head.conv.conv0", "rpn_head/conv"),
    ("proposal_generator.rpn_head.conv.conv{rpn-1}", "rpn_head/conv{rpn}"),
    ("proposal_generator.rpn_head.objectness_logits", "rpn_head/objectness_logits"),
    ("proposal_generator.rpn_head.anchor_deltas", "rpn_head/anchor_deltas"),
    *_detectron2_box_head("", "box_head"),
    *_detectron2_box_head("0", "box_head"),
    *_detectron2_box_head("{cascade}", "cascade/heads_{cascade-1}"),
    ("roi_heads.mask_head.mask_fcn{fcn}", "mask_head/mask_fcn{fcn}"),
    ("roi_heads.mask_head.mask_fcn{fcn}.norm", "mask_head/mask_fcn{fcn}_norm"),
    ("roi_heads.mask_head.deconv", "mask_head/mask_deconv"),
    ("roi_heads.mask_head.predictor", "mask_head/mask_predictor"),
)
_DETECTRON2: Rows = (
    *_detectron2_resnet("backbone.bottom_up."),
    ("backbone.fpn_lateral{level}", "fpn/fpn_lateral{level}"),
    ("backbone.fpn_lateral{level}.norm", "fpn/fpn_lateral{level}_norm"),
    ("backbone.fpn_output{level}", "fpn/fpn_output{level}"),
    ("backbone.fpn_output{level}.norm", "fpn/fpn_output{level}_norm"),
    *_DETECTRON2_HEADS,
)
_VITDET, _VITDET_TABLES = _vit("backbone.net.")
_MAE, _MAE_TABLES = _vit("")
_MASKRCNN_BENCHMARK: Rows = (
    *_torch_resnet("backbone.body.", stem="stem."),
    ("backbone.fpn.fpn_inner{level-1}", "fpn/fpn_lateral{level}"),
    ("backbone.fpn.fpn_layer{level-1}", "fpn/fpn_output{level}"),
    ("rpn.head.conv", "rpn_head/conv"),
    ("rpn.head.cls_logits", "rpn_head/objectness_logits"),
    ("rpn.head.bbox_pred", "rpn_head/anchor_deltas"),
    ("roi_heads.box.feature_extractor.fc{fc+5}", "box_head/fc{fc}"),
    ("roi_heads.box.predictor.cls_score", "box_head/cls_score"),
    ("roi_heads.box.predictor.bbox_pred", "box_head/bbox_pred"),
    ("roi_heads.mask.feature_extractor.mask_fcn{fcn}", "mask_head/mask_fcn{fcn}"),
    ("roi_heads.mask.predictor.conv5_mask", "mask_head/mask_deconv"),
    ("roi_heads.mask.predictor.mask_fcn_logits", "mask_head/mask_predictor"),
)
_MMDETECTION: Rows = (
    *_torch_resnet("backbone."),
    ("neck.lateral_convs.{level-2}.conv", "fpn/fpn_lateral{level}"),
    ("neck.fpn_convs.{level-2}.conv", "fpn/fpn_output{level}"),
    ("rpn_head.rpn_conv", "rpn_head/conv"),
    ("rpn_head.rpn_cls", "rpn_head/objectness_logits"),
    ("rpn_head.rpn_reg", "rpn_head/anchor_deltas"),
    ("roi_head.bbox_head.shared_fcs.{fc-1}", "box_head/fc{fc}"),
    ("roi_head.bbox_head.fc_cls", "box_head/cls_score"),
    ("roi_head.bbox_head.fc_reg", "box_head/bbox_pred"),
    ("roi_head.mask_head.convs.{fcn-1}.conv", "mask_head/mask_fcn{fcn}"),
    ("roi_head.mask_head.upsample", "mask_head/mask_deconv"),
    ("roi_head.mask_head.conv_logits", "mask_head/mask_predictor"),
)
_CAFFE2: Rows = (
    ("conv1", "backbone/stem_conv"),
    ("res_conv1_bn", "backbone/stem_norm"),
    ("res{stage}_{block}_branch1", "backbone/res{stage}_{block}/shortcut"),
    ("res{stage}_{block}_branch1_bn", "backbone/res{stage}_{block}/shortcut_norm"),
    ("res{stage}_{block}_branch2a", "backbone/res{stage}_{block}/conv1"),
    ("res{stage}_{block}_branch2a_bn", "backbone/res{stage}_{block}/norm1"),
    ("res{stage}_{block}_branch2b", "backbone/res{stage}_{block}/conv2"),
    ("res{stage}_{block}_branch2b_bn", "backbone/res{stage}_{block}/norm2"),
    ("res{stage}_{block}_branch2c", "backbone/res{stage}_{block}/conv3"),
    ("res{stage}_{block}_branch2c_bn", "backbone/res{stage}_{block}/norm3"),
)
# Both files are called R-50.pkl. Detectron's holds detectron2's four arrays folded into two.
_DETECTRON_NORM_PARTS = {"_s": "scale", "_b": "bias"}
_DETECTRON2_NORM_PARTS = _norm_parts("_gamma", "_beta", "_running_mean", "_running_var")
# Both systems ignore convolution biases as well, because a norm follows.
_CAFFE2_UNUSED = r"(fc\d*|pred)_[wb]|conv1_b|res\d_\d+_branch\w\w?_b|.*_momentum|lr|model_iter"
_NVIDIA_RN50_BLOCK = "resnet50/btlnck_block_{stage-2}_{block}/"
_NVIDIA_RN50: Rows = (
    ("resnet50/conv2d/conv2d", "backbone/stem_conv"),
    ("resnet50/conv2d/BatchNorm", "backbone/stem_norm"),
    (_NVIDIA_RN50_BLOCK + "bottleneck_{conv}/conv2d", "backbone/res{stage}_{block}/conv{conv}"),
    (_NVIDIA_RN50_BLOCK + "bottleneck_{conv}/BatchNorm", "backbone/res{stage}_{block}/norm{conv}"),
    (_NVIDIA_RN50_BLOCK + "shortcut/conv2d/conv2d", "backbone/res{stage}_{block}/shortcut"),
    (_NVIDIA_RN50_BLOCK + "shortcut/conv2d/BatchNorm", "backbone/res{stage}_{block}/shortcut_norm"),
)
_NVIDIA_TF2_BLOCK = "resnet50/group_{stage-1}/block_{block}/"
_NVIDIA_TF2: Rows = (
    ("resnet50/stem", "backbone/stem_conv"),
    ("resnet50/stem/bn", "backbone/stem_norm"),
    (_NVIDIA_TF2_BLOCK + "conv{conv}", "backbone/res{stage}_{block}/conv{conv}"),
    (_NVIDIA_TF2_BLOCK + "conv{conv}/bn", "backbone/res{stage}_{block}/norm{conv}"),
    (_NVIDIA_TF2_BLOCK + "shortcut", "backbone/res{stage}_{block}/shortcut"),
    (_NVIDIA_TF2_BLOCK + "shortcut/bn", "backbone/res{stage}_{block}/shortcut_norm"),
    ("fpn/l{level}", "fpn/fpn_lateral{level}"),
    ("fpn/post_hoc_d{level}", "fpn/fpn_output{level}"),
    ("rpn_head/rpn", "rpn_head/conv"),
    ("rpn_head/rpn-class", "rpn_head/objectness_logits"),
    ("rpn_head/rpn-box", "rpn_head/anchor_deltas"),
    ("box_head/fc{fc+5}", "box_head/fc{fc}"),
    ("box_head/class-predict", "box_head/cls_score"),
    ("box_head/box-predict", "box_head/bbox_pred"),
    ("mask_head/mask-conv-l{fcn-1}", "mask_head/mask_fcn{fcn}"),
    ("mask_head/conv5-mask", "mask_head/mask_deconv"),
    ("mask_head/mask_fcn_logits", "mask_head/mask_predictor"),
)
_DETECTRON2_UNUSED = (
    r".*\.num_batches_tracked|proposal_generator\.anchor_generator\..*|pixel_(mean|std)"
)

_TF: dict[str, Any] = {"parts": TF_PARTS, "norm_parts": TF_NORM_PARTS, "layout": "tf"}
_CAFFE2_OPTIONS: dict[str, Any] = {"parts": {"_w": "kernel"}, "unused": _CAFFE2_UNUSED}

SOURCES = {
    "torchvision": Source(
        "torchvision's Mask R-CNN", ("backbone.fpn.inner_blocks.0.0.weight",), _TORCHVISION
    ),
    "torchvision_v2": Source(
        "torchvision's Mask R-CNN, version 2",
        ("backbone.fpn.inner_blocks.0.1.weight",),
        _TORCHVISION_V2,
    ),
    "torchvision_old": Source(
        "torchvision's Mask R-CNN (old names)",
        ("backbone.fpn.inner_blocks.0.weight",),
        _TORCHVISION_OLD,
    ),
    "torchvision_resnet": Source(
        "torchvision's ResNet",
        ("conv1.weight", "backbone.body.conv1.weight"),
        _torch_resnet("[backbone.body.]"),
        unused=r".*\.num_batches_tracked|(backbone\.body\.)?fc\..*",
    ),
    "detectron2": Source(
        "detectron2's Mask R-CNN",
        ("backbone.fpn_lateral2.weight",),
        _DETECTRON2,
        unused=_DETECTRON2_UNUSED,
        background="last",
    ),
    "detectron2_vitdet": Source(
        "detectron2's ViTDet",
        ("backbone.net.patch_embed.proj.weight",),
        (*_VITDET, *_simple_pyramid(), *_DETECTRON2_HEADS),
        unused=_DETECTRON2_UNUSED,
        background="last",
        tables=_VITDET_TABLES,
    ),
    "mae": Source(
        "MAE's vision transformer",
        ("patch_embed.proj.weight",),
        _MAE,
        unused=r"cls_token|mask_token|(norm|fc_norm|head|decoder_\w+)\..*|decoder_pos_embed",
        tables=_MAE_TABLES,
    ),
    "detectron2_resnet": Source(
        "detectron2's ResNet",
        ("stem.conv1.weight", "backbone.bottom_up.stem.conv1.weight"),
        _detectron2_resnet("[backbone.bottom_up.]"),
        unused=r".*\.num_batches_tracked|(stem\.)?(fc|linear)\..*",
    ),
    "detectron_msra": Source(
        "Detectron's copy of the MSRA ResNet",
        ("res_conv1_bn_s",),
        _CAFFE2,
        norm_parts=_DETECTRON_NORM_PARTS,
        **_CAFFE2_OPTIONS,
    ),
    "detectron2_msra": Source(
        "detectron2's copy of the MSRA ResNet",
        ("res_conv1_bn_running_var",),
        _CAFFE2,
        norm_parts=_DETECTRON2_NORM_PARTS,
        **_CAFFE2_OPTIONS,
    ),
    "maskrcnn_benchmark": Source(
        "maskrcnn-benchmark's Mask R-CNN",
        ("backbone.fpn.fpn_inner1.weight",),
        _MASKRCNN_BENCHMARK,
        unused=r".*\.num_batches_tracked|rpn\.anchor_generator\..*",
        has_eps=False,
    ),
    "mmdetection": Source(
        "mmdetection's Mask R-CNN",
        ("neck.lateral_convs.0.conv.weight",),
        _MMDETECTION,
        background="last",
    ),
    "google_resnet": Source(
        "Google's TensorFlow ResNet-50",
        ("conv2d/kernel", "resnet50/conv2d/kernel"),
        _google_resnet50(),
        unused=_TF_UNUSED,
        **_TF,
    ),
    "nvidia_rn50": Source(
        "NVIDIA's TensorFlow ResNet-50",
        ("resnet50/conv2d/conv2d/kernel",),
        _NVIDIA_RN50,
        unused=_TF_UNUSED,
        **_TF,
    ),
    "nvidia_tf2": Source(
        "NVIDIA's TensorFlow 2 Mask R-CNN",
        ("resnet50/stem/kernel",),
        _NVIDIA_TF2,
        unused=r"global_step",
        deltas="yx",
        **_TF,
    ),
}
