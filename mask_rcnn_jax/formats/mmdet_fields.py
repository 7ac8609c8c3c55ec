"""Fields of the model in configs of mmdetection 3, and their counterparts."""

from typing import Any

DETECTORS = ("MaskRCNN", "FasterRCNN")
HEADS: dict[str, dict[str, Any]] = {
    "Shared2FCBBoxHead": {"name": "two_fc"},
    "Shared4Conv1FCBBoxHead": {"name": "conv_fc", "num_convs": 4, "num_fcs": 1},
}
BOX, MASK = "model.roi_head.bbox_head", "model.roi_head.mask_head"
RPN_TRAIN, RPN_TEST = "model.train_cfg.rpn", "model.test_cfg.rpn"
RCNN_TRAIN, RCNN_TEST = "model.train_cfg.rcnn", "model.test_cfg.rcnn"
PROPOSALS = "model.train_cfg.rpn_proposal"
# Fields whose value is that of an entry.
SAME = {
    "model.backbone.depth": "model.backbone.depth",
    "model.backbone.groups": "model.backbone.groups",
    "model.backbone.base_width": "model.backbone.width_per_group",
    "model.neck.out_channels": "model.fpn.channels",
    "model.rpn_head.feat_channels": "model.rpn.channels",
    "model.rpn_head.num_convs": "model.rpn.num_convs",
    "model.rpn_head.loss_bbox.loss_weight": "loss.rpn_box_weight",
    "model.data_preprocessor.pad_size_divisor": "model.input.pad_multiple",
    f"{BOX}.fc_out_channels": "model.box_head.channels",
    f"{BOX}.conv_out_channels": "model.box_head.conv_channels",
    f"{BOX}.reg_class_agnostic": "model.box_head.class_agnostic",
    f"{BOX}.loss_bbox.loss_weight": "loss.box_reg_weight",
    f"{MASK}.num_convs": "model.mask_head.num_convs",
    f"{MASK}.conv_out_channels": "model.mask_head.channels",
    f"{MASK}.loss_mask.loss_weight": "loss.mask_weight",
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
    "model.type": DETECTORS,
    "model.data_preprocessor.type": ("DetDataPreprocessor",),
    "model.backbone.type": ("ResNet", "ResNeXt"),
    "model.backbone.num_stages": (4,),
    "model.backbone.out_indices": ((0, 1, 2, 3),),
    "model.backbone.strides": ((1, 2, 2, 2),),
    "model.backbone.dilations": ((1, 1, 1, 1),),
    "model.backbone.deep_stem": (False,),
    "model.backbone.avg_down": (False,),
    "model.backbone.dcn": (None,),
    "model.backbone.plugins": (None,),
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
    "model.roi_head.type": ("StandardRoIHead",),
    "model.roi_head.shared_head": (None,),
    f"{BOX}.type": tuple(HEADS),
    f"{BOX}.roi_feat_size": (7,),
    f"{BOX}.norm_cfg": (None,),
    f"{BOX}.bbox_coder.type": ("DeltaXYWHBBoxCoder",),
    f"{BOX}.bbox_coder.target_means": ((0, 0, 0, 0),),
    f"{BOX}.loss_cls.type": ("CrossEntropyLoss",),
    f"{BOX}.loss_cls.use_sigmoid": (False,),
    f"{BOX}.loss_cls.loss_weight": (1,),
    f"{MASK}.type": ("FCNMaskHead",),
    f"{MASK}.class_agnostic": (False,),
    f"{MASK}.norm_cfg": (None,),
    f"{MASK}.roi_feat_size": (14,),
    f"{MASK}.loss_mask.type": ("CrossEntropyLoss",),
    f"{MASK}.loss_mask.use_mask": (True,),
    f"{RPN_TRAIN}.assigner.type": ("MaxIoUAssigner",),
    f"{RPN_TRAIN}.assigner.match_low_quality": (True,),
    f"{RPN_TRAIN}.sampler.type": ("RandomSampler",),
    f"{RPN_TRAIN}.sampler.add_gt_as_proposals": (False,),
    f"{PROPOSALS}.nms.type": ("nms",),
    f"{RPN_TEST}.nms.type": ("nms",),
    f"{RCNN_TRAIN}.assigner.type": ("MaxIoUAssigner",),
    f"{RCNN_TRAIN}.sampler.type": ("RandomSampler",),
    f"{RCNN_TRAIN}.sampler.add_gt_as_proposals": (True,),
    f"{RCNN_TRAIN}.mask_size": (28,),
    f"{RCNN_TEST}.nms.type": ("nms", "soft_nms"),
    f"{RCNN_TEST}.mask_thr_binary": (0.5,),
    **{f"{m}_cfg.{s}.{n}": (-1,) for m, s in (("model.train", "rpn"), ("model.train", "rcnn"))
       for n in ("pos_weight", "assigner.ignore_iof_thr", "sampler.neg_pos_ub")},
}  # fmt: skip
for _kind, _size in (("bbox", 7), ("mask", 14)):
    _extractor = f"model.roi_head.{_kind}_roi_extractor"
    FIXED |= {
        f"{_extractor}.type": ("SingleRoIExtractor",),
        f"{_extractor}.roi_layer.type": ("RoIAlign",),
        f"{_extractor}.roi_layer.output_size": (_size,),
        f"{_extractor}.featmap_strides": ((4, 8, 16, 32),),
    }
# What mmengine reads beside `model`; other names are variables.
READ = (
    *("train_dataloader", "val_dataloader", "train_cfg", "optim_wrapper", "param_scheduler"),
    *("auto_scale_lr", "custom_hooks", "custom_imports", "randomness"),
)
# Fields that follow from others, or change nothing.
IGNORED = (
    *("model.backbone.with_cp", "model.backbone.zero_init_residual", "model.backbone.in_channels"),
    *("model.neck.in_channels", "model.rpn_head.in_channels", "model.neck.init_cfg"),
    *(f"{head}.{name}" for head in (BOX, MASK) for name in ("in_channels", "num_classes")),
    *(f"model.roi_head.{kind}_roi_extractor.out_channels" for kind in ("bbox", "mask")),
    *(f"model.data_preprocessor.{name}" for name in ("pad_mask", "mask_pad_value", "pad_value")),
    *(f"{train}.debug" for train in (RPN_TRAIN, RCNN_TRAIN)),
    *("default_scope", "default_hooks", "env_cfg", "vis_backends", "visualizer", "log_processor"),
    *("log_level", "resume", "tta_model", "tta_pipeline", "val_cfg", "test_cfg", "work_dir"),
    *("val_evaluator", "test_evaluator", "test_dataloader", "launcher", "metainfo", "find_unused"),
    *("model.data_preprocessor.batch_augments", "randomness.deterministic"),
)
