"""Entries of a run's config are overridden where a command takes the run."""

import json

import pytest

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.training import scoring
from mask_rcnn_jax.weights import restore
from tests.commands.command import ROOT, error_line, run_inside

PHOTO = str(ROOT / "docs" / "people.jpg")
COMMANDS = {
    "evaluate": [],
    "infer": ["--input", PHOTO, "--output", "out"],
    "export": ["--format=onnx", "--output", "out"],
}


@pytest.fixture
def run(tmp_path):
    """A workdir with a config alone: that of a recipe with a changed entry."""
    config = load_config("quickstart", {"train.seed": 17})
    categories = [{"id": 3, "name": "a"}, {"id": 5, "name": "b"}]
    workdir = tmp_path / "run"
    workdir.mkdir()
    (workdir / "config.json").write_text(
        json.dumps({"config": config.to_dict(), "categories": categories})
    )
    return workdir


@pytest.fixture
def taken(monkeypatch, tmp_path):
    """The configs that commands go to work with."""
    monkeypatch.chdir(tmp_path)
    configs = []

    def stop(*arguments, **_):
        configs.extend(value for value in arguments if not isinstance(value, str))
        raise ValueError("stopped here")

    monkeypatch.setattr(scoring, "evaluate", stop)
    monkeypatch.setattr(restore, "restore", stop)
    return configs


@pytest.mark.parametrize("entry", COMMANDS)
@pytest.mark.parametrize("source", ["--workdir={}", "--workdir {} --config {}/config.json"])
def test_overrides_of_a_run(entry, source, run, taken, capsys):
    flags = source.replace("{}", str(run)).split()
    overrides = ["--config.eval.max_images=10", "--config.data.image_size=(64,128)"]
    code = run_inside(entry, *flags, *COMMANDS[entry], *overrides)
    assert error_line(code, capsys.readouterr().err) == "stopped here"
    (config,) = taken
    assert (config.eval.max_images, config.data.image_size) == (10, (64, 128))
    assert (config.train.seed, config.model.num_classes) == (17, 2)


@pytest.mark.parametrize("entry", COMMANDS)
def test_faulty_overrides_of_a_run(entry, run, taken, capsys):
    for override, words in (
        ("--config.eval.max_image=10", 'Did you mean "max_images"'),
        ("--config.eval.max_images=ten", "config.eval.max_images"),
    ):
        code = run_inside(entry, "--workdir", run, *COMMANDS[entry], override)
        assert words in error_line(code, capsys.readouterr().err)
    assert not taken


def test_a_run_without_overrides_keeps_its_config(run, taken, capsys):
    run_inside("evaluate", "--workdir", run)
    assert taken == [None]
    assert "stopped here" in capsys.readouterr().err
