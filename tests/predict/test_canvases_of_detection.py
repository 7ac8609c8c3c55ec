"""Detections do not depend on the canvas in recipes whose maps end at the image."""

import jax
import numpy as np
import pytest

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.formats.shapes import generate_image
from mask_rcnn_jax.predict.predictor import Predictor
from tests.small_model import SMALL, random_variables

SIZES = [(40, 56), (56, 40), (48, 48), (90, 60), (64, 120)]
CANVASES = ((64, 64), (64, 128), (128, 64))
BACKBONE = "model.backbone."
TRUNKS = {
    "coco_torchvision": dict(depth=10),
    "coco_detectron2:lsj_100ep_regnety_4gf": dict(
        depth=6, initial_width=8, slope=8.0, multiplier=2.0, group_width=8
    ),
    "coco_convnext": dict(depths=(1, 1, 2, 1), width=8),
    "coco_swin": dict(depths=(2, 1, 2, 1), width=8, num_heads=(1, 2, 2, 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", TRUNKS)
def test_detections_are_those_of_the_full_canvas(recipe):
    trunk = {BACKBONE + name: value for name, value in TRUNKS[recipe].items()}
    own = {name: value for name, value in SMALL.items() if not name.startswith(BACKBONE)} | trunk
    own |= {"data.image_size": (64, 192), "data.short_sides": (), "eval.score_threshold": 0.0}
    variables, found = random_variables(load_config(recipe, own)), []
    drawn = [generate_image(0, "val", i, size)[0] for i, size in enumerate(SIZES)]
    for canvases in ((), CANVASES):
        config = load_config(recipe, own | {"data.canvases": canvases})
        predictor = Predictor(config, variables)
        prepared = [predictor.prepare(image) for image in drawn]
        shapes = {image.canvas.shape[:2] for image in prepared}
        assert shapes == (set(CANVASES) if canvases else {(64, 192), (192, 64)})
        stream = predictor.stream(enumerate(prepared))
        found.append([detections for _, _, detections in stream])
    assert sum(map(len, found[0])) > 20
    for full, small in zip(*found, strict=True):
        np.testing.assert_array_equal(full.valid, small.valid)
        np.testing.assert_array_equal(full.classes, small.classes)
        for name, tolerance in (("boxes", 2e-3), ("scores", 3e-5), ("masks", 1e-4)):
            one, other = jax.device_get((getattr(full, name), getattr(small, name)))
            np.testing.assert_allclose(one, other, atol=tolerance, rtol=0)
