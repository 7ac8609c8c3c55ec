"""examples/lr_finder.py at a toy size."""

import importlib.util
from pathlib import Path

import pytest

from mask_rcnn_jax.formats.shapes import write_shapes
from tests.training.own_run import small_config

FILE = Path(__file__).resolve().parents[1] / "examples" / "lr_finder.py"
RECIPE = """
from tests.training.own_run import small_config


def get_config():
    return small_config()
"""


@pytest.fixture
def lr_finder():
    spec = importlib.util.spec_from_file_location("lr_finder", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_it_raises_the_rate_until_the_loss_runs_away(lr_finder, tmp_path, capsys):
    path = write_shapes(tmp_path, train=4, val=1, size=(64, 64))["train"]
    (tmp_path / "recipe.py").write_text(RECIPE)
    entries = {"data.train_json": path, "data.train_images": tmp_path / "train"}
    entries |= {"train.batch_size": 2, "data.source": "json", "optim.name": "sgd"}
    named = [f"{name}={value}" for name, value in entries.items()]
    lr_finder.main([str(tmp_path / "recipe.py"), *named, "--steps=24"])
    *rows, last = capsys.readouterr().out.splitlines()
    rates, losses = zip(*(map(float, row.split()) for row in rows), strict=True)
    assert rates[0] == pytest.approx(1e-6) and list(rates) == sorted(rates) and len(rows) > 5
    best = rates[losses.index(min(losses))] / 10 * small_config().optim.reference_batch / 2
    name, _, value = last.partition("=")
    assert name == "try --config.optim.learning_rate" and float(value) == pytest.approx(best, 0.1)


def test_a_mistake_and_a_loss_that_is_not_finite_are_one_line(
    lr_finder, tmp_path, capsys, monkeypatch
):
    (tmp_path / "recipe.py").write_text(RECIPE)
    for entries, said in (
        (["optim.lr=1"], "no config entry 'optim.lr'"),
        (["data.train_json=none.json"], "no annotation file 'none.json'"),
    ):
        with pytest.raises(SystemExit) as ended:
            lr_finder.main([str(tmp_path / "recipe.py"), *entries])
        assert ended.value.code == 2 and said in capsys.readouterr().err

    def train(*given, **parts):
        raise FloatingPointError("step 1: loss/total is nan")

    monkeypatch.setattr(lr_finder.mrcnn, "train", train)
    with pytest.raises(SystemExit) as ended:
        lr_finder.main([str(tmp_path / "recipe.py")])
    assert ended.value.code == 2 and "not finite at the first step" in capsys.readouterr().err
