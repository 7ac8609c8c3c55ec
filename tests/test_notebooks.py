"""The notebooks, run as scripts on a small run with random weights."""

import importlib.util
import json
import re
import runpy

import jax
import numpy as np
import pytest

from mask_rcnn_jax.training import step
from tests.commands.command import ROOT, STEPS
from tests.commands.small_run import Run, untrained_run

_spec = importlib.util.spec_from_file_location("notebooks", ROOT / "docs/notebooks.py")
build_notebooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build_notebooks)
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))


@pytest.fixture(scope="module")
def small_run(tmp_path_factory) -> Run:
    return untrained_run(tmp_path_factory.mktemp("notebooks"))


@pytest.fixture
def run_notebook(small_run, tmp_path, monkeypatch):
    """Runs one to its end; returns its variables."""
    monkeypatch.chdir(tmp_path)  # and back again: they change the folder
    monkeypatch.setenv("NOTEBOOK_RUN", str(small_run.workdir))
    monkeypatch.setenv("NOTEBOOK_FOLDER", str(tmp_path))

    def run(name: str, **settings) -> dict:
        for key, value in settings.items():
            monkeypatch.setenv(f"NOTEBOOK_{key.upper()}", str(value))
        return runpy.run_path(str(ROOT / "notebooks" / f"{name}.py"))

    return run


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_sources_are_cells_with_words_first(path):
    cells = path.read_text().split("# %%")
    assert cells[0] == "" and cells[1].startswith(" [markdown]\n# # ")
    for cell in cells[1:]:
        kind, *lines = cell.strip("\n").split("\n")
        if kind == " [markdown]":
            assert all(line.startswith("# ") or line in ("#", "") for line in lines), cell


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_have_the_cells_of_their_sources_and_small_outputs(path):
    text = path.with_suffix(".ipynb").read_text(encoding="utf-8")
    entries = json.loads(text)["cells"]
    found = [(entry["cell_type"], "".join(entry["source"])) for entry in entries]
    assert found == build_notebooks.read_cells(path), f"run python docs/notebooks.py {path.stem}"
    code = [entry for entry in entries if entry["cell_type"] == "code"]
    assert [entry["execution_count"] for entry in code] == list(range(1, len(code) + 1))
    outputs = [output for entry in code for output in entry["outputs"]]
    kinds = {output["output_type"] for output in outputs}
    assert kinds == {"stream", "execute_result"} and len(text) < 400_000
    assert not re.search(r"/(tmp|home|root|work|Users)/|Traceback", text)


def test_a_notebook_is_made_of_its_cells(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(
        "# %% [markdown]\n# # Title\n#\n# words\n\n# %%\nx = 3\nprint(x)\n\n# %%\nx + 1\n"
    )
    cells = build_notebooks.read_cells(path)
    assert cells == [
        ("markdown", "# Title\n\nwords"),
        ("code", "x = 3\nprint(x)"),
        ("code", "x + 1"),
    ]
    words, first, second = build_notebooks.run_cells(cells, path.name)
    assert words["source"] == ["# Title\n", "\n", "words"] and "outputs" not in words
    assert first["outputs"] == [{"name": "stdout", "output_type": "stream", "text": ["3\n"]}]
    assert second["outputs"][0]["data"] == {"text/plain": ["4"]}


def test_predict(run_notebook, small_run):
    path = small_run.data_dir / "val" / "000000.jpg"
    found = run_notebook("predict", image=path, score=0.0)
    assert found["checkpoint"].step == STEPS
    assert found["class_names"] == ["circle", "square", "triangle", "star"]
    assert len(found["result"]) > 0
    # Small pictures are enlarged, and something is drawn on this one.
    drawn, image = found["drawn"], found["result"].image
    assert image.shape == (64, 64, 3) and drawn.shape == (320, 320, 3)
    assert drawn.std(axis=(0, 1)).min() > 0
    assert found["cut_out"].size > 0


def test_one_image(run_notebook, monkeypatch):
    in_one_program = jax.jit(step.loss_terms, static_argnums=(1, 2))  # not each of its operations
    monkeypatch.setattr(step, "loss_terms", in_one_program)
    found = run_notebook("one_image", index=0)
    one, targets, anchors = found["one"], found["targets"], found["anchors"]
    assert len(anchors) == len(one.anchor_labels) == 3 * (16**2 + 8**2 + 4**2 + 2**2 + 1)
    # What the words say: every object has an anchor, what is sampled was matched, and a
    # foreground region comes from a proposal or is an object itself.
    assert np.sum(one.anchor_labels == 1) >= targets.valid.sum() > 0
    assert set(one.anchor_labels[one.sampled_labels >= 0]) <= {0, 1}
    candidates = np.concatenate([one.proposals.boxes, targets.boxes])
    foreground = one.rois.boxes[one.rois.foreground]
    assert len(foreground) > 0
    for box in foreground:
        assert np.abs(candidates - box).max(axis=1).min() == 0
    assert found["sheet"].size == (3 * 112, 112 * found["count"])


@pytest.mark.slow
def test_finetune(run_notebook, tmp_path):
    found = run_notebook("finetune", epochs=2)
    losses = list(found["losses"].values())
    assert losses[-1] < losses[0]
    assert set(found["scores"]["per_category"]) == {"rolls", "stands"}
    assert found["val_set"].class_names == ("rolls", "stands")
    assert found["drawn"].shape == found["truth"].shape
    # Again: nothing is trained anew.
    assert list(run_notebook("finetune", epochs=2)["losses"].values()) == losses
