"""Kinds of augmentation that move pixels: random affine maps.

Each kind has `affine(rng, size)`, the map for an image (height, width). Maps in a row are composed,
and the image is resampled once. All padding has the fill of the first kind with one, which gives it
with every map.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, runtime_checkable

import numpy as np

from mask_rcnn_jax.data.affine import Affine, Color, diagonal, scaling
from mask_rcnn_jax.ranges import Probability, ProperFraction, Range, Ranged, numbers

GRAY = (128, 128, 128)
Rounding = Literal["floor", "round"]
Size = Annotated[tuple[int, int], numbers("(height, width), both at least 1", lambda n: n >= 1)]
Fill = Annotated[
    Color,
    Range("values from 0 to 255", lambda fill: fill and all(0 <= value <= 255 for value in fill)),
]
Scales = Annotated[
    tuple[float, float],
    Range("0 < lowest <= highest", lambda pair: 0 < pair[0] <= pair[1] < math.inf),
]


@runtime_checkable
class Geometry(Protocol):
    """A kind that moves pixels."""

    def affine(self, rng: np.random.Generator, size: tuple[int, int]) -> Affine:
        """Draw the map for an image (height, width)."""


@dataclass(frozen=True)
class ScaleJitter(Ranged):
    """Scale to a random multiple of the largest size that fits (Ghiasi et al., 2021).

    Attributes:
        size: (height, width) that multiple 1 fits into; pixels.
        scales: lowest and highest multiple: (0.1, 2.0) is large-scale jitter, (0.8, 1.25) the
            standard one.
        rounding: rounding for the new sides, "floor" as in torchvision, "round" as in Detectron2;
            "floor" puts run-length masks half a pixel too far right and down, as torchvision.
    """

    size: Size = (1024, 1024)
    scales: Scales = (0.1, 2.0)
    rounding: Rounding = "round"

    def affine(self, rng: np.random.Generator, size: tuple[int, int]) -> Affine:
        low, high = self.scales
        sides, draw = np.array(size, np.float64), rng.random()
        if self.rounding == "floor":  # in single precision, as torchvision
            single = np.float32(low) + np.float32(draw) * np.float32(high - low)
            new = np.trunc(np.float32(sides) * (np.float32((self.size / sides).min()) * single))
        else:
            scale = low + (high - low) * draw
            new = np.rint(sides * (np.array(self.size) * scale / sides).min())
        height, width = (max(1, int(side)) for side in new)
        return scaling(size, (height, width))._replace(torch_masks=self.rounding == "floor")


@dataclass(frozen=True)
class FixedSizeCrop(Ranged):
    """Crop a random window where the image is larger, pad right and below where it is smaller.

    Attributes:
        size: (height, width) after the crop; pixels. It is the canvas in training.
        pad: False leaves smaller images smaller.
        fill: color for the padding, RGB, or a value for each band, or one for all; that of the
            first kind in the list counts.
        boxes: "tight" recomputes boxes from masks and drops objects without any mask left, as
            Detectron2; "clip" clips boxes and drops those without area, as torchvision.
        rounding: rounding for the window's place, "floor" as in torchvision, "round" as in
            Detectron2.
    """

    size: Size = (1024, 1024)
    pad: bool = True
    fill: Fill = GRAY
    boxes: Literal["tight", "clip"] = "tight"
    rounding: Rounding = "round"

    def affine(self, rng: np.random.Generator, size: tuple[int, int]) -> Affine:
        draw = rng.random()  # one for both axes, as in torchvision and Detectron2
        surplus = np.maximum(np.array(size) - self.size, 0)
        y, x = (np.trunc if self.rounding == "floor" else np.rint)(surplus * draw)
        height, width = np.array(size) - surplus
        new_size = self.size if self.pad else (int(height), int(width))
        return Affine(diagonal(1, 1, -x, -y), new_size, self.fill, self.boxes == "tight")


@dataclass(frozen=True)
class HorizontalFlip(Ranged):
    """Mirror left to right.

    Attributes:
        probability: probability for an image.
    """

    probability: Probability = 0.5

    def affine(self, rng: np.random.Generator, size: tuple[int, int]) -> Affine:
        flips = rng.random() < self.probability
        return Affine(diagonal(-1, 1, size[1]) if flips else diagonal(1, 1), size)


@dataclass(frozen=True)
class VerticalFlip(Ranged):
    """Mirror top to bottom.

    Attributes:
        probability: probability for an image.
    """

    probability: Probability = 0.5

    def affine(self, rng: np.random.Generator, size: tuple[int, int]) -> Affine:
        flips = rng.random() < self.probability
        return Affine(diagonal(1, -1, 0, size[0]) if flips else diagonal(1, 1), size)


@dataclass(frozen=True)
class QuarterTurns(Ranged):
    """Turn by 0, 90, 180 or 270 degrees.

    Attributes:
        probability: probability of a turn, the three being equally likely.
    """

    probability: Probability = 0.75

    def affine(self, rng: np.random.Generator, size: tuple[int, int]) -> Affine:
        height, width = size
        turns = int(rng.integers(1, 4)) if rng.random() < self.probability else 0
        if turns == 1:  # counterclockwise: the upper right corner becomes the upper left one
            return Affine(np.array([[0.0, 1, 0], [-1, 0, width]]), (width, height))
        if turns == 3:
            return Affine(np.array([[0.0, -1, height], [1, 0, 0]]), (width, height))
        return Affine(diagonal(-1, -1, width, height) if turns else diagonal(1, 1), size)


@dataclass(frozen=True)
class Rotation(Ranged):
    """Rotate about the center, and keep the size.

    Attributes:
        degrees: largest angle in either direction.
        probability: probability for an image.
        fill: color beyond the image, as for `fixed_size_crop`; that of the first kind in the list
            counts.
    """

    degrees: Annotated[float, Range("0 to 180", lambda angle: 0 <= angle <= 180)] = 10.0
    probability: Probability = 0.5
    fill: Fill = GRAY

    def affine(self, rng: np.random.Generator, size: tuple[int, int]) -> Affine:
        height, width = size
        angle = math.radians(rng.uniform(-self.degrees, self.degrees))
        if rng.random() >= self.probability:
            return Affine(diagonal(1, 1), size, self.fill)
        cos, sin = math.cos(angle), math.sin(angle)
        linear = np.array([[cos, sin], [-sin, cos]])  # counterclockwise, since y points down
        center = np.array([width / 2, height / 2])
        matrix = np.column_stack([linear, center - linear @ center])
        return Affine(matrix, size, self.fill, tight=True)


@dataclass(frozen=True)
class Translation(Ranged):
    """Shift by whole pixels, and keep the size.

    Attributes:
        fraction: largest shift in either direction, as a fraction of the side.
        probability: probability for an image.
        fill: color beyond the image, as for `fixed_size_crop`; that of the first kind in the list
            counts.
    """

    fraction: ProperFraction = 0.1
    probability: Probability = 0.5
    fill: Fill = GRAY

    def affine(self, rng: np.random.Generator, size: tuple[int, int]) -> Affine:
        y, x = np.rint(rng.uniform(-self.fraction, self.fraction, 2) * size)
        if rng.random() >= self.probability:
            return Affine(diagonal(1, 1), size, self.fill)
        return Affine(diagonal(1, 1, x, y), size, self.fill, tight=True)
