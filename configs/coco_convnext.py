"""Mask R-CNN with a ConvNeXt on COCO 2017, the recipe of its paper and of mmdetection
(mask-rcnn_convnext-t-p4-w7_fpn_amp-ms-crop-3x_coco).

    python -m mask_rcnn_jax.train --config configs/coco_convnext.py --workdir runs/convnext \\
        --config.model.init_from=weights/convnext_tiny_1k_224.pth
    python -m mask_rcnn_jax.infer --config configs/coco_convnext.py \\
        --weights weights/mask_rcnn_convnext_tiny_1k_3x.pth --input photo.jpg --output out

Not measured here. Both publish box AP 46.2 and mask AP 41.7 for ConvNeXt-T, after 36 epochs in
float16; none for `:small` (ConvNeXt-S), whose drop path is that of its cascade.

Here the precision is bfloat16; train.remat=backbone trades time for memory. torchvision's
weights (`prepare weights convnext_tiny`) and mmpretrain's start a run, too.
Deliberate differences: short sides of 480 to 800 pixels for all images; the originals first resize
half of them to 400, 500 or 600 pixels and crop 384 to 600. Low-quality matches of anchors, mask
targets and initial weights of the heads are those of configs/coco_detectron2.py, as are its
differences.
"""

from typing import Any

from ml_collections import ConfigDict

from mask_rcnn_jax.configs import coco_detectron2
from mask_rcnn_jax.models.build import named_section

# variant: what it is, and the box and mask AP published for COCO val2017, in percent
SYSTEMS = {
    "": ("ConvNeXt's paper and mmdetection, ConvNeXt-T", 46.2, 41.7),
    "small": ("ConvNeXt-S", None, None),
}

TRUNKS: dict[str, dict[str, Any]] = {
    "tiny": dict(depths=(3, 3, 9, 3), drop_path=0.4),
    "small": dict(depths=(3, 3, 27, 3), drop_path=0.6),
}
EPOCHS, EPOCH = 36, 7_330  # steps of 16 images


def get_config(variant: str = "tiny") -> ConfigDict:
    if variant not in TRUNKS:
        raise ValueError(f"coco_convnext:{variant}: expected one of {list(TRUNKS)}")
    config = coco_detectron2.get_config("3x")
    config.data.update(short_sides=tuple(range(480, 801, 32)), antialias=False)
    trunk = dict(width=96, layer_scale=1.0, **TRUNKS[variant])
    config.model.init_from = ""
    config.model.backbone = named_section("backbone", "convnext", **trunk)
    config.model.input.update(channel_order="rgb", std=(58.395, 57.12, 57.375))
    config.optim.update(
        name="adamw",
        learning_rate=1e-4,
        weight_decay=0.05,
        decay_on=("kernel",),
        layer_decay=0.95,
        warmup_until=1000 / (EPOCHS * EPOCH),
        decay_at=(27 / EPOCHS, 33 / EPOCHS),
    )
    config.train.update(steps=EPOCHS * EPOCH, precision="auto")
    return config
