"""Fine-tune on your own dataset: a starting point for 50 to 50,000 images.

    python -m mask_rcnn_jax.prepare check --json train.json --images train
    python -m mask_rcnn_jax.train --config configs/finetune.py --workdir runs/mine \\
        --config.data.train_json=train.json --config.data.train_images=train \\
        --config.data.val_json=val.json --config.data.val_images=val \\
        --config.model.init_from=weights/maskrcnn_resnet50_fpn_coco-bf2d0c1e.pth

Not measured here with these weights; docs/results.md has the same model trained from ImageNet's.

torchvision's model (configs/coco_torchvision.py:coco_v1), to fit its COCO weights; layers sized by
the class count are reinitialized. Ten epochs at a small rate, each followed by an evaluation. On a
CPU use smaller images: --config.data.image_size="(320, 512)".
"""

from ml_collections import ConfigDict

from mask_rcnn_jax.configs import coco_torchvision


def get_config() -> ConfigDict:
    config = coco_torchvision.get_config("coco_v1")
    config.data.update(tfds_dir="tfds", train_json="train.json", train_images="train")
    config.data.update(val_json="val.json", val_images="val", image_dtype="uint8", num_workers=4)
    # "contiguous": your category ids may be anything.
    config.data.update(class_ids="contiguous", bad_annotations="error")
    config.optim.update(learning_rate=0.005, reference_batch=4)
    config.optim.update(warmup_until=0.05, decay_at=(0.7, 0.9))
    config.train.update(batch_size=4, epochs=10.0, log_every=20, checkpoint_every=500, eval_every=0)
    config.eval.update(loss_images=100, pictures=8)
    return config
