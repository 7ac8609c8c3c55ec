import itertools

import cv2
import numpy as np
import pytest

from mask_rcnn_jax.evaluation import labels
from mask_rcnn_jax.evaluation.visualize import (
    draw_detections,
    draw_ground_truth,
    instance_color,
    side_by_side,
    trace_mask,
    write_image,
)
from mask_rcnn_jax.structures import Detections

GRAY = 128


def gray_image(height, width):
    return np.full((height, width, 3), GRAY, np.uint8)


def disk(side=28, radius=0.4, hole=0.0):
    """[side, side] probabilities of a disk, its radius given in parts of the box."""
    center = (np.arange(side) + 0.5) / side - 0.5
    distance = np.hypot(center[:, None], center)
    soft = 1 / side
    outer = np.clip(0.5 + (radius - distance) / soft, 0, 1)
    inner = np.clip(0.5 + (distance - hole) / soft, 0, 1) if hole else 1.0
    return (outer * inner).astype(np.float32)


def changed(picture):
    """[H, W] bool: the pixels that are no longer gray."""
    return (picture != GRAY).any(axis=2)


def found(boxes, classes, scores, masks=None):
    classes = np.array(classes, int)
    return Detections(np.array(boxes), np.array(scores), classes, masks, classes > 0)


def draw_disk(box, mask, height=400, width=400, names=("a",), score=0.9):
    return draw_detections(gray_image(height, width), found([box], [1], [score], mask[None]), names)


def is_color(pixels, color):
    return (pixels == np.array(color)).all(axis=-1)


def test_fill_and_contour_follow_the_mask():
    picture = draw_disk((100, 100, 300, 300), disk(radius=0.4))
    y, x = np.mgrid[:400, :400]
    distance = np.hypot(y + 0.5 - 200, x + 0.5 - 200)
    tint = np.round(0.58 * GRAY + 0.42 * np.array(instance_color(0)))
    assert (np.abs(picture[distance < 77] - tint) <= 1).all()
    ring = (distance > 83) & (distance < 98) & (y > 130)  # below the label, inside the box
    assert not changed(picture)[ring].any()
    # On every ray, the strongest color lies within a pixel of the true edge at 80.
    for angle in np.linspace(0.1, 3.0, 40):
        radii = np.arange(74, 86, 0.25)
        rows = (200 + radii * np.sin(angle)).astype(int)
        columns = (200 + radii * np.cos(angle)).astype(int)
        difference = np.abs(picture[rows, columns] - np.array(instance_color(0), float)).sum(axis=1)
        strongest = radii[difference <= difference.min() + 1].mean()
        assert abs(strongest - 80) < 1.2


def test_hole_of_a_mask_stays_clear():
    picture = draw_disk((100, 100, 300, 300), disk(radius=0.4, hole=0.2))
    y, x = np.mgrid[:400, :400]
    distance = np.hypot(y - 200, x - 200)
    assert not changed(picture)[distance < 36].any()
    assert changed(picture)[(distance > 44) & (distance < 76)].all()


def test_threshold_and_padding_leave_the_picture_alone():
    image = gray_image(400, 400)
    boxes = np.array([[10, 10, 200, 200], [50, 50, 300, 300], [0, 0, 0, 0]])
    masks = np.stack([disk()] * 3)
    arguments = found(boxes, [1, 2, 0], [0.3, 0.49, 0.0], masks), ("a", "b")
    np.testing.assert_array_equal(draw_detections(image, *arguments), image)
    np.testing.assert_array_equal(draw_detections(image, *arguments, score_threshold=0.5), image)
    assert changed(draw_detections(image, *arguments, score_threshold=0.4)).any()
    assert (image == GRAY).all()  # the argument itself is never drawn on
    # Padding has score 0, which reaches a threshold of 0, but class 0.
    assert not changed(draw_detections(image, *arguments, score_threshold=0.0))[:8, :8].any()


def test_picture_without_detections_is_returned_as_it_is():
    image = np.random.default_rng(0).integers(0, 256, (330, 340, 3), np.uint8)
    empty = found(np.zeros((0, 4)), [], [], np.zeros((0, 28, 28)))
    np.testing.assert_array_equal(draw_detections(image, empty, ()), image)


def test_first_colors_are_distinct():
    rgb = np.array([instance_color(i) for i in range(20)], np.float32) / 255
    lab = cv2.cvtColor(rgb[None], cv2.COLOR_RGB2LAB)[0]
    # A difference of 2 in CIE Lab is just noticeable.
    for n, least in ((8, 40), (20, 25)):
        for one, other in itertools.combinations(lab[:n], 2):
            assert np.linalg.norm(one - other) > least


def test_small_object_is_drawn_over_a_large_one():
    boxes = np.array([[180, 180, 230, 230], [20, 20, 380, 380]])
    for order in ([0, 1], [1, 0]):
        detections = found(boxes[order], [1, 1], [0.9, 0.8], np.ones((2, 28, 28), np.float32))
        picture = draw_detections(gray_image(400, 400), detections, ("a",))
        small = instance_color(order.index(0))
        assert is_color(picture[205:229, 229], small).all()  # the right side of its box


@pytest.mark.parametrize(
    "box",
    [
        (0, 0, 40, 40),
        (360, 0, 400, 30),
        (0, 380, 30, 400),
        (370, 370, 400, 400),
        (-50, -50, 450, 450),
        (500, 500, 600, 600),
        (200, 200, 200, 200),
    ],
)
@pytest.mark.parametrize("name", ["a", "a name that is far too long for a picture of this width"])
def test_label_is_whole_and_inside_the_picture(box, name):
    plain = draw_disk(box, disk(), names=("",))
    picture = draw_disk(box, disk(), names=(name,))
    color = is_color(picture, instance_color(0)).astype(np.uint8)
    # The label's padding is a solid run of its color, at least two pixels wide and a line high.
    runs = cv2.erode(color, np.ones((9, 2), np.uint8), borderValue=0)
    assert runs.any()
    assert picture.shape == plain.shape == (400, 400, 3)


def test_labels_of_many_objects_are_placed_as_if_all_were_looked_at(monkeypatch):
    rng = np.random.default_rng(0)
    center, half = rng.uniform(0, 640, (2, 400, 1, 2))
    boxes = np.concatenate([center - half / 30, center + half / 30], axis=-1)[:, 0]
    names = ["a name", "b"] * 200
    few, all_boxes = gray_image(640, 640), gray_image(640, 640)
    labels.draw_labels(few, boxes, names, ["0.97"] * 400, [(0, 90, 200)] * 400)
    monkeypatch.setattr(labels, "_near", lambda spots, boxes: np.arange(len(boxes)))
    labels.draw_labels(all_boxes, boxes, names, ["0.97"] * 400, [(0, 90, 200)] * 400)
    assert (few != GRAY).mean() > 0.05
    np.testing.assert_array_equal(few, all_boxes)


@pytest.mark.parametrize("side", [14, 40, 90])
def test_labels_leave_the_objects_to_be_seen(side):
    """36 objects in 640 pixels, whose labels were as large as they are."""
    image = gray_image(640, 640)
    corners = np.array([(x, y) for x in range(20, 620, 104) for y in range(30, 630, 104)])
    boxes = np.concatenate([corners, corners + side], axis=1).astype(np.float64)
    names = ["a long enough name"] * len(boxes)
    canvas = image.copy()
    labels.draw_labels(canvas, boxes, names, ["0.97"] * len(boxes), [(0, 90, 200)] * len(boxes))
    changed = (canvas != image).any(axis=2)
    covered = [changed[y1:y2, x1:x2].mean() for x1, y1, x2, y2 in boxes.astype(int)]
    assert max(covered) <= 0.36
    assert np.mean(covered) < 0.2
    assert changed.sum() > 36 * 9 * 40 * 0.8  # nearly all have found a place


def test_score_survives_a_name_that_is_cut():
    long = draw_disk((0, 0, 400, 400), np.zeros((28, 28)), names=("x" * 300,))
    longer = draw_disk((0, 0, 400, 400), np.zeros((28, 28)), names=("x" * 400,))
    other_score = draw_disk((0, 0, 400, 400), np.zeros((28, 28)), names=("x" * 300,), score=0.87)
    np.testing.assert_array_equal(long, longer)
    assert (long != other_score).any()


@pytest.mark.parametrize("name", ["x" * 40, "two words of different lengths", "iiiiWWWW", ""])
@pytest.mark.parametrize("room", [8, 30, 60, 130])
def test_a_name_is_cut_to_the_longest_part_that_fits(name, room):
    font = labels._font("", 11)
    expected, kept = f"{name} 0.93".strip(), name
    while kept and font.getlength(expected) > room - 2 * labels._padding(11):
        kept = kept[:-1].rstrip()
        expected = f"{kept}... 0.93" if kept else "0.93"
    assert labels._fit(name, "0.93", 11, room) == expected


@pytest.mark.parametrize("name", ["naïve\n", "\u2029ï\x85b", "\n"])
def test_a_name_of_several_lines_is_drawn_in_one(name):
    in_one_line = " ".join(name.split())
    drawn, expected = (
        draw_disk((30, 30, 300, 300), disk(), names=(given,)) for given in (name, in_one_line)
    )
    np.testing.assert_array_equal(drawn, expected)


def test_a_name_without_end_takes_no_time(monkeypatch):
    measured = []
    font = labels._font("", 11)

    class Font:
        def getlength(self, text):
            measured.append(len(text))
            return font.getlength(text)

    monkeypatch.setattr(labels, "_font", lambda text, size: Font())
    assert labels._fit("x" * 10**6, "0.93", 11, 131).endswith("xxx... 0.93")
    assert sum(measured) < 20_000


@pytest.mark.parametrize("size", [(64, 64), (48, 3), (1, 1), (2000, 700)])
@pytest.mark.parametrize("masks", [None, np.ones((3, 28, 28), np.float32)])
def test_any_size_of_picture_can_be_drawn_on(size, masks):
    height, width = size
    boxes = np.array([[0, 0, width, height], [0.2, 0.2, 0.4, 0.4], [-1e5, -1e5, 1e5, 1e5]])
    names = ("with accents: crème brûlée", "人", "")
    picture = draw_detections(
        gray_image(*size), found(boxes, [1, 2, 3], np.ones(3), masks), names, min_side=0
    )
    assert picture.shape == (*size, 3)
    assert picture.dtype == np.uint8


def test_boxes_that_are_not_numbers_do_no_harm():
    boxes = np.array([[np.nan, 0, 10, 10], [0, 0, np.inf, 10]])
    masks = np.ones((2, 28, 28), np.float32)
    draw_detections(gray_image(400, 400), found(boxes, [1, 1], np.ones(2), masks), ("a",))


@pytest.mark.parametrize("shape", [(0, 0), (0, 7), (7, 0)])
def test_a_mask_without_a_pixel_has_no_outline(shape):
    """As tiles of an image that is one pixel high find them."""
    assert trace_mask(np.zeros(shape), np.array([3.0, 1.0, 3.0, 1.0])) == []


def test_small_picture_is_enlarged_by_a_whole_factor():
    image = np.random.default_rng(0).integers(0, 256, (50, 80, 3), np.uint8)
    detections = found([[20, 10, 60, 40]], [1], [1.0])
    picture = draw_detections(image, detections, ("a",), min_side=120)
    assert picture.shape == (150, 240, 3)
    assert is_color(picture[60:118, 60], instance_color(0)).all()  # the box's left side, tripled
    kept = draw_detections(image, detections, ("a",), min_side=0)
    assert kept.shape == image.shape


def test_ground_truth_draws_crops_of_bytes():
    crops = (disk(112)[None] * 255).astype(np.uint8)
    truth = draw_ground_truth(
        gray_image(400, 400), np.array([[100, 100, 300, 300]]), np.array([1]), crops, ("a",)
    )
    detection = draw_disk((100, 100, 300, 300), disk(112))
    inside = (slice(130, 300), slice(100, 300))  # below the labels
    assert (truth[inside] == detection[inside]).mean() > 0.995


def test_picture_is_written_into_a_new_folder(tmp_path):
    picture = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)
    path = tmp_path / "a" / "b" / "picture.png"
    write_image(path, picture)
    np.testing.assert_array_equal(cv2.imread(str(path))[..., ::-1], picture)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        write_image(tmp_path / "file" / "picture.png", picture)


def test_side_by_side_keeps_both_pictures():
    left, right = gray_image(30, 40), gray_image(30, 50) + 1
    both = side_by_side(left, right)
    assert both.shape[0] == 30
    np.testing.assert_array_equal(both[:, :40], left)
    np.testing.assert_array_equal(both[:, -50:], right)


def test_colors_by_class_are_the_same_in_every_picture():
    boxes = np.array([[10, 10, 100, 100], [150, 150, 250, 250], [280, 280, 380, 380]])
    scores = np.array([0.7, 0.8, 0.9])
    for classes in ([2, 2, 5], [5, 2, 1]):
        picture = draw_detections(
            gray_image(400, 400), found(boxes, classes, scores), "abcde", color_by="class"
        )
        for box, k in zip(boxes, classes, strict=True):
            assert is_color(picture[box[3] - 30 : box[3] - 5, box[0]], instance_color(k - 1)).all()


def test_a_thousand_objects_are_drawn():
    rng = np.random.default_rng(0)
    corner = rng.uniform(0, 900, (1000, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(5, 60, (1000, 2))], axis=1)
    picture = draw_detections(
        gray_image(1000, 1000), found(boxes, np.ones(1000), np.ones(1000)), ("a",)
    )
    assert changed(picture).mean() > 0.5
