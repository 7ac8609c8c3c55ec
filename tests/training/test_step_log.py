"""The lines of a training run: rates and times left without compilation."""

import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging

from mask_rcnn_jax.training.loggers import Loggers
from mask_rcnn_jax.training.step_log import StepLog
from tests.helpers import tiny_batch, tiny_config


@pytest.fixture
def clock(monkeypatch):
    """Seconds, that only the test moves on."""
    now = [1000.0]
    monkeypatch.setattr("mask_rcnn_jax.training.step_log.time.monotonic", lambda: now[0])
    return now


def test_compiling_counts_neither_for_the_rate_nor_for_the_time_left(clock, caplog):
    """Four images a step and two seconds a step; compiling takes 100 s, and 50 s on a new canvas
    at step 4, while step 3 is still to be read."""
    config = tiny_config()
    config.train.update(batch_size=4, steps=10, log_every=2)
    records = []
    logger = lambda step, metrics, images: records.append((step, metrics))  # noqa: E731
    log = StepLog(config, Loggers((), [logger]), dataset=None, started=clock[0] - 7)
    square = tiny_batch(4)
    wide = square.replace(images=np.zeros((4, 64, 128, 3), np.uint8))
    with caplog.at_level("INFO", logger=logging.get_absl_logger().name):
        for step, batch, compiling in ((1, square, 100), (2, square, 0), (3, square, 0),
                                       (4, wide, 50), (5, square, 0), (6, wide, 0)):  # fmt: skip
            with log.dispatching(batch):
                clock[0] += compiling
            log.finish_previous(step, {"loss/total": jnp.float32(3.0)}, batch.image_index)
            clock[0] += 2
        log.finish()
    rates = {step: metrics["perf/images_per_s"] for step, metrics in records}
    assert rates == pytest.approx({1: 2.0, 2: 2.0, 4: 2.0, 6: 2.0})
    assert [record.getMessage() for record in caplog.records] == [
        "compiling the training step for images of 64 x 64 ...",
        "compiled in 100.0 s",
        "first step done after 109.0 s",
        "step 1 of 10  loss 3.000  2 images/s  0:00:18 left",
        "step 2 of 10  loss 3.000  2 images/s  0:00:16 left",
        "compiling the training step for images of 64 x 128 ...",
        "compiled in 50.0 s",
        "step 4 of 10  loss 3.000  2 images/s  0:00:12 left",
        "step 6 of 10  loss 3.000  2 images/s  0:00:08 left",
    ]
