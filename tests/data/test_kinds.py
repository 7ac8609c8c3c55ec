"""The list of augmentations: in a config, from Python, and what training makes of it."""

import pickle
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pytest

from mask_rcnn_jax import parts
from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data.affine import Affine
from mask_rcnn_jax.data.augment import augmented
from mask_rcnn_jax.data.color import Contrast
from mask_rcnn_jax.data.copy_paste import CopyPaste
from mask_rcnn_jax.data.dataset import Annotation, ImageRecord, UndecodableImage
from mask_rcnn_jax.data.example import Example
from mask_rcnn_jax.data.geometry import FixedSizeCrop, HorizontalFlip, Rotation, ScaleJitter
from mask_rcnn_jax.data.kinds import KINDS, build_augment, resolve_augment
from mask_rcnn_jax.data.loader import TrainLoader, TrainOrder
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.resize import resize_mask, resize_plan
from mask_rcnn_jax.data.transforms import empty_batch, load_row
from mask_rcnn_jax.recipe.recipe import Recipe
from tests.data.test_augment import both, rows
from tests.data.test_loader import train_batches
from tests.memory_set import ShapeSet

SQUARE = ExampleOptions(image_size=(64, 64), resize="fit", max_instances=6, mask_size=8)
LSJ = ("scale_jitter", "fixed_size_crop")
PATH = "mask_rcnn_jax.data.geometry"


def config_with(**entries):
    names = {name.replace("__", "."): value for name, value in entries.items()}
    return load_config("quickstart", {f"data.{name}": value for name, value in names.items()})


def test_every_kind_has_a_section_with_meanings_and_its_defaults():
    data = load_config("coco").data
    described = parts.describe(data)
    for name, kind in KINDS.items():
        assert getattr(data, name) == kind()
        for entry in asdict(kind()):
            assert described[f"{name}.{entry}"].meaning
    assert data.augment == ()
    assert build_augment(data) == ()


def test_a_list_is_built_from_its_sections():
    config = config_with(
        augment=("contrast", *LSJ, "tests.data.test_augment:both", "copy_paste"),
        scale_jitter__scales=(0.8, 1.25),
        fixed_size_crop__size=(128, 192),
        copy_paste__blend=False,
    )
    expected = (
        Contrast(),
        ScaleJitter(scales=(0.8, 1.25)),
        FixedSizeCrop(size=(128, 192)),
        both,
        CopyPaste(blend=False),
    )
    assert build_augment(config.data) == expected
    assert pickle.loads(pickle.dumps(expected)) == expected


class HalfTurn:
    """A kind from outside."""

    def affine(self, rng, size):
        height, width = size
        return Affine(np.array([[-1.0, 0, width], [0, -1, height]]), size)


def test_a_kind_from_outside_becomes_part_of_the_map():
    config = config_with(augment=("tests.data.test_kinds:HalfTurn", "vertical_flip"))
    kinds = build_augment(config.data)
    dataset = ShapeSet("train", 1)
    given = Example(dataset.decode(0), dataset.images[0].annotations)
    result = augmented((kinds[0], kinds[0]), (0,), dataset, 0, given)
    np.testing.assert_array_equal(result.pending.matrix, [[1, 0, 0], [0, 1, 0]])
    np.testing.assert_array_equal(result.read().image, given.image)
    assert resolve_augment(config.data, [HalfTurn()])[1].augment == (f"{__name__}:HalfTurn",)


@pytest.mark.parametrize(
    "entries, words",
    [
        ({"augment": ("flip",)}, "data.augment is 'flip', expected one of .*'horizontal_flip'"),
        ({"augment": ("nothing:here",)}, "data.augment is 'nothing:here': No module"),
        ({"augment": ("horizontal_flip",)}, "data.flip_probability is 0.5, expected 0 if .*twice"),
        (
            {"augment": LSJ, "scale_jitter.scales": (2.0, 1.0)},
            r"data.scale_jitter.scales is \(2.0, 1.0\), expected 0 < lowest <= highest",
        ),
        (
            {"augment": LSJ, "fixed_size_crop.boxes": "none"},
            "data.fixed_size_crop.boxes is 'none', expected one of .'tight', 'clip'",
        ),
        ({"augment": (f"{PATH}:HorizontalFlip",)}, "data.flip_probability is 0.5, expected 0 if"),
        (
            {"augment": (f"{PATH}:FixedSizeCrop",)},
            f"data.augment has '{PATH}:FixedSizeCrop', expected 'fixed_size_crop', whose size is",
        ),
        ({"augment": ("os:sep",)}, "data.augment is 'os:sep', which is '/', expected a kind of"),
        ({"augment": ("functools:partial",)}, "data.augment is 'functools:partial': type 'par"),
        ({"augment": (1,)}, r"data.augment is \(1,\), expected tuple\[str, ...\]"),
        ({"augment": "hue"}, r"data.augment is 'hue', expected tuple\[str, ...\]"),
    ],
)
def test_wrong_entries_are_named(entries, words):
    tree = load_config("quickstart").to_dict()
    for name, value in entries.items():
        section, _, entry = name.rpartition(".")
        (tree["data"][section] if section else tree["data"])[entry] = value
    with pytest.raises(ValueError, match=words) as error:
        build_augment(Recipe.read(tree).data)
    assert "\n" not in str(error.value)


def test_a_list_given_in_python_takes_the_place_of_the_configs_and_is_recorded():
    before = config_with(augment=("hue",), flip_probability=0.0).data
    kinds = [HorizontalFlip(0.25), both, FixedSizeCrop((128, 128))]
    made, data = resolve_augment(before, kinds)
    assert made == tuple(kinds)
    assert data.augment == ("horizontal_flip", "tests.data.test_augment:both", "fixed_size_crop")
    assert data.horizontal_flip.probability == 0.25
    assert data.in_training().image_size == (128, 128)
    assert build_augment(data) == tuple(kinds)
    assert resolve_augment(data, both)[0] == (both,)
    assert resolve_augment(data, ()) == ((), replace(data, augment=()))
    with pytest.raises(ValueError, match="augment has 5 at place 1, expected a kind of augmentat"):
        resolve_augment(data, [both, 5])


class LargeCrop(FixedSizeCrop):
    """A kind whose size the config does not have."""


@pytest.mark.parametrize(
    "kinds, words",
    [
        ([both, Rotation], "augment has <class .*Rotation'> at place 1, expected a kind"),
        (
            [Rotation(5), both, Rotation(30)],
            r"Rotation\(degrees=30.* at place 2, expected the same",
        ),
        (
            [LargeCrop((640, 640))],
            "data.augment has '.*:LargeCrop', expected 'fixed_size_crop'",
        ),
    ],
)
def test_lists_that_the_config_would_record_as_others_are_refused(kinds, words):
    with pytest.raises(ValueError, match=words) as error:
        resolve_augment(config_with().data, kinds)
    assert "\n" not in str(error.value)


def test_a_kind_that_its_name_does_not_make_is_recorded_as_given():
    kinds = [partial(both), Rotation(5), Rotation(5)]
    made, data = resolve_augment(config_with().data, kinds)
    given = "functools:partial, given as augment"
    assert made == tuple(kinds) and data.augment == (given, "rotation", "rotation")
    with pytest.raises(ValueError, match=f"data.augment is '{given}': module"):
        build_augment(data)


def test_the_config_of_an_earlier_version_has_no_such_entries():
    tree = load_config("quickstart").to_dict()
    for name in ("augment", *KINDS):
        del tree["data"][name]
    data = Recipe.read(tree).data
    assert build_augment(data) == () and data.in_training() == data


def test_training_has_the_canvas_of_the_crop_and_evaluation_its_own():
    crop = {"data.augment": LSJ, "data.fixed_size_crop.size": (600, 1024)}
    data = load_config("coco_torchvision", crop).data
    options = data.in_training()
    assert (options.image_size, options.resize, options.image_dtype) == (
        (640, 1024),
        "keep",
        "uint8",
    )
    assert data.image_size == (800, 1333)
    other = load_config("coco_torchvision", {"data.augment": ("rotation",)}).data
    assert other.in_training() == other


# --- through the loader

CROP = ExampleOptions(image_size=(64, 128), resize="keep", max_instances=9, mask_size=8)
JITTER = (
    Contrast(),
    HorizontalFlip(),
    Rotation(10),
    ScaleJitter((64, 100)),
    FixedSizeCrop((64, 100)),
    CopyPaste(),
    both,
)


@pytest.mark.slow
def test_draws_do_not_depend_on_workers_processes_or_where_a_run_resumed():
    """Of a function without a name, too."""
    dataset, kinds = ShapeSet("train", 7), (*JITTER, lambda example, rng: both(example, rng))
    whole = rows(train_batches(dataset, 6, CROP, augment=kinds))
    assert rows(train_batches(dataset, 6, CROP, augment=kinds, workers=1)) == whole
    assert rows(train_batches(dataset, 6, CROP, augment=kinds, processes=4)) == whole
    assert rows(train_batches(dataset, 3, CROP, augment=kinds, start=3)) == whole[3:]
    assert rows(train_batches(dataset, 6, CROP, augment=kinds, seed=4)) != whole


def one_row(dataset, index, kinds, options, canvas, seed=0, short_side=None):
    batch = empty_batch(1, canvas, options)

    def change(example):
        return augmented(kinds, (seed,), dataset, index, example)

    load_row(batch, 0, dataset, index, options, short_side, change)
    return batch


def test_a_smaller_crop_is_placed_in_the_upper_left_corner_and_not_resized():
    batch = one_row(ShapeSet("train", 1), 0, (FixedSizeCrop((40, 50)),), CROP, (64, 128))
    assert batch.image_sizes[0].tolist() == [40, 50] and batch.scales[0].tolist() == [1, 1]
    assert not batch.images[0, 40:].any() and not batch.images[0, :, 50:].any()


def test_a_padded_crop_fills_the_canvas():
    kinds = (FixedSizeCrop((64, 128), fill=(1, 2, 3)),)
    batch = one_row(ShapeSet("train", 1), 0, kinds, CROP, (64, 128))
    assert batch.image_sizes[0].tolist() == [64, 128]
    assert (batch.images[0, :, 64:] == [1, 2, 3]).all()


EDGE = ExampleOptions((96, 192), "shortest_edge", max_instances=9, mask_size=8, max_vertices=200)


class Nudge:
    """Hardly moves anything, but resamples."""

    def affine(self, rng, size):
        return Affine(np.array([[1.0, 0, 1e-6], [0, 1, 0]]), size)


def test_the_last_pixel_of_an_inclusive_box_is_one_of_the_original_image():
    """Whether or not the image is resampled once: x2 = 1.5 (x + width - 1)."""
    thin = np.zeros((64, 64), bool)
    thin[10:20, 30:31] = True
    wide = np.roll(thin, -20, axis=1)
    wide[5:15, 10:33] = True
    dataset, options = Plain(1), replace(EDGE, inclusive_boxes=True)
    objects = Annotation.from_mask(thin, 1), Annotation.from_mask(wide, 1)
    dataset.images = [replace(dataset.images[0], annotations=objects)]
    whole, resampled = (
        one_row(dataset, 0, kinds, options, (128, 192)).targets
        for kinds in ((HorizontalFlip(0.0),), (Nudge(),))
    )
    np.testing.assert_array_equal(whole.boxes[0, 0], [15, 7.5, 48, 28.5])
    np.testing.assert_allclose(resampled.boxes, whole.boxes, atol=1e-4)
    np.testing.assert_array_equal(resampled.valid, whole.valid)
    assert whole.valid.sum() == 1


@pytest.mark.parametrize("mask_frame", ["box", "image"])
@pytest.mark.parametrize("kinds", [(HorizontalFlip(1.0),), (Rotation(8, 1.0),)])
def test_without_a_crop_the_recipes_resize_follows(kinds, mask_frame):
    """Also in one map with it. Boxes, masks and vertices are those of the resized image."""
    options, dataset = replace(EDGE, mask_frame=mask_frame), ShapeSet("train", 1)
    batch = one_row(dataset, 0, kinds, options, (128, 192), seed=2)
    assert batch.image_sizes[0].tolist() == [96, 96] and batch.scales[0].tolist() == [1.5, 1.5]
    image, objects = dataset.decode(0), dataset.images[0].annotations
    turned = augmented(kinds, (2,), dataset, 0, Example(image, objects)).read()
    targets = batch.targets
    assert targets.valid[0].sum() == len(turned.objects) > 0
    for place, annotation in enumerate(turned.objects):
        np.testing.assert_allclose(targets.boxes[0, place], annotation.box * 1.5, atol=1.6)
        if not isinstance(annotation.segmentation, dict):
            points = np.concatenate(annotation.segmentation).reshape(-1, 2) * 1.5
            used = targets.polygons[0, place, :, 2] >= 0
            np.testing.assert_allclose(targets.polygons[0, place, used, :2], points, atol=1e-3)
        if mask_frame == "image":
            mask = targets.masks[0, place, :96, :96] > 0
            plan = resize_plan(64, 64, options)
            expected = resize_mask(annotation.mask(64, 64), plan)[:96, :96] > 0
            assert (mask ^ expected).sum() <= 0.15 * expected.sum() + 4


class Partly(ShapeSet):
    """Image 1 is damaged."""

    def decode(self, index):
        if index == 1:
            raise UndecodableImage("image 1 is damaged")
        return super().decode(index)


PASTE = (CopyPaste(blend=False),)


def first_batches(dataset, count, order, kinds=PASTE):
    loader = TrainLoader(dataset, SQUARE, order, num_workers=0, augment=kinds)
    try:
        return [next(loader) for _ in range(count)], loader.skipped
    finally:
        loader.close()


def test_a_damaged_second_image_is_not_blamed_on_the_first():
    order = TrainOrder(seed=3, batch_size=4)
    batches, skipped = first_batches(Partly("train", 3), 6, order)
    assert skipped == {"000001.jpg"}
    assert {int(i) for batch in batches for i in batch.image_index} == {0, 2}


def test_images_to_skip_are_not_copied_from():
    order = TrainOrder(seed=3, batch_size=4, skip=frozenset({1}))
    _, skipped = first_batches(Partly("train", 3), 6, order)
    assert skipped == set()


class Plain:
    """Image k is all of value 50 k, without objects but for the last, which holds one."""

    class_names = ("square",)

    def __init__(self, count, crowd=False):
        mask = np.zeros((64, 64), bool)
        mask[10:20, 30:50] = True
        self.square = Annotation.from_mask(mask, 1, iscrowd=crowd)
        self.images = [
            ImageRecord(i, f"{i}.png", 64, 64, (self.square,) * (i == count - 1))
            for i in range(count)
        ]

    def decode(self, index):
        return np.full((64, 64, 3), 50 * index, np.uint8)


def test_an_image_without_objects_gets_those_of_another():
    batches, _ = first_batches(Plain(3), 12, TrainOrder(seed=0, batch_size=1))
    seen = set()
    for batch in batches:
        index, valid = int(batch.image_index[0]), int(batch.targets.valid.sum())
        pasted = (batch.images[0, 10:20, 30:50] == 100).all()
        assert (batch.images[0, 0, 0] == 50 * index).all()
        assert pasted == (valid > 0)
        if valid:
            np.testing.assert_array_equal(batch.targets.boxes[0, 0], [30, 10, 50, 20])
        seen.add((index, valid))
    assert {(0, 0), (0, 1)} <= seen and (2, 0) not in seen


def test_crowds_and_images_without_any_object_left_are_trained_on():
    dataset, order = Plain(1, crowd=True), TrainOrder(seed=0, batch_size=1)
    batches, _ = first_batches(dataset, 2, order, (ScaleJitter((32, 32)), *JITTER[:4]))
    assert not any(batch.targets.valid.any() for batch in batches)


def test_a_function_after_an_empty_mask_may_keep_the_object():
    """torchvision's crop keeps boxes whose mask is cut off."""
    mask = np.zeros((64, 64), bool)
    mask[:4, :4] = True
    wide = Annotation(
        np.array([0, 0, 60, 60], np.float32), 1, Annotation.from_mask(mask, 1).segmentation, 16.0
    )
    crop = FixedSizeCrop((32, 32), boxes="clip")
    example = Example(np.zeros((64, 64, 3), np.uint8), (wide,))
    kept = []
    for seed in range(8):
        result = augmented((crop, lambda example, rng: example), (seed,), Plain(1), 0, example)
        kept += [one.segmentation for one in result.objects]
    assert () in kept
