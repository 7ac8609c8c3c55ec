"""Mask R-CNN R-50-FPN on LVIS v1: 1203 classes, rare ones among them.

    python -m mask_rcnn_jax.train --config configs/lvis.py --workdir runs/lvis
    python -m mask_rcnn_jax.evaluate --config configs/lvis.py --results results.json --output out

`1x` is detectron2's configs/LVISv1-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml, 180,000 steps
of 16 images on eight GPUs, from its R-50.pkl: softmax over all classes. `:lsj_100ep` has the strong
model of configs/coco_detectron2.py, from random weights, with the classifier, data and schedule of
projects/ViTDet/configs/LVIS (100 epochs of 64 images): a sigmoid per class, and a federated loss
over 50 classes per image. AP not measured here; detectron2 publishes none for either.

Both repeat images of rare classes (data.repeat_threshold) and are scored by LVIS's rules. Images of
both splits are in COCO's folders: data/coco/train2017, data/coco/val2017.

Deliberate differences, besides those in configs/coco_detectron2.py: the classes in the federated
loss are drawn for each image, as detectron2 does with one image on a GPU, for any number of images
on a device; at most 300 objects per image are trained on.
"""

from ml_collections import ConfigDict

from mask_rcnn_jax.configs import coco_detectron2

# variant: what it is, and the box and mask AP published for COCO val2017, in percent
SYSTEMS = {
    "": ("detectron2 LVISv1-InstanceSegmentation/mask_rcnn_R_50_FPN_1x (LVIS)", None, None),
    "lsj_100ep": ("LVIS with the strong model and ViTDet's federated loss", None, None),
}

VARIANTS = ("1x", "lsj_100ep")
DATA = dict(
    train_json="data/lvis/lvis_v1_train.json",
    train_images="data/coco",
    val_json="data/lvis/lvis_v1_val.json",
    val_images="data/coco",
    tfds_dir="data/lvis/tfds",
    max_instances=300,
    repeat_threshold=0.001,
)


def get_config(variant: str = "1x") -> ConfigDict:
    if variant not in VARIANTS:
        raise ValueError(f"lvis:{variant}: expected one of {list(VARIANTS)}")
    config = coco_detectron2.get_config(variant)
    set_lvis(config)
    if variant == "1x":
        _set_steps(config, 180_000, decays=(120_000, 160_000), warmup=1000)
        config.eval.score_threshold = 0.0001
    else:
        set_federated_loss(config)
        warmup = coco_detectron2.LSJ_WARMUP
        _set_steps(config, 156_250, decays=(138_889, 150_463), warmup=warmup)
    return config


def set_lvis(config: ConfigDict) -> None:
    """Train and score a COCO recipe on LVIS."""
    config.data.update(DATA)
    config.train.eval_every = 30_000
    config.eval.update(protocol="lvis", detections_per_image=300)


def set_federated_loss(config: ConfigDict) -> None:
    """Classify as detectron2's ViTDet on LVIS."""
    config.model.classifier.update(kind="sigmoid", federated_classes=50, frequency_power=0.5)
    config.eval.score_threshold = 0.02


def _set_steps(config: ConfigDict, steps: int, decays: tuple[int, int], warmup: int) -> None:
    config.train.steps = steps
    config.optim.update(warmup_until=warmup / steps)
    config.optim.decay_at = tuple(step / steps for step in decays)
