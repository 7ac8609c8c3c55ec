"""Mask R-CNN R-50-FPN on COCO 2017, the recipe of NVIDIA's PyTorch example (maskrcnn-benchmark).

    python -m mask_rcnn_jax.train --config configs/coco_nvidia_pytorch.py --workdir runs/pytorch \\
        --config.model.init_from=weights/R-50.pkl

Not measured here. NVIDIA publishes box AP 37.65 and mask AP 34.08 (TF32, eight A100).

`init_from` is Detectron's R-50.pkl (of dl.fbaipublicfiles.com/detectron, not detectron2).
Variants: `:bs64`, `:bs32` and `:1gpu` (batch 4) are NVIDIA's other schedules, `:mlperf` has the
warm-up and the target APs of MLPerf.

The numbers are those of the shipped e2e_mask_rcnn_R_50_FPN_1x.yaml and the launch scripts; NVIDIA's
page lists the defaults behind them (rate 0.001, batch 16, conv4, background below 0.5). Their 1-GPU
file trains on COCO 2014, whose json files are to be named in `data`. The number of proposals in
training is that of one device's batch, for eight devices (one in `:1gpu`).
Deliberate differences: polygons of more than 512 vertices fall back to mask crops; at most 100
objects an image are trained on; detection considers the best 4096 scores of all classes.
"""

from ml_collections import ConfigDict

from configs import coco

# variant: batch, steps, rate, decay steps, warm-up steps and factor, a device's proposals
SCHEDULES = {
    "bs96": (96, 16_667, 0.12, (12_000, 16_000), 800, 1e-4, 12_000),
    "bs64": (64, 27_500, 0.08, (18_000, 24_000), 800, 1e-4, 8_000),
    "bs32": (32, 50_000, 0.04, (33_000, 44_000), 500, 1 / 3, 4_000),
    "1gpu": (4, 360_000, 0.005, (240_000, 360_000), 500, 1 / 3, 2_000),
    "mlperf": (96, 16_667, 0.12, (12_000, 16_000), 625, 1e-4, 12_000),
}


def get_config(variant: str = "bs96") -> ConfigDict:
    if variant not in SCHEDULES:
        raise ValueError(
            f"configs/coco_nvidia_pytorch.py:{variant}: expected one of {list(SCHEDULES)}"
        )
    batch, steps, rate, decays, warmup, factor, proposals = SCHEDULES[variant]
    config = coco.get_config()
    config.data.update(
        image_size=(800, 1333),  # short side, longest side allowed
        resize="shortest_edge",
        resize_rounding="caffe",
        antialias=True,
        max_vertices=512,
        box_offset=1.0,  # x2 = x + width - 1
        keep_empty=False,
    )
    config.model = dict(
        num_classes=0,
        init_from="",
        depth=50,
        norm="frozen",
        norm_eps=0.0,
        stride_in="1x1",
        padding="torch",
        pool_padding="torch",
        frozen_stages=2,
        channel_order="bgr",
        pixel_mean=(122.7717, 115.9465, 102.9801),
        pixel_std=(1.0, 1.0, 1.0),
        pad_multiple=32,
        fpn_channels=256,
        fpn_init="xavier_fill",
        anchor_sizes=(32.0, 64.0, 128.0, 256.0, 512.0),
        anchor_shapes=((2**0.5, 0.5**0.5), (1.0, 1.0), (0.5**0.5, 2**0.5)),
        anchor_centre=0.5,
        anchor_rounding="base_window",
        anchor_offset=1.0,
        anchor_stride="level",
        rpn_channels=256,
        rpn_fg_thresh=0.7,
        rpn_bg_thresh=0.3,
        rpn_low_quality="ties",
        rpn_straddle=0.0,
        rpn_anchors_per_image=256,
        rpn_fg_fraction=0.5,
        rpn_encode_offset=1.0,
        rpn_nms_thresh=0.7,
        pre_nms_topk_train=2000,
        pre_nms_topk_test=1000,
        post_nms_topk_train=proposals,
        post_nms_topk_test=1000,
        post_nms_scope="batch",
        proposal_min_size=-1.0,
        box_offset=1.0,
        iou_offset=1.0,
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
        fc_init="xavier_fill",
        predictor_init="normal",
        mask_channels=256,
        mask_targets="polygons",
        mask_half_pixel=True,
        mask_predictor_init="he",
    )
    config.loss.update(
        rpn_cls_average="sampled",
        rpn_box_loss="smooth_l1",
        rpn_box_beta=1 / 9,
        rpn_box_average="sampled",
        box_beta=1.0,
        box_average="rois",
    )
    config.optim.update(
        learning_rate=rate,
        reference_batch=batch,
        warmup_until=warmup / steps,
        warmup_factor=factor,
        decay_at=tuple(step / steps for step in decays),
        decay_levels=(0.1, 0.01),
        rate_in_velocity=False,
        weight_decay=1e-4,
        decay_on=("kernel",),
        bias_lr_factor=2.0,
        loss_scale=2.0**13,
    )
    config.train.update(
        batch_size=batch, steps=steps, checkpoint_every=2500, eval_every=0, precision="float32"
    )
    config.eval.update(
        batch_size=1,
        score_threshold=0.05,
        paste="integer",
        box_offset=1.0,  # results are written with width = x2 - x1 + 1
    )
    if variant == "mlperf":
        config.train.update(stop_at_box_ap=0.377, stop_at_mask_ap=0.339)
    return config
