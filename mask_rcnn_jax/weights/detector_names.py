"""Detectors' layer names in the systems whose weights can be read, next to ours.

Rows and templates are as in `sources`.
"""

from mask_rcnn_jax.weights.trunk_names import (
    Rows,
    convnext,
    detectron2_resnet,
    mmdetection_swin,
    regnet,
    swin,
    torch_resnet,
    vit,
)


def _detectron2_box_head(stage: str, ours: str) -> Rows:
    """Return rows for a box head; stage: its number in a cascade, or ""."""
    number = f".{stage}." if stage else "."
    head, predictor = f"roi_heads.box_head{number}", f"roi_heads.box_predictor{number}"
    return (
        (head + "conv{fcn}", ours + "/conv{fcn}"),
        (head + "conv{fcn}.norm", ours + "/norm{fcn}"),
        (head + "fc{fc}", ours + "/fc{fc}"),
        (predictor + "cls_score", ours + "/cls_score"),
        (predictor + "bbox_pred", ours + "/bbox_pred"),
    )


def _pointrend(coarse: str, point: str, fc: str) -> Rows:
    """Return rows for PointRend's heads, whose first files had other names."""
    return (
        (coarse + "reduce_spatial_dim_conv", "mask_head/coarse_conv"),
        (coarse + fc + "{fc}", "mask_head/coarse_fc{fc}"),
        (coarse + "prediction", "mask_head/coarse_predictor"),
        (point + "fc{point}", "mask_head/point_head/fc{point}"),
        (point + "predictor", "mask_head/point_head/predictor"),
    )


def _simple_pyramid() -> Rows:
    """Return rows for ViTDet's pyramid."""
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


_TORCHVISION_PREDICTORS: Rows = (
    ("rpn.head.cls_logits", "rpn_head/objectness_logits"),
    ("rpn.head.bbox_pred", "rpn_head/anchor_deltas"),
    ("roi_heads.box_predictor.cls_score", "box_head/cls_score"),
    ("roi_heads.box_predictor.bbox_pred", "box_head/bbox_pred"),
    ("roi_heads.mask_predictor.conv5_mask", "mask_head/mask_deconv"),
    ("roi_heads.mask_predictor.mask_fcn_logits", "mask_head/mask_predictor"),
)
_TORCHVISION_KEYPOINTS: Rows = (
    # A ReLU follows each convolution, and has a number, too.
    *((f"roi_heads.keypoint_head.{2 * i}", f"keypoint_head/keypoint_fcn{i + 1}") for i in range(8)),
    ("roi_heads.keypoint_predictor.kps_score_lowres", "keypoint_head/keypoint_deconv"),
)
_TORCHVISION_HEADS: Rows = (
    ("roi_heads.box_head.fc{fc+5}", "box_head/fc{fc}"),
    *_TORCHVISION_PREDICTORS,
    *_TORCHVISION_KEYPOINTS,
)
TORCHVISION: Rows = (
    *torch_resnet("backbone.body."),
    ("backbone.fpn.inner_blocks.{level-2}.0", "fpn/fpn_lateral{level}"),
    ("backbone.fpn.layer_blocks.{level-2}.0", "fpn/fpn_output{level}"),
    ("rpn.head.conv.0.0", "rpn_head/conv"),
    ("roi_heads.mask_head.{fcn-1}.0", "mask_head/mask_fcn{fcn}"),
    *_TORCHVISION_HEADS,
)
TORCHVISION_V2: Rows = (
    *torch_resnet("backbone.body."),
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
TORCHVISION_OLD: Rows = (
    *torch_resnet("backbone.body."),
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
    ("roi_heads.keypoint_head.conv_fcn{fcn}", "keypoint_head/keypoint_fcn{fcn}"),
    ("roi_heads.keypoint_head.score_lowres", "keypoint_head/keypoint_deconv"),
    *_pointrend("roi_heads.mask_head.coarse_head.", "roi_heads.mask_head.point_head.", "fc"),
    *_pointrend("roi_heads.mask_coarse_head.", "roi_heads.mask_point_head.", "coarse_mask_fc"),
)
_DETECTRON2_FPN: Rows = (
    ("backbone.fpn_lateral{level}", "fpn/fpn_lateral{level}"),
    ("backbone.fpn_lateral{level}.norm", "fpn/fpn_lateral{level}_norm"),
    ("backbone.fpn_output{level}", "fpn/fpn_output{level}"),
    ("backbone.fpn_output{level}.norm", "fpn/fpn_output{level}_norm"),
)
DETECTRON2: Rows = (
    *detectron2_resnet("backbone.bottom_up."),
    *_DETECTRON2_FPN,
    *_DETECTRON2_HEADS,
)
DETECTRON2_REGNET: Rows = (*regnet("backbone.bottom_up."), *_DETECTRON2_FPN, *_DETECTRON2_HEADS)
_VIT, VITDET_TABLES = vit("backbone.net.")
VITDET: Rows = (*_VIT, *_simple_pyramid(), *_DETECTRON2_HEADS)
MASKRCNN_BENCHMARK: Rows = (
    *torch_resnet("backbone.body.", stem="stem."),
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


def _mmdetection_box_head(stage: str, ours: str) -> Rows:
    """Return rows for a box head; stage: its number in a cascade, or ""."""
    head = f"roi_head.bbox_head.{stage}." if stage else "roi_head.bbox_head."
    return (
        (head + "shared_convs.{fcn-1}.conv", ours + "/conv{fcn}"),
        (head + "shared_convs.{fcn-1}.bn", ours + "/norm{fcn}"),
        (head + "shared_fcs.{fc-1}", ours + "/fc{fc}"),
        (head + "fc_cls", ours + "/cls_score"),
        (head + "fc_reg", ours + "/bbox_pred"),
    )


_MMDETECTION_POINTREND: Rows = (
    ("roi_head.mask_head.downsample_conv.conv", "mask_head/coarse_conv"),
    ("roi_head.mask_head.fcs.{fc-1}", "mask_head/coarse_fc{fc}"),
    ("roi_head.mask_head.fc_logits", "mask_head/coarse_predictor"),
    ("roi_head.point_head.fcs.{point-1}.conv", "mask_head/point_head/fc{point}"),
    ("roi_head.point_head.fc_logits", "mask_head/point_head/predictor"),
)


def _mmdetection_mask_head(stage: str, ours: str) -> Rows:
    """Return rows for a mask head; stage: as above."""
    head = f"roi_head.mask_head.{stage}." if stage else "roi_head.mask_head."
    return (
        (head + "convs.{fcn-1}.conv", ours + "/mask_fcn{fcn}"),
        (head + "upsample", ours + "/mask_deconv"),
        (head + "conv_logits", ours + "/mask_predictor"),
    )


_MMDETECTION_HEADS: Rows = (
    ("neck.lateral_convs.{level-2}.conv", "fpn/fpn_lateral{level}"),
    ("neck.fpn_convs.{level-2}.conv", "fpn/fpn_output{level}"),
    ("rpn_head.rpn_conv", "rpn_head/conv"),
    ("rpn_head.rpn_cls", "rpn_head/objectness_logits"),
    ("rpn_head.rpn_reg", "rpn_head/anchor_deltas"),
    *_mmdetection_box_head("", "box_head"),
    *_mmdetection_box_head("0", "box_head"),
    *_mmdetection_box_head("{cascade}", "cascade/heads_{cascade-1}"),
    *_mmdetection_mask_head("", "mask_head"),
    *_mmdetection_mask_head("{mask}", "mask_head/heads_{mask}"),
    *_MMDETECTION_POINTREND,
)
MMDETECTION: Rows = (*torch_resnet("backbone."), *_MMDETECTION_HEADS)
_CONVNEXT, MMDETECTION_CONVNEXT_TABLES = convnext("backbone.")
MMDETECTION_CONVNEXT: Rows = (*_CONVNEXT, *_MMDETECTION_HEADS)
_SWIN, SWIN_TABLES = swin("backbone.")
SWIN: Rows = (*_SWIN, *_MMDETECTION_HEADS)
_SWIN, MMDETECTION_SWIN_TABLES = mmdetection_swin("backbone.")
MMDETECTION_SWIN: Rows = (*_SWIN, *_MMDETECTION_HEADS)
_NVIDIA_TF2_BLOCK = "resnet50/group_{stage-1}/block_{block}/"
NVIDIA_TF2: Rows = (
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
