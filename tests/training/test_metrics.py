"""metrics.jsonl and TensorBoard's events, as a run and its resume write them."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from mask_rcnn_jax.training.loggers import jsonl_logger, tensorboard_logger
from mask_rcnn_jax.training.metrics import read_metrics


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_scalars_become_one_json_line_each(tmp_path):
    with jsonl_logger(tmp_path, 99) as log:
        log(1, {"loss/total": np.float32(0.1), "lr": 0.5}, {})
        # Readable before close: a killed run leaves what it has logged.
        assert lines(tmp_path) == [{"step": 1, "loss/total": float(np.float32(0.1)), "lr": 0.5}]
        log(np.int64(2), {"loss/total": 3}, {})
    assert lines(tmp_path)[1] == {"step": 2, "loss/total": 3.0}


def test_images_alone_make_no_line(tmp_path):
    with jsonl_logger(tmp_path, 99) as log:
        log(1, {}, {"a": np.zeros((2, 2, 3), np.uint8)})
    assert lines(tmp_path) == []


def test_numbers_that_json_lacks_become_null(tmp_path):
    with jsonl_logger(tmp_path, 99) as log:
        log(1, {"a": float("nan"), "b": float("inf"), "c": 1.0}, {})
    assert lines(tmp_path) == [{"step": 1, "a": None, "b": None, "c": 1.0}]


def test_resume_removes_the_steps_that_are_done_again(tmp_path):
    with jsonl_logger(tmp_path, 0) as log:
        for step in (10, 20, 30):
            log(step, {"x": step}, {})
        log(20, {"ap/box": 0.5}, {})
    with jsonl_logger(tmp_path, 20) as log:
        log(30, {"x": 31}, {})
    assert lines(tmp_path) == [
        {"step": 10, "x": 10.0},
        {"step": 20, "x": 20.0},
        {"step": 20, "ap/box": 0.5},
        {"step": 30, "x": 31.0},
    ]
    assert not list(tmp_path.glob("*.tmp"))


def test_start_over_at_step_zero_removes_everything(tmp_path):
    with jsonl_logger(tmp_path, 99) as log:
        log(1, {"x": 1}, {})
    with jsonl_logger(tmp_path, 0):
        pass
    assert lines(tmp_path) == []


@pytest.mark.parametrize("tail", ['{"step": 2, "x"', "\x00\x00\x00", '{"step": 2, "x": 5', "7"])
def test_half_written_line_is_dropped(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "x": 1.0}\n' + tail)
    assert read_metrics(path) == [{"step": 1, "x": 1.0}]
    with jsonl_logger(tmp_path, 99) as log:
        log(2, {"x": 2}, {})
    assert lines(tmp_path) == [{"step": 1, "x": 1.0}, {"step": 2, "x": 2.0}]


def test_line_without_its_end_keeps_its_record(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "x": 1.0}')
    with jsonl_logger(tmp_path, 99) as log:
        log(2, {"x": 2}, {})
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_kept_records_are_unchanged_to_the_last_digit(tmp_path):
    values = np.random.default_rng(0).random(50).astype(np.float32)
    with jsonl_logger(tmp_path, 99) as log:
        for step, value in enumerate(values):
            log(step, {"x": value}, {})
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    with jsonl_logger(tmp_path, 24):
        pass
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == before[:25]


def test_killed_process_leaves_its_records(tmp_path):
    program = """
        import sys, os, pathlib, signal
        from mask_rcnn_jax.training.loggers import jsonl_logger
        with jsonl_logger(pathlib.Path(sys.argv[1]), 0) as log:
            for step in range(1, 4):
                log(step, {"x": step}, {})
            os.kill(os.getpid(), signal.SIGKILL)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


def test_tensorboard_holds_scalars_pictures_and_the_purge(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    with tensorboard_logger(tmp_path, 4) as log:
        log(5, {"loss/total": 2.5}, {"val/a": np.full((6, 8, 3), 200, np.uint8)})
    (path,) = tmp_path.glob("events.out.tfevents.*")
    events = [Event.FromString(record) for record in tfrecords(path.read_bytes())]
    values = [(event.step, value) for event in events for value in event.summary.value]
    assert [(step, value.tag) for step, value in values] == [(5, "loss/total"), (5, "val/a")]
    assert values[0][1].simple_value == 2.5
    assert (values[1][1].image.height, values[1][1].image.width) == (6, 8)
    # TensorBoard hides what an earlier run wrote from this step on.
    assert [event.step for event in events if event.HasField("session_log")] == [5]


def tfrecords(data):
    """The records of a TensorBoard file: length (8 bytes), check (4), record, check (4)."""
    position = 0
    while position < len(data):
        length = int.from_bytes(data[position : position + 8], "little")
        yield data[position + 12 : position + 12 + length]
        position += 16 + length


def test_records_go_on_in_a_file_that_someone_replaced(tmp_path):
    """As editors do; what they left is kept."""
    path = tmp_path / "metrics.jsonl"
    with jsonl_logger(tmp_path, 0) as log:
        log(1, {"x": 1.0}, {})
        (tmp_path / "edited").write_text('{"step": 1, "x": 5.0}\n')
        (tmp_path / "edited").rename(path)
        log(2, {"x": 2.0}, {})
    assert read_metrics(path) == [{"step": 1, "x": 5.0}, {"step": 2, "x": 2.0}]
