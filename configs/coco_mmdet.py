"""Mask R-CNN R-50-FPN on COCO 2017, mmdetection's recipe (mask-rcnn_r50_fpn_1x_coco).

    python -m mask_rcnn_jax.train --config configs/coco_mmdet.py --workdir runs/mmdet
    python -m mask_rcnn_jax.infer --config configs/coco_mmdet.py --weights epoch_12.pth \\
        --input photo.jpg --output out

Not measured here. mmdetection publishes box AP 38.2 and mask AP 34.7.

It starts from torchvision's ResNet-50. `:caffe` is mask-rcnn_r50-caffe_fpn_1x_coco (38.0 / 34.4),
whose backbone is detectron2's R-50.pkl: it strides in 1x1 convolutions, takes B, G, R and has norms
that do not learn. For other configs of mmdetection, `prepare mmdet_config` writes a recipe.

Deliberate differences: an object whose best anchor has an IoU below 0.3 gets that one too
(min_pos_iou); images of less than 32 pixels are trained on; RoIAlign uses at most 16 x 16 points
per bin, exceeded only by boxes longer than 112 cells on their level; training uses ground-truth
masks as 112 x 112 box crops and at most 100 objects per image; detection considers the best 4096
scores over all classes.
"""

from ml_collections import ConfigDict

from mask_rcnn_jax.configs import base

# variant: what it is, and the box and mask AP published for COCO val2017, in percent
SYSTEMS = {
    "": ("mmdetection mask-rcnn_r50_fpn_1x_coco", 38.2, 34.7),
    "caffe": ("mmdetection mask-rcnn_r50-caffe_fpn_1x_coco", 38.0, 34.4),
}

EPOCH = -(-117_266 // 16)  # steps; of the images with objects
STEPS = 12 * EPOCH


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", "caffe"):
        raise ValueError(f"coco_mmdet:{variant}: expected caffe or nothing")
    config = base.get_config()
    config.data.update(resize_rounding="round", keep_empty=False)
    config.model.update(
        init_from="resnet50",
        backbone=dict(norm="affine"),
        fpn=dict(init="glorot"),
        roi_align=dict(sampling_ratio=0, max_sampling_ratio=16, aligned=True, min_size=0.0),
        box_head=dict(fc_init="glorot"),
    )
    if variant == "caffe":
        config.model.init_from = "detectron2_msra_r50"
        config.model.backbone.update(norm="frozen", stride_in="1x1")
        config.model.input.update(channel_order="bgr", std=(1.0, 1.0, 1.0))
    config.loss.update(rpn_box_beta=0.0, box_beta=0.0)
    config.optim.update(warmup_until=500 / STEPS, decay_at=(8 / 12, 11 / 12))
    config.optim.decay_on = ("kernel", "bias", "scale")
    config.train.update(steps=STEPS, checkpoint_every=EPOCH, eval_every=EPOCH)
    config.eval.paste = "continuous"
    return config
