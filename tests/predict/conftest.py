"""Fixtures: a very small model with random weights."""

import pytest

from mask_rcnn_jax.models.build import build_model
from mask_rcnn_jax.predict.predictor import Predictor
from tests import small_trunk
from tests.helpers import any_variables, tiny_config

CATEGORIES = [{"id": 3, "name": "bolt"}, {"id": 8, "name": "nut"}]


def two_canvas_config():
    """Config with 64 x 128 and 128 x 64 canvases for landscape and portrait images."""
    config = tiny_config()
    config.model.backbone = small_trunk.SECTION
    config.data.update(image_size=(48, 96), resize="shortest_edge", antialias=False)
    config.model.input.pad_multiple = 16
    return config


@pytest.fixture(scope="session")
def variables() -> dict:
    return any_variables(build_model(two_canvas_config().model))


@pytest.fixture(scope="session")
def predictor(variables) -> Predictor:
    """Predictor with batches of three images."""
    return Predictor(two_canvas_config(), variables, 3, CATEGORIES)
