"""Benchmark of the input: its pictures are a sound data set, and its figures hold together."""

import pytest

from mask_rcnn_jax.benchmarking import loading
from mask_rcnn_jax.data.coco import load_coco
from tests.helpers import tiny_config


def test_generated_pictures_are_a_sound_set(tmp_path):
    dataset = load_coco(loading.write_pictures(tmp_path, 3), tmp_path)  # ValueError if not
    assert len(dataset.images) == 3 and dataset.class_names == ("cloud",)
    for image in dataset.images:
        assert len(image.annotations) == loading.OBJECTS
        assert 50_000 < (tmp_path / image.file_name).stat().st_size < 250_000


@pytest.mark.parametrize("workers", [0, 1])
def test_figures(workers):
    config = tiny_config()
    config.data.num_workers = workers
    figures = loading.run(config, pictures=6, batches=4)
    assert figures["batch_size"] == config.train.batch_size
    assert figures["images_per_s"] > 0 and figures["peak_memory_mb"] > 10
    assert (figures["images_per_s_per_core"] is None) == (workers == 1)
