"""Affine maps: what they make of images, masks, outlines and boxes, and how kinds draw them."""

from dataclasses import replace

import cv2
import numpy as np
import pytest
from PIL import Image

from mask_rcnn_jax.data.affine import Affine, compose, diagonal, reveals, scaling, transform
from mask_rcnn_jax.data.augment import augmented
from mask_rcnn_jax.data.copy_paste import CopyPaste
from mask_rcnn_jax.data.dataset import Annotation
from mask_rcnn_jax.data.example import Example, map_objects
from mask_rcnn_jax.data.geometry import (
    FixedSizeCrop,
    HorizontalFlip,
    QuarterTurns,
    Rotation,
    ScaleJitter,
    Translation,
    VerticalFlip,
)
from mask_rcnn_jax.data.warp import warp_image, warp_mask
from tests.memory_set import ShapeSet

SIZE = (37, 53)  # height, width


def noise(size=SIZE, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)


def smooth(size=SIZE):
    small = np.random.default_rng(3).uniform(0, 255, (5, 6, 3))
    return (
        cv2.resize(small, size[::-1], interpolation=cv2.INTER_CUBIC).clip(0, 255).astype(np.uint8)
    )


def draw(kind, size=SIZE, seed=0):
    return kind.affine(np.random.default_rng(seed), size)


class Turns:
    """A generator that makes `QuarterTurns` turn that often."""

    def __init__(self, turns):
        self.turns = turns

    def random(self):
        return 0.0 if self.turns else 0.99

    def integers(self, low, high):
        assert (low, high) == (1, 4)
        return self.turns


WHOLE = {
    "mirror": (HorizontalFlip(1.0).affine, lambda image: image[:, ::-1]),
    "flip": (VerticalFlip(1.0).affine, lambda image: image[::-1]),
    **{
        f"{90 * turns} degrees": (
            lambda rng, size, turns=turns: QuarterTurns().affine(Turns(turns), size),
            lambda image, turns=turns: np.rot90(image, turns),
        )
        for turns in range(4)
    },
}


@pytest.mark.parametrize("name", WHOLE)
def test_flips_and_turns_move_pixels_exactly(name):
    make, expected = WHOLE[name]
    affine, image = make(np.random.default_rng(0), SIZE), noise()
    np.testing.assert_array_equal(warp_image(image, affine), expected(image))
    mask = (noise(seed=1)[..., 0] > 128).astype(np.uint8)
    window = (0, 0, *affine.size[::-1])
    np.testing.assert_array_equal(warp_mask(mask, affine, window), expected(mask))


@pytest.mark.parametrize("name", WHOLE)
def test_objects_turn_with_the_image(name):
    make, expected = WHOLE[name]
    affine = make(np.random.default_rng(0), SIZE)
    mask = np.zeros(SIZE, bool)
    mask[3:20, 30:50] = mask[10:35, 40:45] = True
    objects = (
        Annotation.from_mask(mask, 2, iscrowd=True),
        Annotation.from_polygons([[[30, 3], [50, 3], [50, 20], [30, 20]]], 1, SIZE),
    )
    coded, drawn = map_objects(objects, affine, SIZE)
    np.testing.assert_array_equal(coded.mask(*affine.size), expected(mask))
    assert (coded.iscrowd, coded.class_index, coded.area) == (True, 2, mask.sum())
    rectangle = np.zeros(SIZE, bool)
    rectangle[3:20, 30:50] = True
    np.testing.assert_array_equal(drawn.mask(*affine.size), expected(rectangle))
    rows, columns = np.nonzero(expected(rectangle))
    box = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    np.testing.assert_allclose(drawn.box, box)
    assert drawn.area == pytest.approx(17 * 20)


@pytest.mark.parametrize("seed", range(10))
def test_resized_images_are_pillows(seed):
    """Up and down, with another scale along each axis, then cropped, mirrored and turned."""
    rng, image = np.random.default_rng(seed), noise(seed=seed)
    size = tuple(rng.integers(5, 110, 2).tolist())
    resized = np.asarray(Image.fromarray(image).resize(size[::-1], Image.Resampling.BILINEAR))
    crop = FixedSizeCrop((48, 40), fill=(9, 8, 7))
    top, left = (np.maximum(np.array(size) - crop.size, 0) * 0.4).round().astype(int)
    part = resized[top : top + 48, left : left + 40]
    expected = np.tile(np.array([9, 8, 7], np.uint8), (48, 40, 1))
    expected[: part.shape[0], : part.shape[1]] = part
    expected = np.rot90(expected[:, ::-1])

    class Fixed:
        random = staticmethod(lambda: 0.4)

    affine = compose(scaling(SIZE, size), crop.affine(Fixed, size))
    affine = compose(affine, draw(HorizontalFlip(1.0), affine.size))
    affine = compose(affine, QuarterTurns().affine(Turns(1), affine.size))
    difference = np.abs(warp_image(image, affine).astype(int) - expected)
    assert difference.max() <= 1


def test_large_enlargements_of_small_parts_are_pillows_too():
    image, size = noise(), (37 * 40, 53 * 40)
    window = Affine(diagonal(1, 1, -1001, -777), (20, 30))
    resized = np.asarray(Image.fromarray(image).resize(size[::-1], Image.Resampling.BILINEAR))
    found = warp_image(image, compose(scaling(SIZE, size), window))
    assert np.abs(found.astype(int) - resized[777:797, 1001:1031]).max() <= 1


@pytest.mark.parametrize("scale", [0.6, 1.0, 1.5])
@pytest.mark.parametrize("offset", [0.5, -0.5, 2.5, -3.25])
def test_an_image_lies_at_a_fraction_of_a_pixel(scale, offset):
    """A ramp has the value of its source at every pixel away from its ends."""
    ramp = np.repeat(np.arange(53, dtype=np.uint8)[None] * 4, 37, axis=0)
    image = np.stack([ramp, ramp, ramp], axis=-1)
    found = warp_image(image, Affine(diagonal(scale, scale, offset, 0.5), (60, 90)))
    source = (np.arange(90) + 0.5 - offset) / scale - 0.5
    inner = (source > 2) & (source < 50)
    assert inner.sum() > 25
    rows = slice(1, int(0.5 + 37 * scale))  # those that lie in the image as a whole
    assert np.abs(found[rows, inner, 0] - 4 * source[inner]).max() <= 1
    assert not found[0].any() and not found[rows.stop :].any()


def bilinear(image, affine):
    """Pixel by pixel: the color at the source of each pixel's center, black beyond the image."""
    height, width = image.shape[:2]
    matrix = np.vstack([affine.matrix, [0, 0, 1]])
    result = np.zeros((*affine.size, 3))
    padded = np.pad(image.astype(float), ((1, 1), (1, 1), (0, 0)))
    for row, column in np.ndindex(*affine.size):
        x, y, _ = np.linalg.solve(matrix, [column + 0.5, row + 0.5, 1]) + 0.5  # + 1 of padding
        if not (0 <= x < width + 1 and 0 <= y < height + 1):
            continue
        x0, y0 = int(x), int(y)
        for dy, dx in np.ndindex(2, 2):
            weight = (1 - abs(x - x0 - dx)) * (1 - abs(y - y0 - dy))
            result[row, column] += weight * padded[y0 + dy, x0 + dx]
    return result


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize(
    "matrix", [diagonal(0.7, -0.6, 3, 30), np.array([[0.6, 0.2, 4], [-0.2, 0.6, 9]])]
)
def test_a_canvas_to_write_into_gets_the_same_image(matrix, dtype):
    affine = Affine(matrix, (40, 50), (9, 8, 7))
    canvas = np.full((48, 64, 3), 255, dtype)
    warp_image(noise(), affine, canvas[:40, :50])
    np.testing.assert_array_equal(canvas[:40, :50], warp_image(noise(), affine))
    assert (canvas[40:] == 255).all() and (canvas[:, 50:] == 255).all()


@pytest.mark.parametrize("degrees", [3.0, -8.0, 45.0, 160.0])
def test_rotated_images_are_bilinear(degrees):
    radians = np.radians(degrees)
    cos, sin = np.cos(radians), np.sin(radians)
    center = np.array([25.5, 20.25]) - np.array([[cos, sin], [-sin, cos]]) @ [26.5, 18.5]
    affine = Affine(np.array([[cos, sin, center[0]], [-sin, cos, center[1]]]), (40, 50))
    image = smooth()
    difference = np.abs(warp_image(image, affine) - bilinear(image, affine))
    inside = warp_image(np.full_like(image, 255), affine)[..., 0] == 255
    assert inside.mean() > 0.1 and difference[inside].max() <= 2  # OpenCV has 32 places per pixel


def test_what_is_rotated_and_shrunk_is_averaged():
    """A checkerboard of single pixels becomes gray."""
    image = np.zeros((80, 80, 3), np.uint8)
    image[::2, ::2] = image[1::2, 1::2] = 255
    cos, sin = np.cos(0.3) / 4, np.sin(0.3) / 4
    affine = Affine(np.array([[cos, sin, 0.0], [-sin, cos, 5]]), (24, 24))
    found = warp_image(image, affine)
    inside = warp_image(np.full_like(image, 255), affine)[..., 0] == 255
    assert inside.sum() > 200
    assert np.abs(found[inside].astype(int) - 127).max() <= 20


MASK = cv2.resize(noise((9, 13), seed=5)[..., 0], SIZE[::-1]) // 128


@pytest.mark.parametrize("size", [(37, 53), (74, 106), (19, 27), (100, 31), (12, 200), (1, 1)])
def test_resized_masks_are_pillows(size):
    found = warp_mask(MASK, scaling(SIZE, size), (0, 0, *size[::-1]))
    expected = Image.fromarray(MASK).resize(size[::-1], Image.Resampling.NEAREST)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("scale", [0.3, 0.77, 1.9])
def test_masks_after_torchvisions_jitter_are_torchs(scale):
    affine = draw(ScaleJitter(SIZE, (scale, scale), rounding="floor"))
    height, width = affine.size
    rows = (np.arange(height, dtype=np.float32) * np.float32(37 / height)).astype(int)
    columns = (np.arange(width, dtype=np.float32) * np.float32(53 / width)).astype(int)
    found = warp_mask(
        MASK, compose(affine, scaling(affine.size, affine.size)), (0, 0, width, height)
    )
    np.testing.assert_array_equal(found, MASK[rows][:, columns])


@pytest.mark.parametrize("seed", range(20))
def test_codes_do_not_move_against_the_image(seed):
    """The center of a disc, in any list that does not cut it."""
    y, x = np.mgrid[:64, :64]
    disc = (x - 30) ** 2 + (y - 34) ** 2 < 15**2
    kinds = [ScaleJitter((64, 64), (0.5, 2.0)), HorizontalFlip(), VerticalFlip(), QuarterTurns()]
    kinds = [kinds[i] for i in np.random.default_rng(seed).permutation(4)]
    kinds.append(FixedSizeCrop((160, 160), fill=(0, 0, 0)))
    image = np.repeat(255 * disc.astype(np.uint8)[..., None], 3, axis=2)
    given = Example(image, (Annotation.from_mask(disc, 1),))
    result = augmented(kinds, (seed,), ShapeSet("train", 1), 0, given).read()
    seen, code = result.image[..., 0].astype(float), result.objects[0].mask(160, 160)
    for axis in np.mgrid[:160, :160]:
        assert abs(np.average(axis, weights=code) - np.average(axis, weights=seen)) < 0.35


class Angle:
    """A generator that makes `Rotation` turn by that angle."""

    def __init__(self, degrees):
        self.degrees = degrees

    def random(self):
        return 0.0

    def uniform(self, low, high):
        return self.degrees


@pytest.mark.parametrize("degrees", [10.0, -30.0])
def test_outlines_and_codes_rotate_with_the_image(degrees):
    """A red rectangle in the image, as an outline and as a code, stays where the image is red."""
    image = np.zeros((90, 120, 3), np.uint8)
    image[30:60, 40:80, 0] = 255
    objects = (
        Annotation.from_mask(image[..., 0] > 0, 1),
        Annotation.from_polygons([[[40, 30], [80, 30], [80, 60], [40, 60]]], 1, (90, 120)),
    )
    affine = Rotation(180, 1.0, fill=(0, 0, 0)).affine(Angle(degrees), (90, 120))
    red = warp_image(image, affine)[..., 0] > 127
    assert red[:, :60].any(axis=1).argmax() != red[:, 60:].any(axis=1).argmax()
    for annotation in map_objects(objects, affine, (90, 120)):
        mask = annotation.mask(90, 120).astype(bool)
        assert (mask ^ red).sum() <= 0.05 * red.sum()
        rows, columns = np.nonzero(red)
        box = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        np.testing.assert_allclose(annotation.box, box, atol=1)
        assert annotation.area == pytest.approx(1200, rel=0.05)


def test_a_rotation_turns_counterclockwise_about_the_center():
    affine = Rotation(180, 1.0).affine(Angle(90), (30, 30))
    np.testing.assert_allclose(transform(affine.matrix, np.array([[30.0, 0]])), [[0, 0]], atol=1e-9)
    np.testing.assert_array_equal(warp_image(noise((30, 30)), affine), np.rot90(noise((30, 30))))


def test_a_translation_moves_by_whole_pixels_and_fills():
    image = noise()
    for seed in range(8):
        affine = draw(Translation(0.5, 1.0, fill=(1, 2, 3)), seed=seed)
        x, y = affine.matrix[:, 2].astype(int)
        assert (affine.matrix[:, 2] == (x, y)).all() and abs(y) <= 18 and abs(x) <= 27
        expected = np.tile(np.array([1, 2, 3], np.uint8), (*SIZE, 1))
        for row, column in np.ndindex(*SIZE):
            if 0 <= row - y < SIZE[0] and 0 <= column - x < SIZE[1]:
                expected[row, column] = image[row - y, column - x]
        np.testing.assert_array_equal(warp_image(image, affine), expected)


KINDS = [
    ScaleJitter((40, 40), (0.5, 1.5)),
    FixedSizeCrop((32, 40)),
    HorizontalFlip(),
    VerticalFlip(),
    QuarterTurns(),
    Rotation(20, 1.0),
    Translation(0.3, 1.0),
]


@pytest.mark.parametrize("seed", range(20))
def test_a_list_maps_points_as_its_kinds_do_one_after_the_other(seed):
    rng = np.random.default_rng(seed)
    kinds = [KINDS[i] for i in rng.permutation(len(KINDS))[:4]]
    points, size, affine = rng.uniform(0, 37, (5, 2)), SIZE, None
    moved = points
    for kind in kinds:
        step = draw(kind, size, seed)
        moved, size = transform(step.matrix, moved), step.size
        affine = step if affine is None else compose(affine, step)
    np.testing.assert_allclose(transform(affine.matrix, points), moved, atol=1e-9)
    assert affine.size == size


def example_of(size=SIZE):
    mask = np.zeros(size, bool)
    mask[5:30, 8:45] = True
    mask[10:20, 20:30] = False
    outline = [[8, 5], [45, 5], [20, 20], [45, 30], [8, 30]]
    objects = (Annotation.from_mask(mask, 1), Annotation.from_polygons([outline], 2, size))
    return Example(smooth(size), objects)


@pytest.mark.parametrize("seed", range(8))
def test_composed_maps_show_what_single_ones_show(seed):
    """Flips, turns, crops and shifts resample nothing: one map is exactly many, also where a crop
    is followed by a shift, which must not bring back what was cut off."""
    rng = np.random.default_rng(seed)
    exact = [FixedSizeCrop((30, 40)), HorizontalFlip(), QuarterTurns(), Translation(0.3, 1.0)]
    exact = [exact[i] for i in rng.permutation(4)]
    together, single = example_of(), example_of()
    for kind in exact:
        step = draw(kind, together.size, seed)
        together, single = together.then(step), single.then(step).read()
    together = together.read()
    np.testing.assert_array_equal(together.image, single.image)
    for one, other in zip(together.objects, single.objects, strict=True):
        np.testing.assert_allclose(one.box, other.box, atol=1e-4)
        np.testing.assert_array_equal(one.mask(*together.size), other.mask(*together.size))


def test_a_shift_after_a_crop_reads_the_image_in_between():
    crop, shift = Affine(diagonal(1, 1, -10, 0), (20, 20)), Affine(diagonal(1, 1, 5, 0), (20, 20))
    assert reveals(crop, shift, (20, 40))
    assert not reveals(Affine(diagonal(1, 1), (20, 20)), shift, (20, 20))
    assert not reveals(crop, draw(HorizontalFlip(1.0), (20, 20)), (20, 40))
    back = Affine(diagonal(1, 1, -5, 0), (20, 20))
    assert reveals(shift, back, (20, 20))


class Back:
    """Shifts back what a crop may have cut off, and has no color of its own."""

    def affine(self, rng, size):
        return Affine(diagonal(1, 1, 9, 5), size)


LILAC = (200, 160, 220)
ONE_COLOR = {
    "crop, rotation": [FixedSizeCrop((40, 40), fill=LILAC), Rotation(30)],
    "rotation, crop": [Rotation(30, fill=LILAC), FixedSizeCrop((40, 40))],
    "translation, crop": [Translation(0.5, fill=LILAC), FixedSizeCrop((40, 40))],
    "crop, shift": [FixedSizeCrop((40, 40), fill=LILAC), Back()],
    "crop, function": [FixedSizeCrop((40, 40), fill=LILAC), lambda e, rng: e, Translation(0.5)],
    "crop, paste": [FixedSizeCrop((40, 40), fill=LILAC), CopyPaste(0.5), Rotation(30)],
}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", ONE_COLOR)
def test_all_padding_has_the_color_of_the_first_kind_with_one(name, seed):
    """Whatever is drawn: an image in that color keeps it."""
    image = np.full((*SIZE, 3), LILAC, np.uint8)
    given = Example(image, (Annotation.from_mask(np.ones(SIZE), 1),))
    kinds, dataset = [ScaleJitter((40, 40), (0.5, 2.0)), *ONE_COLOR[name]], ShapeSet("train", 1)
    result = augmented(kinds, (seed,), dataset, 0, given, lambda rng: given).read()
    assert (result.image == LILAC).all()


def test_the_image_is_resampled_once(monkeypatch):
    calls = []

    def counted(*given):
        calls.append(given)
        return warp_image(*given)

    monkeypatch.setattr("mask_rcnn_jax.data.example.warp_image", counted)
    kinds = [HorizontalFlip(), Rotation(5, 1.0), ScaleJitter(SIZE), FixedSizeCrop(SIZE)]
    kinds.append(VerticalFlip())
    dataset = ShapeSet("train", 1, SIZE)
    given = Example(dataset.decode(0), dataset.images[0].annotations)
    result = augmented(kinds, (1,), dataset, 0, given)
    assert result.pending is not None and not calls
    result.read()
    assert len(calls) == 1


def random_kinds(rng):
    size = tuple(rng.integers(8, 100, 2).tolist())
    kinds = [
        ScaleJitter(size, (0.1, 2.0)),
        ScaleJitter(size, (0.8, 1.25), rounding="floor"),
        FixedSizeCrop(size),
        FixedSizeCrop(size, pad=False, boxes="clip", rounding="floor"),
        HorizontalFlip(),
        VerticalFlip(),
        QuarterTurns(),
        Rotation(float(rng.uniform(0, 180))),
        Translation(0.9, 0.8),
    ]
    return [kinds[i] for i in rng.integers(len(kinds), size=rng.integers(1, 7))]


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_any_list_followed_by_any_resize_fills_the_canvas(first):
    """A gray image with gray padding is gray. Boxes lie in the canvas."""
    for seed in range(first, first + 100):
        rng = np.random.default_rng(seed)
        (height, width), new = rng.integers(1, 120, (2, 2)).tolist()
        whole = np.ones((height, width), bool)
        outline = [[0, 0], [width, 0], [width, height]]
        coded = Annotation.from_mask(whole, 1)
        objects = coded, Annotation.from_polygons([outline], 2, whole.shape)
        given = Example(np.full((height, width, 3), 128, np.uint8), objects)
        result = augmented(random_kinds(rng), (seed,), ShapeSet("train", 1), 0, given)
        result = result.then(scaling(result.size, new)).read()
        assert result.image.shape == (*new, 3) and (result.image == 128).all(), seed
        for one in result.objects:
            assert (one.box >= 0).all() and (one.box <= [*new[::-1]] * 2).all(), seed


# --- objects at the border

LEFT = Annotation.from_polygons([[[2, 2], [12, 2], [12, 12], [2, 12]]], 1, (40, 40))
CODED = Annotation.from_mask(np.pad(np.ones((10, 10), bool), ((2, 28), (2, 28))), 2)
BOX_ONLY = replace(LEFT, segmentation=(), class_index=3)


@pytest.mark.parametrize("boxes", ["tight", "clip"])
def test_objects_are_cut_at_the_window_and_dropped_beyond_it(boxes):
    tight = boxes == "tight"
    objects = (LEFT, CODED, BOX_ONLY)
    cut = Affine(diagonal(1, 1, -7, -4), (30, 30), tight=tight)
    found = map_objects(objects, cut, (40, 40))
    assert [one.class_index for one in found] == [1, 2, 3]
    for one in found:
        np.testing.assert_allclose(one.box, [0, 0, 5, 8])
    assert [one.area for one in found[:2]] == [40, 40]
    assert found[0].mask(30, 30).sum() == found[1].mask(30, 30).sum() == 40
    gone = Affine(diagonal(1, 1, -12, 0), (20, 20), tight=tight)
    assert map_objects(objects, gone, (40, 40)) == ()


def test_tight_boxes_follow_the_mask_and_clipped_ones_the_box():
    """The box is larger than the mask, of which the window holds nothing."""
    wide = replace(CODED, box=np.array([0, 0, 30, 30], np.float32))
    shifted = Affine(diagonal(1, 1, -15, 0), (20, 20))
    (kept,) = map_objects((wide,), shifted, (40, 40))
    np.testing.assert_allclose(kept.box, [0, 0, 15, 20])
    assert kept.segmentation == () and not kept.mask(20, 20).any() and kept.area == 0
    assert map_objects((wide,), shifted._replace(tight=True), (40, 40)) == ()
    (tight,) = map_objects((wide,), Affine(diagonal(1, 1), (40, 40), tight=True), (40, 40))
    np.testing.assert_allclose(tight.box, [2, 2, 12, 12])


@pytest.mark.parametrize("tight", [True, False])
def test_outlines_end_where_the_image_does(tight):
    """Beyond it there is padding, which no object covers."""
    size = 100, 200
    right = Annotation.from_polygons([[[150, 10], [260, 10], [260, 50], [150, 50]]], 1, size)
    (found,) = map_objects((right,), draw(FixedSizeCrop((400, 400)), size), size)
    np.testing.assert_allclose(found.box, [150, 10, 200, 50])
    assert found.area == 50 * 40 and found.mask(400, 400).sum() == 50 * 40
    left = Annotation.from_polygons([[[-50, 20], [30, 20], [30, 60], [-50, 60]]], 1, size)
    shifted = Affine(diagonal(1, 1, 60, 0), size, tight=tight)
    (found,) = map_objects((left,), shifted, size)
    np.testing.assert_allclose(found.box, [60, 20, 90, 60])
    np.testing.assert_array_equal(found.mask(*size)[:, 60:], left.mask(*size)[:, :140])
    assert not found.mask(*size)[:, :60].any()


def test_a_sliver_of_a_box_that_its_outline_leaves_far_is_dropped():
    """Training draws outlines into their boxes, which would take gigabytes."""
    wide = Annotation.from_polygons([[[0, 0], [30, 0], [30, 30], [0, 30]]], 1, (40, 40))
    narrow = replace(wide, box=np.array([0, 0, 10.00001, 30], np.float32))
    shifted = Affine(diagonal(1, 1, -10, 0), (40, 40))
    assert map_objects((narrow,), shifted, (40, 40)) == ()


def test_degenerate_images_and_objects():
    one_pixel = Example(np.full((1, 1, 3), 200, np.uint8), ())
    kinds = [*KINDS, ScaleJitter((64, 64), (0.001, 0.001)), FixedSizeCrop((64, 64), fill=(5, 5, 5))]
    dataset = ShapeSet("train", 1)
    for seed in range(20):
        result = augmented(kinds, (seed,), dataset, 0, one_pixel).read()
        assert result.image.shape == (64, 64, 3) and result.objects == ()
    pixel = Annotation.from_mask(np.ones((1, 1), bool), 1)
    result = Example(one_pixel.image, (pixel,)).then(scaling((1, 1), (8, 8))).read()
    assert (result.image == 200).all() and result.objects[0].mask(8, 8).all()
    thin = Example(noise((1, 300)), ()).then(draw(ScaleJitter((64, 64)), (1, 300))).read()
    assert thin.image.shape[0] == 1


@pytest.mark.parametrize("rounding, size", [("floor", (20, 29)), ("round", (21, 30))])
def test_the_two_roundings(rounding, size):
    class Fixed:
        random = staticmethod(lambda: (0.416 - 0.1) / 1.9)

    jitter = ScaleJitter((50, 71), rounding=rounding)
    assert jitter.affine(Fixed, (50, 71)).size == size  # 20.8, 29.536

    class Half:
        random = staticmethod(lambda: 0.5)

    crop = FixedSizeCrop((10, 10), rounding=rounding)
    x, y = -crop.affine(Half, (13, 17)).matrix[:, 2]
    assert (x, y) == {"floor": (3, 1), "round": (4, 2)}[rounding]


def test_a_crop_without_padding_keeps_smaller_images_as_they_are():
    crop = FixedSizeCrop((30, 100), pad=False)
    assert draw(crop).size == (30, 53) and draw(crop, (5, 200)).size == (5, 100)


def test_draws_stay_in_their_ranges():
    scales = [
        draw(ScaleJitter((100, 100), (0.8, 1.25)), (100, 50), seed).size for seed in range(99)
    ]
    heights = [height for height, _ in scales]
    assert 80 <= min(heights) < 85 and 120 < max(heights) <= 125
    flips = [draw(HorizontalFlip(0.3), seed=seed).matrix[0, 0] < 0 for seed in range(400)]
    assert 0.22 < np.mean(flips) < 0.38
    turns = [tuple(draw(QuarterTurns(), seed=seed).matrix[0, :2]) for seed in range(400)]
    assert len(set(turns)) == 4 and min(map(turns.count, set(turns))) > 70
    sizes = [draw(Rotation(10, 0.5), seed=seed).matrix[0, 0] for seed in range(200)]
    assert 0.4 < np.mean(np.array(sizes) == 1) < 0.6 and min(sizes) >= np.cos(np.radians(10))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: ScaleJitter(size=(0, 5)), r"size is \(0, 5\), expected"),
        (lambda: ScaleJitter(scales=(2.0, 0.1)), r"scales is \(2.0, 0.1\), expected"),
        (lambda: FixedSizeCrop(fill=(1, 2, 256)), "fill is .* from 0 to 255"),
        (lambda: HorizontalFlip(1.5), "probability is 1.5, expected 0 to 1"),
        (lambda: Rotation(degrees=-1), "degrees is -1, expected 0 to 180"),
        (lambda: Translation(fraction=1), "fraction is 1, expected"),
    ],
)
def test_wrong_values_name_the_entry(make, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()
