"""Every recipe on real COCO images: twenty steps with a falling loss, then an evaluation."""

import numpy as np
import pytest

from mask_rcnn_jax.config import load_tree
from mask_rcnn_jax.training.loop import train
from mask_rcnn_jax.training.metrics import read_metrics
from tests.helpers import shared
from tests.test_recipes import SYSTEMS


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SYSTEMS, "coco_detectron2:3x", "finetune"])
def test_a_recipe_learns(name, tmp_path):
    """Sizes and the rate fit two cores, colors the weights at hand, which are torchvision's; what
    else makes up the recipe stays."""
    config = load_tree(name)
    annotations = str(shared("data/coco128/annotations/instances_train2017.json"))
    images = str(shared("data/coco128/train2017"))
    fit = config.data.resize == "fit"
    config.data.update(
        train_json=annotations, train_images=images, val_json=annotations, val_images=images,
        image_size=(192, 256) if fit else (160, 256), max_instances=20, num_workers=0,
        short_sides=(128, 160) if config.data.short_sides else (),
    )  # fmt: skip
    config.model.update(
        init_from=str(shared("data/weights/resnet50_imagenet.safetensors")),
        sampling=dict(batch_size_per_image=64),
        rpn=dict(
            pre_nms_topk_train=300,
            post_nms_topk_train=200,
            pre_nms_topk_test=200,
            post_nms_topk_test=100,
        ),
        input=dict(
            channel_order="rgb", mean=(123.675, 116.28, 103.53), std=(58.395, 57.12, 57.375)
        ),
    )
    config.optim.update(
        learning_rate=0.005, reference_batch=2, warmup_until=0.25, decay_at=(), decay_levels=()
    )
    config.train.update(
        batch_size=2, steps=20, epochs=0.0, eval_every=20, log_every=1, precision="float32"
    )
    config.eval.update(batch_size=2, max_images=4, loss_images=0, pictures=0)
    train(config, str(tmp_path))
    records = list(read_metrics(tmp_path / "metrics.jsonl"))
    losses = [record["loss/total"] for record in records if "loss/total" in record]
    assert len(losses) == 20 and np.isfinite(losses).all()
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:3]), losses
    assert 0 <= records[-1]["ap/box"] <= 1
