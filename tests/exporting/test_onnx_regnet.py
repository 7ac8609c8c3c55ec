"""RegNet in ONNX against JAX: maps, whose means leave out cells beyond the images."""

import jax
import numpy as np
import pytest

from mask_rcnn_jax.config import load_config
from tests.small_model import SMALL, predict_function, random_variables

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from mask_rcnn_jax.jax_to_onnx.graph import OPSETS  # noqa: E402
from tests.jax_to_onnx.traced import converted  # noqa: E402

# Stages of 1, 1, 3 and 1 blocks with 1, 2, 4 and 8 groups.
TRUNK = dict(depth=6, initial_width=8, slope=8.0, multiplier=2.0, group_width=8, se_ratio=0.25)
TRUNK |= dict(norm="affine")


SLOW = pytest.mark.slow  # of all, the one with the most rules is quick


@pytest.mark.parametrize("opset", [pytest.param(OPSETS.start, marks=SLOW), OPSETS.stop - 1])
@pytest.mark.parametrize("image", [pytest.param(None, marks=SLOW), (32, 90)])
@pytest.mark.slow
def test_maps_match_jax(image, opset):
    """On a canvas that an image fills, and on one of which it has a part, 32 x 96 cells."""
    trunk = {f"model.backbone.{name}": value for name, value in TRUNK.items()}
    multiple = {"model.input.pad_multiple": 32 if image else 0}
    config = load_config("coco_detectron2:lsj_100ep_regnety_4gf", SMALL | trunk | multiple)
    model, variables = predict_function(config)[0], random_variables(config)
    height, width = image or (64, 128)
    images = np.random.default_rng(3).integers(0, 256, (2, 64, 128, 3), dtype=np.uint8)
    sizes = np.array([[height, width]] * 2, np.int32)
    images[:, height:], images[:, :, width:] = 0, 0

    def pyramid(variables, images):
        return model.apply(variables, images, sizes, train=False, method="pyramid")[0]

    expected = jax.jit(pyramid)(variables, images)
    feed = images.astype(np.float32)
    _, found = converted(pyramid, feed, variables=variables, opset=opset)
    for ours, theirs in zip(found, map(np.asarray, expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())
