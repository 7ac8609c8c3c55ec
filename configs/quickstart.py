"""A small Mask R-CNN on generated images of shapes: the whole pipeline in minutes on two CPU cores.

    python -m mask_rcnn_jax.prepare shapes --data_dir data/shapes
    python -m mask_rcnn_jax.train --config configs/quickstart.py --workdir runs/quickstart

NVIDIA's recipe (configs/coco.py) made small: ResNet-10 with group norm from random weights and 192
channels in its last two stages, narrow heads, 128 x 128 pixels, Adam.

Measured on two cores of an Intel Xeon at 2.5 GHz, beside other work, JAX 0.10.2, 2026-11-28: box /
mask AP 0.603 / 0.621, 0.626 / 0.638 and 0.603 / 0.610 on the 60 held-out images with seeds 0 to 2,
in 128 to 137 processor seconds each, compilation and evaluation included.

`:long` is 600 steps of 8 images with 64 RoIs each and 512 channels in the last stage. Measured on
two idle AMD EPYC cores, 2026-11-26: box AP 0.633, mask AP 0.623 in 3 minutes with installation.
Recipes for other data and trunks start from it.
"""

from ml_collections import ConfigDict

from mask_rcnn_jax.configs import coco

# variant: what it is, and the box and mask AP published for COCO val2017, in percent
SYSTEMS = {
    "": ("a small model on generated images, in minutes on a CPU", None, None),
    "long": ("the same with a wider model, on more images", None, None),
}


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", "long"):
        raise ValueError(f"quickstart:{variant}: expected long or nothing")
    config = coco.get_config()
    config.data.update(
        tfds_dir="data/shapes/tfds",
        train_json="data/shapes/annotations/instances_train.json",
        train_images="data/shapes/train",
        val_json="data/shapes/annotations/instances_val.json",
        val_images="data/shapes/val",
    )
    config.data.update(image_size=(128, 128), max_instances=20)
    config.data.update(bad_annotations="error", num_workers=0)
    config.model.update(
        init_from="",
        backbone=dict(depth=10, norm="group", frozen_stages=0),
        fpn=dict(channels=64),
        anchors=dict(sizes=(16.0, 32.0, 64.0, 128.0, 256.0)),
        # Continuous boxes and pixel centers: half a pixel matters in small images.
        box_coder=dict(inclusive="none"),
        roi_align=dict(sampling_ratio=2, aligned=True),
        rpn=dict(
            channels=64,
            batch_size_per_image=64,
            pre_nms_topk_train=300,
            pre_nms_topk_test=300,
            post_nms_topk_train=100,
            post_nms_topk_test=100,
        ),
        sampling=dict(batch_size_per_image=64),
        box_head=dict(channels=256),
        mask_head=dict(channels=32),
    )
    config.optim.update(name="adamw", learning_rate=1e-3, reference_batch=8, warmup_until=1 / 12)
    config.optim.update(clip_norm=10.0, weight_decay=1e-2)
    config.train.update(batch_size=8, steps=600, precision="float32")
    config.train.update(log_every=20, checkpoint_every=200, eval_every=600)
    config.eval.update(batch_size=8, pictures=8, loss_images=16, paste="continuous")
    config.eval.update(score_threshold=0.05, pre_nms_topk=300, detections_per_image=20)
    if not variant:
        _shorten(config)
    return config


def _shorten(config: ConfigDict) -> None:
    """Change what costs more time than it brings AP in the first minutes."""
    stages = {"res4": 192, "res4_0/conv1": 192, "res5": 192, "res5_0/conv1": 192}
    config.model.backbone.widths = tuple(stages.items())
    config.model.sampling.update(
        batch_size_per_image=32, positive_fraction=0.5, mask_rois_per_image=8
    )
    config.optim.update(learning_rate=1.5e-3, reference_batch=4, betas=(0.9, 0.99))
    config.optim.update(schedule="polynomial", power=0.5)
    config.train.update(batch_size=4, steps=660, log_every=30, checkpoint_every=220, eval_every=660)
    config.eval.update(loss_images=0, pictures=4)
