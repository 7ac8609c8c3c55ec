"""Layouts of single arrays: kernels, norms and class orders of any known system, and ours."""

import re
from collections.abc import Mapping

import numpy as np

from mask_rcnn_jax.weights.sources import Source

WITHOUT_STATISTICS = ("group", "layer")  # norms
NORM_LEAVES = ("scale", "bias", "mean", "var")
ROI_SIDE = 7  # side of the RoI features that the box head flattens
FIRST_FCS = ("box_head/fc1", "mask_head/coarse_fc1")  # which flatten these
MASK_LAYERS = ("mask_head/mask_predictor", "mask_head/point_head/predictor")
BOX_LAYERS = ("rpn_head/anchor_deltas", "box_head/bbox_pred")


def as_box_head(module: str) -> str:
    """Return a layer of a cascade's head, or of one of several mask heads, under the name that it
    has in the only one."""
    module = re.sub(r"^cascade/heads_\d+/", "box_head/", module)
    return re.sub(r"^mask_head/heads_\d+/", "mask_head/", module)


def to_our_layout(
    module: str, name: str, array: np.ndarray, source: Source, class_agnostic: bool
) -> np.ndarray:
    """Convert a kernel or bias, except of a norm, to our layout and class order."""
    if source.layout == "torch":
        if array.ndim == 3:  # of PointRend's points: a convolution of one cell
            is_predictor = module.endswith("/predictor")
            array = array[..., None] if is_predictor else array[..., 0]
        if module in FIRST_FCS and array.ndim == 2:
            if array.shape[1] % ROI_SIDE**2:
                expected = f"a multiple of {ROI_SIDE} x {ROI_SIDE} cells"
                raise ValueError(f"{name} has {array.shape[1]} inputs, expected {expected}")
            array = array.reshape(len(array), -1, ROI_SIDE, ROI_SIDE)  # out, C, H, W
            array = array.transpose(2, 3, 1, 0).reshape(-1, len(array))
        else:
            # OIHW to HWIO and [out, in] to [in, out]; the up-convolution's torch kernel
            # [in, out, h, w] becomes our [h, w, out, in].
            array = array.transpose({4: (2, 3, 1, 0), 2: (1, 0)}.get(array.ndim))
    if source.deltas == "yx" and module in BOX_LAYERS:
        array = array.reshape(*array.shape[:-1], -1, 4)[..., [1, 0, 3, 2]].reshape(array.shape)
    if source.background == "last":
        if module == "box_head/cls_score":
            array = np.roll(array, 1, axis=-1)
        elif module in MASK_LAYERS or (module == "box_head/bbox_pred" and not class_agnostic):
            slot = 4 if module == "box_head/bbox_pred" else 1
            array = np.pad(array, [(0, 0)] * (array.ndim - 1) + [(slot, 0)])
    return np.ascontiguousarray(array)


def to_torch_layout(module: str, array: np.ndarray, source: Source) -> np.ndarray:
    """Invert `to_our_layout` for a system of torch; background's own boxes and mask are dropped."""
    if source.background == "last":
        if module == "box_head/cls_score":
            array = np.roll(array, -1, axis=-1)
        elif module == "box_head/bbox_pred" and array.shape[-1] > 4:
            array = array[..., 4:]
        elif module in MASK_LAYERS:
            array = array[..., 1:]
    if module in FIRST_FCS and array.ndim == 2:
        outputs = array.shape[1]
        array = array.reshape(ROI_SIDE, ROI_SIDE, -1, outputs).transpose(3, 2, 0, 1)
        return array.reshape(outputs, -1)
    array = array.transpose({4: (3, 2, 0, 1), 2: (1, 0)}.get(array.ndim))
    if module.startswith("mask_head/point_head/") and array.ndim > 1:
        return array.reshape(*array.shape[:2], 1)
    return array


def check_roi_side(params: Mapping[str, np.ndarray], source: Source) -> None:
    """Raise ValueError if our box head, by the params' paths, flattens other RoI features."""
    first = params.get("box_head/fc1/kernel")
    convs = [name for name in params if re.fullmatch(r"box_head/conv\d+/kernel", name)]
    before = params.get(max(convs, default="fpn/fpn_output2/kernel"))
    if first is None or before is None or len(first) == ROI_SIDE**2 * before.shape[-1]:
        return
    side = round((len(first) / before.shape[-1]) ** 0.5)
    expected = f"{source.title} has {ROI_SIDE}"
    raise ValueError(f"model.box_head.roi_size is {side}, {expected}")


def is_merging(module: str) -> bool:
    """Whether a layer is of Swin's between two stages, which merge patches of 2 x 2 cells."""
    return re.fullmatch(r"backbone/down\d_(norm|reduction)", module) is not None


def fold_patches(array: np.ndarray) -> np.ndarray:
    """Order inputs [.., 4 C] of torch's Unfold (channel, row, column) as Swin's (column, row,
    channel)."""
    cells = array.reshape(*array.shape[:-1], -1, 2, 2)
    return np.moveaxis(cells, (-1, -3), (-3, -1)).reshape(array.shape)


def join_attention(params: dict[str, np.ndarray]) -> None:
    """Join queries, keys and values where a file has layers of their own for them, and leave keys
    without a bias where the attention is by cosine."""
    for path in [path for path in params if path.endswith("attn/query/kernel")]:
        module, kinds = path.removesuffix("query/kernel"), ("query", "key", "value")
        for leaf in ("kernel", "bias"):
            names = [f"{module}{kind}/{leaf}" for kind in kinds]
            found = [params.pop(name) for name in names if name in params]
            if len(found) == 3:
                params[f"{module}qkv/{leaf}"] = np.concatenate(found, axis=-1)
            elif found:
                params[f"{module}q_bias"], params[f"{module}v_bias"] = found
    for path in [path for path in params if path.endswith("attn/logit_scale")]:
        module = path.removesuffix("logit_scale")
        if (bias := params.pop(f"{module}qkv/bias", None)) is not None:
            params[f"{module}q_bias"], _, params[f"{module}v_bias"] = np.split(bias, 3)


def convert_norm(
    module: str, parts: Mapping[str, np.ndarray], norm: str, eps: float, has_eps: bool
) -> tuple[dict, dict]:
    """Return one norm's params and batch_stats, each leaf [C] float32.

    parts: scale and bias, and mean and var unless already folded into them, or without statistics.
    """
    wanted = NORM_LEAVES if {"mean", "var"} & parts.keys() else NORM_LEAVES[:2]
    lacking = [leaf for leaf in wanted if leaf not in parts]
    if lacking:
        raise ValueError(f"the norm {module} lacks {', '.join(lacking)}")
    scale, bias = parts["scale"], parts["bias"]
    if norm in WITHOUT_STATISTICS:
        return {"scale": scale, "bias": bias}, {}
    if "var" in parts:
        if has_eps and norm != "frozen":
            return {"scale": scale, "bias": bias}, {"mean": parts["mean"], "var": parts["var"]}
        scale = scale / np.sqrt(parts["var"] + np.float32(eps if has_eps else 0.0))
        bias = bias - parts["mean"] * scale
    if norm == "frozen":
        return {}, {"scale": scale, "bias": bias}
    stats = {"mean": np.zeros_like(scale), "var": unit_variance(scale, eps)}
    return {"scale": scale, "bias": bias}, stats


def unit_variance(like: np.ndarray, eps: float) -> np.ndarray:
    """Return the variance that sums to exactly 1 with `eps` in float32."""
    return np.full_like(like, np.float32(1) - np.float32(eps))


def check_classes(params: Mapping[str, np.ndarray], class_agnostic: bool) -> None:
    """Raise ValueError unless masks and, unless `class_agnostic`, boxes have a slot per score."""
    scores = params.get("box_head/cls_score/bias", ())
    for module, per_class in {"box_head/bbox_pred": 4, "mask_head/mask_predictor": 1}.items():
        bias = params.get(f"{module}/bias")
        if not len(scores) or bias is None:
            continue
        if class_agnostic and module == "box_head/bbox_pred":
            if len(bias) != per_class:
                raise ValueError(
                    f"{module} has {len(bias)} outputs, expected {per_class}, as "
                    "model.box_head.class_agnostic says"
                )
        elif len(bias) != per_class * len(scores):
            raise ValueError(
                f"{module} has {len(bias)} outputs for {len(scores)} class scores (background "
                f"included), expected {per_class} per score"
            )


def check_groups(path: str, array: np.ndarray, groups: int) -> None:
    """Raise ValueError if a ResNet's 3x3 convolution has other groups than ours; array: OIHW."""
    is_inner = path.startswith("backbone/") and path.endswith("/conv2/kernel")
    if is_inner and array.ndim == 4 and array.shape[1] > 0:
        found = max(1, array.shape[0] // array.shape[1])
        if found != groups:
            kind = "ResNeXt" if found > 1 else "ResNet"
            raise ValueError(
                f"the weights of a {kind}, whose {path.removesuffix('/kernel')} has {found} groups "
                f"of channels; model.backbone.groups is {groups}"
            )


def check_norm(
    module: str, parts: Mapping[str, np.ndarray], norm: str | None, source: Source
) -> str:
    """Return the norm to convert to, by default as in the file; ValueError if it has another."""
    part = module.partition("/")[0]
    if {"mean", "var"} & parts.keys() or not {"mean", "var"} & {*source.norm_parts.values()}:
        if norm in WITHOUT_STATISTICS:
            raise ValueError(
                f"model.{part}.norm is {norm!r}, which {source.title} has no counterpart for in "
                "this file, expected 'frozen', 'affine' or a batch norm"
            )
        return norm or "batch"
    if norm is not None and norm not in WITHOUT_STATISTICS:
        raise ValueError(
            f"{module} has no statistics, as group or layer norm, but model.{part}.norm is {norm!r}"
        )
    return norm or "group"
