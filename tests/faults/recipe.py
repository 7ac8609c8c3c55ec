"""The recipe of the stubbed runs: small images, short intervals; the data come as flags."""

from tests.helpers import tiny_config


def get_config():
    config = tiny_config()
    config.model.num_classes = 0
    config.model.backbone.update(norm="group", frozen_stages=0)
    config.data.update(max_instances=6, num_workers=0)
    config.train.update(
        batch_size=4, steps=24, log_every=1, checkpoint_every=3, eval_every=8, keep_checkpoints=2
    )
    config.eval.update(batch_size=4, loss_images=4, pictures=2, score_threshold=0.0)
    return config
