"""The commands of the comparison of small models are those of today."""

import ast
from types import SimpleNamespace

import pytest

from benchmarks.small_models import ENTRIES, SHARES, Rows, print_table
from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.weights.restore import make_model


def literal(text):
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


@pytest.mark.parametrize("name", ENTRIES)
def test_commands(name, tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(
        Rows, "run", lambda self, result, folder, *line: lines.append([*map(str, line)])
    )
    options = SimpleNamespace(set=name, output=tmp_path, data="data", weights="weights.pth")
    rows = Rows(options).make()
    assert len(rows) == 6 + 2 * len(SHARES)
    assert sorted({line[0] for line in lines}) == ["evaluate", "prune", "train"]
    for line in lines:
        if line[0] == "train":
            pairs = (flag.removeprefix("--config.").split("=", 1) for flag in line[5:])
            config = load_config("quickstart", {entry: literal(text) for entry, text in pairs})
            assert make_model(config, 3).backbone.depth in (10, 18, 50)
            assert config.model.init_from or "depth=18" in " ".join(line) or "pruned" in line[2]


def test_a_table_with_gaps(capsys):
    print_table({"a": {"AP": 0.5, "s": 2.0}, "b": {"AP": 0.25}})
    assert capsys.readouterr().out.splitlines() == [
        "| | AP | s |",
        "|---|---|---|",
        "| a | 0.500 | 2.000 |",
        "| b | 0.250 |  |",
    ]
