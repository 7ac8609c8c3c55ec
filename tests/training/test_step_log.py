"""The lines of a training run: rates and times left without compilation."""

import resource
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging

from mask_rcnn_jax.recipe.options import TrainOptions
from mask_rcnn_jax.terminal import console
from mask_rcnn_jax.training import step_log
from mask_rcnn_jax.training.loggers import Loggers
from mask_rcnn_jax.training.step_log import StepLog
from tests.helpers import tiny_batch


@pytest.fixture
def clock(monkeypatch):
    """Seconds, that only the test moves on."""
    now = [1000.0]
    monkeypatch.setattr("mask_rcnn_jax.training.step_log.time.monotonic", lambda: now[0])
    return now


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """A device that used 12.345 GB, and a host that used 2 GB."""
    device = SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 12_345_000_000})
    monkeypatch.setattr(step_log.jax, "local_devices", lambda: [device])
    usage = SimpleNamespace(ru_maxrss=2_000_000_000 // (1 if sys.platform == "darwin" else 1024))
    monkeypatch.setattr(resource, "getrusage", lambda who: usage)


def test_compiling_counts_neither_for_the_rate_nor_for_the_time_left(clock, caplog):
    """Four images a step and two seconds a step; compiling takes 100 s, and 50 s on a new canvas
    at step 4, while step 3 is still to be read."""
    options = TrainOptions(batch_size=4, steps=10, log_every=2)
    records = []
    logger = lambda step, metrics, images: records.append((step, metrics))  # noqa: E731
    log = StepLog(options, Loggers((), [logger]), None, clock[0] - 7, lowest_scale=1.0)
    square = tiny_batch(4)
    wide = square.replace(images=np.zeros((4, 64, 128, 3), np.uint8))
    with caplog.at_level("INFO", logger=logging.get_absl_logger().name):
        for step, batch, compiling in ((1, square, 100), (2, square, 0), (3, square, 0),
                                       (4, wide, 50), (5, square, 0), (6, wide, 0)):  # fmt: skip
            with log.dispatching(batch):
                clock[0] += compiling
            metrics = {"loss/total": jnp.float32(3.0), "lr": jnp.float32(0.02)}
            metrics |= {"loss/mask": jnp.float32(1.25), "loss/rpn_cls": jnp.float32(1.75)}
            log.finish_previous(step, metrics, batch.image_index)
            clock[0] += 2
        log.finish()
    rates = {step: metrics["perf/images_per_s"] for step, metrics in records}
    assert rates == pytest.approx({1: 2.0, 2: 2.0, 4: 2.0, 6: 2.0})
    assert [metrics["perf/ms_per_step"] for _, metrics in records] == pytest.approx([2000] * 4)
    assert records[0][1]["perf/peak_memory_mb"] == 12_345
    assert records[0][1]["perf/peak_rss_mb"] == pytest.approx(2_000, rel=1e-3)
    rates = "loss 3.000 (mask 1.250, rpn_cls 1.750)  lr 0.02  2 s/step  2 images/s"
    rates += "  device 12.3 GB  host 2.0 GB"
    assert [record.getMessage() for record in caplog.records] == [
        "compiling the training step for images of 64 x 64 ...",
        "compiled in 100.0 s",
        "first step done after 109.0 s",
        f"step 1 of 10  0:00:18 left  {rates}",
        f"step 2 of 10  0:00:16 left  {rates}",
        "compiling the training step for images of 64 x 128 ...",
        "compiled in 50.0 s",
        f"step 4 of 10  0:00:12 left  {rates}",
        f"step 6 of 10  0:00:08 left  {rates}",
    ]


def nine_steps(clock, caplog, seconds):
    """Log nine steps of so many seconds; return those with records."""
    options = TrainOptions(batch_size=4, steps=9, log_every=100)
    records = []
    logger = lambda step, metrics, images: records.append(step)  # noqa: E731
    log = StepLog(options, Loggers((), [logger]), None, clock[0], lowest_scale=1.0)
    batch = tiny_batch(4)
    with log.dispatching(batch):
        clock[0] += 30
    with caplog.at_level("INFO", logger=logging.get_absl_logger().name):
        for step in range(1, 10):
            clock[0] += seconds
            log.finish_previous(step, {"loss/total": jnp.float32(step)}, batch.image_index)
        log.finish()
    return records


def test_a_log_has_a_line_for_every_ten_seconds_of_work(clock, caplog):
    """Of steps of 4 s: the first, then every third, beside those with records."""
    records = nine_steps(clock, caplog, 4.0)
    lines = [record.getMessage().split("  ")[0] for record in caplog.records]
    assert [line for line in lines if line.startswith("step ")] == [
        f"step {step} of 9" for step in (1, 4, 7, 9)
    ]
    assert records == [1, 9]


def test_in_a_terminal_every_step_is_shown_and_as_many_are_logged(clock, caplog, monkeypatch):
    """One line for each 0.2 s of steps that take 0.15 s."""
    monkeypatch.setattr(console, "_in_terminal", True)
    records = nine_steps(clock, caplog, 0.15)
    shown = [r.getMessage() for r in caplog.records if getattr(r, "is_update", False)]
    assert [line.split()[1] for line in shown] == ["1", "3", "5", "7", "9"]
    assert records == [1, 9]
    assert shown[2].startswith("step 5 of 9  0:00:01 left  loss 5.000  0.15 s/step  26.7 images/s")


def test_dropped_masks_of_all_steps_are_counted_and_shown(clock, caplog):
    """The mean over the steps since the last record, of which only every third is logged."""
    options = TrainOptions(batch_size=4, steps=9, log_every=3)
    records = []
    logger = lambda step, metrics, images: records.append((step, metrics))  # noqa: E731
    log = StepLog(options, Loggers((), [logger]), None, clock[0], lowest_scale=1.0)
    batch = tiny_batch(4)
    dropped = [0.0, 0.0, 1.5, 0.0, 6.0, 0.0, 0.0, 0.0, 0.0]
    with log.dispatching(batch):
        clock[0] += 30
    with caplog.at_level("INFO", logger=logging.get_absl_logger().name):
        for step, count in enumerate(dropped, 1):
            clock[0] += 2
            metrics = {"loss/total": jnp.float32(1.0), "dropped_masks": jnp.float32(count)}
            log.finish_previous(step, metrics, batch.image_index)
        log.finish()
    counted = {step: metrics["dropped_masks"] for step, metrics in records}
    assert counted == {1: 0.0, 3: 0.75, 6: 2.0, 9: 0.0}
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("step")]
    assert ["masks per image dropped" in line for line in lines] == [False, True, True, False]
    assert lines[1].endswith("  0.75 masks per image dropped")
