"""Code that a stranger's run names is not imported unasked; that of one's own runs is."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax import consent
from mask_rcnn_jax.config import (
    as_recipe,
    load_config,
    load_tree,
    named_code,
    read_workdir,
    write_workdir,
)
from mask_rcnn_jax.models.build import build_model
from mask_rcnn_jax.predict.engines import load_exported
from mask_rcnn_jax.pruning.choice import Limits
from mask_rcnn_jax.pruning.run import prune_run
from mask_rcnn_jax.training import teacher
from mask_rcnn_jax.training.setup import open_workdir
from mask_rcnn_jax.weights.restore import restore, restore_recipe
from tests.commands.command import error_line, run_captured
from tests.helpers import GOLDENS, tiny_config
from tests.small_trunk import SECTION

SAVED = GOLDENS / "version_0_1_0"
ALLOWED = "tests.small_trunk"  # what the saved run needs
STRANGER = """
from pathlib import Path

Path(__file__).with_name("imported").touch()
from tests.small_trunk import FourConvolutions  # noqa: E402


def build(**entries):
    Path(__file__).with_name("called").touch()
    return FourConvolutions((4, 4, 4, 4))  # the weights do not fit


def augment(example, rng):
    return example


def get_config():
    raise AssertionError("a recipe that ran")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder, from which Python imports, with a stranger's module and run."""
    (tmp_path / "stranger.py").write_text(STRANGER)
    shutil.copytree(SAVED / "run", tmp_path / "run")
    shutil.copytree(SAVED / "onnx", tmp_path / "exported")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "stranger", raising=False)
    yield tmp_path
    sys.modules.pop("stranger", None)


def change(path: Path, entry: str, value) -> None:
    """Set an entry of the config in a json."""
    content = json.loads(path.read_text())
    section, name = entry.split(".")
    content["config"][section][name] = value
    path.write_text(json.dumps(content))


def plant(path: Path, function: str = "stranger:build", **entries) -> None:
    change(path, "model.backbone", {"name": function, **entries})


def has_run(folder: Path) -> bool:
    return (folder / "imported").exists()


def read_as_teacher(path: str) -> None:
    config = tiny_config()
    config.distill = {"teacher": path}
    teacher.open_teacher(as_recipe(config), None)


READERS = {
    "load": mrcnn.load,
    "evaluate": mrcnn.evaluate,
    "restore": lambda path: restore(None, path),
    "restore with a recipe": lambda path: restore(load_config("quickstart"), path),
    "prune": lambda path: prune_run(path, "out", threshold=0.5),
    "teacher": read_as_teacher,
}


@pytest.mark.parametrize("path", ["run", "run/checkpoints/40"])
@pytest.mark.parametrize("reader", READERS)
def test_a_run_and_a_checkpoint_import_nothing(reader, path, folder):
    plant(folder / "run/config.json")
    with pytest.raises(ValueError) as error:
        READERS[reader](path)
    text = str(error.value)
    assert "run/config.json: model.backbone.name is 'stranger:build', and this file is none" in text
    assert "its code runs only with --allow_code stranger (mrcnn.allow_code in Python)" in text
    assert "\n" not in text and not has_run(folder)


def test_a_function_of_the_library_is_not_called(folder):
    plant(folder / "run/config.json", "os:system", command="touch called")
    for given in ("run", "run/checkpoints/40"):
        with pytest.raises(ValueError, match="is 'os:system', .* --allow_code os "):
            restore(None, given)
    assert not (folder / "called").exists()


@pytest.mark.parametrize("path", ["run", "run/config.json", "exported"])
def test_neither_does_its_recipe(path, folder):
    plant(folder / "run/config.json")
    plant(folder / "exported/manifest.json")
    for read in (load_config, load_tree, lambda path: mrcnn.train(path, "new")):
        with pytest.raises(ValueError, match="json: model.backbone.name is 'stranger:build'"):
            read(path)
    assert not has_run(folder)


@pytest.mark.parametrize("name", ["exported/manifest.json", "run/config.json:x", "other.json"])
def test_a_json_is_not_run_as_a_recipe(name, folder):
    path = name.partition(":")[0]
    (folder / path).write_text(STRANGER)
    with pytest.raises(ValueError, match=f"{path} is no recipe, which is Python, but a json"):
        load_config(name)
    assert not has_run(folder)


def test_an_exported_model_runs_without_it(folder):
    """What it computes is in its own file; the manifest only describes the model."""
    pytest.importorskip("onnxruntime")
    plant(folder / "exported/manifest.json", given=[1, {"a": 2}])
    exported = load_exported("exported")
    mrcnn.load("exported")
    assert exported.recipe.model.backbone.entries == {"given": (1, {"a": 2})}
    flags = ["--artifact=exported", "--output=out", "--config.data.val_json=none.json"]
    done = run_captured("evaluate", *flags)
    assert "none.json" in error_line(done.returncode, done.stderr)
    assert not has_run(folder)
    with pytest.raises(ValueError, match="model.backbone.*not imported, since nothing is built"):
        build_model(exported.recipe.model)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("model.fpn", {"name": "stranger:build"}),
        ("model.box_head", {"name": "stranger:build"}),
        ("model.mask_head", {"name": "stranger:build", "channels": 8}),
        ("data.augment", ["rotation", "stranger:augment"]),
        ("data.augment", ["stranger:augment, given as augment"]),
        ("loss.own", ["stranger:loss"]),
    ],
)
def test_every_entry_that_names_code_is_asked_for(entry, value, folder):
    change(folder / "run/config.json", entry, value)
    with consent.allow_code(ALLOWED), pytest.raises(ValueError, match=f"config.json: {entry}"):
        load_config("run")
    assert not has_run(folder)


def test_a_teachers_recipe_is_code_if_it_is_a_file(folder):
    path = folder / "run/config.json"
    change(path, "distill.recipe", "stranger.py:variant")
    with consent.allow_code(ALLOWED):
        with pytest.raises(ValueError, match="distill.recipe is 'stranger.py:v.*_code stranger.py"):
            load_config("run")
        with consent.allow_code("stranger.py"):
            assert load_config("run").distill.recipe == "stranger.py:variant"
        for other in ("quickstart", "coco_torchvision:coco_v1", "run", "run/config.json"):
            change(path, "distill.recipe", other)
            assert load_config("run").distill.recipe == other
        (folder / "quickstart").write_text("a file wins over a name")
        change(path, "distill.recipe", "quickstart")
        with pytest.raises(ValueError, match="distill.recipe is 'quickstart'"):
            load_config("run")


@pytest.mark.parametrize(
    "allowed", ["stranger", ("other", "stranger"), "other, stranger", "stranger:build"]
)
def test_what_is_allowed_runs(allowed, folder):
    plant(folder / "run/config.json", widths=[4])
    with mrcnn.allow_code(allowed):
        recipe = load_config("run")
    assert has_run(folder) and recipe.model.backbone.get("widths", None) == (4,)
    with pytest.raises(ValueError, match="--allow_code stranger"):
        load_config("run")  # once more without it


@pytest.mark.parametrize("allowed", ["strange", "stranger.more", "stranger:other", "", ()])
def test_what_is_not_allowed_does_not(allowed, folder):
    plant(folder / "run/config.json")
    with mrcnn.allow_code(allowed), pytest.raises(ValueError, match="--allow_code stranger"):
        load_config("run")
    assert not has_run(folder)


def test_a_package_allows_what_is_in_it(folder):
    with mrcnn.allow_code("tests"):
        assert load_config("run").model.backbone.name == SECTION["name"]
        assert len(mrcnn.load("run").categories) == 4


@pytest.mark.parametrize("entry", ["train", "evaluate", "infer", "export", "serve", "prune"])
def test_each_command_says_it_in_one_line_and_has_the_flag(entry, folder):
    plant(folder / "run/config.json")
    Image.new("RGB", (64, 64)).save("photo.png")
    flags = {
        "train": ["--config=run", "--workdir=new"],
        "evaluate": ["--workdir=run", "--config.eval.max_images=1"],
        "infer": ["--workdir=run", "--input=photo.png", "--output=out"],
        "export": ["--weights=run/checkpoints/40", "--format=onnx", "--output=out"],
        "serve": ["--workdir=run", "--port=0"],
        "prune": ["--workdir=run", "--output=out", "--threshold=0.5"],
    }[entry]
    done = run_captured(entry, *flags, "--platform=cpu")
    line = error_line(done.returncode, done.stderr)
    assert "config.json: model.backbone.name is 'stranger:build'" in line
    assert not has_run(folder)
    done = run_captured(entry, *flags, "--allow_code=other", "--allow_code", "a,stranger")
    assert has_run(folder) and "--allow_code" not in error_line(done.returncode, done.stderr)


def test_benchmark_and_a_listed_config_take_it_too(folder):
    plant(folder / "run/config.json")
    for command in (["benchmark", "infer"], ["train", "--list_config"]):
        done = run_captured(*command, "--config=run")
        assert "--allow_code stranger" in error_line(done.returncode, done.stderr)
    assert not has_run(folder)
    done = run_captured("train", "--list_config", "--config=run", "--allow_code=stranger")
    assert done.returncode == 0 and "stranger:build" in done.stdout


@pytest.mark.parametrize(
    "name",
    [
        "mask_rcnn_jax.config:load_config",  # runs a file
        "mask_rcnn_jax.export:write",
        "mask_rcnn_jax.cli:os",
        "mask_rcnn_jax.models.build:partial",
        "mask_rcnn_jax.models.resnet:nn.Module",
        "mask_rcnn_jax.models.build:build_model",
        "mask_rcnn_jax.models.nothing:ResNet",
        "mask_rcnn_jax.models..os:system",
        "mask_rcnn_jax_more:build",
        "mask_rcnn_jax:train",
    ],
)
def test_of_this_package_only_its_parts_are_taken(name, folder):
    plant(folder / "run/config.json", name)
    with pytest.raises(ValueError, match="model.backbone.name is 'mask_rcnn_jax.*only with"):
        load_config("run")


def test_parts_of_this_package_need_no_word(folder):
    plant(folder / "run/config.json", "mask_rcnn_jax.models.resnet:ResNet", depth=10)
    flips = ["mask_rcnn_jax.data.geometry:VerticalFlip"]
    change(folder / "run/config.json", "data.augment", flips)
    assert load_config("run").data.augment == tuple(flips)


def own_run(folder: Path, name: str = "own") -> Path:
    """A run that this user's own command writes."""
    config = tiny_config()
    config.model.backbone = {"name": "stranger:build", "widths": (4,)}
    write_workdir(name, as_recipe(config), [{"id": 1, "name": "a"}])
    (folder / "imported").unlink()
    sys.modules.pop("stranger")
    return folder / name / "config.json"


def test_a_run_of_ones_own_needs_no_word(folder):
    path = own_run(folder)
    assert load_config("own").model.num_classes == 1 and has_run(folder)
    done = run_captured("train", "--list_config", "--config=own")
    assert done.returncode == 0 and "stranger:build" in done.stdout
    shutil.move("own", "elsewhere")
    assert read_workdir("elsewhere")[0].model.backbone.name == "stranger:build"
    plant(folder / "elsewhere/config.json", widths=[5])
    with pytest.raises(ValueError, match="--allow_code stranger"):
        read_workdir("elsewhere")
    assert not path.exists()


def test_a_pruned_run_and_a_resumed_one_are_ones_own(folder):
    plant(folder / "run/config.json", SECTION["name"], widths=[8, 12, 16, 24])
    with consent.allow_code(ALLOWED):
        recipe, categories = read_workdir("run")
        prune_run("run", "half", threshold=0.5, limits=Limits(min_channels=4))
    assert load_config("half").model.backbone.name == SECTION["name"]
    with pytest.raises(ValueError, match=f"--allow_code {ALLOWED}"):
        read_workdir("run")
    open_workdir("run", recipe, categories, resuming=True)
    assert read_workdir("run")[0] == recipe


def test_a_recipe_of_ones_own_allows_what_it_names(folder):
    with consent.allow_code(ALLOWED):
        recipe, _ = read_workdir("run")
    assert restore_recipe(recipe, "run")[0] == recipe.with_classes(4)
    plant(folder / "run/config.json")
    with pytest.raises(ValueError, match="--allow_code stranger"):
        restore_recipe(recipe, "run")
    overrides = {"model.backbone": {"name": "stranger:build"}}
    assert load_config("quickstart", overrides).model.backbone.name == "stranger:build"
    recipe = tiny_config()
    recipe.model.backbone = {"name": "stranger:build"}
    assert list(named_code(as_recipe(recipe).to_dict())) == ["model.backbone.name"]


def test_without_a_note_the_flag_is_asked_for(folder, monkeypatch, caplog):
    (folder / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "file"))
    own_run(folder)
    assert "will need --allow_code: no note is kept" in caplog.text
    with pytest.raises(ValueError, match="--allow_code stranger"):
        load_config("own")


def test_a_note_that_others_could_have_written_counts_for_nothing(folder, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    own_run(folder)
    notes = folder / "state/mask_rcnn_jax/own_runs"
    assert notes.stat().st_mode & 0o777 == 0o700 and len(os.listdir(notes)) == 1
    notes.chmod(0o777)
    with pytest.raises(ValueError, match="--allow_code stranger"):
        load_config("own")
    assert not has_run(folder)


def test_a_run_of_built_in_parts_leaves_no_note(folder, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    write_workdir("plain", load_config("quickstart"), [{"id": 1, "name": "a"}])
    assert not (folder / "state").exists()
    assert load_config("plain").model.backbone.name == "resnet"
