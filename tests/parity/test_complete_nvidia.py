"""Detections of the whole R-50 model of NVIDIA's TensorFlow 2 code, from raw images.

`tests/models/test_nvidia_tf2.py` compares its stages, losses and gradients, and says how.
"""

import jax
import numpy as np
import pytest

from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.models.build import build_model
from tests.bounds import assert_within, network_bound
from tests.models.test_nvidia_tf2 import OPTIMIZED, SIDE, TERMS, XYXY, golden, their_config
from tests.models.test_nvidia_tf2 import inputs as _inputs
from tests.models.test_nvidia_tf2 import variables as _variables
from tests.models.test_nvidia_tf2 import weights as _weights
from tests.survivors import Survivors, pair_survivors

inputs, variables, weights = _inputs, _variables, _weights  # fixtures


@pytest.mark.slow
def test_detections(variables, inputs):
    config = their_config()
    # Fewer than all, to save time: what NMS keeps beyond the best 4000 does not come into question.
    config.model.rpn.pre_nms_topk_test = config.eval.pre_nms_topk = 4000
    model, options = build_model(config.model), as_recipe(config).eval
    predict = jax.jit(
        lambda v, *args: model.apply(v, *args, detect=options, method="predict"),
        compiler_options=OPTIMIZED,
    )
    found, expected = jax.device_get(predict(variables, *inputs)), golden("eval")
    np.testing.assert_array_equal(found.valid.sum(axis=1), expected["num_detections"])
    # The slopes of softmax, of the decoder, whose weights are 10, and of the masks' sigmoid.
    logits, deltas, masks = (
        network_bound(TERMS, expected[name]).max()
        for name in ("class_outputs", "box_outputs", "mask_outputs_selected")
    )
    for image in (0, 1):
        ours = Survivors(found.boxes[image], found.scores[image], found.classes[image])
        boxes, scores, classes = (
            expected[f"detection_{name}"][image] for name in ("boxes", "scores", "classes")
        )
        theirs = Survivors(boxes[:, XYXY], scores, classes)
        rows, their_rows = pair_survivors(
            ours, theirs, iou_thresh=0.5, box_close=deltas / 10 * SIDE, score_close=logits / 2
        )
        scores = scores[their_rows]
        assert_within(ours.scores[rows], scores, 2 * scores * (1 - scores) * logits)
        half_of_float16, theirs = 2.0**-12, expected["detection_masks"][image]
        stored = their_rows < len(theirs)
        assert stored.sum() >= len(theirs) - 2
        assert_within(
            found.masks[image][rows[stored]], theirs[their_rows[stored]],
            masks / 4 + half_of_float16,
        )  # fmt: skip
