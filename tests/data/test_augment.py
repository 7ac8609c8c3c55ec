"""Augmentation on the host: its contract, its checks, and random numbers that stay the same."""

import dataclasses
import re

import numpy as np
import pytest

from mask_rcnn_jax.data.affine import Affine, diagonal
from mask_rcnn_jax.data.augment import Example, augmented
from mask_rcnn_jax.data.dataset import Annotation, UndecodableImage
from mask_rcnn_jax.data.eval_loader import EvalLoader
from mask_rcnn_jax.data.geometry import HorizontalFlip
from mask_rcnn_jax.data.loader import TrainLoader, TrainOrder
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.transforms import empty_batch, load_row
from tests.data.test_loader import train_batches
from tests.helpers import assert_tree_close
from tests.memory_set import ShapeSet

SQUARE = ExampleOptions(image_size=(64, 64), resize="fit", max_instances=6, mask_size=8)
TWO_CANVASES = ExampleOptions((64, 128), "shortest_edge", max_instances=6, mask_size=8)


def mirror(example, rng):
    """Left to right, in half of the cases."""
    if rng.random() < 0.5:
        return example
    height, width = example.image.shape[:2]
    objects = [o.with_mask(o.mask(height, width)[:, ::-1]) for o in example.objects]
    return Example(example.image[:, ::-1].copy(), tuple(objects))


def brighten(example, rng):
    """By a random amount, also written into the first pixel."""
    amount = int(rng.integers(1, 255))
    example.image[:] = np.clip(example.image.astype(int) + amount, 0, 255)
    example.image[0, 0] = amount
    return example


def crop_left(example, rng):
    """The right half is cut away, and what is in it."""
    height, width = example.image.shape[:2]
    masks = [(o, o.mask(height, width)[:, : width // 2]) for o in example.objects]
    objects = [o.with_mask(m) for o, m in masks if m.any()]
    return Example(example.image[:, : width // 2], tuple(objects))


def turn(example, rng):
    """A quarter turn: landscapes become portraits."""
    height, width = example.image.shape[:2]
    objects = [o.with_mask(np.rot90(o.mask(height, width))) for o in example.objects]
    return Example(np.rot90(example.image).copy(), tuple(objects))


def loaded(dataset, index, augment, options=SQUARE, canvas=(64, 64), seed=0):
    """One row of a batch; `augment` draws from a generator of that seed."""
    batch = empty_batch(1, canvas, options)

    def change(example):
        return augmented(augment, (seed,), dataset, index, example)

    load_row(batch, 0, dataset, index, options, augment=augment and change)
    return batch


def test_everything_moves_together():
    dataset = ShapeSet("train", 4)
    plain, moved = loaded(dataset, 3, None), loaded(dataset, 3, mirror)
    assert np.random.default_rng(0).random() >= 0.5  # this seed mirrors
    np.testing.assert_array_equal(moved.images, plain.images[:, :, ::-1])
    before, after = plain.targets, moved.targets
    count = int(before.valid.sum())
    assert count == after.valid.sum() > 1
    for row in range(count):
        # Boxes of polygons may begin between pixels, those of masks do not.
        x1, y1, x2, y2 = before.boxes[0, row]
        np.testing.assert_allclose(after.boxes[0, row], [64 - x2, y1, 64 - x1, y2], atol=1)
        difference = np.abs(after.masks[0, row].astype(int) - before.masks[0, row][:, ::-1])
        assert difference.mean() < 40
    np.testing.assert_array_equal(before.classes, after.classes)


def test_objects_may_be_dropped_and_the_image_may_shrink():
    dataset = ShapeSet("train", 14)
    seen = set()
    for index, record in enumerate(dataset.images):
        # 64 x 32 on a canvas of 64 x 64: no pixel is resized.
        batch = loaded(dataset, index, crop_left)
        np.testing.assert_array_equal(batch.images[0, :, :32], dataset.decode(index)[:, :32])
        assert batch.image_sizes[0].tolist() == [64, 32]
        objects = [o for o in record.annotations if not o.iscrowd]
        kept = [o for o in objects if o.mask(64, 64)[:, :32].any()]
        assert batch.targets.valid.sum() == len(kept)
        assert (batch.targets.boxes[..., 2] <= 32).all()
        seen.add(len(objects) - len(kept))
    assert len(seen) > 1


def test_an_image_of_the_other_orientation_fits_the_canvas_of_its_batch():
    """A landscape of 64 x 96 on 64 x 128, turned: 96 x 64, of which 64 x 42 is left."""
    dataset = ShapeSet("train", 2, size=(64, 96))
    batch = loaded(dataset, 1, turn, TWO_CANVASES, canvas=(64, 128))
    assert batch.image_sizes[0].tolist() == [64, 42]
    plain = loaded(dataset, 1, None, TWO_CANVASES, canvas=(64, 128))
    assert plain.image_sizes[0].tolist() == [64, 96]
    x1, y1, x2, y2 = plain.targets.boxes[0, 0]
    expected = np.array([y1 * 42 / 64, (96 - x2) * 64 / 96, y2 * 42 / 64, (96 - x1) * 64 / 96])
    np.testing.assert_allclose(batch.targets.boxes[0, 0], expected, atol=1)


def test_the_dataset_stays_as_it_was():
    """The image that an augmentation is given is its own."""

    class Held(ShapeSet):
        picture = np.full((64, 64, 3), 100, np.uint8)

        def decode(self, index):
            return self.picture

    batch = loaded(Held("train", 1), 0, brighten)
    assert (Held.picture == 100).all() and (batch.images[0, 1:] > 100).all()


OBJECT = Annotation.from_mask(np.eye(64), 1)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "NoneType, expected an Example"),
        (
            Example(np.zeros((64, 64), np.uint8), ()),
            r"an image of uint8 \(64, 64\), expected uint8 \[H, W, 3",
        ),
        (Example(np.zeros((64, 64, 3)), ()), r"an image of float64 \(64, 64, 3\), expected uint8"),
        (Example(np.zeros((0, 64, 3), np.uint8), ()), r"an image of uint8 \(0, 64, 3\)"),
        (Example([[1]], ()), "an image of list"),
        (Example(np.zeros((64, 64, 3), np.uint8), None), "objects of type NoneType"),
        (Example(np.zeros((32, 64, 3), np.uint8), (OBJECT,)), "object 0: box .* 32 x 64"),
        (
            Example(
                np.zeros((64, 99, 3), np.uint8),
                (dataclasses.replace(OBJECT, box=np.float32([0, 0, 9, 9])),),
            ),
            r"object 0: RLE of size \[64, 64\], expected \[64, 99\]",
        ),
        (
            Example(
                np.zeros((64, 64, 3), np.uint8),
                (OBJECT, dataclasses.replace(OBJECT, class_index=5)),
            ),
            "object 1: class_index 5, expected 1 to 4",
        ),
        (Example(np.zeros((64, 64, 3), np.uint8), ("star",)), "object 0: str, expected an Annot"),
    ],
)
def test_bad_output_names_the_image(result, message):
    expected = f"ShapeSet: image '000000.jpg': augment returned {message}"
    with pytest.raises(ValueError, match=expected):
        loaded(ShapeSet("train", 1), 0, lambda example, rng: result)


def fails(example, rng):
    raise KeyError("no such transform")


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_augmentation_that_fails_names_the_image(workers):
    expected = "ShapeSet: image '00000[012].jpg': augment failed: KeyError: 'no such transform'"
    with pytest.raises(ValueError, match=expected):
        train_batches(ShapeSet("train", 3), 1, SQUARE, augment=fails, workers=workers)


class BadMap:
    """A kind whose map cannot be had."""

    def affine(self, rng, size):
        raise KeyError("no such map")


class NoMap:
    """A kind whose map is none."""

    def affine(self, rng, size):
        return None


class BadFill:
    """A kind whose map fails when the image is read: its fill is no color."""

    def __init__(self, scale=1.5):
        self.scale = scale

    def affine(self, rng, size):
        return Affine(diagonal(self.scale, 1, 3), size, fill=(1, 2))


@pytest.mark.parametrize(
    "kinds",
    [
        (BadFill(),),
        (BadFill(1),),
        (BadFill(), HorizontalFlip(1.0)),
        (BadFill(), mirror),
        (BadFill(), BadFill()),
    ],
)
def test_a_map_that_fails_later_names_the_image(kinds):
    expected = "ShapeSet: image '000000.jpg': augment failed: ValueError: fill is .1, 2."
    with pytest.raises(ValueError, match=expected):
        loaded(ShapeSet("train", 1), 0, kinds)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (BadMap(), "failed: KeyError: 'no such map'"),
        (NoMap(), "returned NoneType, expected an Affine"),
    ],
)
def test_a_map_that_fails_names_the_image(kind, message):
    with pytest.raises(ValueError, match=f"ShapeSet: image '000000.jpg': augment {message}"):
        loaded(ShapeSet("train", 1), 0, kind)


def rows(batches):
    """Per step all rows of all processes: (image, its first pixel, its objects)."""
    return [
        [
            (int(index), image[:2].tobytes(), boxes.tobytes(), masks.tobytes())
            for part in parts
            for index, image, boxes, masks in zip(
                part.image_index, part.images, part.targets.boxes, part.targets.masks, strict=True
            )
        ]
        for parts in batches
    ]


def both(example, rng):
    return brighten(mirror(example, rng), rng)


def test_draws_are_new_in_every_epoch_and_for_every_image():
    batches = train_batches(ShapeSet("train", 5), 20, SQUARE, augment=brighten, global_batch=1)
    draws = [(int(b.image_index[0]), int(b.images[0, 0, 0, 0])) for (b,) in batches]
    assert len({index for index, _ in draws}) == 5
    assert len(set(draws)) >= 19 and len({amount for _, amount in draws}) >= 17


def test_without_an_augmentation_nothing_changes_and_the_order_is_the_same():
    dataset = ShapeSet("train", 7)
    plain = train_batches(dataset, 6, SQUARE)
    same = train_batches(dataset, 6, SQUARE, augment=lambda example, rng: example)
    for (a,), (b,) in zip(plain, same, strict=True):
        assert_tree_close(a, b)


def test_evaluation_is_not_augmented():
    dataset = ShapeSet("val", 4)
    for batch in EvalLoader(dataset, SQUARE, batch_size=2, num_workers=0):
        for row, index in enumerate(batch.image_index):
            np.testing.assert_array_equal(batch.images[row], dataset.decode(index))


class Damaged(ShapeSet):
    def decode(self, index):
        if index == 2:
            raise UndecodableImage("image 2 is damaged")
        return super().decode(index)


def test_a_damaged_image_of_ones_own_set_is_skipped(caplog):
    loader = TrainLoader(
        Damaged("train", 4), SQUARE, TrainOrder(seed=3, batch_size=4), num_workers=0, augment=both
    )
    try:
        seen = np.concatenate([next(loader).image_index for _ in range(6)])
    finally:
        loader.close()
    assert set(seen.tolist()) == {0, 1, 3} and loader.skipped == {"000002.jpg"}
    assert "skipped 000002.jpg: image 2 is damaged" in caplog.text


@pytest.mark.parametrize(
    "image", [np.zeros((64, 64), np.uint8), np.zeros((64, 64, 3)), np.zeros((32, 64, 3), np.uint8)]
)
def test_decoded_images_are_held_to_their_record(image):
    class Wrong(ShapeSet):
        def decode(self, index):
            return image

    found = re.escape(f"{image.dtype} {image.shape}, expected uint8 (64, 64, 3) as recorded")
    with pytest.raises(ValueError, match=f"Wrong: image '000000.jpg': decoded to {found}"):
        loaded(Wrong("train", 1), 0, None)


def test_what_cannot_be_pickled_says_so():
    dataset = ShapeSet("train", 2)
    dataset.lock = __import__("threading").Lock()
    with pytest.raises(ValueError, match="augment cannot be pickled .*data.num_workers .*lock"):
        train_batches(dataset, 1, SQUARE, workers=1)
