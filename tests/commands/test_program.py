"""`mask-rcnn-jax` as a script that pip installs in another folder, and what it finds from there."""

import os
import subprocess
import sys

import pytest

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.config import write_workdir
from tests.commands.command import ROOT, error_line, run_captured

SCRIPT = "from mask_rcnn_jax.__main__ import main\nmain()\n"
OWN = """
from mask_rcnn_jax.config import load_tree
def get_config():
    tree = load_tree("quickstart")
    tree.data.augment = ("my_album:album",)
    return tree
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "bin" / "mask-rcnn-jax"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return [sys.executable, path]


@pytest.mark.parametrize("place", [pytest.param(".", marks=pytest.mark.slow), "recipes"])
def test_it_imports_what_lies_in_the_working_folder_or_beside_the_recipe(place, script, tmp_path):
    folder, work = tmp_path / "work" / place, tmp_path / "work"
    folder.mkdir(parents=True)
    (tmp_path / "work" / "recipe.py").write_text(OWN)
    (folder / "recipe.py").write_text(OWN)
    (folder / "my_album.py").write_text("def album(example, rng):\n    return example\n")
    command = [*script, "train", "--config", folder / "recipe.py", "--list_config"]
    done = subprocess.run(command, cwd=work, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "my_album:album" in done.stdout


@pytest.mark.parametrize(
    "arguments", [["--help"], pytest.param(["train", "--help"], marks=pytest.mark.slow)]
)
def test_a_reader_that_has_ended_is_no_error(arguments, script):
    read, write = os.pipe()
    os.close(read)
    command = [*script, *arguments]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("config", "workdir"),
    [
        ("quickstart", "runs/quickstart"),
        ("dense:small", "runs/dense_small"),
        (f"{ROOT}/configs/dense.py:small", "runs/dense_small"),
    ],
)
def test_a_run_without_workdir_is_named_after_its_recipe(config, workdir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run_captured("train", "--config", config, "--config.data.train_json=absent.json")
    assert f"workdir: {workdir}\n" in done.stderr
    assert "absent.json" in error_line(done.returncode, done.stderr)


def test_a_run_is_no_name_for_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_workdir("old", mrcnn.load_config("quickstart"), [{"id": 1, "name": "a"}])
    done = run_captured("train", "--config=old")
    line = error_line(done.returncode, done.stderr)
    assert "--workdir must have a value: --config old is no recipe" in line


def test_completion_shows_public_names_alone():
    assert {"load", "train", "evaluate"} < set(dir(mrcnn))
    assert not {"os", "sys", "importlib", "ModuleType", "_HOMES"} & set(dir(mrcnn))
