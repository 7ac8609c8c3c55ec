"""Mask R-CNN R-50-FPN on COCO 2017, the recipe of detectron2's mask_rcnn_R_50_FPN_1x and 3x.

    python -m mask_rcnn_jax.train --config configs/coco_detectron2.py:3x --workdir runs/d2_3x \\
        --config.model.init_from=weights/R-50.pkl
    python -m mask_rcnn_jax.infer --config configs/coco_detectron2.py \\
        --weights weights/model_final_f10217.pkl --input photo.jpg --output out

Not measured here. detectron2 publishes box AP 38.6 and mask AP 35.2 (1x), 41.0 and 37.2 (3x).

Deliberate differences: RoIAlign takes at most 16 x 16 points a bin, which only boxes longer than
112 cells of their level would exceed; polygons of more than 512 vertices fall back to mask crops;
at most 100 objects an image are trained on, and detection considers the best 4096 scores of all
classes.
"""

from ml_collections import ConfigDict

from configs import coco

# variant: steps, decay steps
SCHEDULES = {"1x": (90_000, (60_000, 80_000)), "3x": (270_000, (210_000, 250_000))}


def get_config(variant: str = "1x") -> ConfigDict:
    if variant not in SCHEDULES:
        raise ValueError(f"configs/coco_detectron2.py:{variant}: expected one of {list(SCHEDULES)}")
    steps, decays = SCHEDULES[variant]
    config = coco.get_config()
    config.data.update(
        image_size=(800, 1333),  # short side, longest side allowed
        resize="shortest_edge",
        resize_rounding="round",
        antialias=True,
        short_sides=(640, 672, 704, 736, 768, 800),
        max_vertices=512,
        keep_empty=False,
    )
    config.model = dict(
        num_classes=0,
        init_from="",
        depth=50,
        norm="frozen",
        norm_eps=1e-5,
        stride_in="1x1",
        padding="torch",
        pool_padding="torch",
        frozen_stages=2,
        channel_order="bgr",
        pixel_mean=(123.675, 116.28, 103.53),
        pixel_std=(1.0, 1.0, 1.0),
        pad_multiple=32,
        fpn_channels=256,
        fpn_init="xavier_fill",
        anchor_sizes=(32.0, 64.0, 128.0, 256.0, 512.0),
        anchor_shapes=((2**0.5, 0.5**0.5), (1.0, 1.0), (0.5**0.5, 2**0.5)),
        anchor_centre=0.0,
        anchor_rounding="none",
        anchor_offset=0.0,
        anchor_stride="level",
        rpn_channels=256,
        rpn_fg_thresh=0.7,
        rpn_bg_thresh=0.3,
        rpn_low_quality="ties",
        rpn_straddle=-1.0,
        rpn_anchors_per_image=256,
        rpn_fg_fraction=0.5,
        rpn_encode_offset=0.0,
        rpn_nms_thresh=0.7,
        pre_nms_topk_train=2000,
        pre_nms_topk_test=1000,
        post_nms_topk_train=1000,
        post_nms_topk_test=1000,
        post_nms_scope="image",
        proposal_min_size=0.0,
        box_offset=0.0,
        iou_offset=0.0,
        rois_per_image=512,
        roi_fg_fraction=0.25,
        roi_fg_thresh=0.5,
        roi_fg_strict=False,
        roi_bg_thresh=(0.0, 0.5),
        roi_max_level=5,
        roi_sampling=0,  # adaptive
        roi_max_sampling=16,
        roi_half_pixel=True,
        roi_border="zero",
        roi_min_size=0.0,
        box_weights=(10.0, 10.0, 5.0, 5.0),
        box_channels=1024,
        fc_init="xavier_fill",
        predictor_init="normal",
        mask_channels=256,
        mask_targets="polygons",
        mask_half_pixel=True,
        mask_predictor_init="normal",
    )
    config.loss.update(
        rpn_cls_average="budget",
        rpn_box_loss="smooth_l1",
        rpn_box_beta=0.0,
        rpn_box_average="budget",
        box_beta=0.0,
        box_average="rois",
    )
    config.optim.update(
        learning_rate=0.02,
        reference_batch=16,
        warmup_until=1000 / steps,
        warmup_factor=1e-3,
        decay_at=tuple(step / steps for step in decays),
        decay_levels=(0.1, 0.01),
        rate_in_velocity=False,
        weight_decay=1e-4,
        decay_on=("kernel", "bias"),
        bias_lr_factor=1.0,
        loss_scale=2.0**16,
    )
    config.train.update(
        batch_size=16, steps=steps, checkpoint_every=5000, eval_every=0, precision="float32"
    )
    config.eval.update(batch_size=1, score_threshold=0.05, paste="continuous")
    return config
