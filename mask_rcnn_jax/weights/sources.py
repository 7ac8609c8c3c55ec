"""Layer names of the systems whose weights can be read, next to ours.

A row is a pair of templates: a system's layer name and our path. `{stage}` is a number equal on
both sides, `{stage-1}` that number minus one, `[...]` an optional part. The `parts` of a source
append array names ("weight", "bias", ...) to layer names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mask_rcnn_jax.weights import detector_names as detectors
from mask_rcnn_jax.weights import dino_names as dino
from mask_rcnn_jax.weights import trunk_names as trunks
from mask_rcnn_jax.weights.trunk_names import Rows

# Ranges of the numbers in templates, inclusive.
RANGES = {"stage": (2, 5), "block": (0, 99), "conv": (1, 3)}
RANGES |= {"level": (2, 5), "fcn": (1, 8), "fc": (1, 2), "rpn": (2, 8), "cascade": (1, 9)}
RANGES |= {"mask": (0, 9), "point": (1, 9)}
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
        unfolds: whether Swin's patches are merged in the order of torch's Unfold, mmdetection's
            way, with a channel's four cells side by side.
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
    unfolds: bool = False


# Both files are called R-50.pkl. Detectron's holds detectron2's four arrays folded into two.
_DETECTRON_NORM_PARTS = {"_s": "scale", "_b": "bias"}
_DETECTRON2_NORM_PARTS = _norm_parts("_gamma", "_beta", "_running_mean", "_running_var")
# Both systems ignore convolution biases as well, because a norm follows.
_CAFFE2_UNUSED = r"(fc\d*|pred)_[wb]|conv1_b|res\d_\d+_branch\w\w?_b|.*_momentum|lr|model_iter"
_DETECTRON2_UNUSED = (
    r".*\.num_batches_tracked|proposal_generator\.anchor_generator\..*|pixel_(mean|std)"
)

_MAE, _MAE_TABLES = trunks.vit("")
_CONVNEXT, _CONVNEXT_TABLES = trunks.convnext("[backbone.]")
_TORCHVISION_CONVNEXT, _TORCHVISION_CONVNEXT_TABLES = trunks.torchvision_convnext()
_DINOV3_CONVNEXT, _DINOV3_CONVNEXT_TABLES = trunks.huggingface_convnext("[model.]")
_DINOV3, _DINOV3_TABLES = dino.huggingface_dinov3("[model.]")
_DINOV2, _DINOV2_TABLES = dino.huggingface_dinov2("[dinov2.][dinov2_with_registers.]")
_META_DINOV3, _META_DINOV3_TABLES = dino.timm_and_meta(("reg_token", "storage_tokens"), False)
_META_DINOV2, _META_DINOV2_TABLES = dino.timm_and_meta(("reg_token", "register_tokens"), True)
_TIMM_CONVNEXT, _TIMM_CONVNEXT_TABLES = trunks.timm_convnext()
_SWIN, _SWIN_TABLES = trunks.swin("[backbone.]")
_TIMM_SWIN, _TIMM_SWIN_TABLES = trunks.swin("", "{stage-2}")
_MMPRETRAIN_SWIN, _MMPRETRAIN_SWIN_TABLES = trunks.mmdetection_swin("[backbone.]")
_TORCHVISION_SWIN, _TORCHVISION_SWIN_TABLES = trunks.torchvision_swin()
_TRANSFORMERS_SWIN, _TRANSFORMERS_SWIN_TABLES = trunks.transformers_swin()
# Constants of Swin that follow from the sizes.
_SWIN_BUFFERS = r".*\.(relative_position_index|relative_coords_table|attn_mask|k_bias)"
_TF: dict[str, Any] = {"parts": TF_PARTS, "norm_parts": TF_NORM_PARTS, "layout": "tf"}
_CAFFE2_OPTIONS: dict[str, Any] = {"parts": {"_w": "kernel"}, "unused": _CAFFE2_UNUSED}

SOURCES = {
    "torchvision": Source(
        "torchvision's Mask R-CNN", ("backbone.fpn.inner_blocks.0.0.weight",), detectors.TORCHVISION
    ),
    "torchvision_v2": Source(
        "torchvision's Mask R-CNN, version 2",
        ("backbone.fpn.inner_blocks.0.1.weight",),
        detectors.TORCHVISION_V2,
    ),
    "torchvision_old": Source(
        "torchvision's Mask R-CNN (old names)",
        ("backbone.fpn.inner_blocks.0.weight",),
        detectors.TORCHVISION_OLD,
    ),
    "torchvision_resnet": Source(
        "torchvision's ResNet",
        ("conv1.weight", "backbone.body.conv1.weight"),
        trunks.torch_resnet("[backbone.body.]"),
        unused=r".*\.num_batches_tracked|(backbone\.body\.)?fc\..*",
    ),
    "detectron2": Source(
        "detectron2's Mask R-CNN",
        ("backbone.fpn_lateral2.weight",),
        detectors.DETECTRON2,
        unused=_DETECTRON2_UNUSED,
        background="last",
    ),
    "detectron2_regnet": Source(
        "detectron2's Mask R-CNN with a RegNet",
        ("backbone.bottom_up.stem.conv.weight",),
        detectors.DETECTRON2_REGNET,
        unused=_DETECTRON2_UNUSED,
        background="last",
    ),
    "detectron2_vitdet": Source(
        "detectron2's ViTDet",
        ("backbone.net.patch_embed.proj.weight",),
        detectors.VITDET,
        unused=_DETECTRON2_UNUSED,
        background="last",
        tables=detectors.VITDET_TABLES,
    ),
    "mae": Source(
        "MAE's vision transformer",
        ("patch_embed.proj.weight",),
        _MAE,
        unused=r"cls_token|mask_token|(norm|fc_norm|head|decoder_\w+)\..*|decoder_pos_embed",
        tables=_MAE_TABLES,
    ),
    "torchvision_regnet": Source(
        "torchvision's RegNet",
        ("stem.0.weight",),
        trunks.torchvision_regnet(),
        unused=r".*\.num_batches_tracked|fc\..*",
    ),
    "regnet": Source(
        "the RegNet of its paper",
        ("stem.conv.weight",),
        trunks.regnet(""),
        unused=r".*\.num_batches_tracked|head\..*",
    ),
    "torchvision_convnext": Source(
        "torchvision's ConvNeXt",
        ("features.1.0.layer_scale",),
        _TORCHVISION_CONVNEXT,
        unused=r"classifier\..*",
        tables=_TORCHVISION_CONVNEXT_TABLES,
    ),
    "convnext": Source(
        "the ConvNeXt of its paper or of mmpretrain",
        ("downsample_layers.0.0.weight", "backbone.downsample_layers.0.0.weight"),
        _CONVNEXT,
        unused=r"(backbone\.)?(norm|head)\..*",
        tables=_CONVNEXT_TABLES,
    ),
    "dinov3_convnext": Source(
        "Hugging Face's DINOv3 ConvNeXt",
        tuple(f"{p}stages.0.layers.0.depthwise_conv.weight" for p in ("", "model.")),
        _DINOV3_CONVNEXT,
        tables=_DINOV3_CONVNEXT_TABLES,
    ),
    "dinov3": Source(
        "Hugging Face's DINOv3 vision transformer",
        tuple(f"{prefix}layer.0.layer_scale1.lambda1" for prefix in ("", "model.")),
        _DINOV3,
        unused=dino.UNUSED,
        tables=_DINOV3_TABLES,
    ),
    "dinov2": Source(
        "Hugging Face's DINOv2",
        tuple(
            f"{prefix}encoder.layer.0.layer_scale1.lambda1"
            for prefix in ("", "dinov2.", "dinov2_with_registers.")
        ),
        _DINOV2,
        unused=dino.UNUSED,
        tables=_DINOV2_TABLES,
    ),
    "dinov3_meta": Source(
        "Meta's or timm's DINOv3 vision transformer",
        ("reg_token", "storage_tokens"),  # other models of timm have its names without registers
        _META_DINOV3,
        unused=dino.UNUSED,
        tables=_META_DINOV3_TABLES,
    ),
    "dinov2_meta": Source(
        "Meta's or timm's DINOv2",
        (dino.META_SIGN,),
        _META_DINOV2,
        unused=dino.UNUSED,
        tables=_META_DINOV2_TABLES,
    ),
    "timm_convnext": Source(
        "timm's ConvNeXt",
        ("stages.0.blocks.0.conv_dw.weight",),
        _TIMM_CONVNEXT,
        unused=r"head\.fc\..*",
        tables=_TIMM_CONVNEXT_TABLES,
    ),
    "timm_mobilenetv4": Source(
        "timm's MobileNetV4",
        ("blocks.2.0.pw_exp.conv.weight",),
        trunks.timm_mobilenetv4(),
        unused=r".*\.num_batches_tracked|(blocks\.4\.0|conv_head|norm_head|classifier)\..*",
    ),
    "torchvision_swin": Source(
        "torchvision's Swin",
        ("features.1.0.attn.qkv.weight",),
        _TORCHVISION_SWIN,
        unused=rf"(norm|head)\..*|{_SWIN_BUFFERS}",
        tables=_TORCHVISION_SWIN_TABLES,
    ),
    "timm_swin": Source(
        "timm's Swin",
        ("layers.3.downsample.reduction.weight",),
        _TIMM_SWIN,
        unused=rf"(norm|head)\..*|{_SWIN_BUFFERS}",
        tables=_TIMM_SWIN_TABLES,
    ),
    "swin": Source(
        "the Swin of its paper",
        ("layers.0.downsample.reduction.weight", "backbone.layers.0.downsample.reduction.weight"),
        _SWIN,
        unused=rf"(backbone\.)?(norm|head)\..*|{_SWIN_BUFFERS}",
        tables=_SWIN_TABLES,
    ),
    "transformers_swin": Source(
        "transformers' Swin",
        tuple(
            f"{prefix}embeddings.patch_embeddings.projection.weight"
            for prefix in ("", "swin.", "swinv2.")
        ),
        _TRANSFORMERS_SWIN,
        unused=rf"(swin\.|swinv2\.)?(layernorm\..*|embeddings\.mask_token)|classifier\..*|"
        rf"{_SWIN_BUFFERS}",
        tables=_TRANSFORMERS_SWIN_TABLES,
    ),
    "mmpretrain_swin": Source(
        "mmpretrain's Swin",
        ("patch_embed.projection.weight", "backbone.patch_embed.projection.weight"),
        _MMPRETRAIN_SWIN,
        unused=rf"(backbone\.)?(norm|head)\..*|{_SWIN_BUFFERS}",
        tables=_MMPRETRAIN_SWIN_TABLES,
        unfolds=True,
    ),
    "detectron2_resnet": Source(
        "detectron2's ResNet",
        ("stem.conv1.weight", "backbone.bottom_up.stem.conv1.weight"),
        trunks.detectron2_resnet("[backbone.bottom_up.]"),
        unused=r".*\.num_batches_tracked|(stem\.)?(fc|linear)\..*",
    ),
    "detectron_msra": Source(
        "Detectron's copy of the MSRA ResNet",
        ("res_conv1_bn_s",),
        trunks.CAFFE2,
        norm_parts=_DETECTRON_NORM_PARTS,
        **_CAFFE2_OPTIONS,
    ),
    "detectron2_msra": Source(
        "detectron2's copy of the MSRA ResNet",
        ("res_conv1_bn_running_var",),
        trunks.CAFFE2,
        norm_parts=_DETECTRON2_NORM_PARTS,
        **_CAFFE2_OPTIONS,
    ),
    "maskrcnn_benchmark": Source(
        "maskrcnn-benchmark's Mask R-CNN",
        ("backbone.fpn.fpn_inner1.weight",),
        detectors.MASKRCNN_BENCHMARK,
        unused=r".*\.num_batches_tracked|rpn\.anchor_generator\..*",
        has_eps=False,
    ),
    "mmdetection": Source(
        "mmdetection's Mask R-CNN",
        ("neck.lateral_convs.0.conv.weight",),
        detectors.MMDETECTION,
        background="last",
    ),
    "mmdetection_convnext": Source(
        "mmdetection's Mask R-CNN with a ConvNeXt",
        ("neck.lateral_convs.0.conv.weight",),
        detectors.MMDETECTION_CONVNEXT,
        background="last",
        tables=detectors.MMDETECTION_CONVNEXT_TABLES,
    ),
    "mmdetection_swin": Source(
        "mmdetection's Mask R-CNN with a Swin",
        ("neck.lateral_convs.0.conv.weight",),
        detectors.MMDETECTION_SWIN,
        unused=rf".*\.num_batches_tracked|{_SWIN_BUFFERS}",
        background="last",
        tables=detectors.MMDETECTION_SWIN_TABLES,
        unfolds=True,
    ),
    "swin_detection": Source(
        "the Mask R-CNN of Swin's paper",
        ("neck.lateral_convs.0.conv.weight",),
        detectors.SWIN,
        unused=rf".*\.num_batches_tracked|{_SWIN_BUFFERS}",
        background="last",
        tables=detectors.SWIN_TABLES,
    ),
    "google_resnet": Source(
        "Google's TensorFlow ResNet-50",
        ("conv2d/kernel", "resnet50/conv2d/kernel"),
        trunks.google_resnet50(),
        unused=_TF_UNUSED,
        **_TF,
    ),
    "nvidia_rn50": Source(
        "NVIDIA's TensorFlow ResNet-50",
        ("resnet50/conv2d/conv2d/kernel",),
        trunks.NVIDIA_RN50,
        unused=_TF_UNUSED,
        **_TF,
    ),
    "nvidia_tf2": Source(
        "NVIDIA's TensorFlow 2 Mask R-CNN",
        ("resnet50/stem/kernel",),
        detectors.NVIDIA_TF2,
        unused=r"global_step",
        deltas="yx",
        **_TF,
    ),
}
