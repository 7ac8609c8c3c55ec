"""What a command says that it computes with."""

import logging

import pytest

from mask_rcnn_jax import device
from mask_rcnn_jax.models.build import build_model
from mask_rcnn_jax.predict.predictor import Predictor
from tests.helpers import any_variables, tiny_config


@pytest.fixture
def lines(caplog):
    with caplog.at_level(logging.INFO, "absl"):
        yield lambda: [record.getMessage() for record in caplog.records]


def test_what_auto_stands_for_is_logged(lines):
    device.log_precision("bfloat16")
    assert lines() == []
    device.log_precision("auto")
    assert lines() == ["train.precision=auto is float32 on cpu"]


def test_a_predictor_says_it(lines):
    config = tiny_config()
    config.train.precision = "auto"
    Predictor(config, any_variables(build_model(config.model)))
    assert lines() == ["train.precision=auto is float32 on cpu"]
