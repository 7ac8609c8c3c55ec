"""A run on a small generated set with keypoints: trained, scored and used."""

import json

import numpy as np
import pytest
from PIL import Image

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.models.build import named_section
from tests.helpers import tiny_config
from tests.keypoint_set import NAMES, figure_json
from tests.small_trunk import SECTION


def config(folder):
    tree = figure_json()
    rng = np.random.default_rng(0)
    for image, one in zip(tree["images"], tree["annotations"], strict=True):
        pixels = rng.integers(0, 60, (image["height"], image["width"], 3), np.uint8)
        x, y, width, height = one["bbox"]
        pixels[y : y + height, x : x + width] += 120
        for number, (x, y, seen) in enumerate(np.reshape(one["keypoints"], (-1, 3))):
            if seen:
                pixels[int(y) - 2 : int(y) + 3, int(x) - 2 : int(x) + 3] = np.eye(3)[number] * 255
        Image.fromarray(pixels).save(folder / image["file_name"])
    (folder / "figures.json").write_text(json.dumps(tree))
    config = tiny_config()
    where = {"json": str(folder / "figures.json"), "images": str(folder)}
    for part in ("train", "val"):
        config.data.update({f"{part}_{name}": value for name, value in where.items()})
    config.data.update(keypoints=NAMES, num_workers=0)
    config.model.num_classes = 0
    config.model.backbone = SECTION
    head = dict(num_keypoints=3, channels=16, num_convs=2)
    config.model.keypoint_head = named_section("keypoint_head", "conv_deconv", **head)
    config.model.update(mask_head=dict(name="none"), fpn=dict(channels=16))
    config.train.update(batch_size=2, steps=30, log_every=5, checkpoint_every=30, eval_every=30)
    config.optim.update(name="adamw", learning_rate=0.01)
    config.eval.score_threshold = 0.0
    return config


@pytest.mark.slow
def test_a_run_learns_keypoints_and_finds_them(tmp_path):
    recipe = config(tmp_path)
    state = mrcnn.train(recipe, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss/keypoint"] for line in lines if "loss/keypoint" in line]
    assert losses[-1] < 0.9 * losses[0] and "loss/mask" not in lines[0]
    assert "ap/keypoints" in state.metrics and "ap/box" in state.metrics
    predictor = mrcnn.load(tmp_path / "run")
    result = predictor(str(tmp_path / "1.png"))
    assert len(result) and result.masks is None
    assert result.keypoints.shape == (len(result), 3, 3) and np.isfinite(result.keypoints).all()
