"""A run in float16, in parts, taken up in the middle: the loss scale goes on where it was."""

import shutil

import numpy as np
import pytest

from mask_rcnn_jax.data.shapes import write_shapes
from mask_rcnn_jax.training.checkpoint import load_checkpoint
from mask_rcnn_jax.training.loop import train_and_evaluate
from mask_rcnn_jax.training.metrics import read_metrics
from tests.helpers import assert_tree_close, tiny_config


@pytest.mark.slow
def test_float16_in_parts_resumes_with_its_scale(tmp_path):
    """The scale starts so high that the first steps overflow."""
    jsons = write_shapes(tmp_path / "shapes", train=8, val=2, size=(64, 64))
    workdir = tmp_path / "run"

    def config():
        config = tiny_config()
        for split in ("train", "val"):
            config.data[f"{split}_json"] = str(jsons[split])
            config.data[f"{split}_images"] = str(tmp_path / "shapes" / split)
        config.model.num_classes = 0
        config.optim.update(loss_scale=2.0**40, loss_scale_growth=3)
        config.train.update(
            precision="float16", steps=24, log_every=1, checkpoint_every=12, eval_every=24,
            images_per_device=1,
        )  # fmt: skip
        config.eval.update(loss_images=0, pictures=0)
        return config

    def series() -> list[dict]:
        drop = ("perf/images_per_s",)
        records = read_metrics(workdir / "metrics.jsonl")
        return [{k: v for k, v in record.items() if k not in drop} for record in records]

    train_and_evaluate(config(), str(workdir))
    whole, parameters = series(), load_checkpoint(workdir)
    steps = [record for record in whole if "loss_scale" in record]
    assert [record["step"] for record in steps] == list(range(1, 25))
    assert steps[0]["loss_scale"] == 2.0**40 and steps[0]["skipped_steps"] == 1
    assert steps[0]["grad_norm"] is None
    skipped = steps[-1]["skipped_steps"]
    assert 2 < skipped < 23 and np.isfinite(steps[-1]["loss/total"])

    shutil.rmtree(workdir / "checkpoints" / "24")
    train_and_evaluate(config(), str(workdir))
    assert series() == whole
    assert_tree_close(load_checkpoint(workdir), parameters)
