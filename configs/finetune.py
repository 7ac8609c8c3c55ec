"""Fine-tune on a data set of your own: what to start from, for 50 to 50,000 images.

    python -m mask_rcnn_jax.prepare check --json train.json --images train
    python -m mask_rcnn_jax.train --config configs/finetune.py --workdir runs/mine \\
        --config.data.train_json=train.json --config.data.train_images=train \\
        --config.data.val_json=val.json --config.data.val_images=val \\
        --config.model.init_from=weights/maskrcnn_resnet50_fpn_coco-bf2d0c1e.pth

Not measured here with these weights; docs/results.md has a run of the same model from ImageNet's.

torchvision's model (configs/coco_torchvision.py:coco_v1), so that its COCO weights fit; the layers
whose size follows the number of classes start anew. Ten epochs at a small rate, evaluated after
each. On a CPU make the pictures smaller: --config.data.image_size="(320, 512)".
"""

from ml_collections import ConfigDict

from mask_rcnn_jax.configs import coco_torchvision


def get_config() -> ConfigDict:
    config = coco_torchvision.get_config("coco_v1")
    config.data.update(
        tfds_dir="tfds",
        train_json="train.json",
        train_images="train",
        val_json="val.json",
        val_images="val",
        class_ids="contiguous",  # one's own category ids may be anything
        bad_annotations="error",
        image_dtype="uint8",
        num_workers=4,
    )
    config.optim.update(
        learning_rate=0.005, reference_batch=4, warmup_until=0.05, decay_at=(0.7, 0.9)
    )
    config.train.update(batch_size=4, epochs=10.0, log_every=20, checkpoint_every=500, eval_every=0)
    config.eval.update(loss_images=100, pictures=8)
    return config
