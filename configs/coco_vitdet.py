"""Mask R-CNN with a plain vision transformer on COCO 2017, detectron2's ViTDet.

    python -m mask_rcnn_jax.train --config configs/coco_vitdet.py --workdir runs/vitdet \\
        --config.model.init_from=weights/mae_pretrain_vit_base.pth
    python -m mask_rcnn_jax.infer --config configs/coco_vitdet.py \\
        --weights weights/model_final_61ccd1.pkl --input photo.jpg --output out

Not measured here. detectron2 publishes box AP 51.6 and mask AP 45.9 for ViT-B, 55.5 / 49.2 for
`:l` and 56.7 / 50.2 for `:h`; with `:cascade_b` 54.0 / 46.7, `:cascade_l` 57.6 / 50.0 and
`:cascade_h` 58.7 / 51.0. It trains 64 images at a time on 64 GPUs, in float16, from MAE's weights.
Those of ViT-H are resampled there from patches of 14 to 16 pixels (in
mae_pretrain_vit_huge_p14to16.pth); MAE's own file does not fit `:h`.

Here the precision is bfloat16. train.remat=backbone trades time for memory, and
model.backbone.attention=cudnn takes the fused attention of NVIDIA GPUs.
Deliberate differences: as in configs/coco_detectron2.py.
"""

from typing import Any

from ml_collections import ConfigDict

from mask_rcnn_jax.configs import coco_detectron2
from mask_rcnn_jax.models.build import named_section

# variant: what it is, and the box and mask AP published for COCO val2017, in percent
SYSTEMS = {
    "": ("detectron2 ViTDet, ViT-B", 51.6, 45.9),
    "l": ("detectron2 ViTDet, ViT-L", 55.5, 49.2),
    "h": ("detectron2 ViTDet, ViT-H", 56.7, 50.2),
    "cascade_b": ("ViTDet with a cascade, ViT-B", 54.0, 46.7),
    "cascade_l": ("ViTDet with a cascade, ViT-L", 57.6, 50.0),
    "cascade_h": ("ViTDet with a cascade, ViT-H", 58.7, 51.0),
}

STEPS, DECAYS, WARMUP = 184_375, (163_889, 177_546), 250  # of 100 epochs
TRUNKS: dict[str, dict[str, Any]] = {
    "b": dict(width=768, depth=12, num_heads=12, drop_path=0.1),
    "l": dict(width=1024, depth=24, num_heads=16, drop_path=0.4),
    "h": dict(width=1280, depth=32, num_heads=16, drop_path=0.5, exempt_from_decay=()),
}
EPOCHS = {"b": 100, "l": 100, "h": 75}
LAYER_DECAYS = {"b": 0.7, "l": 0.8, "h": 0.9}
VARIANTS = (*TRUNKS, *(f"cascade_{size}" for size in TRUNKS))


def get_config(variant: str = "b") -> ConfigDict:
    if variant not in VARIANTS:
        raise ValueError(f"coco_vitdet:{variant}: expected one of {list(VARIANTS)}")
    size = variant.removeprefix("cascade_")
    config = coco_detectron2.get_config()
    augment = ("horizontal_flip", "scale_jitter", "fixed_size_crop")
    config.data.update(image_size=(1024, 1024), short_sides=(), augment=augment)
    config.data.update(flip_probability=0.0)  # it comes first, before the crop
    config.data.fixed_size_crop.pad = False
    depth = TRUNKS[size]["depth"]
    every = depth // 4
    last = tuple(range(every - 1, depth, every))
    config.model.init_from = ""
    config.model.backbone = named_section("backbone", "vit", **TRUNKS[size], global_blocks=last)
    config.model.fpn = named_section("fpn", "simple")
    config.model.input.update(channel_order="rgb", std=(58.395, 57.12, 57.375), pad_multiple=0)
    config.model.rpn.num_convs = 2
    config.model.box_head.update(name="conv_fc", num_convs=4, num_fcs=1, norm="layer")
    config.model.mask_head.norm = "layer"
    if variant != size:
        config.model.box_head.class_agnostic = True
        config.model.cascade.fg_iou_thresh = (0.6, 0.7)
    steps = STEPS * EPOCHS[size] // 100
    config.optim.update(
        name="adamw",
        learning_rate=1e-4,
        reference_batch=64,
        weight_decay=0.1,
        decay_on=("kernel", "bias", "scale", "other"),
        layer_decay=LAYER_DECAYS[size],
        warmup_factor=0.001,
        warmup_until=WARMUP / STEPS,
        decay_at=tuple(step * EPOCHS[size] // 100 / steps for step in DECAYS),
    )
    config.train.update(batch_size=64, steps=steps, precision="auto")
    return config
