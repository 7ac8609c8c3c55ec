"""`train` with datasets, augmentation, optimizer and loggers of the user's own."""

import json
import os
import shutil
import signal
import sys

import jax
import numpy as np
import optax
import pytest

from mask_rcnn_jax.config import as_recipe, load_config
from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.formats.shapes import write_shapes
from mask_rcnn_jax.models.build import init_variables
from mask_rcnn_jax.training.loop import train
from mask_rcnn_jax.training.metrics import read_metrics
from mask_rcnn_jax.training.scoring import evaluate
from mask_rcnn_jax.training.setup import fingerprint, open_datasets, open_workdir
from mask_rcnn_jax.weights.restore import make_model
from mask_rcnn_jax.weights.run_checkpoint import load_checkpoint
from tests.helpers import assert_tree_close, tiny_config
from tests.memory_set import ShapeSet
from tests.pair import Pair
from tests.training.own_run import STEPS, cosine_sgd, mirror_and_shade, sets, small_config
from tests.training.stubbed_run import stubbed

__all__ = ["stubbed"]


def call(workdir, config=None, **parts):
    """The run of `own_run`, changed as a test wants it."""
    own = {**sets(), "augment": mirror_and_shade, "optimizer": cosine_sgd(), **parts}
    return train(config or small_config(), workdir, **own)


def series(workdir):
    return [
        {name: value for name, value in record.items() if not name.startswith("perf/")}
        for record in read_metrics(workdir / "metrics.jsonl")
    ]


class Recorder:
    def __init__(self):
        self.steps, self.images, self.closed = [], {}, False

    def __call__(self, step, metrics, images):
        self.steps.append((step, sorted(metrics)))
        self.images |= images

    def close(self):
        self.closed = True


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run, its logger and its last state."""
    workdir, recorder = tmp_path_factory.mktemp("own") / "run", Recorder()
    state = call(workdir, loggers=[recorder])
    return workdir, recorder, jax.device_get(state)


def test_the_run_is_like_any_other(whole):
    workdir, _, state = whole
    assert int(state.step) == STEPS
    content = json.loads((workdir / "config.json").read_text())
    assert [entry["name"] for entry in content["categories"]] == list(ShapeSet.class_names)
    given = "tests.memory_set.ShapeSet, given as train_set"
    assert content["config"]["data"]["train_json"] == given
    assert_tree_close(load_checkpoint(workdir)["params"], state.params)
    results = json.loads((workdir / "eval" / str(STEPS) / "bbox_results.json").read_text())
    assert {entry["image_id"] for entry in results} <= {1, 2, 3, 4}
    assert {entry["category_id"] for entry in results} <= {1, 2, 3, 4}
    assert [path.name for path in (workdir / f"eval/{STEPS}/pictures").iterdir()] == ["000000.jpg"]


def test_the_logger_receives_what_metrics_jsonl_holds(whole):
    workdir, recorder, _ = whole
    records = read_metrics(workdir / "metrics.jsonl")
    (last, names), per_class = recorder.steps.pop(), "ap_class/"
    recorder.steps.append((last, [name for name in names if not name.startswith(per_class)]))
    assert recorder.steps == [(r["step"], sorted(r.keys() - {"step"})) for r in records]
    metrics = json.loads((workdir / "eval" / str(STEPS) / "metrics.json").read_text())
    known = {
        f"{per_class}{kind}/{name}"
        for kind, key in (("box", "AP"), ("mask", "mask_AP"))
        for name, aps in metrics["per_category"].items()
        if aps[key] >= 0
    }
    assert {name for name in names if name.startswith(per_class)} == known != set()
    assert [step for step, _ in recorder.steps] == [*range(1, STEPS + 1), STEPS]
    ((name, image),) = recorder.images.items()
    assert name == "000000.jpg" and image.dtype == np.uint8 and image.shape[2] == 3
    assert recorder.closed


def test_the_rate_of_an_injected_schedule_is_logged(whole):
    """Warm-up from 0.001 to 0.01 over two steps, then half a cosine over four."""
    rates = [record["lr"] for record in series(whole[0]) if "lr" in record]
    decay = [0.01 * 0.5 * (1 + np.cos(np.pi * k / 4)) for k in range(4)]
    np.testing.assert_allclose(rates, [0.001, 0.0055, *decay], rtol=1e-5)


def test_evaluate_scores_the_run_as_its_training_did(whole, tmp_path):
    workdir = whole[0]
    metrics = evaluate(workdir, val_set=sets()["val_set"], output=tmp_path, report=True)
    written = json.loads((workdir / "eval" / str(STEPS) / "metrics.json").read_text())
    assert metrics == written == json.loads((tmp_path / "metrics.json").read_text())
    page = (tmp_path / "report.html").read_text()
    assert "ShapeSet" in page and "data:image/jpeg" in page
    expected = "no annotation file 'tests.memory_set.ShapeSet, given as val_set', expected a COCO"
    with pytest.raises(FileNotFoundError, match=expected) as e:
        evaluate(workdir)
    assert "\n" not in str(e.value)


@pytest.mark.slow
def test_evaluate_looks_at_several_views(whole, tmp_path):
    """Twice the size and mirrored; the few steps of the run find nothing worth a score."""
    views = {"eval.tta_scales": (1.0, 2.0), "eval.tta_flip": True}
    config, val_set = load_config(whole[0], views), sets()["val_set"]
    metrics = evaluate(whole[0], config, val_set=val_set, output=tmp_path)
    assert metrics == json.loads((tmp_path / "metrics.json").read_text())
    found = json.loads((tmp_path / "bbox_results.json").read_text())
    assert {entry["image_id"] for entry in found} == {1, 2, 3, 4}
    boxes = np.array([entry["bbox"] for entry in found])
    assert (boxes >= -1e-3).all() and (boxes[:, :2] + boxes[:, 2:] <= 64 + 1e-3).all()


@pytest.mark.slow
def test_a_run_that_was_cut_off_ends_like_one_that_was_not(whole, tmp_path, caplog):
    """As kill -9 leaves it after step 3; the metrics of later steps are there already."""
    workdir = tmp_path / "run"
    shutil.copytree(whole[0], workdir)
    shutil.rmtree(workdir / "checkpoints" / str(STEPS))
    with caplog.at_level("INFO"):
        state = call(workdir)
    assert "resuming at step 3 of 6" in caplog.text
    assert series(workdir) == series(whole[0])
    assert_tree_close(jax.device_get(state), whole[2])


@pytest.mark.slow
def test_sigterm_saves_and_the_same_call_goes_on(whole, tmp_path, caplog):
    def stop(step, metrics, images):
        if step == 4:
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with caplog.at_level("INFO"):
        with pytest.raises(SystemExit) as stopped:
            call(tmp_path, loggers=[stop])
        assert stopped.value.code == 75
        stopped_at = max(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
        assert 4 <= stopped_at < STEPS
        assert f"stopped by SIGTERM, saved step {stopped_at} in {tmp_path}" in caplog.text
        assert signal.getsignal(signal.SIGTERM) == before and "next:" not in caplog.text
        state = call(tmp_path, config=small_config(), loggers=[Recorder()])
        assert f"tensorboard --logdir {tmp_path}" in caplog.text.partition("next:")[2]
    assert series(tmp_path) == series(whole[0])
    assert_tree_close(jax.device_get(state), whole[2])


@pytest.mark.slow
def test_worker_processes_change_nothing(whole, tmp_path):
    config = small_config()
    config.data.num_workers = 2
    call(tmp_path, config)
    assert series(tmp_path) == series(whole[0])


@pytest.mark.slow
def test_another_optimizer_cannot_resume(whole, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(whole[0], workdir)
    config = small_config()
    with pytest.raises(ValueError, match="saved with another optimizer, whose state") as error:
        call(workdir, config, optimizer=optax.adam(1e-3))
    assert "\n" not in str(error.value) and str(workdir / "checkpoints" / "6") in str(error.value)
    with pytest.raises(ValueError, match="saved with another optimizer"):
        call(workdir, config, optimizer=None)


def test_another_dataset_cannot_resume(whole):
    class Other(ShapeSet):
        pass

    with pytest.raises(ValueError, match="holds a run of another config: data.train_json was"):
        call(whole[0], train_set=Other("train", 10))


@pytest.mark.slow
def test_a_plain_transformation_has_no_rate_and_leaves_frozen_layers_alone(tmp_path):
    """Float16, so that the loss is scaled around it; the caller's config stays as it was."""
    config = small_config(precision="float16")
    config.model.backbone = tiny_config().model.backbone
    config.model.backbone.frozen_stages, config.model.init_from = 2, "random"
    config.train.epochs = 0.4  # four images: one step
    config.eval.update(max_images=1, loss_images=0, pictures=0)
    logged = []
    before = config.to_json()
    state = jax.device_get(call(
        tmp_path, config, optimizer=optax.adam(optax.cosine_decay_schedule(1e-3, 10)),
        loggers=[lambda step, metrics, images: logged.append(metrics)],
    ))  # fmt: skip
    assert config.to_json() == before
    first, last = logged
    assert "lr" not in first and first["loss_scale"] > 1 and "ap/box" in last
    start = init_variables(make_model(as_recipe(config), 4), config.train.seed)["params"]
    for name, layer in state.params["backbone"].items():
        frozen = name.startswith(("stem", "res2"))
        same = jax.tree.map(np.array_equal, layer, start["backbone"][name])
        assert all(jax.tree.leaves(same)) == frozen, name


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"optimizer": 1e-3}, "optimizer is float, expected an optax transformation"),
        ({"train_set": "coco"}, r"train_set \(str\) has no 'class_names', 'images', 'decode'"),
        ({"val_set": ShapeSet("val", 0)}, r"val_set \(ShapeSet\): 'images' is empty"),
        ({"config": 7}, "config is int, expected a recipe, the name of one, or a ConfigDict"),
        ({"config": "nowhere"}, "no recipe or run 'nowhere'"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(parts, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        call(tmp_path / "run", **parts)
    assert not (tmp_path / "run").exists()


def test_classes_of_both_sets_must_agree(tmp_path):
    class Other(ShapeSet):
        class_names = ("circle", "square", "triangle", "moon")

    with pytest.raises(ValueError, match=r"Other has 4 categories, ShapeSet has 4.*'moon'"):
        call(tmp_path, val_set=Other("val", 2))


def test_loggers_of_the_config_are_checked_first(tmp_path):
    config = small_config()
    config.train.loggers = ("wandb", "tensorbored")
    with pytest.raises(ValueError, match="train.loggers has 'tensorbored'"):
        call(tmp_path / "run", config, train_set="not looked at yet")


def test_one_logger_needs_no_list(tmp_path):
    with pytest.raises(ValueError, match="train.loggers has 'tensorbored'"):
        call(tmp_path / "run", train_set="not looked at yet", loggers="tensorbored")
    with pytest.raises(ValueError, match="train_set .str. has no"):
        call(tmp_path / "run", train_set="no set", loggers=print)


def test_a_failing_augmentation_stops_in_one_line(stubbed, tmp_path):
    expected = "ShapeSet: image '00000..jpg': augment returned NoneType, expected an Example"
    with pytest.raises(ValueError, match=expected) as error:
        call(tmp_path, augment=lambda example, rng: None)
    assert "\n" not in str(error.value)


def test_a_given_coco_dataset_is_evaluated_by_the_command_too(tmp_path):
    """config.json then names its files."""
    paths = write_shapes(tmp_path, train=4, val=2, size=(64, 64))
    given = {split: load_coco(paths[split], tmp_path / split) for split in paths}
    *sets, data = open_datasets(as_recipe(small_config()).data, given["train"], given["val"])
    assert sets == [given["train"], given["val"]]
    assert data.val_json == str(paths["val"])
    assert data.train_images == str(tmp_path / "train")


def test_a_training_set_that_changed_under_its_path_is_said(tmp_path, caplog):
    """A box that moved is enough; the same set again is not."""
    path = write_shapes(tmp_path, train=4, val=2, size=(64, 64))["train"]
    recipe, classes = as_recipe(small_config()), [{"id": 1, "name": "a"}]

    def start(resuming=True):
        known = fingerprint(load_coco(path, tmp_path / "train"), recipe.data)
        open_workdir(tmp_path / "run", recipe, classes, resuming=resuming, train_set=known)
        return known

    first = start(resuming=False)
    assert first.startswith("4 images, ") and start() == first and not caplog.text
    content = json.loads(path.read_text())
    entry = content["annotations"][0]
    entry["segmentation"] = [[1, 1, 9, 1, 9, 9]]
    entry["bbox"] = [1, 1, 8, 8]
    path.write_text(json.dumps(content))
    second = start()
    assert f"the training set changed since this run began: it was {first} and" in caplog.text
    caplog.clear()
    assert start() == second != first and not caplog.text
    open_workdir(tmp_path / "run", recipe, classes, resuming=True)  # of an older version
    assert start() == second and not caplog.text


def test_a_training_set_alone_says_how_to_do_without_validation(tmp_path):
    paths = write_shapes(tmp_path, train=4, val=2, size=(64, 64))
    config = small_config()
    config.data.update(val_json=str(tmp_path / "none.json"), val_images=str(tmp_path))
    mine = load_coco(paths["train"], tmp_path / "train")
    with pytest.raises(FileNotFoundError, match=r"none.json.*; give val_set, or data.val_json=''"):
        open_datasets(as_recipe(config).data, mine, None)
    config.data.val_json = ""
    assert open_datasets(as_recipe(config).data, mine, None)[1] is None


@pytest.mark.slow
def test_boxes_alone_train_and_are_scored_without_masks(tmp_path):
    """A json without a single segmentation; the best checkpoint is that of the boxes."""
    paths = write_shapes(tmp_path, train=4, val=2, size=(64, 64))
    config = small_config()
    config.train.update(steps=2, eval_every=1, checkpoint_every=1)
    config.loss.mask_weight = 0.0
    for split, path in paths.items():
        content = json.loads(path.read_text())
        for n, entry in enumerate(content["annotations"]):
            entry.update({"segmentation": []} if n % 2 else {"iscrowd": 0})
            if n % 2 == 0:
                del entry["segmentation"]
        path.write_text(json.dumps(content))
        config.data.update({f"{split}_json": str(path), f"{split}_images": str(tmp_path / split)})
    train(config, tmp_path / "run")
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records if "ap/box" in record] == [1, 2]
    assert not any("ap/mask" in record for record in records)
    assert all(record["loss/mask"] == 0 for record in records if "loss/mask" in record)
    found = json.loads((tmp_path / "run" / "eval" / "2" / "metrics.json").read_text())
    assert "AP" in found and "mask_AP" not in found
    assert not (tmp_path / "run" / "eval" / "2" / "segm_results.json").exists()
    assert evaluate(tmp_path / "run", output=tmp_path / "out")["AP"] == found["AP"]
    config.loss.mask_weight = 1.0
    with pytest.raises(
        ValueError, match="lacks 'segmentation'; loss.mask_weight=0 trains on boxes"
    ):
        train(config, tmp_path / "other")


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    """One device each against two devices of one: the same augmented images, logged once."""

    def start(index, port):
        where = [f"--coordinator_address=localhost:{port}", "--num_processes=2"]
        where += [f"--process_id={index}", "--compile_cache=off"]
        command = [sys.executable, "-m", "tests.training.own_run", tmp_path / "two", *where]
        return command, os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}

    with Pair(start, tmp_path) as pair:
        assert pair.codes() == [0, 0], pair.said()
    assert [said.splitlines()[-1] for said in pair.said()] == ["logged 7 times", "logged 0 times"]
    call(tmp_path / "one")
    one, two = series(tmp_path / "one"), series(tmp_path / "two")
    assert [record.keys() for record in one] == [record.keys() for record in two]
    for record, other in zip(one, two, strict=True):
        assert record == pytest.approx(other, rel=1e-5, abs=1e-6)


def test_the_config_may_be_the_name_of_a_recipe(tmp_path, monkeypatch):
    """Nothing is trained: the recipe's data is looked for where it says."""
    recipe = "quickstart"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=load_config(recipe).data.train_json):
        train(recipe, tmp_path / "run")
