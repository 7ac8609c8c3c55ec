"""Augmentation of images of any number of bands, of whole numbers and of fractions."""

from dataclasses import replace

import numpy as np
import pytest

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data.affine import Affine, fill_of, scaling
from mask_rcnn_jax.data.augment import augmented
from mask_rcnn_jax.data.color import Brightness, Contrast, Hue, OfColors, Saturation
from mask_rcnn_jax.data.copy_paste import CopyPaste
from mask_rcnn_jax.data.dataset import Annotation, ImageRecord
from mask_rcnn_jax.data.example import Example
from mask_rcnn_jax.data.geometry import (
    FixedSizeCrop,
    HorizontalFlip,
    QuarterTurns,
    Rotation,
    ScaleJitter,
    Translation,
    VerticalFlip,
)
from mask_rcnn_jax.data.kinds import build_augment, resolve_augment
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.transforms import load_example
from mask_rcnn_jax.images.bands import Bands

IMAGE = np.random.default_rng(0).integers(0, 256, (47, 63, 12), np.uint8)
FILL = tuple(range(10, 130, 10))
LISTS = {
    "flips": [HorizontalFlip(1.0), VerticalFlip(1.0)],
    "turn": [QuarterTurns(1.0)],
    "rotation": [Rotation(40, 1.0, FILL)],
    "shrunk rotation": [ScaleJitter((30, 30), (0.5, 0.7)), Rotation(40, 1.0, FILL)],
    "larger": [ScaleJitter((90, 90), (1.1, 1.3)), FixedSizeCrop((64, 64), fill=FILL)],
    "smaller": [ScaleJitter((40, 40), (0.3, 0.7)), FixedSizeCrop((64, 64), fill=FILL)],
    "shift": [QuarterTurns(1.0), Translation(0.3, 1.0, FILL)],
}


def warped(kinds, image, first=0):
    """What a list makes of bands of an image, the first of which has this place in FILL."""
    last, bands = Example(image, ()), image.shape[2]
    rng = np.random.default_rng(3)
    for kind in kinds:
        affine = kind.affine(rng, last.size)
        if affine.fill:
            affine = affine._replace(fill=affine.fill[first : first + bands])
        last = last.then(affine)
    return last.read().image


@pytest.mark.parametrize("bands", [1, 2, 4, 12])
@pytest.mark.parametrize("name", LISTS)
def test_bands_move_as_colors_do(name, bands):
    found = warped(LISTS[name], IMAGE[..., :bands])
    triples = [warped(LISTS[name], IMAGE[..., at : at + 3], at) for at in range(0, 12, 3)]
    np.testing.assert_array_equal(found, np.concatenate(triples, axis=2)[..., :bands])


@pytest.mark.parametrize("bands", [1, 3, 12])
@pytest.mark.parametrize("name", LISTS)
def test_fractions_move_as_whole_numbers_do(name, bands):
    image = IMAGE[..., :bands]
    found = warped(LISTS[name], image.astype(np.float32))
    assert found.dtype == np.float32
    # Pillow rounds between the two passes, and OpenCV after its sum.
    assert np.abs(found - warped(LISTS[name], image)).max() <= 1.01


def test_a_fill_is_one_value_or_one_for_each_band():
    assert fill_of((7,), 4) == fill_of((7, 7, 7), 4) == (7, 7, 7, 7)
    assert fill_of((1, 2, 3, 4), 4) == (1, 2, 3, 4)
    affine = scaling((4, 4), (4, 4))._replace(size=(8, 8))
    for fill, at in (((128, 128, 128), 128), (None, 0)):
        example = Example(np.zeros((4, 4, 13), np.float32), ())
        image = example.then(Affine(affine.matrix, (8, 8), fill)).read().image
        assert image.shape == (8, 8, 13) and (image[4:] == at).all()


def applied(kind, image, seed=0):
    return kind(Example(image, ()), np.random.default_rng(seed)).image


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("bands", [1, 2, 4, 13])
def test_brightness_and_contrast_change_all_bands(bands, dtype):
    rng = np.random.default_rng(1)
    image = rng.integers(0, 256, (9, 11, bands)).astype(dtype)
    before, values = image.copy(), image.astype(np.float64)
    tolerance = 0.51 if dtype == np.uint8 else 1e-3
    for kind, level in ((Brightness, 0), (Contrast, values.mean())):
        found = applied(kind(factors=(1.3, 1.3), probability=1.0), image)
        assert found.dtype == dtype and found.shape == image.shape
        expected = (level + 1.3 * (values - level)).clip(0, 255)
        np.testing.assert_allclose(found, expected, atol=tolerance)
    np.testing.assert_array_equal(image, before)


@pytest.mark.parametrize("kind", [Brightness, Contrast, Saturation, Hue])
def test_colors_with_fractions_change_as_whole_ones_do(kind):
    image = IMAGE[..., :3]
    whole = applied(kind(probability=1.0), image)
    found = applied(kind(probability=1.0), image.astype(np.float32))
    assert found.dtype == np.float32 and found.min() >= 0 and found.max() <= 255
    np.testing.assert_allclose(found, whole, atol=1)


@pytest.mark.parametrize("kind", [Saturation(probability=1.0), Hue(probability=1.0)])
def test_hue_and_saturation_change_the_colors_among_bands(kind):
    image = np.random.default_rng(2).uniform(0, 255, (9, 11, 4)).astype(np.float32)
    found = applied(OfColors(kind, [2, 1, 0]), image)
    colors = applied(kind, np.ascontiguousarray(image[..., [2, 1, 0]]))
    np.testing.assert_array_equal(found, np.dstack([colors[..., ::-1], image[..., 3]]))


def test_hue_and_saturation_need_bands_that_are_colors():
    data = replace(options_of("nir", "red", "green", "blue"), augment=("saturation", "contrast"))
    kinds = build_augment(data)
    assert isinstance(kinds[0], OfColors) and list(kinds[0].places) == [1, 2, 3]
    assert resolve_augment(data, [Saturation()])[0] == (OfColors(Saturation(), [1, 2, 3]),)
    data = replace(options_of("red", "green", "blue"), augment=("saturation",))
    assert build_augment(data) == (Saturation(),)
    data = replace(options_of("nir", "red"), augment=("hue",))
    with pytest.raises(ValueError, match="'hue', expected red, green and blue among data.bands.na"):
        build_augment(data)
    data = replace(options_of("a", "b"), augment=("rotation",), rotation=Rotation(fill=(1, 2, 3)))
    with pytest.raises(ValueError, match="Rotation: fill is .1, 2, 3., expected one value, or one"):
        build_augment(data)


def options_of(*names):
    flat = (100.0,) * len(names)
    entries = {"data.bands.names": names, "model.input.mean": flat, "model.input.std": flat}
    return load_config("quickstart", entries).data


def test_objects_are_pasted_with_all_bands():
    image = np.zeros((20, 20, 5), np.float32)
    source = np.random.default_rng(0).uniform(0, 255, (20, 20, 5)).astype(np.float32)
    mask = np.zeros((20, 20), np.uint8)
    mask[3:9, 4:12] = 1
    objects = (Annotation.from_mask(mask, 1),)
    kind, rng = CopyPaste(blend=False), np.random.default_rng(0)
    found = kind.paste(Example(image, ()), Example(source, objects), rng).image
    np.testing.assert_array_equal(found, source * mask[..., None])


class BandSet:
    """One image of a dataset of one's own."""

    class_names = ("one",)

    def __init__(self, image):
        self.image, (height, width, _) = image, image.shape
        box = Annotation.from_polygons([[2, 2, 20, 2, 20, 30]], 1, (height, width))
        self.images = [ImageRecord(1, "one", height, width, (box,))]

    def decode(self, index):
        return self.image


def four(**entries):
    bands = Bands(names=("a", "b", "c", "d"), **entries)
    return ExampleOptions((64, 64), "fit", 2, mask_size=8, bands=bands)


def test_datasets_of_ones_own_have_bands():
    image = np.random.default_rng(0).uniform(0, 255, (64, 64, 4)).astype(np.float32)
    batch = load_example(BandSet(image), 0, four(scale="bits"))
    assert batch.images.dtype == np.float32
    np.testing.assert_array_equal(batch.images, image)
    whole = image.astype(np.uint8)
    np.testing.assert_array_equal(load_example(BandSet(whole), 0, four()).images, whole)
    wrong = {
        "float32 .64, 64, 4., expected uint8 .64, 64, 4.": (image, four()),
        "uint8 .64, 64, 3., expected uint8 .64, 64, 4.": (whole[..., :3], four()),
        "values that are not finite": (np.where(image > 9, image, np.nan), four(scale="bits")),
    }
    for message, (pixels, options) in wrong.items():
        with pytest.raises(ValueError, match="image 'one': decoded to " + message):
            load_example(BandSet(pixels), 0, options)


@pytest.mark.parametrize(
    "change", [lambda x: x[..., :3], lambda x: x.astype(np.uint8), lambda x: x[..., 0]]
)
def test_a_function_keeps_bands_and_type(change):
    dataset = BandSet(np.zeros((20, 30, 4), np.float32))
    example = Example(dataset.image, dataset.images[0].annotations)

    def function(example, rng):
        return replace(example, image=change(example.image))

    with pytest.raises(ValueError, match="returned an image of .*, expected float32 .H, W, 4."):
        augmented(function, (1,), dataset, 0, example)
