"""Fixtures: a very small model with random weights."""

import jax
import pytest

from mask_rcnn_jax.deploy.predictor import Predictor
from mask_rcnn_jax.models.build import build_model, init_variables
from tests.helpers import tiny_config

CATEGORIES = [{"id": 3, "name": "bolt"}, {"id": 8, "name": "nut"}]


def two_canvas_config():
    """Config with 64 x 128 and 128 x 64 canvases for landscape and portrait images."""
    config = tiny_config()
    config.data.update(image_size=(48, 96), resize="shortest_edge", antialias=False)
    config.model.input.pad_multiple = 16
    return config


@pytest.fixture(scope="session")
def variables() -> dict:
    config = two_canvas_config()
    return jax.device_get(init_variables(build_model(config.model), 0))


@pytest.fixture(scope="session")
def predictor(variables) -> Predictor:
    """Predictor with batches of three images."""
    return Predictor(two_canvas_config(), variables, 3, CATEGORIES)
