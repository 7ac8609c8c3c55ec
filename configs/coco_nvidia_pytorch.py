"""Mask R-CNN R-50-FPN on COCO 2017, NVIDIA's PyTorch recipe (maskrcnn-benchmark).

    python -m mask_rcnn_jax.train --config configs/coco_nvidia_pytorch.py --workdir runs/pytorch

Not measured here. NVIDIA publishes box AP 37.65 and mask AP 34.08 (TF32, eight A100).

It starts from Detectron's R-50.pkl (from dl.fbaipublicfiles.com/detectron, not detectron2).
Variants: `:bs64`, `:bs32` and `:1gpu` (batch 4) are NVIDIA's other schedules, `:mlperf` uses the
warm-up and target APs from MLPerf.

Values come from the shipped e2e_mask_rcnn_R_50_FPN_1x.yaml and the launch scripts; NVIDIA's page
lists the defaults behind them (rate 0.001, batch 16, conv4, background below 0.5). Their 1-GPU file
trains on COCO 2014, whose json files must be set in `data`. Training proposals are limited per
device batch, for eight devices (one in `:1gpu`).
Deliberate differences: objects with more than 512 polygon vertices use mask crops; training uses at
most 100 objects per image; detection considers the best 4096 scores over all classes.
"""

from ml_collections import ConfigDict

from mask_rcnn_jax.configs import base

# variant: what it is, and the box and mask AP published for COCO val2017, in percent
SYSTEMS = {
    "": ("NVIDIA DeepLearningExamples, PyTorch", 37.65, 34.08),
    "bs64": ("NVIDIA's PyTorch recipe, schedule for batches of 64", None, None),
    "bs32": ("NVIDIA's PyTorch recipe, schedule for batches of 32", None, None),
    "1gpu": ("NVIDIA's PyTorch recipe, schedule for one GPU", None, None),
    "mlperf": ("NVIDIA's PyTorch recipe, warm-up and target APs of MLPerf", None, None),
}

# variant: batch, steps, rate, decay steps, warm-up steps and factor, proposals per device
SCHEDULES = {
    "bs96": (96, 16_667, 0.12, (12_000, 16_000), 800, 1e-4, 12_000),
    "bs64": (64, 27_500, 0.08, (18_000, 24_000), 800, 1e-4, 8_000),
    "bs32": (32, 50_000, 0.04, (33_000, 44_000), 500, 1 / 3, 4_000),
    "1gpu": (4, 360_000, 0.005, (240_000, 360_000), 500, 1 / 3, 2_000),
    "mlperf": (96, 16_667, 0.12, (12_000, 16_000), 625, 1e-4, 12_000),
}


def get_config(variant: str = "bs96") -> ConfigDict:
    if variant not in SCHEDULES:
        raise ValueError(f"coco_nvidia_pytorch:{variant}: expected one of {list(SCHEDULES)}")
    batch, steps, rate, decays, warmup, factor, proposals = SCHEDULES[variant]
    config = base.get_config()
    config.data.update(resize_rounding="caffe", antialias=True, max_vertices=512, keep_empty=False)
    config.model.update(
        init_from="detectron_msra_r50",
        input=dict(channel_order="bgr", mean=(122.7717, 115.9465, 102.9801), std=(1.0, 1.0, 1.0)),
        backbone=dict(stride_in="1x1", norm_eps=0.0),
        anchors=dict(center=0.5, rounding="base_window"),
        box_coder=dict(inclusive="all"),
        rpn=dict(straddle_thresh=0.0, min_size=-1.0, post_nms_scope="batch"),
        mask_targets=dict(kind="polygons"),
    )
    config.model.rpn.post_nms_topk_train = proposals
    config.optim.update(learning_rate=rate, reference_batch=batch, loss_scale=2.0**13)
    config.optim.update(warmup_until=warmup / steps, warmup_factor=factor)
    config.optim.update(decay_at=tuple(step / steps for step in decays))
    config.optim.update(decay_on=("kernel",), bias_lr_factor=2.0)
    config.train.update(batch_size=batch, steps=steps, checkpoint_every=2500)
    if variant == "mlperf":
        config.train.update(stop_at_box_ap=0.377, stop_at_mask_ap=0.339)
    return config
