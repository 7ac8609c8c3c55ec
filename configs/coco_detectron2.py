"""Mask R-CNN R-50-FPN on COCO 2017, detectron2's recipe (mask_rcnn_R_50_FPN_1x and 3x).

    python -m mask_rcnn_jax.train --config configs/coco_detectron2.py:3x --workdir runs/d2_3x \\
        --config.model.init_from=weights/R-50.pkl
    python -m mask_rcnn_jax.infer --config configs/coco_detectron2.py \\
        --weights weights/model_final_f10217.pkl --input photo.jpg --output out

Not measured here. detectron2 publishes box AP 38.6 and mask AP 35.2 (1x), 41.0 and 37.2 (3x).

Deliberate differences: RoIAlign uses at most 16 x 16 points per bin, exceeded only by boxes longer
than 112 cells on their level; objects with more than 512 polygon vertices use mask crops; training
uses at most 100 objects per image; detection considers the best 4096 scores over all classes.
"""

from ml_collections import ConfigDict

from mask_rcnn_jax.configs import base

# variant: steps, decay steps
SCHEDULES = {"1x": (90_000, (60_000, 80_000)), "3x": (270_000, (210_000, 250_000))}


def get_config(variant: str = "1x") -> ConfigDict:
    if variant not in SCHEDULES:
        raise ValueError(f"coco_detectron2:{variant}: expected one of {list(SCHEDULES)}")
    steps, decays = SCHEDULES[variant]
    config = base.get_config()
    config.data.update(resize_rounding="round", antialias=True, max_vertices=512, keep_empty=False)
    config.data.short_sides = (640, 672, 704, 736, 768, 800)
    config.model.update(
        input=dict(channel_order="bgr", std=(1.0, 1.0, 1.0)),
        backbone=dict(stride_in="1x1"),
        roi_align=dict(sampling_ratio=0, max_sampling_ratio=16, aligned=True, min_size=0.0),
        mask_head=dict(predictor_init="normal"),
        mask_targets=dict(kind="polygons"),
    )
    config.loss.update(
        rpn_cls_average="budget", rpn_box_average="budget", rpn_box_beta=0.0, box_beta=0.0
    )
    config.optim.update(warmup_until=1000 / steps, decay_at=tuple(step / steps for step in decays))
    config.train.update(steps=steps, checkpoint_every=5000)
    config.eval.paste = "continuous"
    return config
