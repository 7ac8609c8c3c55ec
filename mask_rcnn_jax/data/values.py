"""Checks for entries of augmentation kinds. Each raises ValueError, beginning with the entry."""

import math

from mask_rcnn_jax.data.affine import Color


def check_probability(value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"probability is {value}, expected 0 to 1")


def check_size(size: tuple[int, int]) -> None:
    if min(size) < 1:
        raise ValueError(f"size is {size}, expected (height, width), both at least 1")


def check_fill(fill: Color) -> None:
    if not fill or not all(0 <= value <= 255 for value in fill):
        raise ValueError(f"fill is {fill}, expected values from 0 to 255")


def check_factors(factors: tuple[float, float]) -> None:
    if not 0 <= factors[0] <= factors[1] < math.inf:
        raise ValueError(f"factors is {factors}, expected 0 <= lowest <= highest")
