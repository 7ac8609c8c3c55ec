"""Mask R-CNN R-50-FPN on COCO 2017, NVIDIA's TensorFlow 1 recipe.

    python -m mask_rcnn_jax.train --config configs/coco_nvidia_tf1.py --workdir runs/tf1

Not measured here. NVIDIA publishes box AP 37.77 and mask AP 34.35 (TF32, June 2020).

Changes the TensorFlow 2 recipe (configs/coco.py) as below. Deliberate differences are the same for
classes, pixels, mask crops, bfloat16, detection's 4096 scores, empty rows and a ground truth
without overlap. Its scripts, unlike its defaults, also run NMS over all anchors. The schedule is
for eight GPUs with four images each; on one GPU with four images theirs uses rate 0.005, which the
linear rule gives too. It starts from torchvision's ResNet-50, which learned with padding on both
sides of the max pooling and an epsilon of 1e-5; theirs starts from Google's, a folder of files:
--config.model.init_from=weights/resnet-nhwc-2018-02-07/model.ckpt-112603.
"""

from ml_collections import ConfigDict

from mask_rcnn_jax.configs import coco

# variant: what it is, and the box and mask AP published for COCO val2017, in percent
SYSTEMS = {
    "": ("NVIDIA DeepLearningExamples, TensorFlow 1", 37.77, 34.35),
}

STEPS = 45_000


def get_config() -> ConfigDict:
    config = coco.get_config()
    # Strided convolutions pad both sides, max pooling does not.
    config.model.backbone.update(norm_eps=1e-4, padding="torch")
    config.optim.update(warmup_until=1000 / STEPS, decay_at=(30_000 / STEPS, 40_000 / STEPS))
    config.optim.update(rate_in_velocity=False, bias_lr_factor=2.0, loss_scale=2.0**12)
    config.train.update(steps=STEPS, eval_every=2500, checkpoint_every=3696)
    return config
