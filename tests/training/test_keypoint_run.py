"""A run of a model of keypoints: trained, scored, evaluated again and used."""

import json

import pytest

from mask_rcnn_jax.models.build import named_section
from mask_rcnn_jax.predict.loading import load as load_model
from mask_rcnn_jax.recipe.stopping import measure
from mask_rcnn_jax.training.loop import train
from mask_rcnn_jax.training.metrics import read_evaluations
from mask_rcnn_jax.training.scoring import evaluate
from tests.data.test_keypoints import load
from tests.keypoint_set import NAMES
from tests.training.own_run import small_config


@pytest.mark.slow
def test_a_run_of_keypoints_is_scored_by_them_and_finds_them(tmp_path):
    pytest.importorskip("mask_rcnn_jax.models.keypoints")
    load(tmp_path)
    config, workdir = small_config(), tmp_path / "run"
    for split in ("train", "val"):
        config.data[f"{split}_json"] = str(tmp_path / "figures.json")
        config.data[f"{split}_images"] = str(tmp_path)
    config.data.update(keypoints=NAMES, keypoint_offset=0.5, num_workers=0, augment=("rotation",))
    config.model.mask_head = dict(name="none")
    head = dict(num_keypoints=3, channels=8, num_convs=1)
    config.model.keypoint_head = named_section("keypoint_head", "conv_deconv", **head)
    config.train.update(batch_size=2, steps=2, eval_every=2, checkpoint_every=2)
    train(config, workdir)
    (record,) = read_evaluations(workdir, 2)
    metrics = json.loads((workdir / "eval/2/metrics.json").read_text())
    assert measure(record) == "ap/keypoints"
    assert record["ap/keypoints"] == metrics["keypoints_AP"] >= 0
    results = json.loads((workdir / "eval/2/keypoints_results.json").read_text())
    assert len(results[0]["keypoints"]) == 9
    assert evaluate(workdir, output=tmp_path / "out") == metrics
    found = load_model(str(workdir))(tmp_path / "1.png")
    assert found.keypoints.shape == (len(found), 3, 3) and found.keypoint_names == NAMES
    assert found.plot().shape[2] == 3
