"""Recipes and runs are found by name and by path, from any folder."""

import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.config import (
    as_recipe,
    load_config,
    load_tree,
    read_workdir,
    recipe_names,
    upgrade,
    write_workdir,
)
from mask_rcnn_jax.models.build import build_model
from mask_rcnn_jax.recipe.entries import flatten
from mask_rcnn_jax.weights import restore
from tests.commands.command import ROOT, error_line, run_inside

NAMES = [
    "coco",
    "coco_convnext",
    "coco_detectron2",
    "coco_dino",
    "coco_keypoints",
    "coco_mmdet",
    "coco_nvidia_pytorch",
    "coco_nvidia_tf1",
    "coco_swin",
    "coco_tao",
    "coco_torchvision",
    "coco_vitdet",
    "dense",
    "edge",
    "finetune",
    "lvis",
    "nuclei",
    "quickstart",
]
RECIPE = """
from ml_collections import ConfigDict

from mask_rcnn_jax.configs import quickstart


def get_config(variant="") -> ConfigDict:
    config = quickstart.get_config()
    config.train.steps = 1000 if variant == "long" else 10
    return config
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_run(workdir: Path) -> None:
    """The config.json of a run with three classes, as training writes it."""
    config = load_config("quickstart", {"train.steps": 7, "data.image_size": (64, 128)})
    categories = [{"id": i, "name": f"class {i}"} for i in (1, 5, 9)]
    workdir.mkdir(parents=True)
    content = {"config": config.to_dict(), "categories": categories}
    (workdir / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize("ending", ["", "/", "/config.json"])
def test_a_run_at_an_address_is_loaded_as_one_on_a_disk(ending, tmp_path, monkeypatch):
    monkeypatch.setenv("MASK_RCNN_HOME", str(tmp_path / "home"))
    write_run(tmp_path / "run")
    assert load_config(f"file://{tmp_path}/run{ending}") == load_config(tmp_path / "run")


def test_the_package_has_the_recipes_of_the_repository():
    assert recipe_names() == NAMES
    stems = {path.stem for path in (ROOT / "configs").glob("*.py")}
    assert sorted(stems - {"__init__", "base"}) == NAMES  # base is what they start from


@pytest.mark.parametrize("name", [*NAMES, "coco_torchvision:coco_v1", "coco_detectron2:3x"])
def test_a_name_is_the_recipe_of_the_package(name, folder):
    stem, colon, variant = name.partition(":")
    assert load_config(name) == load_config(f"{ROOT}/configs/{stem}.py{colon}{variant}")


def test_a_recipe_of_ones_own_builds_on_ours(folder):
    (folder / "my").mkdir()
    (folder / "my" / "recipe.py").write_text(RECIPE)
    assert load_config("my/recipe.py").train.steps == 10
    assert load_config(folder / "my" / "recipe.py").train.steps == 10
    assert load_config("my/recipe.py:long").train.steps == 1000
    assert load_config("my/recipe.py:long", {"train.steps": 3}).train.steps == 3


def test_a_file_wins_over_a_name_and_a_folder_that_is_no_run_does_not(folder):
    (folder / "coco").mkdir()
    (folder / "quickstart").write_text(RECIPE)
    assert load_config("quickstart").train.steps == 10
    assert load_config("quickstart:long").train.steps == 1000
    assert load_config("coco") == load_config(ROOT / "configs" / "coco.py")


def test_a_run_is_a_config_with_the_types_of_its_recipe(folder):
    write_run(folder / "coco")  # the name of a recipe, too
    recipe = load_config(ROOT / "configs" / "quickstart.py")
    for name in ("coco", "coco/", "coco/config.json"):
        config = load_config(name)
        assert (config.train.steps, config.model.num_classes) == (7, 3)
        assert config.data.image_size == (64, 128)
        ours, theirs = (flatten(each.to_dict()) for each in (config, recipe))
        assert {k: type(v) for k, v in ours.items()} == {k: type(v) for k, v in theirs.items()}


@pytest.mark.parametrize(
    "name, words",
    [
        ("quikstart", ["no recipe or run 'quikstart', did you mean 'quickstart'?", *NAMES]),
        ("elsewhere/finetune.py", ["no recipe or run", "did you mean 'finetune'?"]),
        ("configs/coco_torchvision.py:coco_v1", ["did you mean 'coco_torchvision'?"]),
        ("zzz", ["no recipe or run 'zzz'. Expected a path, or the name of one", *NAMES]),
        ("empty", ["empty is no workdir of a run: it has no config.json"]),
        ("nothing.py", ["nothing.py is no recipe: it has no get_config()"]),
        ("spec.txt", ["spec.txt is no recipe, which is Python", "prepare d2_config", "tao_spec"]),
        ("a.png", ["a.png is no recipe, which is Python; weights go to --weights"]),
        ("nuclei:3x", ["nuclei:3x: this recipe has no variants"]),
        ("coco:3x", ["coco:3x: expected buckets or nothing"]),
        ("coco_torchvision:3x", ["coco_torchvision", "3x", "expected coco_v1"]),
    ],
)
def test_an_unknown_one_is_refused_and_the_others_are_named(name, words, folder):
    (folder / "empty").mkdir()
    (folder / "nothing.py").write_text("x = 1\n")
    (folder / "spec.txt").write_text("model {\n  layers: 5\n}\n")
    (folder / "a.png").write_bytes(b"\x89PNG\0\1")
    with pytest.raises(ValueError) as caught:
        load_config(name)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    "name, value",
    [
        *(("eval.score_threshold", 50.0), ("eval.nms_thresh", 50.0), ("eval.soft_sigma", 0.0)),
        *(("model.rpn.nms_thresh", -0.1), ("model.rpn.fg_iou_thresh", 70.0)),
        *(("model.rpn.bg_iou_thresh", 0.8), ("model.rpn.positive_fraction", 50.0)),
        *(("model.sampling.fg_iou_thresh", 50.0), ("model.sampling.positive_fraction", 25.0)),
        *(("model.anchors.sizes", (0, 32, 64, 128, 256)), ("model.anchors.aspect_ratios", ())),
        *(("loss.mask_weight", -1.0), ("loss.keypoint_weight", -1.0), ("loss.box_beta", -1.0)),
        *(("optim.learning_rate", -0.1), ("optim.reference_batch", 0)),
        *(("optim.weight_decay", -1.0), ("optim.bias_lr_factor", -1.0)),
        ("data.flip_probability", 50.0),
    ],
)
def test_numbers_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=rf"^{name} is .*, expected .*(0|1|thresh)"):
        load_config("quickstart", {name: value})


NO_MASKS = """
from mask_rcnn_jax.configs import quickstart


def get_config():
    config = quickstart.get_config()
    config.model.mask_head = None
    return config
"""


@pytest.mark.parametrize("way", ["override", "recipe", "given to train", "given to build_model"])
def test_no_mask_head_is_the_head_named_none(way, folder):
    config = load_tree("quickstart")
    config.model.num_classes, config.model.mask_head = 2, None
    model = config.model
    if way == "override":
        model = load_config("quickstart", {"model.mask_head": None, "model.num_classes": 2}).model
    elif way == "recipe":
        (folder / "own.py").write_text(NO_MASKS)
        model = load_config("own.py", {"model.num_classes": 2}).model
    elif way == "given to train":
        model = as_recipe(config).model
    if way != "given to build_model":
        assert model.mask_head.name == "none" and not model.has_masks
    assert build_model(model).mask_head is None
    config.model.backbone = None
    with pytest.raises(ValueError, match="model.backbone.name is 'none', expected one of"):
        build_model(config.model)


@pytest.fixture
def fails(folder, capsys):
    """The error line of `train` in a folder of a user's own; without data it ends early."""

    def fails(*arguments) -> str:
        code = run_inside("train", "--workdir=run", *arguments)
        return error_line(code, capsys.readouterr().err)

    return fails


def test_a_configs_package_of_ones_own_is_not_in_the_way(folder, fails, monkeypatch):
    """It comes first on the path, and its recipe imports both it and ours."""
    (folder / "configs").mkdir()
    (folder / "configs" / "__init__.py").write_text("JSON = 'mine.json'\n")
    own = RECIPE.replace("    return", "    config.data.train_json = configs.JSON\n    return")
    (folder / "configs" / "finetune.py").write_text(f"import configs\n{own}")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, "configs", None)  # afterwards it is as it was
    del sys.modules["configs"]
    assert "no annotation file 'mine.json'" in fails("--config=configs/finetune.py")
    entries = "--config.data.train_json=other.json", "--config.model.init_from=random"
    line = fails("--config", "finetune", *entries)
    assert "no annotation file 'other.json'" in line and "(data.train_json)" in line


def test_entries_of_a_run_can_be_set_on_the_command_line(folder, fails):
    write_run(folder / "old")
    shutil.copy(folder / "old" / "config.json", folder / "config.json")
    size, path = "--config.data.image_size=(64, 192)", "--config.data.train_json=my.json"
    for name in ("old", "config.json"):
        assert "no annotation file 'my.json'" in fails(size, "--config", name, path)
    assert "train.steps" in fails("--config=old", "--config.train.steps=ten")


@pytest.mark.parametrize(
    ("returned", "words"),
    [("load_config('quickstart')", None), ("{'data': 1}", "dict"), ("None", "NoneType")],
)
def test_what_a_recipe_returns_is_a_config_or_a_recipe(returned, words, folder):
    (folder / "own.py").write_text(
        f"from mask_rcnn_jax import load_config\n\n\ndef get_config():\n    return {returned}\n"
    )
    if words is None:
        assert load_config("own.py", {"train.steps": 3}).train.steps == 3
        return
    message = f"^own.py: get_config\\(\\) returns {words}, expected a ConfigDict"
    with pytest.raises(ValueError, match=message):
        load_config("own.py")


def own_trunk(depth=3):
    """A user's backbone."""


@pytest.mark.parametrize("was, now, refused", [(None, 3, False), (5, None, True), (4, 4, False)])
def test_defaults_of_a_users_own_part_are_compared_like_entries(was, now, refused, folder):
    def written(depth):
        config = load_tree("quickstart")
        given = {} if depth is None else {"depth": depth}
        config.model.backbone = {"name": f"{__name__}:own_trunk", **given}
        return as_recipe(config)

    write_workdir("old", written(was), [{"id": 1, "name": "a"}])
    with (
        pytest.raises(ValueError, match="with model.backbone.depth=5, the config says 3")
        if (refused)
        else nullcontext()
    ):
        restore._check_model(written(now), read_workdir("old")[0], folder / "old")


def test_a_model_without_masks_is_the_same_however_it_is_written():
    short, long = load_tree("quickstart"), load_tree("quickstart")
    short.model.mask_head, long.model.mask_head.name = None, "none"
    assert as_recipe(short) == as_recipe(long)


def test_entries_of_another_version_are_left_out_wherever_they_are(folder, caplog):
    tree = load_config("quickstart").to_dict()
    tree["data"]["rotation"]["newer"], tree["optim"]["newer"], tree["more"] = 1, 2, {"x": 3}
    assert upgrade(tree, "old") == load_config("quickstart")
    named = "['data.rotation.newer', 'more', 'optim.newer']"
    assert f"old has entries of another version, left out: {named}" in caplog.text
    (folder / "config.json").write_text(json.dumps({"config": {}, "categories": []}))
    with pytest.raises(ValueError, match="config.json: data is missing"):
        load_config(folder)


SIGMOID = {"model.classifier.kind": "sigmoid"}


def test_a_run_older_than_an_entry_has_its_default(folder, monkeypatch):
    """`evaluate --workdir OLD --config NAME`: the run's config lacks `model.classifier`."""
    write_run(folder / "old")
    path = folder / "old" / "config.json"
    content = json.loads(path.read_text())
    del content["config"]["model"]["classifier"]
    path.write_text(json.dumps(content))
    found = SimpleNamespace(workdir=folder / "old")
    monkeypatch.setattr(restore, "find_checkpoint", lambda weights: found)
    config = load_config("quickstart", {"data.image_size": (64, 128)})
    restore.restore_recipe(config, "old")
    other = load_config("quickstart", SIGMOID | {"data.image_size": (64, 128)})
    with pytest.raises(ValueError, match="old was trained with model.classifier.kind='softmax'"):
        restore.restore_recipe(other, "old")


@pytest.mark.parametrize("workdir", ["hf://owner/run", Path("https://host/run")])
def test_calls_write_to_no_address_but_of_a_store(workdir, folder):
    expected = "an address, expected a path or the address of a store"
    with pytest.raises(ValueError, match=f"workdir is '.*{expected}"):
        mrcnn.train("quickstart", workdir)
    with pytest.raises(ValueError, match=f"output is '.*{expected}"):
        mrcnn.evaluate("runs/mine", output=workdir)
    assert not list(folder.glob("*:"))


def test_a_whole_section_is_overridden(folder):
    norm = {"norm": "batch"}
    section = load_tree("quickstart").model.backbone
    section.update(norm)
    for value in (norm, section):
        assert load_config("quickstart", {"model.backbone": value}).model.backbone.norm == "batch"
