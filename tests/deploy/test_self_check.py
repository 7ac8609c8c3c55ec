"""The self-check of exported models."""

import numpy as np

from mask_rcnn_jax.deploy import artifact
from mask_rcnn_jax.structures import Detections


def test_a_self_check_without_detections_is_said(caplog):
    empty = Detections(
        boxes=np.zeros((1, 3, 4), np.float32),
        scores=np.zeros((1, 3), np.float32),
        classes=np.zeros((1, 3), np.int32),
        masks=None,
        valid=np.zeros((1, 3), bool),
    )

    def predict(images, sizes):
        return empty

    made = artifact.Artifact(artifact.ModelInterface({}, (6, 8), "float32"), (6, 8))
    made.predictors["float"] = predict
    inputs = [(np.zeros((1, 6, 8, 3), np.uint8), np.array([[6, 8]]))]
    artifact._check(predict, inputs, 0.05, made, "float")
    assert made.self_check["float"]["detections"] == 0
    assert "it compared no detection" in caplog.text
