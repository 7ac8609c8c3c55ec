"""Run the Mask R-CNN of NVIDIA's TensorFlow 2 example for `peers.py`.

Imports its package mrcnn_tf2 from `--source`. Its input pipeline labels anchors outside the step,
so random labels replace them here.
"""

import os
import sys
from types import SimpleNamespace

import numpy as np
from peers import canvas, draw_boxes, peer_settings, serve

settings = peer_settings()
sys.path.insert(0, settings.source)
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # faster on a CPU, not always the default

import tensorflow as tf  # noqa: E402
from mrcnn_tf2.config import CONFIG  # noqa: E402
from mrcnn_tf2.model.mask_rcnn import MaskRCNN  # noqa: E402

MAX_OBJECTS = 100
tf.random.set_seed(0)
training = settings.mode == "train"
batch, height, width = settings.batch, *canvas(settings.height, settings.width)
params = SimpleNamespace(**vars(CONFIG), train_batch_size=batch, l2_weight_decay=1e-4)
model = MaskRCNN(params=params, trainable=training)
model.compile(optimizer=tf.keras.optimizers.SGD(learning_rate=1e-5, momentum=0.9))


def anchor_labels(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Label a few anchors 1 or 0 and all others -1; labels of 1 get box targets."""
    labels = {}
    for level in range(params.min_level, params.max_level + 1):
        shape = batch, height >> level, width >> level, len(params.aspect_ratios)
        scores = np.full(shape, -1, np.int32)
        few = rng.integers(0, scores[0].size, (batch, params.rpn_batch_size_per_im // 5))
        scores.reshape(batch, -1)[np.arange(batch)[:, None], few] = rng.integers(0, 2, few.shape)
        boxes = rng.normal(0, 0.1, (*shape, 4)) * (scores == 1)[..., None]
        labels[f"score_targets_{level}"] = scores
        labels[f"box_targets_{level}"] = boxes.reshape(*shape[:3], -1).astype(np.float32)
    return labels


def make_inputs() -> dict[str, tf.Tensor]:
    """Return a batch as its input pipeline would."""
    rng = np.random.default_rng(0)
    size = [settings.height, settings.width]
    inputs = {
        "images": rng.normal(size=(batch, height, width, 3)).astype(np.float32),
        "image_info": np.tile(np.float32([*size, 1, *size]), (batch, 1)),
        "source_ids": np.arange(batch, dtype=np.float32),
    }
    if training:
        boxes = np.full((batch, MAX_OBJECTS, 4), -1, np.float32)
        classes = np.full((batch, MAX_OBJECTS, 1), -1, np.float32)
        boxes[:, : settings.objects] = draw_boxes(settings)[..., [1, 0, 3, 2]]
        classes[:, : settings.objects] = rng.integers(1, 91, (batch, settings.objects, 1))
        side = params.gt_mask_size + 4
        masks = rng.integers(0, 2, (batch, MAX_OBJECTS, side, side)).astype(np.float32)
        inputs |= {"gt_boxes": boxes, "gt_classes": classes, "cropped_gt_masks": masks}
        inputs |= anchor_labels(rng)
    return {name: tf.constant(value) for name, value in inputs.items()}


inputs = make_inputs()


def step():
    if training:
        model.train_on_batch(inputs)
    else:
        model.predict_on_batch(inputs)


threads = tf.config.threading.get_intra_op_parallelism_threads() or "all"
devices = ", ".join(device.device_type for device in tf.config.list_physical_devices())
serve(step, f"TensorFlow {tf.__version__}, {devices}, {threads} threads, canvas {height, width}")
