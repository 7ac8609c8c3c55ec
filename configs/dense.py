"""Hundreds to thousands of small objects in an image: cells, nuclei, trees, panels, ore.

    python -m mask_rcnn_jax.prepare stats --config dense --json train.json --images train \\
        --output stats.html
    python -m mask_rcnn_jax.train --config dense --workdir runs/dense \\
        --config.data.train_json=train.json --config.data.train_images=train \\
        --config.data.val_json=val.json --config.data.val_images=val

configs/finetune.py for up to 2,000 objects in images of 1,024 x 1,024; docs/dense_images.md has the
reason for each entry. `:scratch` starts from random weights, `:small` too, with a model that a
laptop trains in minutes. Not measured here with pretrained weights; docs/dense_images.md has
figures of `:small`.
"""

from ml_collections import ConfigDict

from mask_rcnn_jax.configs import finetune

# variant: what it is, and the box and mask AP published for COCO val2017, in percent
SYSTEMS = {
    "": ("finetune for hundreds to thousands of objects in an image", None, None),
    "scratch": ("dense from random weights", None, None),
    "small": ("dense with a small model, from random weights", None, None),
}

SIZE, CROP = (1024, 1024), (512, 512)


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", "scratch", "small"):
        raise ValueError(f"dense:{variant}: expected scratch, small or nothing")
    config = finetune.get_config()
    # Training sees windows of the images at the scale of evaluation, which sees them whole.
    config.data.update(resize="fit", image_size=SIZE, resize_rounding="floor")
    config.data.augment = ("scale_jitter", "fixed_size_crop", "quarter_turns")
    config.data.scale_jitter.update(size=SIZE, scales=(0.8, 1.25), rounding="round")
    config.data.fixed_size_crop.update(size=CROP, boxes="tight", rounding="round")
    config.data.update(max_instances=1000, mask_size=56, scaled_decoding=False)
    config.model.anchors.update(sizes=(12.0, 24.0, 48.0, 96.0, 192.0), rounding="none")
    config.model.anchors.aspect_ratios = ((0.79, 0.79), (1.0, 1.0), (1.26, 1.26))
    config.model.rpn.update(batch_size_per_image=1024, nms_thresh=0.8)
    config.model.rpn.update(pre_nms_topk_train=4000, post_nms_topk_train=2000)
    config.model.rpn.update(pre_nms_topk_test=8000, post_nms_topk_test=4000)
    config.model.sampling.update(batch_size_per_image=1024, positive_fraction=0.5)
    config.optim.update(warmup_until=0.1, decay_at=(0.7, 0.9))
    config.train.update(epochs=0.0, steps=5000, checkpoint_every=500, eval_every=500)
    config.train.precision = "auto"
    config.eval.update(detections_per_image=2500, pre_nms_topk=6000, loss_images=20)
    config.eval.paste = "continuous"
    if variant:
        _start_anew(config)
    if variant == "small":
        _make_small(config)
    return config


def _start_anew(config: ConfigDict) -> None:
    """Random weights: norms that need no large batch, and everything learns."""
    config.model.init_from = ""
    config.model.backbone.update(norm="group", frozen_stages=0)
    for name in ("fpn", "box_head", "mask_head"):
        config.model[name].norm = "group"
    # No weights need torchvision's pixels; half of one matters in small objects.
    config.model.anchors.update(center=0.5, stride="level")
    config.model.roi_align.aligned = True
    config.model.input.pad_multiple = 0
    config.optim.update(name="adamw", learning_rate=3e-4, reference_batch=4, weight_decay=1e-2)
    config.train.steps = 20_000


def _make_small(config: ConfigDict) -> None:
    """For CPUs: a ResNet-10, narrow heads and windows of 256 x 256."""
    config.data.fixed_size_crop.size = (256, 256)
    config.data.max_instances = 400
    config.model.backbone.depth = 10
    config.model.fpn.channels = 64
    config.model.rpn.update(channels=64, num_convs=1, batch_size_per_image=512)
    config.model.rpn.update(pre_nms_topk_train=1000, post_nms_topk_train=600)
    # Learned from in minutes: windows at the size of evaluation, and cheap steps with background.
    config.data.scale_jitter.scales = (1.0, 1.0)
    config.model.sampling.update(batch_size_per_image=128, positive_fraction=0.25)
    config.model.box_head.update(num_convs=0, channels=256)
    config.model.mask_head.channels = 32
    # Heads without norms learn more in the few hundred steps of minutes.
    for name in ("fpn", "box_head", "mask_head"):
        config.model[name].norm = "none"
    config.optim.update(learning_rate=1e-3, schedule="cosine", warmup_until=0.05)
    config.train.update(steps=2000, eval_every=1000)
