"""Commands that compile for GPUs that are not there, with a small model."""

import json
import subprocess
import sys

import pytest

from tests.commands.command import SMALL

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "command, expected",
    [
        (["mask_rcnn_jax.benchmark", "compile", "--devices=1,2"], "programs"),
        (["mask_rcnn_jax.benchmark", "compile", "--mode=infer", "--devices=1,2"], "programs"),
        (["benchmarks.scaling", "--gpus=8,16", "--config.train.precision=tf32"], "rows"),
    ],
    ids=["memory", "prediction", "scaling"],
)
def test_commands_for_gpus_that_are_not_there(command, expected, tmp_path):
    pytest.importorskip("jax_cuda13_plugin", reason="needs pip install -e '.[gpu-check]'")
    recipe = tmp_path / "small.py"
    recipe.write_text(
        "from mask_rcnn_jax.config import load_config\n"
        f"get_config = lambda: load_config('quickstart', {SMALL | {'model.backbone.depth': 10}})\n"
    )
    flags = [f"--config={recipe}", "--target=h100", "--images=1"]
    done = subprocess.run(
        [sys.executable, "-m", *command, *flags, f"--json={tmp_path / 'found.json'}"],
        text=True, capture_output=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    print(found[expected])
    assert len(found[expected]) == 2
