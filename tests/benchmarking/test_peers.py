"""Two processes taking steps in turns, and what is said of their times."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import peers


@pytest.fixture
def stand_in(tmp_path):
    """A program whose steps take 2 s, whatever they are to do."""
    path = tmp_path / "python"
    path.write_text('#!/bin/sh\necho "a stand-in"\nwhile read line; do echo 2 3; echo 2 3; done\n')
    path.chmod(0o755)
    return str(path)


def test_steps_in_turns(stand_in, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", stand_in)
    report = tmp_path / "ratio.json"
    options = ["--mode=infer", "--size=64,128", "--turns=3", f"--json={report}"]
    peers.main(peers.parse([f"--python={stand_in}", *options]))
    assert "ours: a stand-in\ntorchvision: a stand-in\n" in capsys.readouterr().out
    values = json.loads(report.read_text())
    assert values["steps"] == 6 and values["size"] == "64,128"
    assert values["torchvision_over_ours"] == {"low": 1, "median": 1, "high": 1}
    assert "source" not in values  # a path of somebody's machine


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_our_side_takes_steps(stand_in, mode, capsys):
    peers.main(
        peers.parse([f"--python={stand_in}", f"--mode={mode}", "--size=64,100", "--turns=1"])
    )
    assert "canvas (64, 128)" in capsys.readouterr().out


def test_a_peer_that_ends_is_told_of():
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    with peers.Side(command) as side, pytest.raises(SystemExit, match="error: .* ended with 3"):
        side.answer()


def test_a_peer_that_has_ended_is_told_of():
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    with pytest.raises(SystemExit, match="error: .* ended with 3"), peers.Side(command) as side:
        side.process.wait()
        side.take_turn()


def test_the_turns_before_an_end_are_kept(stand_in, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", stand_in)
    once = tmp_path / "once"
    once.write_text("#!/bin/sh\necho ready\nread line; echo 4 5; echo 4 5\n")
    once.chmod(0o755)
    report = tmp_path / "ratio.json"
    with pytest.raises(SystemExit, match="ended with"):
        peers.main(peers.parse([f"--python={once}", "--turns=3", f"--json={report}"]))
    assert json.loads(report.read_text())["torchvision_over_ours"]["median"] == 2


def test_the_ratio_is_between_neighboring_steps():
    """A step that the whole machine was slow for counts as any other."""
    ours, peer = [(1.0, 2.0), (10.0, 2.0), (2.0, 2.0)], [(1.5, 4.0), (15.0, 4.0), (3.0, 4.0)]
    report = peers.summary({"ours": ours, "peer": peer}, "peer")
    assert report["peer_over_ours"] == {"low": 1.5, "median": 1.5, "high": 1.5}
    assert report["peer_over_ours_cpu"]["median"] == report["ours_cpu_s"]["median"] == 2.0
    assert report["ours_s"]["median"] == 2.0 and report["peer_s"]["median"] == 3.0


def test_boxes_are_inside_the_image_and_not_tiny():
    settings = SimpleNamespace(height=200, width=300, batch=2, objects=50)
    boxes = peers.draw_boxes(settings)
    assert boxes.shape == (2, 50, 4) and boxes.dtype == np.float32
    assert (boxes >= 0).all() and (boxes <= np.float32([300, 200, 300, 200])).all()
    assert (boxes[..., 2:] - boxes[..., :2] > 8).all()
    np.testing.assert_array_equal(boxes, peers.draw_boxes(settings))
