"""One run from training to an exported model, in the programs that users have."""

import json
from statistics import mean

import numpy as np
import pytest

from mask_rcnn_jax.training.metrics import read_metrics
from tests.commands.command import check_done, run_captured
from tests.commands.small_run import Run, write_data

XLA_DEFAULTS = True
STEPS = 60
LEARNS = {"optim.learning_rate": 1e-2, "optim.reference_batch": 2, "train.steps": STEPS}
LEARNS |= {"train.eval_every": STEPS, "train.checkpoint_every": STEPS, "eval.loss_images": 0}


def test_a_model_learns_is_scored_and_detects_the_same_when_exported(tmp_path):
    run = Run(tmp_path / "run", tmp_path / "shapes", entries=tuple(LEARNS.items()))
    write_data(run.data_dir)
    check_done(run_captured("train", *run.flags, "--workdir", run.workdir))
    *steps, last = read_metrics(run.workdir / "metrics.jsonl")
    losses = [step["loss/total"] for step in steps]
    assert mean(losses[-10:]) < 0.7 * mean(losses[:10])

    def done(entry: str, output: str, *arguments):
        check_done(run_captured(entry, *arguments, "--output", tmp_path / output))
        return tmp_path / output

    trained = ("--workdir", run.workdir)
    scores = json.loads((done("evaluate", "scored", *trained) / "metrics.json").read_text())
    assert scores["AP"] == last["ap/box"] > 0 and scores["mask_AP"] == last["ap/mask"] > 0

    exported = done("export", "exported", *trained, "--format=stablehlo")
    assert json.loads((exported / "manifest.json").read_text())["self_check"]["float"]
    images = ("--input", run.data_dir / "val", "--score_threshold=0.1")
    found, again = (
        json.loads((done("infer", name, *model, *images) / "detections.json").read_text())
        for name, model in (("ours", trained), ("theirs", ("--artifact", exported)))
    )
    assert len(found) == len(again) > 0
    for one, other in zip(found, again, strict=True):
        assert one["category_id"] == other["category_id"]
        np.testing.assert_allclose(one["bbox"], other["bbox"], atol=0.1)
        assert one["score"] == pytest.approx(other["score"], abs=1e-3)
