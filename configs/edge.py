"""A small Mask R-CNN for CPUs and small GPUs, made for int8, on your own dataset.

    python -m mask_rcnn_jax.train --config edge --workdir runs/edge \\
        --config.data.train_json=train.json --config.data.train_images=train \\
        --config.data.val_json=val.json --config.data.val_images=val \\
        --config.model.init_from=weights/mobilenetv4_conv_small.safetensors
    python -m mask_rcnn_jax.export --workdir runs/edge --format onnx --int8 \\
        --calibration train --output exported

MobileNetV4-Conv-S, a pyramid and an RPN of 64 channels, 100 proposals and 2 convolutions of 64
channels in the mask head, on canvases of 320 x 320 pixels. `:small_640` and `:medium_640` have
640 x 640, the latter MobileNetV4-Conv-M. docs/edge.md has the times and the reasons.

configs/finetune.py with these differences: batch norm that learns, because the trunk starts from a
classifier or from random weights, and all stages; AdamW and a cosine; as many epochs as small sets
need. AP was not measured on COCO.
"""

from typing import Any

from ml_collections import ConfigDict

from mask_rcnn_jax.configs import finetune
from mask_rcnn_jax.models.build import named_section

# variant: what it is, and the box and mask AP published for COCO val2017, in percent
SYSTEMS = {
    "": ("a small model for CPUs and small GPUs, 320 pixels", None, None),
    "small_640": ("edge with 640 pixels", None, None),
    "medium_640": ("edge with 640 pixels and a medium trunk", None, None),
}

# Trunk, side of the canvas, smallest anchor, channels of the pyramid, width of the box head.
VARIANTS: dict[str, tuple[str, int, float, int, int]] = {
    "": ("small", 320, 16.0, 64, 256),
    "small_640": ("small", 640, 24.0, 64, 256),
    "medium_640": ("medium", 640, 24.0, 96, 512),
}


def get_config(variant: str = "") -> ConfigDict:
    if variant not in VARIANTS:
        raise ValueError(f"edge:{variant}: expected small_640, medium_640 or nothing")
    trunk, side, anchor, channels, width = VARIANTS[variant]
    config = finetune.get_config()
    config.data.update(resize="fit", image_size=(side, side), max_instances=50, mask_size=56)
    config.data.augment = ("brightness", "contrast")
    options: dict[str, Any] = dict(size=trunk, norm="sync_batch", frozen_stages=0)
    config.model.init_from = ""
    config.model.backbone = named_section("backbone", "mobilenetv4", **options)
    config.model.input.pad_multiple = 0  # maps cover the canvas: nothing is masked
    config.model.fpn.update(channels=channels, norm="sync_batch")
    config.model.anchors.sizes = tuple(anchor * 2**level for level in range(5))
    config.model.rpn.update(channels=channels, num_convs=1, batch_size_per_image=128)
    config.model.rpn.update(pre_nms_topk_train=500, post_nms_topk_train=300)
    config.model.rpn.update(pre_nms_topk_test=300, post_nms_topk_test=100)
    config.model.sampling.batch_size_per_image = 64
    config.model.box_head = named_section("box_head", "two_fc", channels=width)
    config.model.mask_head.update(channels=64, num_convs=2, norm="none")
    config.optim.update(name="adamw", learning_rate=1e-3, reference_batch=16, weight_decay=0.05)
    config.optim.update(decay_on=("kernel",), schedule="cosine")
    config.train.update(batch_size=16, epochs=50.0, precision="auto")
    config.eval.update(detections_per_image=50, pre_nms_topk=300, batch_size=8)
    return config
