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

EPOCH = 118_287 // 32  # steps at the reference batch


def get_config() -> ConfigDict:
    return ConfigDict(
        dict(
            data=dict(
                source="json",  # "tfds": the records in tfds_dir, in place of the next four
                tfds_dir="data/coco/tfds",  # as `prepare tfds` makes it
                train_json="data/coco/annotations/instances_train2017.json",
                train_images="data/coco/train2017",
                val_json="data/coco/annotations/instances_val2017.json",
                val_images="data/coco/val2017",
                class_ids="contiguous",  # "raw": class k is category id k
                image_size=(832, 1344),  # height, width of the canvas
                resize="fit",
                resize_rounding="floor",
                antialias=False,
                image_dtype="uint8",  # "float32" does not round resized pixels
                short_sides=(),  # short sides to draw from in training
                max_instances=100,
                mask_size=112,
                mask_frame="box",
                max_vertices=0,  # of an object's polygons, where the model draws them
                box_offset=0.0,
                keep_empty=True,
                skip_crowd=True,
                bad_annotations="skip",  # COCO has a few boxes without area
                flip_probability=0.5,
                num_workers=16,
            ),
            model=dict(
                num_classes=0,  # 0: as many as the json has
                init_from="",
                depth=50,
                norm="frozen",
                norm_eps=1e-5,
                stride_in="3x3",
                padding="same",
                pool_padding="same",
                frozen_stages=2,  # stem and res2
                channel_order="rgb",
                pixel_mean=(123.675, 116.28, 103.53),
                pixel_std=(58.395, 57.12, 57.375),
                pad_multiple=0,
                fpn_channels=256,
                fpn_init="glorot",
                anchor_sizes=(32.0, 64.0, 128.0, 256.0, 512.0),
                anchor_shapes=((1.0, 1.0), (1.4, 0.7), (0.7, 1.4)),
                anchor_centre=0.5,
                anchor_rounding="none",
                anchor_offset=0.0,
                anchor_stride="level",
                rpn_channels=256,
                rpn_fg_thresh=0.7,
                rpn_bg_thresh=0.3,
                rpn_low_quality="best",
                rpn_straddle=-1.0,
                rpn_anchors_per_image=256,
                rpn_fg_fraction=0.5,
                rpn_encode_offset=0.0,
                rpn_nms_thresh=0.7,
                pre_nms_topk_train=2000,
                pre_nms_topk_test=1000,
                post_nms_topk_train=1000,
                post_nms_topk_test=1000,
                post_nms_scope="image",
                proposal_min_size=-1.0,
                box_offset=1.0,
                iou_offset=0.0,
                rois_per_image=512,
                roi_fg_fraction=0.25,
                roi_fg_thresh=0.5,
                roi_fg_strict=True,
                roi_bg_thresh=(0.0, 0.5),
                roi_max_level=6,
                roi_sampling=1,
                roi_max_sampling=8,
                roi_half_pixel=False,
                roi_border="clamp",
                roi_min_size=0.0,
                box_weights=(10.0, 10.0, 5.0, 5.0),
                box_channels=1024,
                fc_init="glorot",
                predictor_init="normal",
                mask_channels=256,
                mask_targets="crops",
                mask_half_pixel=True,
                mask_predictor_init="he",
            ),
            loss=dict(
                rpn_cls_average="budget",
                rpn_box_loss="huber",
                rpn_box_beta=1 / 9,
                rpn_box_average="matched_per_level",
                box_beta=1.0,
                box_average="foreground",
                rpn_box_weight=1.0,
                box_reg_weight=1.0,
                mask_weight=1.0,
            ),
            optim=dict(
                name="sgd",
                learning_rate=0.04,
                reference_batch=32,  # the global batch that learning_rate is for
                warmup_until=0.3 / 12,  # of train.steps
                warmup_factor=0.0,
                decay_at=(8 / 12, 10 / 12),  # of train.steps
                decay_levels=(0.1, 0.01),
                momentum=0.9,
                rate_in_velocity=True,
                weight_decay=1e-4,
                decay_on=("kernel",),
                bias_lr_factor=1.0,
                clip_norm=0.0,
                accumulate_steps=1,  # parts that a device takes its images in, a step
                loss_scale=2.0**15,  # at the start; with train.precision=float16
                loss_scale_growth=2000,  # good steps until it doubles
                loss_scale_floor=1.0,  # an overflow there stops the run
            ),
            train=dict(
                batch_size=32,  # over all devices
                steps=12 * EPOCH,
                epochs=0.0,  # if not 0, sets steps
                seed=0,
                images_per_device=0,  # if not 0, sets accumulate_steps
                precision="bfloat16",  # float32, tf32 or float16; also of evaluation and inference
                implementation="auto",  # of RoIAlign, NMS and polygon targets: "xla" or "pallas"
                remat="none",  # backbone, heads or all: compute again what memory cannot hold
                log_every=100,
                checkpoint_every=1000,
                keep_checkpoints=2,  # beside the best
                eval_every=EPOCH,  # 0: every epoch
                stop_at_box_ap=0.0,  # stop once both are reached; 0 is never
                stop_at_mask_ap=0.0,
            ),
            eval=dict(
                batch_size=8,
                max_images=0,  # 0 is all
                loss_images=320,  # validation loss on that many images; 0 is none
                pictures=4,  # annotated validation pictures at each evaluation
                score_threshold=0.0,
                min_box_size=-1.0,  # pixels of the network input
                nms_thresh=0.5,
                pre_nms_topk=4096,
                detections_per_image=100,
                paste="integer",
                box_offset=0.0,
            ),
        )
    )
