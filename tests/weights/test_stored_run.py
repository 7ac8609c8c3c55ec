"""Local copies of models at addresses."""

import os

import pytest

from mask_rcnn_jax.weights import model_folder, stored_run
from mask_rcnn_jax.weights.checksums import write_checksums


@pytest.fixture
def model(tmp_path, monkeypatch):
    """The address of a whole model's folder."""
    monkeypatch.setenv("MASK_RCNN_HOME", str(tmp_path / "home"))
    folder = tmp_path / "model"
    folder.mkdir()
    for name in (model_folder.CONFIG, model_folder.WEIGHTS):
        (folder / name).write_text(name)
    write_checksums(folder)
    return f"file://{folder}"


@pytest.mark.parametrize("spoil", ["damage", "delete"])
def test_a_copy_that_is_damaged_is_fetched_again(model, spoil):
    found = stored_run.local(model)
    weights = found / model_folder.WEIGHTS
    weights.unlink() if spoil == "delete" else weights.write_text("other")
    assert stored_run.local(model) == found
    assert weights.read_text() == model_folder.WEIGHTS


def test_what_killed_processes_left_is_deleted(model):
    found = stored_run.local(model)
    old, new = found.with_name("tmp.old"), found.with_name("tmp.new")
    for folder in (old, new):
        (folder / "d").mkdir(parents=True)
    os.utime(old, (0, 0))
    (found / model_folder.WEIGHTS).unlink()
    stored_run.local(model)
    assert new.is_dir() and not old.exists()
