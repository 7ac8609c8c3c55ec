"""Keypoint R-CNN R-50-FPN on COCO 2017's people, torchvision's recipe (keypointrcnn_resnet50_fpn)
and detectron2's (keypoint_rcnn_R_50_FPN_1x and 3x): boxes and 17 keypoints, no masks.

    python -m mask_rcnn_jax.train --config configs/coco_keypoints.py --workdir runs/keypoints
    python -m mask_rcnn_jax.infer --config configs/coco_keypoints.py:coco_v1 \\
        --weights weights/keypointrcnn_resnet50_fpn_coco-fc266e95.pth --input photo.jpg --output out

Not measured here. torchvision publishes box AP 54.6 and keypoint AP 65.0, detectron2 53.6 and 64.0
(`:detectron2`), 55.4 and 65.5 (`:detectron2_3x`). `:coco_v1` is for torchvision's published
weights, from which it starts, and whose batch norm has no epsilon; the others start from the
ResNet-50 of their system.

Deliberate differences: those of configs/coco_torchvision.py and configs/coco_detectron2.py.
"""

from ml_collections import ConfigDict

from mask_rcnn_jax.annotations.keypoints import PERSON
from mask_rcnn_jax.configs import coco_detectron2, coco_torchvision
from mask_rcnn_jax.models.build import named_section

# variant: what it is, and the box and mask AP published for COCO val2017, in percent
SYSTEMS = {
    "": ("torchvision keypointrcnn_resnet50_fpn, keypoint AP 65.0", 54.6, None),
    "coco_v1": ("torchvision keypointrcnn_resnet50_fpn, for its COCO weights", 54.6, None),
    "detectron2": ("detectron2 keypoint_rcnn_R_50_FPN_1x, keypoint AP 64.0", 53.6, None),
    "detectron2_3x": ("detectron2 keypoint_rcnn_R_50_FPN_3x, keypoint AP 65.5", 55.4, None),
}

EPOCHS, EPOCH = 46, 64_115 // 16  # steps, of all images with people


def get_config(variant: str = "") -> ConfigDict:
    if variant not in SYSTEMS:
        raise ValueError(
            f"coco_keypoints:{variant}: expected one of {list(SYSTEMS)[1:]} or nothing"
        )
    is_detectron2 = variant.startswith("detectron2")
    config = _detectron2(variant) if is_detectron2 else _torchvision(variant)
    config.data.update(
        tfds_dir="",
        train_json="data/coco/annotations/person_keypoints_train2017.json",
        val_json="data/coco/annotations/person_keypoints_val2017.json",
        keypoints=PERSON,
    )
    score = "softmax" if is_detectron2 else "logit"
    head = named_section("keypoint_head", "conv_deconv", num_keypoints=len(PERSON), score=score)
    config.model.update(num_classes=1, mask_head=dict(name="none"))
    config.model.keypoint_head = head
    return config


def _torchvision(variant: str) -> ConfigDict:
    config = coco_torchvision.get_config(variant)
    if variant == "coco_v1":
        config.model.init_from = "keypointrcnn_resnet50_fpn_coco"
    config.data.update(class_ids="contiguous", min_keypoints=10)
    config.data.short_sides = (640, 672, 704, 736, 768, 800)
    steps = EPOCHS * EPOCH
    config.optim.update(warmup_until=1000 / steps, decay_at=(36 / EPOCHS, 43 / EPOCHS))
    config.train.update(steps=steps, eval_every=EPOCH)
    return config


def _detectron2(variant: str) -> ConfigDict:
    config = coco_detectron2.get_config("3x" if variant.endswith("3x") else "1x")
    config.data.update(max_vertices=0, keypoint_offset=0.5, min_keypoints=1)
    config.model.mask_targets.kind = "crops"  # of no mask head
    config.model.rpn.post_nms_topk_train = 1500
    config.loss.box_beta = 0.5
    return config
