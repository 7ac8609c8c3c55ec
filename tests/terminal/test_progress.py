"""The lines that long work logs."""

from absl import logging

from mask_rcnn_jax.terminal.progress import Progress


def test_progress_tells_items_rate_and_remaining_time(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr("mask_rcnn_jax.terminal.progress.time.monotonic", lambda: now[0])
    with caplog.at_level("INFO", logger=logging.get_absl_logger().name):
        progress = Progress("evaluate", 100, every_seconds=10)
        for seconds, items in ((5, 10), (10, 20), (12, 10), (50, 60)):
            now[0] = 100.0 + seconds
            progress.advance(items)
    assert [record.getMessage() for record in caplog.records] == [
        "evaluate: 30 of 100, 3 per second, 0:00:10, 0:00:18 left",
        "evaluate: 100 of 100, 2 per second, 0:00:50",
    ]


def test_the_time_left_does_not_count_what_the_first_items_waited_for(monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr("mask_rcnn_jax.terminal.progress.time.monotonic", lambda: now[0])
    with caplog.at_level("INFO", logger=logging.get_absl_logger().name):
        progress = Progress("evaluated", 60, every_seconds=10)
        for seconds in (80, 85, 90):
            now[0] = float(seconds)
            progress.advance(2)
    assert [record.getMessage() for record in caplog.records] == [
        "evaluated: 2 of 60, 0.025 per second, 0:01:20",
        "evaluated: 6 of 60, 0.0667 per second, 0:01:30, 0:02:15 left",
    ]


def test_progress_of_work_of_unknown_or_misjudged_length(monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr("mask_rcnn_jax.terminal.progress.time.monotonic", lambda: now[0])
    with caplog.at_level("INFO", logger=logging.get_absl_logger().name):
        for total in (None, 4):
            now[0] = 0.0
            progress = Progress("frames", total, every_seconds=10)
            for seconds in (2, 4, 6, 8, 10, 11, 12):
                now[0] = float(seconds)
                progress.advance(1)
    assert [record.getMessage() for record in caplog.records] == [
        "frames: 5, 0.5 per second, 0:00:10",
        "frames: 4 of 4, 0.5 per second, 0:00:08",
    ]
