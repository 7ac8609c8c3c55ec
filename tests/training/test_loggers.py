"""Loggers: what they receive, what happens when one fails, and three services, used offline."""

import json
import math
import os
import re
import subprocess
import sys
import textwrap
import time
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mask_rcnn_jax.training import loggers as loggers_module
from mask_rcnn_jax.training.loggers import (
    BY_NAME,
    Loggers,
    mlflow_logger,
    open_loggers,
    resolve_loggers,
    wandb_logger,
)
from mask_rcnn_jax.training.metrics import read_metrics
from mask_rcnn_jax.training.validation import category_metrics

IMAGE = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)
CONFIG = {"train": {"steps": 3}, "data": {"image_size": (64, 64)}}


class Recorder:
    """A logger that keeps what it is told."""

    def __init__(self):
        self.calls = []

    def open(self, workdir, config):
        self.calls.append(("open", workdir, config))

    def __call__(self, step, metrics, images):
        self.calls.append((step, metrics, images))

    def close(self):
        self.calls.append("close")


def test_all_loggers_receive_floats_and_images(tmp_path):
    recorder, plain = Recorder(), []
    users = [recorder, lambda step, metrics, images: plain.append((step, metrics, images))]
    log = open_loggers(tmp_path, CONFIG, users, resume_step=0)
    log(np.int32(1), {"loss/total": np.float32(0.5), "n": 3})
    log(2, {"ap/box": 0.25}, {"a.jpg": IMAGE})
    log.close()
    log.close()
    calls = [(1, {"loss/total": 0.5, "n": 3.0}, {}), (2, {"ap/box": 0.25}, {"a.jpg": IMAGE})]
    assert recorder.calls == [("open", tmp_path, CONFIG), *calls, "close"] and plain == calls
    assert all(type(value) is float for value in calls[0][1].values())
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss/total": 0.5, "n": 3.0},
        {"step": 2, "ap/box": 0.25},
    ]
    (events,) = tmp_path.glob("events.out.tfevents.*")
    assert b"a.jpg" in events.read_bytes()


def test_metrics_of_a_class_are_for_loggers_alone(tmp_path):
    per_category = {
        "cat": {"AP": 0.5, "mask_AP": 0.25},
        "a/b (\u00e9) .-": {"AP": 0.125},
        "nowhere": {"AP": -1.0, "mask_AP": -1.0},
        "a:b (\u00e9) .-": {"AP": 0.75},
    }
    metrics = category_metrics(per_category)
    assert metrics == {
        "ap_class/box/cat": 0.5,
        "ap_class/mask/cat": 0.25,
        "ap_class/box/a_b _\u00e9_ .-": 0.125,
        "ap_class/box/a_b _\u00e9_ .-_2": 0.75,
    }
    recorder = Recorder()
    log = open_loggers(tmp_path, CONFIG, [recorder], resume_step=0)
    log(2, {"ap/box": 0.25, **metrics})
    log.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 2, "ap/box": 0.25}]
    assert recorder.calls[1][1].keys() == {"ap/box", *metrics}
    (events,) = tmp_path.glob("events.out.tfevents.*")
    assert b"ap_class/mask/cat" in events.read_bytes()


def test_a_logger_that_fails_is_named_once_and_counted(tmp_path, caplog):
    def rings_the_bell(step, metrics, images):
        metrics.clear()  # nobody else's
        if step > 1:
            raise RuntimeError("no bell")

    recorder = Recorder()
    log = open_loggers(tmp_path, CONFIG, [rings_the_bell, recorder], resume_step=0)
    for step in range(1, 5):
        log(step, {"x": step})
    log.close()
    assert [call[:2] for call in recorder.calls[1:-1]] == [(k, {"x": k}) for k in range(1, 5)]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4
    expected = "logger rings_the_bell failed, the run goes on: RuntimeError: no bell"
    assert caplog.text.count(expected) == 1
    assert caplog.text.count("logger rings_the_bell failed 3 times") == 1


def test_closing_a_logger_that_fails_closes_the_others(caplog):
    class Broken(Recorder):
        def close(self):
            raise OSError("gone")

    first, last = Recorder(), Recorder()
    log = Loggers((), [first, Broken(), last])
    log.open(None, {})
    log.close()
    assert first.calls[-1] == last.calls[-1] == "close"
    assert "logger Broken failed, the run goes on: OSError: gone" in caplog.text


def test_errors_of_our_own_loggers_stop_the_run(tmp_path):
    log = open_loggers(tmp_path, CONFIG, [], resume_step=0)
    log.close()
    with pytest.raises(ValueError, match="closed file"):
        log(1, {"x": 1})


def test_a_logger_that_cannot_start_stops_the_run(tmp_path):
    class Offline(Recorder):
        def open(self, workdir, config):
            raise ConnectionError("no server")

    first = Recorder()
    expected = "logger Offline cannot start: ConnectionError: no server"
    with pytest.raises(ValueError, match=expected):
        open_loggers(tmp_path, CONFIG, [first, Offline()], resume_step=0)
    assert first.calls[-1] == "close"


def test_other_processes_log_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(loggers_module.jax, "process_index", lambda: 1)
    recorder = Recorder()
    log = open_loggers(tmp_path / "new", CONFIG, [recorder], resume_step=0)
    log(1, {"x": 1}, {"a": IMAGE})
    log.close()
    assert recorder.calls == [] and not (tmp_path / "new").exists()


def test_names_are_checked():
    assert resolve_loggers(()) == [] and resolve_loggers([print]) == [print]
    with pytest.raises(ValueError, match="train.loggers has 7, expected .* a function of"):
        resolve_loggers([print, 7])
    said = "train.loggers has 'tensorbored', expected 'wand.*TensorBoard .* always on"
    with pytest.raises(ValueError, match=said):
        resolve_loggers(("tensorbored",))


@pytest.mark.parametrize("name", [name for name in BY_NAME if name != "dllogger"])
def test_a_package_that_is_missing_is_named(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    expected = rf"'{name}' needs .* pip install 'mask-rcnn-jax\[{name}\]'"
    with pytest.raises(ValueError, match=expected):
        resolve_loggers((name,))


def test_dllogger_writes_the_lines_of_the_examples(tmp_path):
    """Its format: https://github.com/NVIDIA/dllogger, JSONStreamBackend."""
    for step in (1, 2):
        log = open_loggers(tmp_path, CONFIG, resolve_loggers(("dllogger",)), resume_step=step - 1)
        metrics = {"loss/rpn_cls": math.nan, "lr": 0.5, "perf/ms_per_step": 250.0, "grad_norm": 2.0}
        log(step, metrics, {"a.jpg": IMAGE})
        log(step, {}, {"a.jpg": IMAGE})
        log.close()
    lines = (tmp_path / "dllogger.json").read_text().splitlines()
    assert all(line.startswith("DLLL {") for line in lines)
    entries = [json.loads(line.removeprefix("DLLL ")) for line in lines]
    for entry in entries:
        keys = ["timestamp", "datetime", "elapsedtime", "type", "step", "data"]
        assert list(entry) == keys and entry["type"] == "LOG"
        assert datetime.fromtimestamp(float(entry["timestamp"])) == (
            datetime.fromisoformat(entry["datetime"])
        )
        assert float(entry["elapsedtime"]) >= 0
    data = {"loss_objectness": None, "learning_rate": 0.5, "grad_norm": 2.0, "time": 0.25}
    config = {"train.steps": 3, "data.image_size": [64, 64]}
    steps = [(entry["step"], entry["data"]) for entry in entries]
    assert steps[0::3] == [("PARAMETER", config)] * 2
    assert steps[1::3] == [([1], data), ([2], data)]
    assert [step for step, data in steps[2::3] if data.keys() == {"e2e_train_time"}] == [[], []]


def test_dllogger_drops_what_a_killed_run_wrote_after_its_checkpoint(tmp_path):
    path = tmp_path / "dllogger.json"
    for start, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        log = open_loggers(tmp_path, CONFIG, resolve_loggers(("dllogger",)), resume_step=start)
        for step in steps:
            log(step, {"lr": start + step / 4})
        log.close()
        if start == 0:
            with open(path, "a") as file:
                file.write('DLLL {"step": [4], "da')
    entries = [json.loads(line.removeprefix("DLLL ")) for line in path.read_text().splitlines()]
    steps = [entry for entry in entries if "learning_rate" in entry["data"]]
    found = [(entry["step"][0], entry["data"]["learning_rate"]) for entry in steps]
    assert found == [(1, 0.25), (2, 0.5), (3, 2.75), (4, 3.0)]
    assert [e["step"] for e in entries].count("PARAMETER") == 2


def test_dllogger_writes_a_config_that_every_json_reader_takes(tmp_path):
    config = {"a": {"b": math.inf, "c": (1, -math.inf, math.nan), "d": 0.5}}
    log = open_loggers(tmp_path, config, resolve_loggers(("dllogger",)), resume_step=0)
    log.close()
    first = (tmp_path / "dllogger.json").read_text().splitlines()[0].removeprefix("DLLL ")

    def refuse(text):
        raise AssertionError(text)

    data = json.loads(first, parse_constant=refuse)["data"]
    assert data == {"a.b": "inf", "a.c": [1, "-inf", "nan"], "a.d": 0.5}


def run_twice(workdir, make, pause=0.0):
    """Two steps and an image, and one more step after a resume."""
    workdir.mkdir()
    for calls in ([(1, {"loss/total": 2.5}, {}), (2, {"lr": 0.1}, {"a.jpg": IMAGE})],
                  [(3, {"loss/total": 1.5}, {})]):  # fmt: skip
        time.sleep(pause)  # wandb names its folders by the second
        log = Loggers((), [make()])
        log.open(workdir, CONFIG)
        for call in calls:
            log(*call)
        log.close()
        assert not log._failures


# What a service needs is taken from here; each row is of one that lacks a key or an address.
KEYS = ("WANDB_API_KEY", "WANDB_MODE", "NETRC", "MLFLOW_TRACKING_URI", "CLEARML_API_ACCESS_KEY")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name, words, remedy",
    [
        ("wandb", "has no key for .*`wandb login`", {"WANDB_MODE": "offline"}),
        ("wandb", "has no key for .*WANDB_API_KEY", {"WANDB_API_KEY": "a" * 40}),
        ("mlflow", "cannot log to .*MLFLOW_TRACKING_URI", {"MLFLOW_TRACKING_URI": "http://x.y"}),
        ("clearml", "has no key: .*clearml-init", {"CLEARML_API_ACCESS_KEY": "a"}),
    ],
)
def test_a_service_without_a_key_is_named_before_the_data_are_read(name, words, remedy, tmp_path):
    """In processes of their own, since services read their settings once."""
    pytest.importorskip(name)
    program = f"""
        from mask_rcnn_jax.training.loop import train
        train("quickstart", {str(tmp_path / "run")!r}, loggers=[{name!r}])
    """
    environment = {k: v for k, v in os.environ.items() if k not in KEYS} | {"HOME": str(tmp_path)}
    found = [
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            env=environment | more, capture_output=True, text=True, cwd=tmp_path, timeout=120,
        ).stderr.splitlines()[-1]
        for more in ({}, remedy)
    ]  # fmt: skip
    assert re.match(f"ValueError: the logger '{name}' {words}", found[0]), found
    assert "no annotation file" in found[1]


@pytest.mark.filterwarnings("ignore")  # of packages that are not ours
def test_wandb_offline(tmp_path, monkeypatch, caplog):
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run_twice(tmp_path / "run", lambda: wandb_logger(project="shapes"), pause=1.1)
    assert "failed" not in caplog.text
    runs, history, images = [], {}, []
    for path in sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in leveldb_records(path.read_bytes()[7:]):
            record = Record.FromString(data)
            if record.HasField("run"):
                runs.append((record.run.run_id, record.run.project, record.run.display_name))
            elif record.HasField("history"):
                for item in record.history.item:
                    name = item.key or "/".join(item.nested_key)
                    history.setdefault(record.history.step.num, {})[name] = item.value_json
        images += path.parent.glob("files/media/images/*.png")
    ((run_id, project, name),) = set(runs)
    assert run_id == (tmp_path / "run" / "wandb_run.txt").read_text()
    assert (project, name) == ("shapes", "run")
    assert history[1]["loss/total"] == "2.5" and history[2]["lr"] == "0.1"
    assert history[3]["loss/total"] == "1.5"
    assert history[2]["a.jpg/_type"] == '"image-file"'
    assert len(images) == 1


def leveldb_records(data, block=32 * 1024):
    """Check (4), length (2), type (1), content; nothing begins in a block's last six bytes. Type 1
    is a whole record; 2, 3 and 4 are the first, a middle and the last part of one."""
    position, record = 7, b""  # of the file, whose header takes 7 bytes
    while position - 7 < len(data):
        if block - position % block < 7:
            position += block - position % block
            continue
        start = position - 7
        length, kind = int.from_bytes(data[start + 4 : start + 6], "little"), data[start + 6]
        record += data[start + 7 : start + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


@pytest.mark.filterwarnings("ignore")
def test_mlflow_in_a_folder(tmp_path, monkeypatch, caplog):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    try:
        run_twice(tmp_path / "run", lambda: mlflow_logger(tags={"kind": "test"}))
        client = mlflow.MlflowClient()
        run = client.get_run((tmp_path / "run" / "mlflow_run.txt").read_text())
        losses = client.get_metric_history(run.info.run_id, "loss/total")
        folder = mlflow.artifacts.download_artifacts(run_id=run.info.run_id, dst_path=tmp_path)
    finally:
        mlflow.set_tracking_uri(before)
    assert "failed" not in caplog.text
    assert [(metric.step, metric.value) for metric in losses] == [(1, 2.5), (3, 1.5)]
    assert run.data.metrics["lr"] == 0.1 and run.data.tags["kind"] == "test"
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    image = Image.open(Path(folder) / "images" / "2" / "a.png")
    np.testing.assert_array_equal(np.asarray(image), IMAGE)
    assert json.loads((Path(folder) / "config.json").read_text())["train"] == {"steps": 3}


def test_clearml_offline(tmp_path):
    """In a process of its own: clearml stays offline, and connected to the flags, to its end."""
    pytest.importorskip("clearml")
    program = """
        import sys, pathlib, clearml
        from mask_rcnn_jax.training.loggers import clearml_logger
        from tests.training.test_loggers import run_twice
        clearml.Task.set_offline(True)
        run_twice(pathlib.Path(sys.argv[1]), clearml_logger)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "run")],
        env=os.environ | {"CLEARML_CACHE_DIR": str(tmp_path), "CLEARML_OFFLINE_MODE": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and "fork" not in done.stderr, done.stderr
    found, images = [], []
    for path in tmp_path.rglob("metrics.jsonl"):
        assert json.loads((path.parent / "task.json").read_text())["name"] == "run"
        for line in path.read_text().splitlines():
            for event in json.loads(line):
                found.append((event["iter"], event["metric"], event["variant"], event.get("value")))
        images += path.parent.rglob("*.jpeg")
    scalars = {(1, "loss", "total", 2.5), (2, "lr", "lr", 0.1), (3, "loss", "total", 1.5)}
    assert scalars <= set(found)
    assert (2, "images", "a.jpg") in [entry[:3] for entry in found] and len(images) == 1
