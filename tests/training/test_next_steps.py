"""What a finished run says to do next: commands that can be typed as they are."""

import shlex
import sys
from pathlib import Path

import pytest
from absl import flags, logging

from mask_rcnn_jax import cli
from mask_rcnn_jax.data.coco import CocoDataset, ImageRecord
from mask_rcnn_jax.training import next_steps
from mask_rcnn_jax.training.next_steps import next_commands
from tests.commands.command import run_inside
from tests.memory_set import ShapeSet


def parsed(command: list[str], monkeypatch) -> dict:
    """The values of a command's own flags; it is not run."""
    python, dash, module, *arguments = command
    assert (python, dash) == ("python", "-m") and module.startswith("mask_rcnn_jax.")
    values = {}

    def take(main, *_):
        assert cli.parse_flags(sys.argv) == []
        values.update(flags.FLAGS.flag_values_dict())

    monkeypatch.setattr(cli, "_run", take)
    level = logging.get_absl_logger().level  # which `run_inside` restores to a command's
    assert run_inside(module.removeprefix("mask_rcnn_jax."), *arguments) == 0
    logging.get_absl_logger().setLevel(level)
    return values


@pytest.mark.parametrize("name", ["run", "my run's (1) $HOME"])
def test_every_command_is_understood_as_it_is_printed(name, tmp_path, monkeypatch):
    workdir, images = tmp_path / name, tmp_path / "with space"
    images.mkdir()
    (images / "a b.jpg").touch()
    records = [ImageRecord(1, "a b.jpg", 30, 40, ())]
    dataset = CocoDataset("val.json", str(images), ("cat",), (1,), records)
    tensorboard, infer, export = map(shlex.split, next_commands(workdir, dataset))
    assert tensorboard[-3:] == ["tensorboard", "--logdir", str(workdir)]
    values = parsed(infer, monkeypatch)
    assert values["workdir"] == str(workdir) and Path(values["output"]).parent == workdir
    assert [Path(one).is_file() for one in values["input"]] == [True]
    values = parsed(export, monkeypatch)
    assert values["workdir"] == str(workdir) and values["format"] == "stablehlo"
    assert Path(values["output"]).parent == workdir


def test_images_that_are_no_files_are_yours_to_name(tmp_path):
    _, infer, _ = next_commands(tmp_path, ShapeSet("val", 2))
    assert "--input photo.jpg" in infer
    missing = CocoDataset("v.json", "nowhere", ("cat",), (1,), [ImageRecord(1, "a", 3, 4, ())])
    assert "--input photo.jpg" in next_commands(tmp_path, missing)[1]


@pytest.mark.parametrize("is_there", [True, False])
def test_tensorboard_is_installed_where_it_is_missing(is_there, tmp_path, monkeypatch):
    spec = object() if is_there else None
    monkeypatch.setattr(next_steps.importlib.util, "find_spec", lambda name: spec)
    command = next_commands(tmp_path, ShapeSet("val", 2))[0]
    assert command.startswith("tensorboard" if is_there else "pip install tensorboard && tensorb")
