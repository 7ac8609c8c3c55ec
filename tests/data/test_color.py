"""Color kinds against the definitions of torchvision and Pillow."""

import colorsys

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from mask_rcnn_jax.data.color import Brightness, Contrast, Hue, Saturation
from mask_rcnn_jax.data.example import Example

IMAGE = np.random.default_rng(0).integers(0, 256, (19, 23, 3), np.uint8)
IMAGE[:4] = IMAGE[:4, :, :1]  # gray
EXAMPLE = Example(IMAGE, ("kept",))
ALWAYS = {"probability": 1.0}


def apply(kind, seed=0):
    result = kind(EXAMPLE, np.random.default_rng(seed))
    assert result.objects is EXAMPLE.objects and result.image.dtype == np.uint8
    return result.image


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, 1.7])
@pytest.mark.parametrize(
    "kind, enhance",
    [
        (Brightness, ImageEnhance.Brightness),
        (Contrast, ImageEnhance.Contrast),
        (Saturation, ImageEnhance.Color),
    ],
)
def test_factors_are_pillows(kind, enhance, factor):
    found = apply(kind(factors=(factor, factor), **ALWAYS))
    expected = np.asarray(enhance(Image.fromarray(IMAGE)).enhance(factor))
    # Pillow rounds the gray levels that it extrapolates from.
    assert np.abs(found.astype(int) - expected).max() <= 1 + (factor > 1)


@pytest.mark.parametrize("seed, sign", [(4, 1), (3, -1)])
def test_the_hue_turns_and_lightness_and_saturation_stay(seed, sign):
    found = apply(Hue(shift=0.5, **ALWAYS), seed)
    shift = np.random.default_rng(seed).uniform(-0.5, 0.5)
    assert sign * shift > 0.05
    for before, after in zip(IMAGE.reshape(-1, 3), found.reshape(-1, 3), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*(before / 255.0))
        expected = np.array(colorsys.hsv_to_rgb((hue + shift) % 1, saturation, value)) * 255
        assert np.abs(after - expected).max() <= 0.51


@pytest.mark.parametrize("kind", [Brightness, Contrast, Saturation, Hue])
def test_colors_change_as_often_as_asked_and_the_image_given_stays(kind):
    before = IMAGE.copy()
    changed = [not np.array_equal(apply(kind(), seed), before) for seed in range(200)]
    assert 0.4 < np.mean(changed) < 0.6
    np.testing.assert_array_equal(before, IMAGE)


@pytest.mark.parametrize("kind", [Brightness, Contrast, Saturation, Hue])
def test_an_image_of_one_pixel(kind):
    result = kind(**ALWAYS)(Example(IMAGE[:1, :1], ()), np.random.default_rng(0))
    assert result.image.shape == (1, 1, 3)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Contrast(factors=(1.5, 0.5)), "factors is .* expected 0 <= lowest <= highest"),
        (lambda: Brightness(factors=(-0.5, 0.5)), "factors is"),
        (lambda: Hue(shift=0.6), "shift is 0.6, expected 0 to 0.5"),
        (lambda: Saturation(probability=2), "probability is 2, expected 0 to 1"),
    ],
)
def test_wrong_values_name_the_entry(make, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()
