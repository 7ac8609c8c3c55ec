"""`benchmark` over devices and processes: flags that do not fit, and a table of two processes."""

import json

import pytest

from mask_rcnn_jax import device
from mask_rcnn_jax.benchmarking import kernels
from pallas_kernels import support
from tests.commands.command import SMALL, config_flags, error_line, run_inside
from tests.commands.test_processes import launched


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["infer", "--devices=1,2"], "--devices is for train and compile, not for infer"),
        (["infer", "--mode=infer"], "--mode is for compile, not for infer"),
        (["compile", "--mode=eval"], "train|infer"),
        (["train", "--devices=1,x"], "--devices has 'x', expected whole numbers from 1"),
        (["train", "--devices=1", "--stages"], "--stages cannot be combined with --devices"),
        (["train", "--devices=1,3"], "--devices has 3, this run has 2"),
        (["train", "--devices=2", "--config.train.batch_size=3"], "expected a multiple of 2"),
    ],
)
def test_flags_that_do_not_fit_are_refused(arguments, expected, capsys):
    code = run_inside("benchmark", *arguments, *config_flags({}))
    assert expected in error_line(code, capsys.readouterr().err)


def test_kernels_are_tried_before_they_are_used(capsys, monkeypatch):
    monkeypatch.setattr(support, "_refused", {})
    monkeypatch.setattr(device, "_is_nvidia", lambda: True)
    monkeypatch.setattr(device, "_failures", lambda: {"nms": "its compiler failed"})
    run_inside("benchmark", "train", "--devices=1,3", *config_flags({}))
    assert "--devices has 3" in capsys.readouterr().err
    assert support.mosaic_unsupported("nms") == "its compiler failed"
    assert kernels.run("nms tiny")["failures"]["nms tiny"] == "no kernel: its compiler failed"


@pytest.mark.slow
def test_two_processes_with_two_devices_measure_weak_scaling_in_one_table(tmp_path, cache):
    """The row of two devices is of the first process alone, for which the second waits."""
    flags = config_flags(SMALL | {"model.num_classes": 3, "train.batch_size": 4})
    command = ("benchmark", "train", *flags, "--devices=2,4", "--steps=3", f"--json={tmp_path}/x")
    with launched(*command, folder=tmp_path, cache=cache, devices=2) as pair:
        assert pair.codes() == [0, 0], pair.said()
    table = json.loads((tmp_path / "x").read_text())
    assert (table["processes"], table["images_per_device"]) == (2, 1)
    assert [(row["devices"], row["batch_size"]) for row in table["rows"]] == [(2, 2), (4, 4)]
    assert table["rows"][0]["efficiency"] == 1
    assert '"rows"' in pair.logs[0].read_text() and '"rows"' not in pair.logs[1].read_text()
