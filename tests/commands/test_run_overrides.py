"""Entries of a run's config are overridden where a command takes the run."""

import json
from types import SimpleNamespace

import pytest

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.training import scoring
from mask_rcnn_jax.weights import restore
from tests.commands.command import ROOT, error_line, run_inside

PHOTO = str(ROOT / "docs" / "nuclei_1.jpg")
COMMANDS = {
    "evaluate": [],
    "infer": ["--input", PHOTO, "--output", "out"],
    "serve": ["--port=0"],
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


@pytest.mark.parametrize("separator", ["=", "= ", None])
def test_a_whole_section_is_overridden(separator, run, taken, capsys):
    given = "--config.eval", "{'max_images': 10}"
    given = given if separator is None else (separator.join(given),)
    run_inside("evaluate", "--workdir", run, *given)
    assert error_line(2, capsys.readouterr().err) == "stopped here"
    assert taken[0].eval.max_images == 10


@pytest.mark.parametrize("entry", COMMANDS)
def test_faulty_overrides_of_a_run(entry, run, taken, capsys):
    for override, words in (
        ("--config.eval.max_image=10", "did you mean 'eval.max_images'?"),
        ("--config.eval.max_images=ten", "config.eval.max_images"),
    ):
        code = run_inside(entry, "--workdir", run, *COMMANDS[entry], override)
        assert words in error_line(code, capsys.readouterr().err)
    assert not taken


@pytest.mark.parametrize("entry", COMMANDS)
def test_entries_newer_than_the_run_can_be_overridden(entry, run, taken, capsys):
    """They have their defaults; the run's own entries stay."""
    path = run / "config.json"
    content = json.loads(path.read_text())
    del content["config"]["eval"]["engine"], content["config"]["train"]["skip_images"]
    del content["config"]["model"]["backbone"]["norm_eps"]
    content["config"]["eval"]["nms_thresh"] = 0.625
    path.write_text(json.dumps(content))
    override = "--config.eval.engine=pycocotools"
    code = run_inside(entry, "--workdir", run, *COMMANDS[entry], override)
    assert error_line(code, capsys.readouterr().err) == "stopped here"
    (config,) = taken
    assert (config.eval.engine, config.train.skip_images) == ("pycocotools", ())
    assert (config.eval.nms_thresh, config.model.backbone.norm_eps) == (0.625, 1e-5)
    assert load_config(run).eval.engine == "auto"


@pytest.mark.parametrize("entry", COMMANDS)
def test_unknown_entries_of_a_run_are_named_and_left_out(entry, run, taken, capsys, caplog):
    path = run / "config.json"
    content = json.loads(path.read_text())
    content["config"]["eval"]["own"], content["config"]["more"] = 3, {"x": 1}
    path.write_text(json.dumps(content))
    code = run_inside(entry, "--workdir", run, *COMMANDS[entry], "--config.eval.max_images=1")
    assert error_line(code, capsys.readouterr().err) == "stopped here"
    assert taken[0].eval.max_images == 1
    assert f"{path} has entries of another version, left out: ['eval.own', 'more']" in caplog.text
    content["config"]["model"]["backbone"]["own"] = 3
    path.write_text(json.dumps(content))
    code = run_inside(entry, "--workdir", run, *COMMANDS[entry], "--config.eval.max_images=1")
    line = error_line(code, capsys.readouterr().err)
    assert line.startswith(f"--workdir: {path}: model.backbone has no entry 'own', expected one")


@pytest.mark.parametrize("entry", COMMANDS)
def test_a_workdir_without_a_run_is_named(entry, tmp_path, taken, capsys):
    arguments = [f"--workdir={tmp_path}", *COMMANDS[entry], "--config.eval.max_images=1"]
    line = error_line(run_inside(entry, *arguments), capsys.readouterr().err)
    assert line == f"--workdir: {tmp_path} is no workdir of a run: it has no config.json"


def test_another_model_than_the_runs_names_the_entry(run, capsys, monkeypatch):
    monkeypatch.setattr(restore.pretrained, "is_run", lambda weights: True)
    found = SimpleNamespace(workdir=run)
    monkeypatch.setattr(restore, "find_checkpoint", lambda weights: found)
    code = run_inside("evaluate", "--workdir", run, "--config.model.backbone.depth=34")
    line = error_line(code, capsys.readouterr().err)
    assert "leave out --config.model.backbone.depth, or --config, to use the run's" in line


def test_a_run_without_overrides_keeps_its_config(run, taken, capsys):
    run_inside("evaluate", "--workdir", run)
    assert taken == [None]
    assert "stopped here" in capsys.readouterr().err
