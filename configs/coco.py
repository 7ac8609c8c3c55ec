"""Mask R-CNN R-50-FPN on COCO 2017, NVIDIA's TensorFlow 2 recipe (mrcnn_tf2).

    python -m mask_rcnn_jax.train --config configs/coco.py --workdir runs/coco

Not measured here. NVIDIA publishes box AP 37.96 and mask AP 34.44 for 12 epochs on eight A100.

`:buckets` is not NVIDIA's: short sides of 800 pixels, as torchvision and detectron2 have them, on
six canvases, each of which compiles its own step. Portraits keep their size, and 14 % fewer pixels
are computed than on 832 x 1344 (388 images of COCO).

Deliberate differences, where NVIDIA's page and code disagree or the code misses its evident intent:
  * a real pre-NMS top-k, 2000 (training) and 1000 (test) boxes per level, as their page says; their
    code passes that number to NMS as an output limit and searches every anchor;
  * a learning rate scaled by the global batch; theirs uses the batch per GPU, so that a single GPU
    trains at eight times the proper rate;
  * it starts from torchvision's ResNet-50, which learned with padding on both sides, so that maps
    shift by a pixel in each strided layer. NVIDIA's own is on NGC, which may ask for a login:
    --config.model.init_from=weights/nvidia_rn50_tf_amp names its files;
  * ImageNet weights are loaded before the first step; theirs arrive after it;
  * classes are the json's categories in id order, without the 11 unused COCO ids (with
    data.class_ids=raw they are kept, for weights with 91 outputs);
  * resized pixels are rounded to whole numbers; a ground truth without overlap claims no anchor;
  * ground-truth masks are drawn from polygons directly into their 112 x 112 crop and sampled at
    pixel centers;
  * bfloat16 instead of float16 with loss scaling;
  * detection considers the best 4096 scores over all classes, theirs 1000 per class;
  * in images with too few RoIs, empty rows are ignored; theirs train as background.
As in their code: losses normalized over the images on one device, one fixed canvas for landscape
and portrait, anchors encoded without the +1 assumed in decoding, RPN box targets for all matched
anchors, RoIAlign with one point per bin, P2 to P6, no score threshold, stem and res2 frozen from
the start.
"""

from ml_collections import ConfigDict

from mask_rcnn_jax.configs import base

# variant: what it is, and the box and mask AP published for COCO val2017, in percent
SYSTEMS = {
    "": ("NVIDIA DeepLearningExamples, TensorFlow 2", 37.96, 34.44),
    "buckets": ("NVIDIA's TensorFlow 2 recipe with more canvases", None, None),
}

EPOCH = 118_287 // 32  # steps at the reference batch
# Of photos of 4:3 and 3:2, which most are.
BUCKETS = ((832, 1088), (832, 1216), (1088, 832), (1216, 832))


def get_config(variant: str = "") -> ConfigDict:
    if variant not in ("", "buckets"):
        raise ValueError(f"coco:{variant}: expected buckets or nothing")
    config = base.get_config()
    config.data.update(image_size=(832, 1344), resize="fit")
    if variant == "buckets":
        config.data.update(image_size=(800, 1333), resize="shortest_edge", canvases=BUCKETS)
    config.model.update(
        init_from="resnet50",
        input=dict(pad_multiple=0),
        backbone=dict(padding="same", pool_padding="same"),
        fpn=dict(init="glorot"),
        anchors=dict(aspect_ratios=((1.0, 1.0), (1.4, 0.7), (0.7, 1.4)), center=0.5),
        box_coder=dict(inclusive="decoder"),
        rpn=dict(low_quality="best", min_size=-1.0),
        sampling=dict(fg_strict=True),
        roi_align=dict(max_level=6, sampling_ratio=1, border="clamp", min_size=0.0),
        box_head=dict(fc_init="glorot"),
    )
    config.loss.update(rpn_cls_average="budget", rpn_box_loss="huber", box_average="foreground")
    config.loss.rpn_box_average = "matched_per_level"
    config.optim.update(learning_rate=0.04, reference_batch=32, rate_in_velocity=True)
    config.optim.update(warmup_until=0.3 / 12, warmup_factor=0.0, decay_at=(8 / 12, 10 / 12))
    config.optim.update(decay_on=("kernel",), loss_scale=2.0**15)
    config.train.update(batch_size=32, steps=12 * EPOCH, precision="auto", eval_every=EPOCH)
    config.eval.update(batch_size=8, score_threshold=0.0)
    return config
