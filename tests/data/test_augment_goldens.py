"""Augmentation against what torchvision and detectron2 make of the same draws."""

import numpy as np
import pytest

from mask_rcnn_jax.annotations.segmentation import mask_to_rle
from mask_rcnn_jax.data.augment import _apply
from mask_rcnn_jax.data.copy_paste import CopyPaste
from mask_rcnn_jax.data.dataset import Annotation
from mask_rcnn_jax.data.example import Example
from mask_rcnn_jax.data.geometry import FixedSizeCrop, HorizontalFlip, ScaleJitter
from tests.helpers import shared

SIZE = (64, 64)
TORCHVISION = (
    ScaleJitter(SIZE, rounding="floor"),
    FixedSizeCrop(SIZE, fill=(123, 117, 104), boxes="clip", rounding="floor"),
    HorizontalFlip(),
)
DETECTRON2 = (ScaleJitter(SIZE), FixedSizeCrop(SIZE), HorizontalFlip())
VITDET = (HorizontalFlip(), ScaleJitter(SIZE), FixedSizeCrop(SIZE, pad=False))


class Draws:
    """Gives the draws of a golden case in place of random numbers."""

    def __init__(self, *draws):
        self.draws = list(draws)

    def random(self):
        return float(self.draws.pop(0))

    def integers(self, n, size):
        return np.array(self.draws.pop(0))


@pytest.fixture(scope="module")
def golden():
    with np.load(shared("goldens/modern/augment.npz")) as file:
        return dict(file)


def case(golden, name):
    return {key.partition("/")[2]: v for key, v in golden.items() if key.startswith(f"{name}/")}


def unpacked(entries, name):
    shape = entries.get(f"{name}_shape")
    width = entries["image"].shape[1] if shape is None else shape[-1]
    return np.unpackbits(entries[name], axis=-1, count=width).astype(bool)


def from_masks(masks, boxes, first=0):
    """Objects with the class k + 1 for object k, from `first` on. A mask may be empty."""
    return tuple(
        Annotation(box, k + 1, mask_to_rle(mask), float(mask.sum()))
        for k, (mask, box) in enumerate(zip(masks, boxes, strict=True), start=first)
    )


def run(kinds, example, draws):
    return _apply(kinds, example, Draws(*draws), None, None).read()


def places(example):
    """Which of the objects are left."""
    return [annotation.class_index - 1 for annotation in example.objects]


def boxes_of(example):
    return np.array([annotation.box for annotation in example.objects]).reshape(-1, 4)


def gray_levels(image, expected):
    return np.abs(image.astype(float) - expected).max()


@pytest.mark.parametrize("number", range(8))
def test_torchvisions_large_scale_jitter(golden, number):
    entries = case(golden, f"tv{number}")
    objects = from_masks(unpacked(entries, "masks"), entries["boxes"])
    result = run(TORCHVISION, Example(entries["image"], objects), entries["draws"])
    assert gray_levels(result.image, entries["out_image"]) <= 1
    assert places(result) == entries["out_kept"].tolist()
    np.testing.assert_allclose(boxes_of(result), entries["out_boxes"], atol=1e-3)
    masks = np.array([annotation.mask(*SIZE) for annotation in result.objects])
    np.testing.assert_array_equal(masks.astype(bool), unpacked(entries, "out_masks"))


@pytest.mark.parametrize("number", range(8))
def test_torchvisions_jitter_alone(golden, number):
    entries = case(golden, f"tv{number}")
    objects = from_masks(unpacked(entries, "masks"), entries["boxes"])
    result = run(TORCHVISION[:1], Example(entries["image"], objects), entries["draws"])
    assert gray_levels(result.image, entries["jittered_image"]) <= 1
    np.testing.assert_allclose(boxes_of(result), entries["jittered_boxes"], atol=1e-3)


def from_polygons(entries):
    """Objects whose box and area do not matter: they are recomputed."""
    parts = {}
    for key, points in entries.items():
        if key.startswith("poly"):
            number = int(key[4:].partition("_")[0])
            parts.setdefault(number, []).append(points.astype(np.float32).reshape(-1))
    box = np.array([0, 0, 1, 1], np.float32)
    return tuple(Annotation(box, number + 1, tuple(parts[number]), 1.0) for number in sorted(parts))


D2_CASES = [(f"d2_{number}", DETECTRON2, (0, 1, 2)) for number in range(8)]
D2_CASES += [(f"d2vit_{number}", VITDET, (2, 0, 1)) for number in range(4)]


@pytest.mark.parametrize("name, kinds, order", D2_CASES)
def test_detectron2s_large_scale_jitter(golden, name, kinds, order):
    entries = case(golden, name)
    scale, crop, flip = entries["draws"]
    draws = ((scale - 0.1) / 1.9, crop, flip)
    example = Example(entries["image"], from_polygons(entries))
    result = run(kinds, example, [draws[i] for i in order])
    image = entries["out_image"].transpose(1, 2, 0)
    if kinds is DETECTRON2:
        image = image[..., ::-1]
    assert gray_levels(result.image, image) <= 1
    assert places(result) == entries["out_kept"].tolist()
    np.testing.assert_allclose(boxes_of(result), entries["out_boxes"], atol=1e-3)
    masks = unpacked(entries, "out_masks")
    for annotation, mask in zip(result.objects, masks, strict=True):
        number = annotation.class_index - 1
        expected = [
            entries[f"out_poly{number}_{part}"].reshape(-1, 2)
            for part in range(3)
            if f"out_poly{number}_{part}" in entries
        ]
        ours = [part.reshape(-1, 2).astype(np.float64) for part in annotation.segmentation]
        assert_same_outlines(ours, expected)
        np.testing.assert_array_equal(annotation.mask(*image.shape[:2]), mask)


def assert_same_outlines(ours, expected):
    """The same areas and the same corners, in any order."""
    assert len(ours) == len(expected)
    corners = [np.concatenate(parts) for parts in (ours, expected)]
    apart = np.linalg.norm(corners[0][:, None] - corners[1], axis=-1)
    assert apart.min(axis=0).max() < 1e-3, "a corner of the reference is missing"
    assert apart.min(axis=1).max() < 1e-3, "a corner is not the reference's"
    areas = [sorted(shoelace(part) for part in parts) for parts in (ours, expected)]
    np.testing.assert_allclose(*areas, atol=0.05)


def shoelace(points):
    (x, y), (next_x, next_y) = points.T, np.roll(points, -1, axis=0).T
    return abs(np.sum(x * next_y - next_x * y)) / 2


@pytest.mark.parametrize("number", range(4))
def test_torchvisions_copy_paste(golden, number):
    entries = case(golden, f"cp{number}")
    base, source = (
        Example(
            np.ascontiguousarray(entries[f"{side}_image"].transpose(1, 2, 0)),
            from_masks(unpacked(entries, f"{side}_masks"), entries[f"{side}_boxes"], first),
        )
        for side, first in (("base", 0), ("paste", 4))
    )
    kind = CopyPaste(blend=number in (0, 2), boxes="pixels")
    result = kind.paste(base, source, Draws(entries["selection"]))
    assert gray_levels(result.image, 255 * entries["out_image"].transpose(1, 2, 0)) <= 1
    labels = np.concatenate([entries["base_labels"], entries["paste_labels"]])
    assert labels[places(result)].tolist() == entries["out_labels"].tolist()
    np.testing.assert_allclose(boxes_of(result), entries["out_boxes"], atol=1e-3)
    masks = np.array([annotation.mask(*base.size) for annotation in result.objects])
    np.testing.assert_array_equal(masks.astype(bool), unpacked(entries, "out_masks"))
