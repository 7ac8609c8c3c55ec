"""What a command says that it computes with."""

import json
import logging

import jax
import numpy as np
import pytest

from mask_rcnn_jax import device
from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.exporting import artifact
from mask_rcnn_jax.exporting.options import ArtifactOptions
from mask_rcnn_jax.models.build import build_model
from mask_rcnn_jax.ops import dispatch
from mask_rcnn_jax.predict.predictor import Predictor
from pallas_kernels import probe, support
from tests.helpers import any_variables, tiny_config
from tests.kernels.test_probe import broken_for


@pytest.fixture(autouse=True)
def first():
    """Nothing was said yet."""
    device.log_devices.cache_clear()
    yield
    device.log_devices.cache_clear()


@pytest.fixture
def lines(caplog):
    with caplog.at_level(logging.INFO, "absl"):
        yield lambda: [record.getMessage() for record in caplog.records]


def test_what_auto_stands_for_is_logged(lines):
    device.log_precision("bfloat16")
    assert lines() == []
    device.log_precision("auto")
    assert lines() == ["train.precision=auto is float32 on cpu"]


def test_processes_that_would_compute_differently_are_refused():
    device.log_precision("auto", lambda own: [own, ["float32", "another CPU"]])
    expected = "auto is float32 on cpu and bfloat16 on NVIDIA A100, expected the same for all"
    with pytest.raises(ValueError, match=expected):
        device.log_precision("auto", lambda own: [own, own, ["bfloat16", "NVIDIA A100"]])
    device.log_precision("float16", lambda own: pytest.fail("nothing to gather"))


def test_a_predictor_says_it(lines):
    config = tiny_config()
    config.train.precision = "auto"
    Predictor(config, any_variables(build_model(config.model)))
    assert lines() == ["computing on 2 x cpu", "train.precision=auto is float32 on cpu"]


def test_processes_say_on_what_they_compute_together(lines, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    device.log_devices()
    device.log_devices()
    assert lines() == ["computing on 2 x cpu of 2 processes"]


def test_one_host_of_a_tpu_does_not_start_alone(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(ValueError, match="4 hosts, expected --coordinator_address=auto on each"):
        device.log_devices()


@pytest.mark.parametrize("format", ["stablehlo", "onnx"])
def test_an_export_says_it_where_it_keeps_it(format, lines):
    config = tiny_config()
    config.train.precision = "auto"
    artifact._source_model(as_recipe(config), {}, [], format, ArtifactOptions())
    said = ["train.precision=auto is float32 on cpu"]
    assert lines() == said * (format == "stablehlo")


@pytest.mark.slow
def test_a_kernel_that_crashes_its_compiler_is_left_out(lines, tmp_path, monkeypatch):
    """As on a GPU, but for the program itself, which is one for a CPU."""
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setattr(device, "_is_nvidia", lambda: True)
    monkeypatch.setattr(device, "_said", "")
    monkeypatch.setattr(support, "_refused", {})
    monkeypatch.setattr(dispatch, "_forms", {})
    monkeypatch.setattr(dispatch, "traced_platform", lambda: None)  # both forms
    monkeypatch.setattr(probe, "COMMAND", broken_for("nms", "os.abort()"))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        config = tiny_config()
        predict = Predictor(config, any_variables(build_model(config.model)))
        for _ in range(2):
            predict(np.zeros((64, 64, 3), np.uint8))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    (line,) = [line for line in lines() if "GPU kernels: " in line]
    assert "NMS by XLA: its compiler was ended by SIGABRT" in line
    (known,) = json.loads((tmp_path / device.MEMORY).read_text()).values()
    assert known == ["fill_polygons", "gather_sum"]


@pytest.mark.parametrize("implementation", ["auto", "xla", "pallas"])
def test_nothing_is_tried_without_a_gpu_or_a_choice(implementation, monkeypatch):
    monkeypatch.setattr(probe, "failures", lambda *args: pytest.fail("tried"))
    monkeypatch.setattr(device, "_is_nvidia", lambda: implementation != "auto")
    device.check_kernels(implementation)


def test_processes_refuse_what_fails_on_one_of_them(monkeypatch):
    monkeypatch.setattr(support, "_refused", {})
    monkeypatch.setattr(device, "_is_nvidia", lambda: True)
    monkeypatch.setattr(device, "_failures", dict)
    device.check_kernels("auto", lambda own: [own, {"nms": "its compiler failed"}])
    assert support.mosaic_unsupported("nms") == "its compiler failed"
    assert support.mosaic_unsupported("gather_sum") is None
