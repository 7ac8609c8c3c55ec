"""A run with PointRend: it stops and goes on, is scored, pruned, exported and made int8."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.export import export_model
from mask_rcnn_jax.exporting.options import ArtifactOptions
from mask_rcnn_jax.models.build import build_model, named_section
from mask_rcnn_jax.pruning.channel_groups import prunable_channels
from mask_rcnn_jax.training.loop import train
from mask_rcnn_jax.training.metrics import read_metrics
from tests.helpers import any_variables, assert_finite_tree, tiny_batch, tiny_config
from tests.training import own_run

HEAD = dict(channels=8, fc_channels=16, point_channels=16, train_points=12, subdivisions=2,
            subdivision_points=40)  # fmt: skip


def small_config():
    config = own_run.small_config()
    config.model.mask_head = named_section("mask_head", "pointrend", **HEAD)
    config.eval.update(boundary=True, loss_images=2)
    return config


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(small_config(), folder, **own_run.sets())


@pytest.mark.slow
def test_a_run_stops_and_goes_on(whole, tmp_path):
    folder, state = whole

    def stop(step, metrics, images):
        if step == 3:
            raise mrcnn.StopTraining("enough")

    train(small_config(), tmp_path, **own_run.sets(), loggers=[stop])
    again = train(small_config(), tmp_path, **own_run.sets())
    jax.tree.map(np.testing.assert_array_equal, again.params, state.params)
    records = read_metrics(folder / "metrics.jsonl")
    assert all(r["loss/mask_point"] > 0 for r in records if "loss/mask" in r)
    assert {"ap/mask", "ap/boundary", "val_loss/mask_point"} <= records[-1].keys()


@pytest.mark.slow
@pytest.mark.parametrize("format", ["stablehlo", "onnx"])
def test_it_is_exported(whole, format, tmp_path):
    export_model(None, str(whole[0]), format, str(tmp_path), ArtifactOptions())
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["outputs"]["masks"]["shape"][-2:] == [28, 28]
    assert manifest["self_check"]


@pytest.mark.slow
def test_int8_and_other_precisions_are_finite():
    config = small_config()
    config.model.num_classes, config.model.quantization.int8 = 2, True
    model = build_model(as_recipe(config).model, precision="bfloat16")
    variables, batch = any_variables(model), jax.tree.map(jnp.asarray, tiny_batch(2))
    keys = jax.random.split(jax.random.key(0), 2)
    run = jax.jit(
        lambda variables: model.apply(variables, batch, keys, train=True, method="forward_train",
                                      mutable=["batch_stats"])
    )  # fmt: skip
    outputs, updated = run(variables)
    assert outputs.point_logits.dtype == outputs.mask_logits.dtype == np.float32
    assert_finite_tree(outputs)
    ranges = updated["batch_stats"]["mask_head"]
    assert "fc1" in ranges["point_head"] and "coarse_predictor" not in ranges


def test_pruning_leaves_the_head_and_its_map():
    config = tiny_config()
    names = set(prunable_channels(build_model(config.model)))
    config.model.mask_head = named_section("mask_head", "pointrend", **HEAD)
    gone = names - set(prunable_channels(build_model(config.model)))
    assert gone == {n for n in names if n.startswith(("mask_head/", "fpn/fpn_output"))}
    assert "fpn/fpn_output" in gone and gone < names
