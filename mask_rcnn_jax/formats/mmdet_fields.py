"""Fields of the model in configs of mmdetection 3, and their counterparts."""

from typing import Any

# Detectors, and their heads of RoIs.
DETECTORS = {
    "MaskRCNN": "StandardRoIHead",
    "FasterRCNN": "StandardRoIHead",
    "CascadeRCNN": "CascadeRoIHead",
    "PointRend": "PointRendRoIHead",
}
HEADS: dict[str, dict[str, Any]] = {
    "Shared2FCBBoxHead": {"name": "two_fc"},
    "Shared4Conv1FCBBoxHead": {"name": "conv_fc", "num_convs": 4, "num_fcs": 1},
    "ConvFCBBoxHead": {"name": "conv_fc", "num_convs": 0, "num_fcs": 0},
}
BOX, MASK = "model.roi_head.bbox_head", "model.roi_head.mask_head"
POINT = "model.roi_head.point_head"
RPN_TRAIN, RPN_TEST = "model.train_cfg.rpn", "model.test_cfg.rpn"
RCNN_TRAIN, RCNN_TEST = "model.train_cfg.rcnn", "model.test_cfg.rcnn"
PROPOSALS = "model.train_cfg.rpn_proposal"
# Fields whose value is that of an entry.
SAME = {
    "model.neck.out_channels": "model.fpn.channels",
    "model.rpn_head.feat_channels": "model.rpn.channels",
    "model.rpn_head.num_convs": "model.rpn.num_convs",
    "model.rpn_head.loss_bbox.loss_weight": "loss.rpn_box_weight",
    "model.data_preprocessor.pad_size_divisor": "model.input.pad_multiple",
    f"{BOX}.fc_out_channels": "model.box_head.channels",
    f"{BOX}.conv_out_channels": "model.box_head.conv_channels",
    f"{BOX}.reg_class_agnostic": "model.box_head.class_agnostic",
    f"{BOX}.loss_bbox.loss_weight": "loss.box_reg_weight",
    f"{RPN_TRAIN}.assigner.pos_iou_thr": "model.rpn.fg_iou_thresh",
    f"{RPN_TRAIN}.assigner.neg_iou_thr": "model.rpn.bg_iou_thresh",
    f"{RPN_TRAIN}.sampler.num": "model.rpn.batch_size_per_image",
    f"{RPN_TRAIN}.sampler.pos_fraction": "model.rpn.positive_fraction",
    f"{RPN_TRAIN}.allowed_border": "model.rpn.straddle_thresh",
    f"{PROPOSALS}.nms_pre": "model.rpn.pre_nms_topk_train",
    f"{PROPOSALS}.max_per_img": "model.rpn.post_nms_topk_train",
    f"{PROPOSALS}.nms.iou_threshold": "model.rpn.nms_thresh",
    f"{PROPOSALS}.min_bbox_size": "model.rpn.min_size",
    f"{RPN_TEST}.nms_pre": "model.rpn.pre_nms_topk_test",
    f"{RPN_TEST}.max_per_img": "model.rpn.post_nms_topk_test",
    f"{RCNN_TRAIN}.assigner.pos_iou_thr": "model.sampling.fg_iou_thresh",
    f"{RCNN_TRAIN}.sampler.num": "model.sampling.batch_size_per_image",
    f"{RCNN_TRAIN}.sampler.pos_fraction": "model.sampling.positive_fraction",
    f"{RCNN_TEST}.score_thr": "eval.score_threshold",
    f"{RCNN_TEST}.nms.iou_threshold": "eval.nms_thresh",
    f"{RCNN_TEST}.max_per_img": "eval.detections_per_image",
}
# Fields with possible values here.
FIXED: dict[str, tuple] = {
    "model.type": tuple(DETECTORS),
    "model.data_preprocessor.type": ("DetDataPreprocessor",),
    "model.neck.type": ("FPN",),
    "model.neck.num_outs": (5,),
    "model.neck.start_level": (0,),
    "model.neck.norm_cfg": (None,),
    "model.neck.add_extra_convs": (False,),
    "model.rpn_head.type": ("RPNHead",),
    "model.rpn_head.anchor_generator.type": ("AnchorGenerator",),
    "model.rpn_head.anchor_generator.strides": ((4, 8, 16, 32, 64),),
    "model.rpn_head.bbox_coder.type": ("DeltaXYWHBBoxCoder",),
    "model.rpn_head.bbox_coder.target_means": ((0, 0, 0, 0),),
    "model.rpn_head.bbox_coder.target_stds": ((1, 1, 1, 1),),
    "model.rpn_head.loss_cls.type": ("CrossEntropyLoss",),
    "model.rpn_head.loss_cls.use_sigmoid": (True,),
    "model.rpn_head.loss_cls.loss_weight": (1,),
    "model.roi_head.shared_head": (None,),
    f"{BOX}.type": tuple(HEADS),
    f"{BOX}.roi_feat_size": (7,),
    **{f"{BOX}.num_{kind}s": (0,) for kind in
       ("cls_conv", "cls_fc", "reg_conv", "reg_fc")},
    f"{BOX}.bbox_coder.type": ("DeltaXYWHBBoxCoder",),
    f"{BOX}.bbox_coder.target_means": ((0, 0, 0, 0),),
    f"{BOX}.loss_cls.type": ("CrossEntropyLoss",),
    f"{BOX}.loss_cls.use_sigmoid": (False,),
    f"{BOX}.loss_cls.loss_weight": (1,),
    f"{RPN_TRAIN}.assigner.type": ("MaxIoUAssigner",),
    f"{RPN_TRAIN}.assigner.match_low_quality": (True,),
    f"{RPN_TRAIN}.sampler.type": ("RandomSampler",),
    f"{RPN_TRAIN}.sampler.add_gt_as_proposals": (False,),
    f"{PROPOSALS}.nms.type": ("nms",),
    f"{PROPOSALS}.nms_across_levels": (False,),
    f"{RPN_TEST}.nms_across_levels": (False,),
    f"{RPN_TEST}.nms.type": ("nms",),
    f"{RCNN_TRAIN}.assigner.type": ("MaxIoUAssigner",),
    f"{RCNN_TRAIN}.sampler.type": ("RandomSampler",),
    f"{RCNN_TRAIN}.sampler.add_gt_as_proposals": (True,),
    f"{RCNN_TEST}.nms.type": ("nms", "soft_nms"),
    f"{RCNN_TEST}.mask_thr_binary": (0.5,),
    **{f"{m}_cfg.{s}.{n}": (-1,) for m, s in (("model.train", "rpn"), ("model.train", "rcnn"))
       for n in ("pos_weight", "assigner.ignore_iof_thr", "sampler.neg_pos_ub")},
}  # fmt: skip
BOX_ROIS, MASK_ROIS = (f"model.roi_head.{kind}_roi_extractor" for kind in ("bbox", "mask"))
LEVELS = (4, 8, 16, 32)  # strides


def roi_fields(extractor: str, size: int) -> dict[str, tuple]:
    """Possible values of the fields of an RoIAlign of that many cells a side."""
    return {
        f"{extractor}.type": ("SingleRoIExtractor",),
        f"{extractor}.roi_layer.type": ("RoIAlign",),
        f"{extractor}.roi_layer.output_size": (size,),
        f"{extractor}.featmap_strides": (LEVELS,),
    }


FIXED |= roi_fields(BOX_ROIS, 7)
# By the mask head's type: fields whose value is that of an entry, and those with possible values.
MASKS: dict[str, tuple[dict[str, str], dict[str, tuple]]] = {
    "FCNMaskHead": (
        {
            f"{MASK}.num_convs": "model.mask_head.num_convs",
            f"{MASK}.conv_out_channels": "model.mask_head.channels",
            f"{MASK}.loss_mask.loss_weight": "loss.mask_weight",
        },
        {
            f"{MASK}.class_agnostic": (False,),
            f"{MASK}.norm_cfg": (None,),
            f"{MASK}.roi_feat_size": (14,),
            f"{RCNN_TRAIN}.mask_size": (28,),
            **roi_fields(MASK_ROIS, 14),
        },
    ),
    "CoarseMaskHead": (
        {
            f"{MASK}.conv_out_channels": "model.mask_head.channels",
            f"{MASK}.fc_out_channels": "model.mask_head.fc_channels",
            f"{MASK}.num_fcs": "model.mask_head.num_fcs",
            f"{POINT}.fc_channels": "model.mask_head.point_channels",
            f"{POINT}.num_fcs": "model.mask_head.num_point_fcs",
            f"{RCNN_TRAIN}.num_points": "model.mask_head.train_points",
            f"{RCNN_TRAIN}.oversample_ratio": "model.mask_head.oversample",
            f"{RCNN_TRAIN}.importance_sample_ratio": "model.mask_head.importance",
            f"{RCNN_TEST}.subdivision_steps": "model.mask_head.subdivisions",
            f"{RCNN_TEST}.subdivision_num_points": "model.mask_head.subdivision_points",
        },
        {
            f"{MASK}.num_convs": (0,),
            f"{MASK}.downsample_factor": (2,),
            f"{MASK}.loss_mask.loss_weight": (1,),
            f"{POINT}.type": ("MaskPointHead",),
            f"{POINT}.class_agnostic": (False,),
            f"{POINT}.coarse_pred_each_layer": (True,),
            f"{POINT}.loss_point.type": ("CrossEntropyLoss",),
            f"{POINT}.loss_point.use_mask": (True,),
            f"{POINT}.loss_point.loss_weight": (1,),
            f"{MASK_ROIS}.type": ("GenericRoIExtractor",),
            f"{MASK_ROIS}.aggregation": ("concat",),
            f"{MASK_ROIS}.roi_layer.type": ("SimpleRoIAlign",),
            f"{MASK_ROIS}.roi_layer.output_size": (14,),
            f"{MASK_ROIS}.featmap_strides": (LEVELS[:1],),
            f"{RCNN_TRAIN}.mask_size": (7,),
            f"{RCNN_TEST}.scale_factor": (2,),
        },
    ),
}
MASK_LOSS: dict[str, tuple] = {
    f"{MASK}.loss_mask.type": ("CrossEntropyLoss",),
    f"{MASK}.loss_mask.use_mask": (True,),
}
# What mmengine reads beside `model`; other names are variables.
READ = (
    *("train_dataloader", "val_dataloader", "train_cfg", "optim_wrapper", "param_scheduler"),
    *("auto_scale_lr", "custom_hooks", "custom_imports", "randomness"),
    *("data", "lr_config", "optimizer_config", "runner", "fp16", "seed"),  # of mmdetection 2
)
# Fields that follow from others, or change nothing.
IGNORED = (
    *("model.neck.in_channels", "model.rpn_head.in_channels", "model.neck.init_cfg"),
    *(f"{head}.{name}" for head in (BOX, MASK, POINT) for name in ("in_channels", "num_classes")),
    *(f"{extractor}.out_channels" for extractor in (BOX_ROIS, MASK_ROIS)),
    *(f"model.data_preprocessor.{name}" for name in ("pad_mask", "mask_pad_value", "pad_value")),
    *(f"{train}.debug" for train in (RPN_TRAIN, RCNN_TRAIN)),
    *("default_scope", "default_hooks", "env_cfg", "vis_backends", "visualizer", "log_processor"),
    *("log_level", "resume", "tta_model", "tta_pipeline", "val_cfg", "test_cfg", "work_dir"),
    *("val_evaluator", "test_evaluator", "test_dataloader", "launcher", "metainfo", "find_unused"),
    *("model.data_preprocessor.batch_augments", "randomness.deterministic"),
)
