"""Mask R-CNN R-50-FPN on COCO 2017, the recipe of torchvision's maskrcnn_resnet50_fpn.

    python -m mask_rcnn_jax.train --config configs/coco_torchvision.py --workdir runs/torchvision \\
        --config.model.init_from=weights/resnet50-0676ba61.pth
    python -m mask_rcnn_jax.infer --config configs/coco_torchvision.py:coco_v1 \\
        --weights weights/maskrcnn_resnet50_fpn_coco-bf2d0c1e.pth --input photo.jpg --output out

Not measured here. torchvision publishes box AP 37.9 and mask AP 34.6.

`:coco_v1` is for torchvision's published COCO weights, whose batch norm has no epsilon.
Deliberate differences: training sees ground-truth masks as 112 x 112 crops of their boxes
(model.mask_targets=whole with data.mask_frame=image keeps them whole, at 100 MB an image);
detection considers the best 4096 scores of all classes; at most 100 objects an image are trained
on. train.precision=bfloat16 gives up being the same to the digit for speed.
"""

from ml_collections import ConfigDict

from configs import coco


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", "coco_v1"):
        raise ValueError(f"configs/coco_torchvision.py:{variant}: expected coco_v1 or nothing")
    config = coco.get_config()
    config.data.update(
        class_ids="raw",  # 90 classes, of which COCO uses 80
        image_size=(800, 1333),  # short side, longest side allowed
        resize="shortest_edge",
        resize_rounding="floor",
        antialias=False,
        image_dtype="float32",
        keep_empty=False,
    )
    config.model = dict(
        num_classes=0,
        init_from="",
        depth=50,
        norm="frozen",
        norm_eps=0.0 if variant == "coco_v1" else 1e-5,
        stride_in="3x3",
        padding="torch",
        pool_padding="torch",
        frozen_stages=2,
        channel_order="rgb",
        pixel_mean=(123.675, 116.28, 103.53),
        pixel_std=(58.395, 57.12, 57.375),
        pad_multiple=32,
        fpn_channels=256,
        fpn_init="xavier_fill",
        anchor_sizes=(32.0, 64.0, 128.0, 256.0, 512.0),
        anchor_shapes=((2**0.5, 0.5**0.5), (1.0, 1.0), (0.5**0.5, 2**0.5)),
        anchor_centre=0.0,
        anchor_rounding="half_sides",
        anchor_offset=0.0,
        anchor_stride="map",  # 61 pixels on the last level where the padded height is 800
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
        post_nms_topk_train=2000,
        post_nms_topk_test=1000,
        post_nms_scope="image",
        proposal_min_size=1e-3,
        box_offset=0.0,
        iou_offset=0.0,
        rois_per_image=512,
        roi_fg_fraction=0.25,
        roi_fg_thresh=0.5,
        roi_fg_strict=False,
        roi_bg_thresh=(0.0, 0.5),
        roi_max_level=5,
        roi_sampling=2,
        roi_max_sampling=8,
        roi_half_pixel=False,
        roi_border="zero",
        roi_min_size=1.0,
        box_weights=(10.0, 10.0, 5.0, 5.0),
        box_channels=1024,
        fc_init="linear",
        predictor_init="linear",
        mask_channels=256,
        mask_targets="soft",
        mask_half_pixel=True,
        mask_predictor_init="he",
    )
    config.loss.update(
        rpn_cls_average="sampled",
        rpn_box_loss="smooth_l1",
        rpn_box_beta=1 / 9,
        rpn_box_average="sampled",
        box_beta=1 / 9,
        box_average="rois",
    )
    epoch = 117_266 // 16  # steps; images without objects are left out
    config.optim.update(
        learning_rate=0.02,
        reference_batch=16,
        warmup_until=1000 / (26 * epoch),
        warmup_factor=1e-3,
        decay_at=(16 / 26, 22 / 26),
        decay_levels=(0.1, 0.01),
        rate_in_velocity=False,
        weight_decay=1e-4,
        decay_on=("kernel", "bias"),
        bias_lr_factor=1.0,
        loss_scale=2.0**16,
    )
    config.train.update(batch_size=16, steps=26 * epoch, eval_every=epoch, precision="float32")
    config.eval.update(batch_size=1, score_threshold=0.05, min_box_size=1e-2, paste="integer")
    return config
