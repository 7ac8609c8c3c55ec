"""The Python snippets of the README and the guides, run as they stand with a small trained run.

Those of extending.md, deployment.md and serving.md have tests of their own.
"""

import inspect
import re
import shutil
from pathlib import Path

import pytest

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.weights.published import PUBLISHED
from tests.commands.command import ROOT

PAGES = ("README.md", *(f"docs/{n}.md" for n in ("index", "getting_started", "inference", "data")))
FROM_OTHERS = "docs/from_others.md"
SNIPPETS = {
    f"{page}, {number}": code
    for page in (*PAGES, FROM_OTHERS)
    for number, code in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL), start=1
    )
}
KNOWN_WEIGHTS = {*PUBLISHED, *(one.url.rpartition("/")[2] for one in PUBLISHED.values())}
IMAGES = ("photo.jpg", "a.jpg", "b.jpg", "b.png", "data/shapes/val/000004.jpg")


@pytest.fixture(scope="module")
def load_small(untrained):
    """`mrcnn.load` of the small run in the place of any other; it compiles once.

    The arguments must be those of `load`: a folder of runs, or a recipe and weights by name.
    """
    signature = inspect.signature(mrcnn.load)
    predictor = mrcnn.load(untrained.workdir, score_threshold=0.0)

    def load(*arguments, **options):
        given = signature.bind(*arguments, **options).arguments
        check_model(given["model"], given.get("weights"))
        return predictor

    return load


def check_model(model: str, weights: str | None) -> None:
    if weights is None and not (model in PUBLISHED and PUBLISHED[model].recipe):
        assert Path(model).parent == Path("runs"), f"{model} is no run"
    elif weights is not None:
        mrcnn.load_config(model)
        assert {weights, Path(weights).name} & KNOWN_WEIGHTS, f"{weights} are no weights"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("mrcnn.load('coco_torchvision:v2', 'weights/resnet50-0676ba6.pth')", "no weights"),
        ("mrcnn.load('coco_torchvision:v3', 'maskrcnn_resnet50_fpn_v2_coco')", "v3"),
        ("mrcnn.load('coco_torchvision:v2')", "no run"),
        ("mrcnn.load('runs/mine', scores=0.5)", "'scores'"),
        ("mrcnn.load()", "'model'"),
    ],
)
def test_a_wrong_argument_of_load_is_noticed(code, words, load_small, monkeypatch):
    monkeypatch.setattr(mrcnn, "load", load_small)
    with pytest.raises((AssertionError, TypeError, ValueError), match=words):
        exec(code, {"mrcnn": mrcnn})


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_runs(name, untrained, load_small, tmp_path, monkeypatch, capsys):
    for image in IMAGES:
        (tmp_path / image).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(untrained.data_dir / "val" / "000002.jpg", tmp_path / image)
    (tmp_path / "my").mkdir()
    jsons = untrained.data_dir / "annotations"
    shutil.copy(jsons / "instances_train.json", tmp_path / "my" / "train.json")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(untrained.workdir)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mrcnn, "load", load_small)
    given = {}
    if name.startswith(FROM_OTHERS):
        given = {"predictor": load_small("runs/any"), "image": "photo.jpg"}
    exec(compile(SNIPPETS[name], name, "exec"), given)
    if "result" in given:
        assert len(given["result"]) and given["result"].masks.shape[1:] == (64, 64)
    if "annotated.jpg" in SNIPPETS[name]:
        assert (tmp_path / "annotated.jpg").is_file()
    if "parameters" in given:
        assert "backbone" in given["parameters"] and given["statistics"] == {}  # group norm


def test_there_are_snippets():
    assert len(SNIPPETS) >= 7
