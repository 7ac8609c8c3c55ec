"""Repeat factors against LVIS's, and the order of epochs in which images repeat."""

import json
import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from mask_rcnn_jax.config import as_recipe, load_config
from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.data.dataset import Annotation, ImageRecord
from mask_rcnn_jax.data.loader import TrainLoader, TrainOrder
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.overview import epoch_factors, training_classes
from mask_rcnn_jax.data.repeat import RepeatedPlaces, Repeats
from mask_rcnn_jax.training.setup import set_steps
from tests.data.small_set import rectangle
from tests.helpers import shared, tiny_config

OPTIONS = ExampleOptions(image_size=(64, 64), resize="fit", max_instances=4, mask_size=8)


def pairs_of(images: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    pairs = [(image, c) for image, classes in enumerate(images) for c in classes]
    return tuple(np.array(column, np.int64) for column in zip(*pairs, strict=True))


@pytest.mark.parametrize("threshold", [0.001, 0.3, 0.5])
def test_factors_are_those_of_lvis(threshold):
    golden = json.loads(shared("goldens/modern/schedules.json").read_text())["repeat_factors"]
    images = golden["images"]
    found = Repeats(threshold).factors(*pairs_of(images), np.ones(len(images), bool))
    np.testing.assert_allclose(found, golden[f"t={threshold:g}"], rtol=1e-6)


def test_factors_by_hand():
    """Class 1 is in a quarter of the images, class 2 in three quarters; one image has none."""
    found = Repeats(0.64).factors(*pairs_of([[2], [1, 2], [2], []]), np.ones(4, bool))
    np.testing.assert_allclose(found, [1.0, 1.6, 1.0, 1.0])


def test_what_is_left_out_does_not_count():
    """Of two images both have class 1."""
    kept = np.array([True, False, True])
    found = Repeats(1.0).factors(*pairs_of([[1], [], [1]]), kept)
    np.testing.assert_allclose(found, [1.0, 0.0, 1.0])


@pytest.mark.parametrize("threshold", [-0.1, 1.5, float("nan")])
def test_a_threshold_is_a_share(threshold):
    with pytest.raises(ValueError, match="^data.repeat_threshold is .*, expected a share"):
        load_config("lvis", {"data.repeat_threshold": threshold})


FACTORS = np.array([1.0, 2.0, 1.25, 3.5])


def epochs(places: RepeatedPlaces, count: int) -> list[list[int]]:
    """The examples of each epoch: the sure places come so often in every one."""
    found, example = [], 0
    for _ in range(count):
        length = len(places._make_order(len(found)))
        found.append([places[n] for n in range(example, example + length)])
        example += length
    return found


def test_every_epoch_has_the_whole_part_and_at_times_one_more():
    found = epochs(RepeatedPlaces(FACTORS, seed=3, epochs=10**6), 400)
    counts = np.array([[Counter(epoch)[place] for place in range(4)] for epoch in found])
    assert (counts[:, :2] == [1, 2]).all()
    assert set(counts[:, 2]) == {1, 2} and set(counts[:, 3]) == {3, 4}
    # Four standard deviations of 400 draws.
    np.testing.assert_allclose(counts.mean(axis=0), FACTORS, atol=4 * 0.5 / 400**0.5)
    assert len({tuple(epoch) for epoch in found}) > 300


def test_any_example_may_be_asked_for_first():
    whole = [RepeatedPlaces(FACTORS, 3, 100)[n] for n in range(60)]
    later = RepeatedPlaces(FACTORS, 3, 100)
    assert [later[n] for n in reversed(range(60))] == whole[::-1]
    assert [pickle.loads(pickle.dumps(later))[n] for n in range(60)] == whole
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(RepeatedPlaces(FACTORS, 3, 100).__getitem__, range(60))) == whole
    assert [RepeatedPlaces(FACTORS, 4, 100)[n] for n in range(60)] != whole


# Sixteen images; class 2 is in one landscape and one portrait.
SIZES = [(20, 30)] * 10 + [(40, 20)] * 6
RARE = (3, 12)
OBJECTS = [
    rectangle(2, 3, 9, 8, image_id=k + 1, category_id=7 if k in RARE else 3)
    for k in range(len(SIZES))
]
RECIPE = replace(OPTIONS, image_size=(64, 128), resize="shortest_edge", short_sides=(20, 40, 64))


@pytest.fixture
def dataset(coco_files):
    return load_coco(*coco_files(sizes=SIZES, annotations=OBJECTS))


def batches(dataset, steps, *, start=0, processes=1, workers=0, threshold=0.5, augment=None):
    """Per step: canvas, and (image, height, first pixel) of the global batch."""
    loaders = []
    for process in range(processes):
        order = TrainOrder(
            seed=5, batch_size=4 // processes, start_step=start, process_index=process,
            process_count=processes, repeats=Repeats(threshold),
        )  # fmt: skip
        loaders.append(TrainLoader(dataset, RECIPE, order, num_workers=workers, augment=augment))
    try:
        found = []
        for _ in range(steps):
            parts = [next(loader) for loader in loaders]
            rows = [
                (int(i), int(size[0]), int(pixel))
                for part in parts
                for i, size, pixel in zip(
                    part.image_index, part.image_sizes, part.images[:, 0, 0, 0], strict=True
                )
            ]
            found.append((parts[0].images.shape[1:3], rows))
        return found
    finally:
        for loader in loaders:
            loader.close()


def test_images_of_rare_classes_come_more_often(dataset):
    """The share is 2 / 16; a threshold of a half gives a factor of 2."""
    factors = epoch_factors(dataset, RECIPE, Repeats(0.5), keep_empty=True)
    np.testing.assert_allclose(factors, [2.0 if k in RARE else 1.0 for k in range(16)])
    seen = Counter(index for _, rows in batches(dataset, 90) for index, _, _ in rows)
    assert seen[3] == pytest.approx(40, abs=4) and seen[12] == pytest.approx(40, abs=4)
    assert all(seen[k] == pytest.approx(20, abs=3) for k in range(16) if k not in RARE)


def test_processes_and_resuming_change_nothing(dataset):
    whole = batches(dataset, 14)
    assert batches(dataset, 14, processes=4) == whole
    assert batches(dataset, 9, start=5, processes=2) == whole[5:]
    assert len({canvas for canvas, _ in whole}) == 2


@pytest.mark.slow
def test_worker_processes_change_nothing(dataset):
    assert batches(dataset, 8, workers=2) == batches(dataset, 8)


def brighter(example, rng):
    return replace(example, image=example.image + rng.integers(0, 200, dtype=np.uint8))


def test_an_image_is_augmented_anew_each_time_it_comes(dataset):
    """Also within an epoch: the factor is the square root of 8."""
    rows = [
        row for _, rows in batches(dataset, 12, threshold=1.0, augment=brighter) for row in rows
    ]
    shades = [pixel for index, _, pixel in rows if index == 3]
    assert len(shades) > 5 and len(set(shades)) > len(shades) - 2


class Objects:
    """A dataset that is no json."""

    class_names = ("a", "b")

    def __init__(self, classes: list[list[int]]):
        mask = np.ones((8, 8), bool)
        self.images = [
            ImageRecord(n, f"{n}.jpg", 8, 8, tuple(Annotation.from_mask(mask, c) for c in found))
            for n, found in enumerate(classes)
        ]


def test_classes_of_images_are_the_same_with_and_without_a_json(dataset):
    images, classes = training_classes(dataset, RECIPE)
    assert images.tolist() == list(range(16))
    assert classes.tolist() == [2 if k in RARE else 1 for k in range(16)]
    own = Objects([[1, 1, 2], [], [2]])
    pairs = training_classes(own, RECIPE)
    assert np.stack(pairs, axis=1).tolist() == [[0, 1], [0, 2], [2, 2]]
    assert training_classes(Objects([[]]), RECIPE)[0].shape == (0,)


def test_an_epoch_is_as_long_as_its_repeats(dataset):
    config = tiny_config()
    config.data.update(repeat_threshold=0.5)
    config.train.update(batch_size=3, epochs=2.0, eval_every=0)
    train = set_steps(as_recipe(config).data, as_recipe(config).train, dataset)
    assert (train.steps, train.eval_every) == (12, 6)
    config.data.repeat_threshold = 0.0
    train = set_steps(as_recipe(config).data, as_recipe(config).train, dataset)
    assert (train.steps, train.eval_every) == (11, 5)


@pytest.mark.parametrize(
    "batch_size, epochs, steps, every, few",
    [
        (4, 10.0, 40, 4, ": few for fine-tuning; --config.train.epochs=125 gives 500"),
        (16, 100.0, 100, 10, ": few for fine-tuning; --config.train.epochs=500 gives 500"),
        (4, 125.0, 500, 50, ""),
        (4, 1000.0, 4000, 50, ""),
        (2, 8.0, 64, 8, ": few for fine-tuning; --config.train.epochs=63 gives 504"),
    ],
)
def test_small_sets_are_told_of_and_evaluated_less(
    batch_size, epochs, steps, every, few, dataset, caplog
):
    """16 images: never more than ten evaluations in 500 steps, nor one in fewer than an epoch."""
    config = tiny_config()
    config.train.update(batch_size=batch_size, epochs=epochs, eval_every=0)
    with caplog.at_level("INFO"):
        train = set_steps(as_recipe(config).data, as_recipe(config).train, dataset)
    assert (train.steps, train.eval_every) == (steps, every)
    said = f"train.epochs={epochs:g} with 16 images sets train.steps={steps}{few}"
    assert [record.getMessage() for record in caplog.records] == [said]
