"""A search on Penn-Fudan at 128 x 208, from ImageNet weights: 12 trials of 240 steps at most.

    DATA=pennfudan WEIGHTS=resnet50.safetensors python examples/optuna_search.py \\
        benchmarks/search_pennfudan.py runs/search 12

DATA holds annotations/instances_train.json, train/ and the same of val, as in docs/results.md. The
model has a ResNet-50 and quickstart's narrow heads, so that a trial takes minutes on two cores.
"""

import os

from ml_collections import ConfigDict

from mask_rcnn_jax.configs import quickstart

STEPS = 240


def get_config() -> ConfigDict:
    config, data = quickstart.get_config("long"), os.environ["DATA"]
    for split in ("train", "val"):
        annotations = f"{data}/annotations/instances_{split}.json"
        config.data.update({f"{split}_json": annotations, f"{split}_images": f"{data}/{split}"})
    config.data.update(image_size=(128, 208), resize="shortest_edge")
    config.model.init_from = os.environ["WEIGHTS"]
    config.model.backbone = dict(depth=50, norm="affine", frozen_stages=2)
    config.optim.update(name="sgd", reference_batch=2, weight_decay=1e-4, warmup_until=0.1)
    config.train.update(batch_size=2, steps=STEPS, keep_checkpoints=1)
    config.train.update(eval_every=STEPS // 3, checkpoint_every=STEPS // 3)
    config.eval.update(loss_images=0, pictures=0)
    return config
