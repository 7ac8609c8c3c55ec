"""Nuclei in fluorescence microscopy: the model of `mask-rcnn-jax demo`, from random weights.

    python -m mask_rcnn_jax.train --config nuclei --workdir runs/nuclei

`quickstart:long` for images of 256 x 256 pixels with up to a hundred nuclei, which it sees
enlarged by half, and with a narrower ResNet-10, so that the weights are small enough to ship.
docs/results.md has the data, what was measured, and how the weights are made.
"""

from ml_collections import ConfigDict

from mask_rcnn_jax.configs import quickstart

# variant: what it is, and the box and mask AP published for COCO val2017, in percent
SYSTEMS = {"": ("nuclei in fluorescence microscopy, from random weights", None, None)}


def get_config() -> ConfigDict:
    config = quickstart.get_config("long")
    config.data.update(
        tfds_dir="data/nuclei/tfds",
        train_json="data/nuclei/annotations/instances_train.json",
        train_images="data/nuclei/train",
        val_json="data/nuclei/annotations/instances_val.json",
        val_images="data/nuclei/val",
    )
    config.data.update(image_size=(384, 384), max_instances=128)
    config.data.augment = ("vertical_flip", "quarter_turns", "brightness", "contrast")
    config.model.input.update(mean=(50.0, 50.0, 50.0), std=(60.0, 60.0, 60.0))
    stages = {"res4": 192, "res4_0/conv1": 192, "res5": 192, "res5_0/conv1": 192}
    config.model.backbone.widths = tuple(stages.items())
    config.model.anchors.sizes = (20.0, 40.0, 80.0, 160.0, 320.0)
    config.model.anchors.aspect_ratios = ((0.6, 0.6), (1.0, 1.0), (1.6, 1.6))
    config.model.rpn.update(
        batch_size_per_image=256,
        pre_nms_topk_train=1000,
        pre_nms_topk_test=1000,
        post_nms_topk_train=400,
        post_nms_topk_test=400,
    )
    config.model.sampling.batch_size_per_image = 128
    config.optim.update(reference_batch=2, warmup_until=0.05, schedule="cosine")
    config.train.update(batch_size=2, steps=880, eval_every=880)
    config.eval.update(batch_size=2, pre_nms_topk=400, detections_per_image=200)
    return config
