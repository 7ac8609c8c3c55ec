"""Objects of one image pasted into another."""

from dataclasses import replace

import numpy as np
import pytest

from mask_rcnn_jax.data.augment import augmented
from mask_rcnn_jax.data.copy_paste import CopyPaste
from mask_rcnn_jax.data.dataset import Annotation
from mask_rcnn_jax.data.example import Example
from mask_rcnn_jax.data.geometry import FixedSizeCrop, ScaleJitter
from tests.memory_set import ShapeSet

SIZE = (20, 30)


def filled(value, size=SIZE):
    return np.full((*size, 3), value, np.uint8)


def rectangle(x1, y1, x2, y2, size=SIZE, class_index=1, crowd=False):
    mask = np.zeros(size, bool)
    mask[y1:y2, x1:x2] = True
    return Annotation.from_mask(mask, class_index, iscrowd=crowd)


class Draw:
    def __init__(self, drawn):
        self.drawn = drawn

    def integers(self, n, size):
        assert n == size == len(self.drawn)
        return np.array(self.drawn)


def test_a_covered_object_is_cut_and_one_below_is_dropped():
    left, right, below = rectangle(0, 0, 8, 20), rectangle(20, 5, 28, 15), rectangle(7, 7, 9, 9)
    pasted = rectangle(6, 5, 12, 15, class_index=2)
    base, source = Example(filled(10), (left, right, below)), Example(filled(200), (pasted,))
    result = CopyPaste(blend=False).paste(base, source, Draw([0]))
    assert (result.image[5:15, 6:12] == 200).all() and (result.image == 200).sum() == 60 * 3
    cut, untouched, new = result.objects
    np.testing.assert_array_equal(cut.box, [0, 0, 8, 20])
    assert cut.area == 8 * 20 - 2 * 10 and not cut.mask(*SIZE)[5:15, 6:8].any()
    assert untouched is right and new is pasted
    assert (base.image == 10).all()


def test_blending_pastes_two_pixels_around():
    base = Example(filled(10), (rectangle(12, 0, 20, 20),))
    source = Example(filled(200), (rectangle(5, 5, 10, 10),))
    result = CopyPaste().paste(base, source, Draw([0]))
    assert (result.image[3:12, 3:12] == 200).all() and (result.image == 200).sum() == 81 * 3
    assert result.objects[0] is base.objects[0] and result.objects[1] is source.objects[0]


def test_outlines_that_nothing_covers_stay_outlines():
    outline = Annotation.from_polygons([[[20, 2], [29, 2], [25, 18]]], 1, SIZE)
    source = Example(filled(200), (rectangle(0, 0, 5, 5),))
    result = CopyPaste().paste(Example(filled(1), (outline,)), source, Draw([0]))
    assert result.objects[0] is outline


def test_crowds_and_objects_without_masks_are_not_pasted():
    crowd = rectangle(0, 0, 9, 9, crowd=True)
    no_mask = replace(rectangle(0, 0, 9, 9), segmentation=())
    base = Example(filled(10), (rectangle(0, 0, 5, 5), no_mask))
    assert CopyPaste().paste(base, Example(filled(200), (crowd, no_mask)), Draw([])) is base
    assert CopyPaste().paste(base, Example(filled(200), ()), Draw([])) is base
    result = CopyPaste().paste(
        base, Example(filled(200), (crowd, rectangle(2, 2, 4, 4))), Draw([0])
    )
    assert [one.area for one in result.objects] == [no_mask.area, 4]


def test_each_object_is_pasted_once():
    source = Example(filled(200), tuple(rectangle(3 * i, 0, 3 * i + 2, 2) for i in range(4)))
    result = CopyPaste(blend=False).paste(Example(filled(1), ()), source, Draw([3, 1, 3, 1]))
    assert result.objects == (source.objects[1], source.objects[3])


def test_a_source_of_another_size_is_stretched():
    source = Example(filled(200, (40, 60)), (rectangle(20, 20, 40, 40, (40, 60)),))
    result = CopyPaste(blend=False).paste(Example(filled(1), ()), source, Draw([0]))
    assert (result.image[10:20, 10:20] == 200).all()
    np.testing.assert_array_equal(result.objects[0].box, [10, 10, 20, 20])


def test_the_second_image_goes_through_the_kinds_before():
    dataset = ShapeSet("train", 2)
    given, other = (Example(dataset.decode(i), dataset.images[i].annotations) for i in range(2))
    kinds = [ScaleJitter((32, 32), (1, 1)), FixedSizeCrop((32, 40)), CopyPaste()]
    seen = []

    def partner(rng):
        seen.append(rng)
        return other

    result = augmented(kinds, (3,), dataset, 0, given, partner)
    assert len(seen) == 1 and result.image.shape == (32, 40, 3) and result.pending is None
    assert len(result.objects) > len(given.objects)
    for annotation in result.objects:
        assert annotation.mask(32, 40).shape == (32, 40) and annotation.box[2:].max() <= 40


@pytest.mark.parametrize("kind, calls", [(CopyPaste(), True), (CopyPaste(probability=0.0), False)])
def test_a_second_image_that_cannot_be_read_changes_nothing(kind, calls):
    dataset, seen = ShapeSet("train", 1), []
    given = Example(dataset.decode(0), dataset.images[0].annotations)
    result = augmented([kind], (3,), dataset, 0, given, lambda rng: seen.append(rng))
    assert result is given and bool(seen) == calls
    assert augmented([kind], (3,), dataset, 0, given) is given  # without a set to draw from


@pytest.mark.parametrize("x", [100, 31.5, 30.25, -60])
def test_outlines_beyond_the_border_are_not_pasted_and_not_covered(x):
    outline = (np.array([x, 5, x + 20, 5, x + 20, 15], np.float32),)
    beyond, near = replace(rectangle(5, 5, 9, 9), segmentation=outline), rectangle(2, 2, 4, 4)
    source = Example(filled(200), (beyond, near))
    result = CopyPaste(blend=False).paste(Example(filled(1), (beyond,)), source, Draw([0, 1]))
    assert result.objects == (beyond, near) and (result.image == 200).sum() == 4 * 3
    result = CopyPaste(boxes="pixels").paste(Example(filled(1), (beyond,)), source, Draw([0, 0]))
    assert result.objects == () and (result.image == 1).all()


@pytest.mark.parametrize("seed", range(10))
def test_outlines_are_cut_as_their_whole_masks_are(seed):
    rng = np.random.default_rng(seed)
    points = rng.uniform([0, 0], SIZE[::-1], (2, 5, 2)).round(seed % 3)
    outlines = [Annotation.from_polygons(list(points), 1, SIZE)]
    mask = outlines[0].mask(*SIZE).astype(bool)
    cover = np.zeros(SIZE, bool)
    y, x = (int(v) for v in np.argwhere(mask)[rng.integers(mask.sum())])
    cover[max(0, y - 3) : y + 4, max(0, x - 3) : x + 4] = True
    source = Example(filled(200), (Annotation.from_mask(cover, 2),))
    result = CopyPaste(blend=False).paste(Example(filled(1), tuple(outlines)), source, Draw([0]))
    expected = Annotation.from_mask(mask & ~cover, 1)
    np.testing.assert_array_equal(result.objects[0].mask(*SIZE), expected.mask(*SIZE))
    np.testing.assert_array_equal(result.objects[0].box, expected.box)
    assert result.objects[0].area == expected.area
