"""Mask R-CNN R-50-FPN on COCO 2017, the recipe of NVIDIA's TensorFlow 2 example (mrcnn_tf2).

    python -m mask_rcnn_jax.train --config configs/coco.py --workdir runs/coco \\
        --config.model.init_from=weights/nvidia_rn50_tf_amp

Not measured here. NVIDIA publishes box AP 37.96 and mask AP 34.44 for 12 epochs on eight A100.

Where NVIDIA's page and code differ, or their code contradicts its evident intent, we chose:
  * a real pre-NMS top-k of 2000 (training) and 1000 (test) boxes a level, as their page says;
    their code hands that number to NMS as an output limit and searches every anchor;
  * a learning rate that follows the global batch; theirs follows the batch of one GPU, so that one
    GPU trains eight times too hot;
  * the ImageNet weights are there from the first step; theirs arrive after it;
  * classes are the json's categories in the order of their ids, without the 11 unused COCO ids
    (data.class_ids=raw has them, for weights with 91 outputs);
  * resized pixels are rounded to whole numbers; a ground truth without overlap claims no anchor;
  * ground-truth masks are drawn from the polygons straight into their 112 x 112 crop, and sampled
    at pixel centres;
  * bfloat16 in place of float16 with loss scaling;
  * detection considers the best 4096 scores of all classes, theirs 1000 of each class;
  * where an image has too few RoIs, the empty rows do not count; theirs train as background.
As in their code: losses normalised over the images of one device, one fixed canvas for landscape
and portrait, anchors encoded without the +1 that decoding assumes, RPN box targets of all matched
anchors, RoIAlign with one point a bin, P2 to P6, no score threshold, stem and res2 frozen from the
start.
"""

from ml_collections import ConfigDict

from mask_rcnn_jax.configs import base

EPOCH = 118_287 // 32  # steps at the reference batch


def get_config() -> ConfigDict:
    config = base.get_config()
    config.data.update(image_size=(832, 1344), resize="fit")
    config.model.update(
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
    config.loss.update(
        rpn_cls_average="budget",
        rpn_box_loss="huber",
        rpn_box_average="matched_per_level",
        box_average="foreground",
    )
    config.optim.update(
        learning_rate=0.04,
        reference_batch=32,
        warmup_until=0.3 / 12,
        warmup_factor=0.0,
        decay_at=(8 / 12, 10 / 12),
        rate_in_velocity=True,
        decay_on=("kernel",),
        loss_scale=2.0**15,
    )
    config.train.update(batch_size=32, steps=12 * EPOCH, precision="bfloat16", eval_every=EPOCH)
    config.eval.update(batch_size=8, score_threshold=0.0)
    return config
