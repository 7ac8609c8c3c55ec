"""A run of which every part is the user's own: both datasets, augmentation, optimizer, logger.

python -m tests.training.own_run WORKDIR --coordinator_address=... ; `test_train_call.py` starts it
twice, and uses its parts in one process.
"""

import numpy as np
import optax

from mask_rcnn_jax import cli
from mask_rcnn_jax.cli import processes
from mask_rcnn_jax.data.augment import Example
from mask_rcnn_jax.training.loop import train
from tests import small_trunk
from tests.helpers import tiny_config
from tests.memory_set import ShapeSet

STEPS = 6


def sets(train=10, val=4):
    return {"train_set": ShapeSet("train", train), "val_set": ShapeSet("val", val)}


def small_config(**train):
    config = tiny_config()
    config.model.num_classes = 0
    config.model.backbone = small_trunk.SECTION
    config.model.mask_head.num_convs = 1
    config.data.update(max_instances=6, image_size=(64, 64))
    config.train.update(
        batch_size=4, steps=STEPS, log_every=1, checkpoint_every=3, eval_every=STEPS, **train
    )
    config.eval.update(loss_images=0, pictures=1, score_threshold=0.0)
    return config


def mirror_and_shade(example: Example, rng: np.random.Generator) -> Example:
    """Mirror half of the images, and change the brightness of all."""
    height, width = example.image.shape[:2]
    image, objects = example.image, example.objects
    if rng.random() < 0.5:
        image = image[:, ::-1]
        objects = tuple(o.with_mask(o.mask(height, width)[:, ::-1]) for o in objects)
    shade = rng.uniform(-30, 30)
    return Example(np.clip(image + shade, 0, 255).astype(np.uint8), objects)


def cosine_sgd(steps: int = STEPS) -> optax.GradientTransformation:
    """SGD whose rate can be seen in the metrics."""
    schedule = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, steps)
    sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=schedule, momentum=0.9)
    return optax.chain(optax.clip_by_global_norm(10.0), sgd)


def main(arguments) -> None:
    (workdir,) = arguments
    calls = []
    train(
        small_config(), workdir, **sets(), augment=mirror_and_shade, optimizer=cosine_sgd(),
        loggers=[lambda step, metrics, images: calls.append(step)],
    )  # fmt: skip
    print(f"logged {len(calls)} times", flush=True)


if __name__ == "__main__":
    cli.run(main, processes.define_processes, positional=True)
