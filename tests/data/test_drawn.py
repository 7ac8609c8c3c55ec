"""Objects of training examples, counted without reading an image."""

import logging
from dataclasses import replace

import numpy as np
import pytest

from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.data.copy_paste import CopyPaste
from mask_rcnn_jax.data.drawn import ImageBoxes, changes_counts, drawn_counts
from mask_rcnn_jax.data.geometry import FixedSizeCrop, HorizontalFlip, QuarterTurns, ScaleJitter
from mask_rcnn_jax.data.loader import TrainLoader, TrainOrder
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.overview import training_boxes
from tests.data.small_set import rectangle

OPTIONS = ExampleOptions(image_size=(64, 64), resize="keep", max_instances=50, mask_size=8)


def grid(side=10, step=20):
    """Boxes of 4 pixels, one in each cell of 20."""
    y, x = np.mgrid[:side, :side].reshape(2, -1) * step + 8.0
    return np.stack([x, y, x + 4, y + 4], axis=1)


def images(count=3):
    boxes = np.concatenate([grid()] * count)
    return ImageBoxes(np.full((count, 2), 200), np.arange(count + 1) * 100, boxes)


def test_a_crop_has_the_objects_of_its_window():
    counts = drawn_counts(images(), (FixedSizeCrop(size=(100, 100)),))
    assert set(counts.tolist()) == {25, 36}  # 5 or, cut on both sides, 6 in each direction
    padded = drawn_counts(images(), (FixedSizeCrop(size=(400, 400)), HorizontalFlip()))
    assert set(padded.tolist()) == {100}


def test_scales_come_before_the_window():
    halved = ScaleJitter(size=(200, 200), scales=(0.5, 0.5)), FixedSizeCrop(size=(100, 100))
    assert set(drawn_counts(images(), halved).tolist()) == {100}
    doubled = ScaleJitter(size=(200, 200), scales=(2.0, 2.0)), FixedSizeCrop(size=(100, 100))
    assert drawn_counts(images(), doubled).max() <= 9


def test_pasted_objects_are_added():
    counts = drawn_counts(images(), (CopyPaste(),))
    assert 150 < counts.mean() < 175 and counts.max() <= 200
    some = drawn_counts(images(), (CopyPaste(probability=0.5),))
    assert 0.35 < (some == 100).mean() < 0.65


def test_no_image_and_no_object():
    nothing = ImageBoxes(np.zeros((0, 2), int), np.zeros(1, int), np.zeros((0, 4)))
    assert drawn_counts(nothing, (CopyPaste(),)).shape == (0,)
    empty = ImageBoxes(np.full((2, 2), 90), np.zeros(3, int), np.zeros((0, 4)))
    kinds = (CopyPaste(), FixedSizeCrop(size=(64, 64)))
    assert not drawn_counts(empty, kinds).any()


def test_kinds_that_keep_all_objects():
    assert not changes_counts([HorizontalFlip(), QuarterTurns(), lambda example, rng: example])
    assert changes_counts([HorizontalFlip(), ScaleJitter()]) and changes_counts([CopyPaste()])


@pytest.fixture
def dataset(coco_files):
    objects = [rectangle(*box[:2], 4, 4) for box in grid().tolist()]
    return load_coco(
        *coco_files(sizes=[(200, 200)], annotations=[*objects, objects[0] | {"iscrowd": 1}])
    )


def test_boxes_of_a_set(dataset):
    found = training_boxes(dataset, OPTIONS)
    assert found.sizes.tolist() == [[200, 200]] and found.bounds.tolist() == [0, 100]
    np.testing.assert_array_equal(found.boxes, grid())


@pytest.mark.parametrize(
    "kinds, limit, said",
    [
        ((FixedSizeCrop(size=(64, 64)),), 20, None),  # a window has up to 16
        ((FixedSizeCrop(size=(64, 64)),), 9, "of 400 images as augmentation draws them hold more"),
        ((CopyPaste(),), 100, "400 of 400 images as augmentation draws them hold more than"),
        ((HorizontalFlip(),), 90, "than data.max_instances=90 objects, up to 100; the 10 smallest"),
        ((HorizontalFlip(),), 90, "of 100 objects are left out (10.0%)"),
    ],
)  # fmt: skip
def test_what_training_leaves_out_is_what_its_examples_hold(dataset, caplog, kinds, limit, said):
    options, order = replace(OPTIONS, max_instances=limit), TrainOrder(seed=0, batch_size=1)
    with caplog.at_level(logging.WARNING):
        loader = TrainLoader(dataset, options, order, num_workers=0, augment=kinds)
    held = [int(next(loader).targets.valid.sum()) for _ in range(6)]
    loader.close()
    assert (loader.overflowed > 0) == (said is not None) and (said or "") in caplog.text
    assert max(held) <= min(limit, loader.counts.max())
    if said is None:
        assert not caplog.text
