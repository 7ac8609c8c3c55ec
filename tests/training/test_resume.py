"""A run in float16, in parts, taken up in the middle: the loss scale goes on where it was."""

import shutil

import numpy as np
import pytest

from mask_rcnn_jax.formats.shapes import write_shapes
from mask_rcnn_jax.training.loop import train
from mask_rcnn_jax.training.metrics import read_metrics
from mask_rcnn_jax.weights.run_checkpoint import load_checkpoint
from tests.helpers import assert_tree_close, tiny_config


@pytest.mark.slow
def test_float16_in_parts_resumes_with_its_scale(tmp_path):
    """It doubles with every step."""
    jsons = write_shapes(tmp_path / "shapes", train=8, val=2, size=(64, 64))
    workdir = tmp_path / "run"

    def config():
        config = tiny_config()
        for split in ("train", "val"):
            config.data[f"{split}_json"] = str(jsons[split])
            config.data[f"{split}_images"] = str(tmp_path / "shapes" / split)
        config.model.num_classes = 0
        config.optim.update(loss_scale=2.0**8, loss_scale_growth=1)
        config.train.update(
            precision="float16", steps=6, log_every=1, checkpoint_every=3, eval_every=6,
            images_per_device=1,
        )  # fmt: skip
        config.eval.update(loss_images=0, pictures=0)
        return config

    def series() -> list[dict]:
        records = read_metrics(workdir / "metrics.jsonl")
        return [{k: v for k, v in r.items() if not k.startswith("perf/")} for r in records]

    train(config(), str(workdir))
    whole, parameters = series(), load_checkpoint(workdir)
    steps = [record for record in whole if "loss_scale" in record]
    assert [record["loss_scale"] for record in steps] == [2.0**k for k in range(8, 14)]
    assert {record["skipped_steps"] for record in steps} == {0}
    assert np.isfinite([record["loss/total"] for record in steps]).all()

    shutil.rmtree(workdir / "checkpoints" / "6")
    train(config(), str(workdir))
    assert series() == whole
    assert_tree_close(load_checkpoint(workdir), parameters)
