"""The Python snippets of the README and the guides, run as they stand with a small trained run.

Those of extending.md, deployment.md and serving.md have tests of their own.
"""

import re
import shutil

import pytest

import mask_rcnn_jax as mrcnn
from tests.commands.command import ROOT

PAGES = ("README.md", "docs/index.md", "docs/getting_started.md", "docs/inference.md")
FROM_OTHERS = "docs/from_others.md"
SNIPPETS = {
    f"{page}, {number}": code
    for page in (*PAGES, FROM_OTHERS)
    for number, code in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL), start=1
    )
}
IMAGES = ("photo.jpg", "a.jpg", "b.jpg", "b.png", "data/shapes/val/000004.jpg")


@pytest.fixture(scope="module")
def load_small(trained):
    """`mrcnn.load` of the small run in the place of any other; it compiles once."""
    predictor = mrcnn.load(trained.untouched, score_threshold=0.0)
    return lambda model, weights=None, **options: predictor


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_runs(name, trained, load_small, tmp_path, monkeypatch, capsys):
    for image in IMAGES:
        (tmp_path / image).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(trained.data_dir / "val" / "000002.jpg", tmp_path / image)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(trained.untouched)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mrcnn, "load", load_small)
    given = {}
    if name.startswith(FROM_OTHERS):
        given = {"predictor": load_small("any"), "image": "photo.jpg"}
    exec(compile(SNIPPETS[name], name, "exec"), given)
    if "result" in given:
        assert len(given["result"]) and given["result"].masks.shape[1:] == (64, 64)
    if "annotated.jpg" in SNIPPETS[name]:
        assert (tmp_path / "annotated.jpg").is_file()
    if "parameters" in given:
        assert "backbone" in given["parameters"] and given["statistics"] == {}  # group norm


def test_there_are_snippets():
    assert len(SNIPPETS) >= 7
