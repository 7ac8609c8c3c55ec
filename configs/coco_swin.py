"""Mask R-CNN with a Swin transformer on COCO 2017, the recipes of its paper
(github.com/SwinTransformer/Swin-Transformer-Object-Detection) and of mmdetection
(mask-rcnn_swin-t-p4-w7_fpn_amp-ms-crop-3x_coco).

    python -m mask_rcnn_jax.train --config configs/coco_swin.py --workdir runs/swin \\
        --config.model.init_from=weights/swin_tiny_patch4_window7_224.pth
    python -m mask_rcnn_jax.infer --config configs/coco_swin.py \\
        --weights weights/mask_rcnn_swin_tiny_patch4_window7.pth --input photo.jpg --output out

Not measured here. The paper's page publishes box AP 46.0 and mask AP 41.6 for Swin-T after 36
epochs, 43.7 / 39.8 for `:tiny_1x` after 12, and 48.5 / 43.3 for `:small` (Swin-S); with three box
heads of four convolutions in a row 50.4 / 43.7 for `:cascade_tiny`, 48.1 / 41.7 for
`:cascade_tiny_1x`, and 51.9 / 45.0 for both `:cascade_small` and `:cascade_base` (Swin-B).

Here the precision is bfloat16; train.remat=backbone trades time for memory. The classifiers of the
paper, torchvision, timm, transformers and mmpretrain start a run.
Deliberate differences: short sides of 480 to 800 pixels for all images; the originals first resize
half of them to 400, 500 or 600 pixels and crop 384 to 600. Cascades detect the same, but train with
L1 losses of deltas instead of GIoU, stages alike, RoIs that are sampled once, and three mask heads
that learn from their mean. The others are those of configs/coco_mmdet.py.
"""

from typing import Any

from ml_collections import ConfigDict

from mask_rcnn_jax.configs import coco_mmdet
from mask_rcnn_jax.models.build import named_section

# variant: what it is, and the box and mask AP published for COCO val2017, in percent
SYSTEMS = {
    "": ("Swin's paper and mmdetection, Swin-T", 46.0, 41.6),
    "tiny_1x": ("Swin's paper, Swin-T after 12 epochs", 43.7, 39.8),
    "small": ("Swin's paper and mmdetection, Swin-S", 48.5, 43.3),
    "cascade_tiny": ("Swin's paper, Swin-T with a cascade", 50.4, 43.7),
    "cascade_tiny_1x": ("Swin's paper, Swin-T with a cascade after 12 epochs", 48.1, 41.7),
    "cascade_small": ("Swin's paper, Swin-S with a cascade", 51.9, 45.0),
    "cascade_base": ("Swin's paper, Swin-B with a cascade", 51.9, 45.0),
}

# variant: the trunk, and epochs
TRUNKS: dict[str, tuple[dict[str, Any], int]] = {
    "tiny": (dict(drop_path=0.2), 36),
    "tiny_1x": (dict(drop_path=0.1), 12),
    "small": (dict(depths=(2, 2, 18, 2), drop_path=0.2), 36),
    "cascade_tiny": (dict(drop_path=0.2), 36),
    "cascade_tiny_1x": (dict(drop_path=0.0), 12),
    "cascade_small": (dict(depths=(2, 2, 18, 2), drop_path=0.2), 36),
    "cascade_base": (
        dict(depths=(2, 2, 18, 2), width=128, num_heads=(4, 8, 16, 32), drop_path=0.3),
        36,
    ),
}
# Of the second and third stage.
BOX_WEIGHTS = ((20.0, 20.0, 10.0, 10.0), (1 / 0.033, 1 / 0.033, 1 / 0.067, 1 / 0.067))
EPOCH, WARMUP = 7_330, 500  # steps of 16 images


def get_config(variant: str = "tiny") -> ConfigDict:
    if variant not in TRUNKS:
        raise ValueError(f"coco_swin:{variant}: expected one of {list(TRUNKS)}")
    config = coco_mmdet.get_config()
    config.data.short_sides = tuple(range(480, 801, 32))
    trunk, epochs = TRUNKS[variant]
    config.model.init_from = ""
    config.model.backbone = named_section("backbone", "swin", **trunk)
    if variant.startswith("cascade"):
        head = dict(name="conv_fc", num_convs=4, num_fcs=1, norm="sync_batch")
        config.model.box_head.update(head)
        config.model.cascade.update(
            fg_iou_thresh=(0.6, 0.7), box_weights=BOX_WEIGHTS, mean_of="logits"
        )
        config.model.mask_head = named_section("mask_head", "mean", heads=3)
        config.model.rpn.update(post_nms_topk_train=2000, straddle_thresh=0.0)
        config.loss.rpn_box_beta = 1 / 9
    steps = epochs * EPOCH
    config.optim.update(
        name="adamw",
        learning_rate=1e-4,
        weight_decay=0.05,
        decay_on=("kernel", "bias", "scale", "other"),
        warmup_factor=0.001,
        warmup_until=WARMUP / steps,
        decay_at=(8 / 12, 11 / 12) if epochs == 12 else (27 / 36, 33 / 36),
    )
    config.train.update(steps=steps, checkpoint_every=EPOCH, eval_every=EPOCH, precision="auto")
    return config
