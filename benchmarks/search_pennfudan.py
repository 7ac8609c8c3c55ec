"""A search on Penn-Fudan at 128 x 208, from ImageNet weights: 12 trials of 90 steps at most.

    DATA=pennfudan WEIGHTS=resnet50.safetensors python examples/optuna_search.py \\
        benchmarks/search_pennfudan.py runs/search 12

DATA holds annotations/instances_train.json, train/ and the same of val, as in docs/results.md.
"""

import os

from ml_collections import ConfigDict

from mask_rcnn_jax.configs import finetune


def get_config() -> ConfigDict:
    config, data = finetune.get_config(), os.environ["DATA"]
    for split in ("train", "val"):
        annotations = f"{data}/annotations/instances_{split}.json"
        config.data.update({f"{split}_json": annotations, f"{split}_images": f"{data}/{split}"})
    config.data.update(image_size=(128, 208), max_instances=20, num_workers=0)
    config.model.init_from = os.environ["WEIGHTS"]
    config.model.sampling.batch_size_per_image = 32
    config.train.update(epochs=0.0, steps=90, batch_size=2, eval_every=30, checkpoint_every=30)
    config.train.keep_checkpoints = 1
    config.eval.update(loss_images=0, pictures=0, detections_per_image=20)
    return config
