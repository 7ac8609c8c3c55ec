"""The walk of docs/dense_images.md, command by command as it stands there, with small models."""

import json
import subprocess
import sys

import pytest

from tests.commands.command import ROOT, check_done, environment
from tests.commands.test_documented import FEW_CELLS, WINDOWS
from tests.commands.test_walk import CHEAP, WEIGHTS, commands_of, write_weights

LIMITS = ("data.max_instances", "eval.detections_per_image")  # stay the recipe's
SMALL = {name: value for name, value in CHEAP.items() if name not in LIMITS}
SMALL |= WINDOWS | {"data.image_size": (128, 128), "model.rpn.batch_size_per_image": 64}


@pytest.mark.slow
def test_the_walk_of_dense_images(tmp_path, cache):
    """Generated cells -> checked -> suggestions -> trained from random weights and from a file's ->
    scores -> pictures."""
    write_weights(tmp_path / WEIGHTS)
    cheap = {"train": [f"--config.{name}={value}" for name, value in SMALL.items()]}
    said = {}
    for entry, *arguments in commands_of(ROOT / "docs" / "dense_images.md"):
        added = FEW_CELLS if arguments[0] == "cells" else cheap.get(entry, [])
        done = subprocess.run(
            [sys.executable, "-m", f"mask_rcnn_jax.{entry}", *arguments, *added], cwd=tmp_path,
            text=True, capture_output=True, timeout=1200,
            env=environment(cache, devices=1) | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        check_done(done)
        said[entry, *arguments[:2]] = done.stdout + done.stderr

    assert "instances_train.json: no problem in 3 images" in said["prepare", "check", "--data_dir"]
    stats = said["prepare", "stats", "--config"]
    assert "--config.data.max_instances=" in stats and (tmp_path / "cells.html").is_file()
    for name in ("cells", "dense"):
        assert (tmp_path / "runs" / name / "checkpoints" / "8").is_dir()
    assert "left out" not in said["train", "--config", "dense"]
    assert "arrays loaded for backbone, box_head, fpn" in said["train", "--config", "dense"]
    scores = json.loads((tmp_path / "runs" / "cells" / "scores" / "metrics.json").read_text())
    assert set(scores["per_category"]) == {"cell"} and 0 <= scores["mask_AP"] <= 1
    assert (tmp_path / "runs/cells/scores/report.html").is_file()
    assert len(list((tmp_path / "found").glob("*.png"))) == 2
