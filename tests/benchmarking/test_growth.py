"""The points of the table of growth, and its rows."""

import json

import pytest

from benchmarks import growth
from mask_rcnn_jax.benchmarking import inputs
from mask_rcnn_jax.config import as_recipe, load_config
from tests.commands.command import ROOT

FIGURES = {
    "ms_per_step": 20.0, "ms_per_step_25": 19.0, "ms_per_step_75": 22.4, "peak_rss_mb": 1234.5,
    "planned_peak_memory_mb": 100.0, "gflop_per_image": 7.0,
}  # fmt: skip


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_each_point_differs_from_the_base_in_one_thing_and_fits_the_recipe(mode):
    axes = growth.axes(mode)
    (name, base), *rows = growth.points(mode, (256, 384), list(axes))
    assert name == "base"
    assert len(rows) == sum(map(len, axes.values())) - len(axes)  # each axis has the base's value
    for _, point in rows:
        changed = {key for key in point if point[key] != base[key]}
        assert len(changed - {"data.max_instances"}) == 1
        point.pop("objects")
        load_config(ROOT / "configs" / "coco.py", point)


def test_rows_of_the_table():
    first = FIGURES | {"ms_per_step": 10.0}
    header, rule = growth.header("train")
    row = growth.line("classes 80", FIGURES, first)
    assert row == "| classes 80 | 20 | 19 to 22 | 2.00 | 100 | 1,234 | 7 |"
    failed = growth.line("images 4", {"failed": "exit code -9"}, first)
    assert failed.startswith("| images 4 | exit code -9 |")
    assert {line.count("|") for line in (header, rule, row, failed)} == {8}


def test_a_point_that_fails_is_told_of(monkeypatch, tmp_path, capsys):
    def measure(mode, point, steps):
        return {"failed": "exit code -9"} if point["train.batch_size"] == 4 else FIGURES

    monkeypatch.setattr(growth, "measure", measure)
    path = tmp_path / "growth.json"
    with pytest.raises(SystemExit, match="failed: images 4"):
        growth.main(growth.parse(["--axes=images", f"--json={path}"]))
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == ["base", "images 2", "images 4"]
    assert "| images 2 | 20 | 19 to 22 | 1.00 |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--axes has .'size_'., expected some of"):
        growth.main(growth.parse(["--axes=size_"]))


@pytest.mark.parametrize("objects", [1, 100])
def test_as_many_objects_are_generated_as_are_asked_for(objects):
    config = load_config(ROOT / "configs" / "coco.py", {"data.image_size": (64, 128)})
    targets = inputs.synthetic_batch(as_recipe(config), 1, objects=objects).targets
    assert targets.valid.sum() == objects and targets.valid.shape == (1, 100)
