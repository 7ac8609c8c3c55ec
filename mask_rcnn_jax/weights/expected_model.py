"""The model that each source's weights belong to: entries of our `model` section.

With other values the same weights compute something else: a map is shifted by a pixel, an anchor
lies elsewhere, a colour is another.
"""

from collections.abc import Mapping
from typing import Any

from mask_rcnn_jax.weights.sources import SOURCES

_RGB = {
    "channel_order": "rgb",
    "pixel_mean": (123.675, 116.28, 103.53),
    "pixel_std": (58.395, 57.12, 57.375),
}
_BGR = {"channel_order": "bgr", "pixel_std": (1.0, 1.0, 1.0)}
_TORCH_PADDING = {"padding": "torch", "pool_padding": "torch"}
_SAME_PADDING = {"padding": "same", "pool_padding": "same"}
_TORCHVISION_RESNET = {**_RGB, **_TORCH_PADDING, "stride_in": "3x3", "norm_eps": 1e-5}
_MSRA_RESNET = {**_BGR, **_TORCH_PADDING, "stride_in": "1x1"}
_NVIDIA_RESNET = {**_RGB, **_SAME_PADDING, "stride_in": "3x3", "norm_eps": 1e-5}
_ANCHOR_SIZES = (32.0, 64.0, 128.0, 256.0, 512.0)
# What the heads of torchvision, detectron2, maskrcnn-benchmark and mmdetection share.
_TORCH_DETECTOR = {
    "pad_multiple": 32,
    "anchor_sizes": _ANCHOR_SIZES,
    "anchor_shapes": ((2**0.5, 0.5**0.5), (1.0, 1.0), (0.5**0.5, 2**0.5)),
    "roi_max_level": 5,
    "roi_border": "zero",
    "box_weights": (10.0, 10.0, 5.0, 5.0),
}
_CONTINUOUS_BOXES = {
    "anchor_centre": 0.0, "anchor_offset": 0.0, "rpn_encode_offset": 0.0, "box_offset": 0.0,
    "iou_offset": 0.0,
}  # fmt: skip
_INCLUSIVE_BOXES = {
    "anchor_centre": 0.5, "anchor_offset": 1.0, "rpn_encode_offset": 1.0, "box_offset": 1.0,
    "iou_offset": 1.0,
}  # fmt: skip
_TORCHVISION_DETECTOR = {
    **_TORCHVISION_RESNET, **_TORCH_DETECTOR, **_CONTINUOUS_BOXES,
    "anchor_rounding": "half_sides", "anchor_stride": "map", "roi_sampling": 2,
    "roi_half_pixel": False, "roi_min_size": 1.0,
}  # fmt: skip
_ALIGNED_DETECTOR = {
    **_TORCH_DETECTOR, **_CONTINUOUS_BOXES,
    "anchor_rounding": "none", "anchor_stride": "level", "roi_sampling": 0, "roi_half_pixel": True,
    "roi_min_size": 0.0,
}  # fmt: skip

RECIPES: dict[str, Mapping[str, Any]] = {
    "torchvision": _TORCHVISION_DETECTOR,
    # Names before torchvision 0.13, which the published COCO_V1 file has; torchvision runs that
    # file without an epsilon.
    "torchvision_old": {**_TORCHVISION_DETECTOR, "norm_eps": 0.0},
    "torchvision_resnet": _TORCHVISION_RESNET,
    "detectron2": {
        **_MSRA_RESNET, **_ALIGNED_DETECTOR,
        "pixel_mean": (123.675, 116.28, 103.53), "norm_eps": 1e-5,
    },
    "detectron2_resnet": {**_MSRA_RESNET, "norm_eps": 1e-5},
    "detectron_msra": _MSRA_RESNET,
    "detectron2_msra": {**_MSRA_RESNET, "norm_eps": 1e-5},
    "maskrcnn_benchmark": {
        **_MSRA_RESNET, **_TORCH_DETECTOR, **_INCLUSIVE_BOXES,
        "pixel_mean": (122.7717, 115.9465, 102.9801), "anchor_rounding": "base_window",
        "anchor_stride": "level", "roi_sampling": 2, "roi_half_pixel": False, "roi_min_size": 1.0,
    },
    # Its backbones are of both kinds, torchvision's and MSRA's, under the same names.
    "mmdetection": {**_TORCH_PADDING, **_ALIGNED_DETECTOR, "norm_eps": 1e-5},
    "google_resnet": {**_RGB, "stride_in": "3x3", "padding": "torch", "pool_padding": "same"},
    "nvidia_rn50": _NVIDIA_RESNET,
    "nvidia_tf2": {
        **_NVIDIA_RESNET,
        "pad_multiple": 0, "anchor_sizes": _ANCHOR_SIZES,
        "anchor_shapes": ((1.0, 1.0), (1.4, 0.7), (0.7, 1.4)), "anchor_centre": 0.5,
        "anchor_rounding": "none", "anchor_offset": 0.0, "anchor_stride": "level",
        "rpn_encode_offset": 0.0, "box_offset": 1.0, "iou_offset": 0.0, "roi_max_level": 6,
        "roi_sampling": 1, "roi_half_pixel": False, "roi_border": "clamp", "roi_min_size": 0.0,
        "box_weights": (10.0, 10.0, 5.0, 5.0),
    },
}  # fmt: skip


def recipe_mismatches(source: str, model: Mapping[str, Any]) -> list[str]:
    """A line for each entry of a `model` section that the source's own model has otherwise.

    source: a key of `RECIPES`. Entries that `model` lacks are left out.
    """
    return [
        f"model.{entry} is {_rounded(model[entry])!r}, "
        f"{SOURCES[source].title} has {_rounded(theirs)!r}"
        for entry, theirs in RECIPES[source].items()
        if entry in model and _rounded(model[entry]) != _rounded(theirs)
    ]


def _rounded(value):
    """Numbers to six digits, lists as tuples: what a config file and its json agree on."""
    if isinstance(value, list | tuple):
        return tuple(_rounded(item) for item in value)
    return float(f"{value:.6g}") if isinstance(value, float) else value
