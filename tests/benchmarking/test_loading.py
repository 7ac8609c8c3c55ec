"""Benchmark of the input: its pictures are a sound data set, and its figures hold together."""

import json

import pytest

from mask_rcnn_jax.benchmarking import loading
from mask_rcnn_jax.data.coco import load_coco
from tests.commands.command import SMALL, config_flags, error_line, run_inside
from tests.helpers import tiny_config


def test_generated_pictures_are_a_sound_set(tmp_path):
    dataset = load_coco(loading.write_images(tmp_path, 3), tmp_path)  # ValueError if not
    assert len(dataset.images) == 3 and dataset.class_names == ("cloud",)
    for image in dataset.images:
        assert len(image.annotations) == loading.OBJECTS
        assert 50_000 < (tmp_path / image.file_name).stat().st_size < 250_000


@pytest.mark.parametrize("workers", [0, 1])
def test_figures(workers):
    config = tiny_config()
    figures = loading.run(config, images=6, batches=4, workers=workers)
    assert figures["batch_size"] == config.train.batch_size
    assert figures["num_workers"] == workers and figures["images_per_s"] > 0
    per_core = figures["images_per_s_per_core"]  # None: less than a tick of the clock
    assert per_core is None or per_core > 0
    for when in ("memory_mb_after_third", "memory_mb_at_end"):
        assert 10 < figures[when] <= figures["peak_memory_mb"]


def test_several_numbers_of_workers_are_measured(tmp_path):
    path = tmp_path / "figures.json"
    given = "--workers=0,1", "--steps=2", "--pictures=3", f"--json={path}"
    assert run_inside("benchmark", "data", *config_flags(SMALL), *given) == 0
    runs = json.loads(path.read_text())["runs"]
    assert [figures["num_workers"] for figures in runs] == [0, 1]


@pytest.mark.parametrize("wrong", ["-1", "a", "1.5"])
def test_numbers_of_workers_are_checked(wrong, capsys):
    code = run_inside("benchmark", "data", *config_flags(SMALL), f"--workers=0,{wrong}")
    line = error_line(code, capsys.readouterr().err)
    assert line == f"--workers has '{wrong}', expected whole numbers from 0"
