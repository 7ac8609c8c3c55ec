"""Batches of evaluation on the two devices of the tests."""

import jax
import numpy as np
import pytest

from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.data import canvases
from mask_rcnn_jax.data.overview import image_id
from mask_rcnn_jax.structures import Detections
from mask_rcnn_jax.training import evaluator, processes, scoring
from mask_rcnn_jax.training.batches import make_eval_loader
from tests.memory_set import ShapeSet
from tests.training.own_run import small_config
from tests.training.test_views import Mixed


@pytest.mark.parametrize(
    "batch_size, max_images, fill, rows, is_full",
    [
        (3, 0, False, 6, [True, False]),
        (3, 4, False, 6, [False]),
        (3, 4, True, 4, [True]),  # smaller batches rather than none that is full
        (1, 4, True, 2, [True, True]),
        (3, 1, True, 2, [False]),
    ],
)
def test_a_batch_has_so_many_images_on_each_device(batch_size, max_images, fill, rows, is_full):
    dataset, options = ShapeSet("val", 9), as_recipe(small_config()).data
    assert jax.device_count() == 2
    numbers = {"batch_size": batch_size, "max_images": max_images, "num_workers": 0}
    loader = make_eval_loader(dataset, options, **numbers, fill=fill)
    batches = list(loader)
    assert [batch.images.shape[0] for batch in batches] == [rows] * len(is_full)
    assert loader.is_full == is_full
    shown = np.concatenate([batch.image_index for batch in batches])
    assert sorted(shown[shown >= 0]) == list(range(max_images or 9))


@pytest.mark.parametrize("others, count", [([], 1), (["same"], 2), (["cores", "host", "same"], 2)])
def test_processes_share_cores_on_one_host_alone(others, count, monkeypatch):
    def gather(own):
        host, cores = own
        kinds = {"same": own, "cores": [host, [*cores, 9999]], "host": ["elsewhere", cores]}
        return [own, *(kinds[other] for other in others)]

    monkeypatch.setattr(processes, "gather", gather)
    assert processes.count_sharing_cores.__wrapped__() == count


@pytest.mark.parametrize(
    "price, pad_multiple, canvas", [(0.0, 32, (64, 64)), (1e9, 32, (64, 192)), (0.0, 0, (64, 192))]
)
def test_canvases_follow_the_images_where_that_pays(price, pad_multiple, canvas, monkeypatch):
    monkeypatch.setattr(canvases, "COMPILING", {"cpu": price, "gpu": price})
    config, dataset = small_config(), ShapeSet("val", 5, (40, 60))
    config.data.update(image_size=(40, 180), resize="shortest_edge")
    config.model.input.pad_multiple = pad_multiple
    options = evaluator.evaluation_options(as_recipe(config), dataset)
    loader = make_eval_loader(dataset, options, batch_size=1, max_images=0, num_workers=0)
    assert {batch.images.shape[1:3] for batch in loader} == {canvas}


class Landscapes:
    """An exported model for one size of images, in batches of two, which finds nothing."""

    name, batch = "landscapes", 2

    def accepts(self, plan):
        return plan.size == (85, 128)

    def __call__(self, images, image_sizes):
        assert len(images) == 2 and set(map(tuple, image_sizes.tolist())) <= {(85, 128), (1, 1)}
        empty = np.zeros((2, 1), np.float32)
        return Detections(np.zeros((2, 1, 4)), empty, empty.astype(int), None, empty > 0)


def test_an_exported_model_is_scored_on_each_image_that_it_takes(caplog):
    """Its images share batches with each other, not with those that it does not take."""
    config, dataset = small_config(), Mixed("val", 7)
    config.data.update(image_size=(128, 128), resize="fit")
    found = scoring._detect_exported(Landscapes(), as_recipe(config), dataset, None)
    assert found.image_ids == [image_id(dataset.images, index) for index in (1, 3, 5)]
    assert "scores are of 3 of 7 images" in caplog.text
