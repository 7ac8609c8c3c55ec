"""A run on a set with LVIS's labels: federated loss, its scores, the same on several devices."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from mask_rcnn_jax import export
from mask_rcnn_jax.annotations.lvis import IMAGE_KEYS
from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.data.overview import image_ids
from mask_rcnn_jax.data.source import load_split
from mask_rcnn_jax.evaluation import lvis
from mask_rcnn_jax.formats.shapes import write_shapes
from mask_rcnn_jax.models.build import build_model, init_variables
from mask_rcnn_jax.training import evaluator
from mask_rcnn_jax.training.loop import train
from mask_rcnn_jax.training.metrics import read_metrics
from mask_rcnn_jax.training.scored_file import evaluate_results
from mask_rcnn_jax.training.scoring import evaluate
from mask_rcnn_jax.training.step import make_loss_step, replicate, shard_batch
from mask_rcnn_jax.training.validation import make_validation
from tests.bounds import sum_bound
from tests.helpers import any_variables, tiny_batch
from tests.training.own_run import STEPS, small_config
from tests.training.test_step import TERMS, detectron2_loss, mesh_of
from tests.training.test_step import small_config as small_model

FEDERATED = dict(kind="sigmoid", federated_classes=6)


def federated_model():
    """Two and twenty RoIs in every image, so that means over devices are means over RoIs."""
    sampling = {"batch_size_per_image": 24, "fg_iou_thresh": 0.99, "bg_iou_range": (0.0, 0.99)}
    rpn = {"nms_thresh": 1.0}
    config = small_model(num_classes=30, classifier=FEDERATED, sampling=sampling, rpn=rpn)
    return build_model(config.model, image_counts=tuple(range(30)))


@pytest.mark.slow
def test_the_loss_is_the_same_on_any_number_of_devices():
    model, batch = federated_model(), jax.tree.map(lambda x: x[:4], tiny_batch(5))
    variables = init_variables(model, 0)

    def losses(devices: int) -> dict:
        mesh = mesh_of(devices)
        step = make_loss_step(model, mesh, loss=detectron2_loss(), seed=0)
        return jax.device_get(step(replicate(variables, mesh), shard_batch(batch, mesh)))

    one, two = losses(1), losses(2)
    assert one["loss/box_cls"] > 1  # five classes of log 2 each
    for name, value in one.items():
        np.testing.assert_allclose(two[name], value, rtol=sum_bound(TERMS), err_msg=name)


@pytest.mark.slow
def test_the_model_draws_for_each_image():
    model, batch = federated_model(), tiny_batch(3)

    @jax.jit  # leaves out what is not returned
    def draw(variables, batch, keys):
        outputs = model.apply(variables, batch, keys, train=False, method="forward_train")
        return outputs.rois.classes, outputs.rois.valid, outputs.drawn_classes[0]

    keys = jax.random.split(jax.random.key(0), 3)
    classes, valid, drawn = jax.device_get(draw(any_variables(model), batch, keys))
    for image in range(3):
        unique = set(classes[image][valid[image]].tolist())
        assert drawn[image].sum() == 6 - (0 in unique)
        assert {k - 1 for k in unique - {0}} <= set(np.flatnonzero(drawn[image]).tolist())
        assert not drawn[image, 0] or 1 in unique  # it has no training images
    assert len(np.unique(drawn, axis=0)) == 3


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Shapes with LVIS's labels: every image lacks its file name, and has lists of classes."""
    folder = tmp_path_factory.mktemp("lvis")
    write_shapes(folder, train=10, val=4, size=(64, 64))
    found = {}
    for split in ("train", "val"):
        path = folder / f"annotations/instances_{split}.json"
        content = json.loads(path.read_text())
        ids = [entry["id"] for entry in content["categories"]]
        for entry, frequency in zip(content["categories"], "rcff", strict=True):
            entry["frequency"] = frequency
        for image in content["images"]:
            image["coco_url"] = f"http://localhost/{split}/{image.pop('file_name')}"
            own = {a["category_id"] for a in content["annotations"] if a["image_id"] == image["id"]}
            absent = sorted(set(ids) - own)[:1]
            image |= dict(zip(IMAGE_KEYS, (absent, sorted(own)[:1]), strict=True))
        path.write_text(json.dumps(content))
        found |= {f"{split}_json": str(path), f"{split}_images": str(folder)}
    return found


def lvis_config(files):
    config = small_config()
    config.data.update(files, repeat_threshold=0.5)
    config.model.update(classifier=FEDERATED | {"federated_classes": 3})
    config.eval.update(protocol="lvis", score_threshold=0.0, detections_per_image=20)
    config.eval.update(loss_images=0, pictures=0)
    return config


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory):
    config, workdir = lvis_config(files), tmp_path_factory.mktemp("run") / "run"
    state = train(config, workdir)
    assert int(state.step) == STEPS
    return config, workdir


@pytest.mark.slow
def test_a_run_logs_the_groups_of_classes(trained, capsys):
    _, workdir = trained
    record = read_metrics(workdir / "metrics.jsonl")[-1]
    metrics = json.loads((workdir / f"eval/{STEPS}/metrics.json").read_text())
    names = {"rare": "APr", "common": "APc", "frequent": "APf"}
    for kind, prefix in (("box", ""), ("mask", "mask_")):
        assert record[f"ap/{kind}"] == metrics[prefix + "AP"]
        for group, name in names.items():
            assert record[f"ap/{kind}_{group}"] == metrics[prefix + name]
    names = {prefix + name for prefix in ("", "mask_") for name in lvis.METRICS}
    assert set(metrics) == names | {"per_category"} and len(metrics["per_category"]) == 4
    records = read_metrics(workdir / "metrics.jsonl")
    losses = [r["loss/box_cls"] for r in records if "loss/box_cls" in r]
    assert len(losses) == STEPS and np.isfinite(losses).all()


@pytest.mark.slow
def test_evaluate_gives_the_same_numbers_and_prints_them(trained, tmp_path, capsys):
    config, workdir = trained
    expected = json.loads((workdir / f"eval/{STEPS}/metrics.json").read_text())
    assert evaluate(workdir, output=tmp_path) == expected
    printed = capsys.readouterr().out
    assert "rare classes" in printed and "AP per category" not in printed
    results = evaluate_results(tmp_path / "bbox_results.json", config)
    assert results == {name: expected[name] for name in lvis.METRICS} | {
        "per_category": {n: {"AP": aps["AP"]} for n, aps in expected["per_category"].items()}
    }
    with pytest.raises(ValueError, match="^eval.protocol is 'lvis', expected 'coco' for a report"):
        evaluate(workdir, output=tmp_path, report=True)
    with pytest.raises(ValueError, match="^eval.protocol is 'lvis', expected 'coco' for a report"):
        evaluate_results(tmp_path / "bbox_results.json", config, output=tmp_path, report=True)


@pytest.fixture
def unlabeled(files, tmp_path):
    """A config whose validation images have no classes that are known to be absent."""
    content = json.loads(Path(files["val_json"]).read_text())
    for image in content["images"]:
        del image["neg_category_ids"]
    path = tmp_path / "val.json"
    path.write_text(json.dumps(content))
    config = lvis_config(files)
    config.data.val_json = str(path)
    return config


MESSAGE = r"val.json: images\[0\] lacks 'neg_category_ids' "


def test_a_set_without_labels_cannot_be_scored_so(unlabeled, tmp_path):
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(ValueError, match=MESSAGE):
        evaluate_results(tmp_path / "results.json", unlabeled)
    recipe = as_recipe(unlabeled)
    val_set = load_split(recipe.data, "val")
    with pytest.raises(ValueError, match=MESSAGE):
        make_validation(recipe, val_set, federated_model(), None, tmp_path)


def test_an_exported_model_is_scored_by_the_same_rules(files, monkeypatch):
    recipe = as_recipe(lvis_config(files))
    val_set, given = load_split(recipe.data, "val"), []
    monkeypatch.setattr(evaluator, "detect", lambda *_: ([], [], image_ids(val_set)))
    monkeypatch.setattr(evaluator, "score", lambda *arguments: given.append(arguments) or {"AP": 1})
    assert export.score(recipe, val_set, None, None) == {"AP": 1}
    assert given[0][2:] == (recipe.eval,)


@pytest.mark.slow
def test_nothing_is_detected_before_that_is_said(trained, unlabeled, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluator, "detect", None)
    with pytest.raises(ValueError, match=MESSAGE):
        evaluate(trained[1], unlabeled, output=tmp_path)
