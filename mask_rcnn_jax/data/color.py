"""Kinds of augmentation that change colors, as torchvision defines them.

Images are [H, W, C], uint8 or float32 in 0..255, and stay so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from mask_rcnn_jax import opencv as cv2
from mask_rcnn_jax.data.example import Example
from mask_rcnn_jax.ranges import Probability, Range, Ranged

Factors = Annotated[
    tuple[float, float],
    Range("0 <= lowest <= highest", lambda pair: 0 <= pair[0] <= pair[1] < math.inf),
]
_LUMA = np.array([0.299, 0.587, 0.114])  # of red, green and blue


@dataclass(frozen=True)
class Brightness(Ranged):
    """Multiply all values by a factor, those of all bands alike.

    Attributes:
        factors: lowest and highest factor.
        probability: probability for an image.
    """

    factors: Factors = (0.875, 1.125)
    probability: Probability = 0.5

    def __call__(self, example: Example, rng: np.random.Generator) -> Example:
        factor = _draw(self.factors, self.probability, rng)
        if factor is None:
            return example
        return replace(example, image=_blend(example.image, 0.0, factor))


@dataclass(frozen=True)
class Contrast(Ranged):
    """Multiply the distance from the mean gray level by a factor.

    The gray level is that of red, green and blue; of other numbers of bands, their mean.

    Attributes:
        factors: lowest and highest factor.
        probability: probability for an image.
    """

    factors: Factors = (0.5, 1.5)
    probability: Probability = 0.5

    def __call__(self, example: Example, rng: np.random.Generator) -> Example:
        factor = _draw(self.factors, self.probability, rng)
        if factor is None:
            return example
        return replace(example, image=_blend(example.image, _level(example.image), factor))


@dataclass(frozen=True)
class Saturation(Ranged):
    """Multiply the distance from each pixel's gray level by a factor.

    Attributes:
        factors: lowest and highest factor.
        probability: probability for an image.
    """

    factors: Factors = (0.5, 1.5)
    probability: Probability = 0.5

    def __call__(self, example: Example, rng: np.random.Generator) -> Example:
        factor = _draw(self.factors, self.probability, rng)
        if factor is None:
            return example
        matrix = factor * np.eye(3) + (1 - factor) * np.tile(_LUMA, (3, 1))
        image = cv2.transform(example.image, matrix)
        return replace(example, image=_limited(image, example.image.dtype))


@dataclass(frozen=True)
class Hue(Ranged):
    """Turn the color circle.

    Attributes:
        shift: largest turn in either direction, as a fraction of the circle, at most 0.5.
        probability: probability for an image.
    """

    shift: Annotated[float, Range("0 to 0.5", lambda shift: 0 <= shift <= 0.5)] = 0.05
    probability: Probability = 0.5

    def __call__(self, example: Example, rng: np.random.Generator) -> Example:
        shift = _draw((-self.shift, self.shift), self.probability, rng)
        if shift is None:
            return example
        # The hues of 8-bit images would be integers, up to ten gray levels away.
        values = cv2.cvtColor(example.image.astype(np.float32), cv2.COLOR_RGB2HSV)
        hue = values[..., 0] + shift % 1 * 360  # degrees
        values[..., 0] = np.where(hue < 360, hue, hue - 360)
        image = cv2.cvtColor(values, cv2.COLOR_HSV2RGB)
        return replace(example, image=_limited(image, example.image.dtype))


@dataclass(frozen=True)
class OfColors:
    """Apply a kind to the bands that are red, green and blue.

    Attributes:
        kind: takes and returns examples of [H, W, 3].
        places: of red, green and blue among the bands.
    """

    kind: Saturation | Hue
    places: Sequence[int]

    def __call__(self, example: Example, rng: np.random.Generator) -> Example:
        colors = np.ascontiguousarray(example.image[..., self.places])
        image = example.image.copy()
        image[..., self.places] = self.kind(replace(example, image=colors), rng).image
        return replace(example, image=image)


def _draw(
    limits: tuple[float, float], probability: float, rng: np.random.Generator
) -> float | None:
    """Draw a value, or None for an image that is left alone; two random numbers either way."""
    value = float(rng.uniform(*limits))
    return value if rng.random() < probability else None


def _level(image: np.ndarray) -> float:
    if image.shape[2] == 3:
        return float(_LUMA @ cv2.mean(image)[:3])
    return float(image.mean(dtype=np.float64))


def _limited(image: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Values of a type of images in 0..255."""
    return (np.rint(image) if dtype == np.uint8 else image).clip(0, 255).astype(dtype, copy=False)


def _blend(image: np.ndarray, level: float, factor: float) -> np.ndarray:
    if image.dtype != np.uint8:
        return np.clip(np.float32(level) + np.float32(factor) * (image - np.float32(level)), 0, 255)
    values = level + factor * (np.arange(256) - level)
    table = np.rint(values).clip(0, 255).astype(np.uint8)
    return cv2.LUT(image, table).reshape(image.shape)
