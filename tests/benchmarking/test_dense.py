"""Images with thousands of objects: what the benchmark makes of them, and the memory planned."""

import json
import subprocess
import sys

import pytest

from benchmarks import dense, entries
from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.data.overview import num_objects


@pytest.mark.parametrize("objects", [10, 2000])
def test_budgets_follow_the_objects(objects):
    recipe = load_config("finetune", entries.budgets(objects))
    assert recipe.data.max_instances == objects
    rpn, sampling = recipe.model.rpn, recipe.model.sampling
    assert min(rpn.batch_size_per_image, sampling.batch_size_per_image) >= objects
    assert min(rpn.post_nms_topk_train, recipe.eval.detections_per_image) >= objects
    assert rpn.pre_nms_topk_train <= 8192  # what the GPU's kernel takes


def test_written_images_have_the_objects(tmp_path, monkeypatch):
    monkeypatch.setattr(dense, "SIDE", 96)
    dataset = load_coco(dense.write_images(tmp_path, 30), tmp_path)
    assert len(dataset.images) == dense.IMAGES
    assert dataset.decode(0).shape == (96, 96, 3)
    assert [num_objects(dataset.images, k) for k in (1, 2)] == [30, 60]


@pytest.mark.slow
def test_2000_objects_train_on_a_gpu_of_24_gb():
    """Half of the RoIs foreground, all with masks: 4,776 and 439 MB in the product's `dense`."""
    pytest.importorskip("jax_cuda13_plugin", reason="needs pip install -e '.[gpu-check]'")
    entries = {
        "data.image_size": (1024, 1024), "data.resize": "fit", "train.batch_size": 2,
        "train.precision": "bfloat16", "model.sampling.positive_fraction": 0.5,
    }  # fmt: skip
    flags = [f"--config.{name}={value}" for name, value in entries.items()]
    command = [sys.executable, "-m", "benchmarks.dense", "--config=finetune", "--calls=0"]
    done = subprocess.run(
        [*command, "--objects=2000", "--target=h100", *flags],
        text=True, capture_output=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    planned = json.loads(done.stdout.splitlines()[-1])
    assert planned["objects"] == 2000 and planned["batch_size"] == 2
    assert planned["planned_train_mb"] < 5500
    assert planned["planned_infer_mb"] < 500
