"""Benchmark of the input: its pictures are a sound data set, and its figures hold together."""

import json

import numpy as np
import pytest

from mask_rcnn_jax.benchmarking import loading
from mask_rcnn_jax.benchmarking.inputs import synthetic_batch
from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.data.loader import TrainLoader
from tests.commands.command import SMALL, config_flags, error_line, run_inside
from tests.data.small_set import rectangle, write_coco
from tests.helpers import tiny_config


def test_generated_pictures_are_a_sound_set(tmp_path):
    dataset = load_coco(loading.write_images(tmp_path, 3), tmp_path)  # ValueError if not
    assert len(dataset.images) == 3 and dataset.class_names == ("cloud",)
    for image in dataset.images:
        assert len(image.annotations) == loading.OBJECTS
        assert 50_000 < (tmp_path / image.file_name).stat().st_size < 250_000


def test_bands_are_those_of_the_training_set():
    config = tiny_config()
    config.data.bands = {"names": ("a", "b", "c", "d", "e"), "scale": "bits"}
    config.model.input.update(mean=(100.0,) * 5, std=(50.0,) * 5)
    recipe = as_recipe(config)
    images = synthetic_batch(recipe, 1, training=True).images
    assert images.shape == (1, 64, 64, 5) and images.dtype == np.float32
    with pytest.raises(ValueError, match="--images is 6, expected 0 with data.bands.names"):
        loading.run(recipe, images=6, batches=4, workers=0)


@pytest.mark.parametrize("workers", [0, 1])
def test_figures(workers):
    config = tiny_config()
    figures = loading.run(as_recipe(config), images=6, batches=4, workers=workers)
    assert figures["batch_size"] == config.train.batch_size
    assert figures["num_workers"] == workers and figures["images_per_s"] > 0
    per_core = figures["images_per_s_per_core"]  # None: less than a tick of the clock
    assert per_core is None or per_core > 0
    for when in ("memory_mb_after_third", "memory_mb_at_end"):
        assert 10 < figures[when] <= figures["peak_memory_mb"]


def test_the_training_set_is_read_as_training_reads_it(tmp_path, monkeypatch):
    (tmp_path / "more").mkdir()
    files = write_coco(tmp_path, [(40, 60), (60, 40)], [rectangle(5, 5, 20, 10)])
    more = write_coco(tmp_path / "more", [(40, 60)], [rectangle(2, 3, 9, 8, category_id=7)])
    config, given = tiny_config(), []
    config.data.update(train_json=str(files[0]), train_images=str(files[1]), num_workers=0)
    config.data.update(more_train=(tuple(map(str, more)),), keep_empty=False, repeat_threshold=0.5)

    def loader(dataset, options, order, **others):
        given.append((dataset, order))
        return TrainLoader(dataset, options, order, **others)

    monkeypatch.setattr(loading, "TrainLoader", loader)
    loading.run(as_recipe(config), images=0, batches=1, workers=0)
    ((dataset, order),) = given
    assert len(dataset.images) == 3
    assert not order.keep_empty and order.repeats.repeat_threshold == 0.5


def test_several_numbers_of_workers_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "run", lambda config, *given: {"given": given})
    path = tmp_path / "figures.json"
    given = "--workers=0,1", "--steps=2", "--pictures=3", f"--json={path}"
    assert run_inside("benchmark", "data", *config_flags(SMALL), *given) == 0
    runs = json.loads(path.read_text())["runs"]
    assert runs == [{"given": [3, 2, workers]} for workers in (0, 1)]


@pytest.mark.parametrize("wrong", ["-1", "a", "1.5"])
def test_numbers_of_workers_are_checked(wrong, capsys):
    code = run_inside("benchmark", "data", *config_flags(SMALL), f"--workers=0,{wrong}")
    line = error_line(code, capsys.readouterr().err)
    assert line == f"--workers has '{wrong}', expected whole numbers from 0"
