"""Fine-tune on your own dataset: a starting point for 50 to 50,000 images.

    python -m mask_rcnn_jax.prepare check --json train.json --images train
    python -m mask_rcnn_jax.train --config configs/finetune.py --workdir runs/mine \\
        --config.data.train_json=train.json --config.data.train_images=train \\
        --config.data.val_json=val.json --config.data.val_images=val

Not measured here with these weights.

torchvision's model of version 2 (configs/coco_torchvision.py:v2) from its COCO weights; layers
sized by the class count are reinitialized. Ten epochs at a small rate, each followed by an
evaluation; below 200 images more are needed, as `prepare stats` and `train` say. On a CPU use
smaller images: --config.data.image_size="(320, 512)".

Deliberate differences to training from random weights: norms keep the statistics of the weights,
since those of a few images are noise, and learn scales and biases alone; stem and res2 are frozen;
the new layers start near zero, not with torchvision's deviation of 1 in the mask predictor of a
single class; gradients are clipped; large JPEGs are decoded at a part of their size.
"""

from ml_collections import ConfigDict

from mask_rcnn_jax.configs import coco_torchvision

# variant: what it is, and the box and mask AP published for COCO val2017, in percent
SYSTEMS = {
    "": ("torchvision's version 2 on your own dataset", None, None),
}


def get_config() -> ConfigDict:
    config = coco_torchvision.get_config("v2")
    config.model.init_from = "maskrcnn_resnet50_fpn_v2_coco"
    for name in ("backbone", "fpn", "box_head", "mask_head"):
        config.model[name].norm = "affine"
    config.model.backbone.frozen_stages = 2
    config.model.box_head.predictor_init = config.model.mask_head.predictor_init = "normal"
    config.data.update(tfds_dir="tfds", train_json="train.json", train_images="train")
    config.data.update(val_json="val.json", val_images="val", image_dtype="uint8", num_workers=4)
    # "contiguous": your category ids may be anything.
    config.data.update(class_ids="contiguous", bad_annotations="error", augment=())
    config.data.keep_empty = True  # negative examples
    config.data.scaled_decoding = True  # photos may be far larger than the canvas
    config.optim.update(learning_rate=0.005, reference_batch=4, weight_decay=1e-4, clip_norm=10.0)
    config.optim.update(decay_on=("kernel", "kernel_bias"))
    config.optim.update(warmup_until=0.05, decay_at=(0.7, 0.9))
    config.train.update(batch_size=4, epochs=10.0, log_every=20, checkpoint_every=500, eval_every=0)
    config.eval.update(loss_images=100, pictures=8)
    return config
