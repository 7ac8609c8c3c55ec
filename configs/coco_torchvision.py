"""Mask R-CNN R-50-FPN on COCO 2017, torchvision's recipe (maskrcnn_resnet50_fpn).

    python -m mask_rcnn_jax.train --config configs/coco_torchvision.py --workdir runs/torchvision
    python -m mask_rcnn_jax.infer --config configs/coco_torchvision.py:coco_v1 \\
        --weights weights/maskrcnn_resnet50_fpn_coco-bf2d0c1e.pth --input photo.jpg --output out

Not measured here. torchvision publishes box AP 37.9 and mask AP 34.6.

It starts from torchvision's ResNet-50. `:coco_v1` is for torchvision's published COCO weights, from
which it starts, and whose batch norm has no epsilon. `:v2` is maskrcnn_resnet50_fpn_v2 (47.4 /
41.8), trained from random weights for 400 epochs: batch norm that learns everywhere but in the RPN,
two convolutions in the RPN, four in the box head. To start it from ImageNet's weights, set
model.init_from=resnet50 and model.backbone.frozen_stages=2, as torchvision does.
Deliberate differences: training uses ground-truth masks as 112 x 112 box crops
(model.mask_targets.kind=whole with data.mask_frame=image keeps them whole, at 100 MB per image) and
at most 100 objects per image; detection considers the best 4096 scores over all classes.
train.precision=bfloat16 trades exact agreement for speed.
"""

from ml_collections import ConfigDict

from mask_rcnn_jax.configs import base

# variant: what it is, and the box and mask AP published for COCO val2017, in percent
SYSTEMS = {
    "": ("torchvision maskrcnn_resnet50_fpn", 37.9, 34.6),
    "coco_v1": ("torchvision maskrcnn_resnet50_fpn, for its COCO weights", 37.9, 34.6),
    "v2": ("torchvision maskrcnn_resnet50_fpn_v2", 47.4, 41.8),
}

IMAGES = 117_266  # with objects
EPOCH = IMAGES // 16  # steps
V2_BATCH = 64
V2_EPOCH = IMAGES // V2_BATCH


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", "coco_v1", "v2"):
        raise ValueError(f"coco_torchvision:{variant}: expected coco_v1, v2 or nothing")
    config = base.get_config()
    # "raw" gives 90 classes, of which COCO uses 80.
    config.data.update(class_ids="raw", image_dtype="float32", keep_empty=False)
    config.model.update(
        init_from="maskrcnn_resnet50_fpn_coco" if variant == "coco_v1" else "resnet50",
        backbone=dict(norm_eps=0.0 if variant == "coco_v1" else 1e-5),
        # Anchors are 61 pixels apart on the last level if the padded height is 800.
        anchors=dict(rounding="half_sides", stride="map"),
        rpn=dict(post_nms_topk_train=2000, min_size=1e-3),
        box_head=dict(fc_init="linear", predictor_init="linear"),
        mask_targets=dict(kind="soft"),
    )
    config.loss.box_beta = 1 / 9
    config.optim.update(warmup_until=1000 / (26 * EPOCH), decay_at=(16 / 26, 22 / 26))
    config.train.update(steps=26 * EPOCH, eval_every=EPOCH)
    config.eval.min_box_size = 1e-2
    if variant == "v2":
        _make_v2(config)
    return config


def _make_v2(config: ConfigDict) -> None:
    config.model.update(
        init_from="",
        backbone=dict(norm="sync_batch", frozen_stages=0),
        fpn=dict(norm="sync_batch"),
        rpn=dict(num_convs=2),
        box_head=dict(name="conv_fc", num_convs=4, num_fcs=1, norm="sync_batch"),
        mask_head=dict(norm="sync_batch"),
    )
    config.data.augment = ("scale_jitter", "fixed_size_crop")
    config.data.scale_jitter.rounding = "floor"
    config.data.fixed_size_crop.update(fill=(123, 117, 104), boxes="clip", rounding="floor")
    config.optim.update(learning_rate=0.1, reference_batch=V2_BATCH, weight_decay=4e-5)
    config.optim.update(decay_on=("kernel", "bias", "scale"))
    config.optim.update(warmup_until=1000 / (400 * V2_EPOCH), decay_at=(352 / 400, 384 / 400))
    config.train.update(batch_size=V2_BATCH, steps=400 * V2_EPOCH, eval_every=4 * V2_EPOCH)
