"""Detections of tiles, merged, against the objects of the untiled image.

A detector that makes no mistake: it sees every object of a window, cut at the window's border.
"""

import cv2
import numpy as np
import pytest
from pycocotools import mask as coco_mask

from mask_rcnn_jax.data.tiles import Tiles, view_windows
from mask_rcnn_jax.evaluation import merge as merging
from mask_rcnn_jax.evaluation.encode import ImageDetections, encode_image
from mask_rcnn_jax.evaluation.merge import merge_views
from mask_rcnn_jax.rle import WindowMask

HEIGHT, WIDTH, TILES = 300, 500, Tiles(120, 0.25)
WINDOWS = view_windows(HEIGHT, WIDTH, TILES)


def shape(kind, *points):
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    if kind == "rectangle":
        x0, y0, x1, y1 = points
        mask[y0:y1, x0:x1] = 1
    elif kind == "ellipse":
        center, axes, angle = points
        cv2.ellipse(mask, center, axes, angle, 0, 360, 1, -1)
    else:
        cv2.polylines(mask, [np.array(points)], False, 1, 15)
    return mask


def look(objects, window, *, blind=False, score=lambda k, window: 0.9 - 0.01 * k):
    """The view of a window; objects: (class, mask). A blind detector finds nothing."""
    x0, y0, x1, y1 = window
    boxes, scores, classes, masks = [], [], [], []
    for k, (class_id, mask) in enumerate([] if blind else objects):
        part = mask[y0:y1, x0:x1]
        if not part.any():
            continue
        x, y, width, height = cv2.boundingRect(part)
        boxes.append([x, y, x + width, y + height])
        masks.append(WindowMask.from_crop(part[y : y + height, x : x + width], (x, y)))
        scores.append(score(k, window))
        classes.append(class_id)
    boxes = np.array(boxes, np.float64).reshape(-1, 4)
    scores = np.array(scores, np.float32)
    return ImageDetections("id", y1 - y0, x1 - x0, boxes, scores, classes, masks)


def merge(objects, *, whole_is_blind=True, windows=WINDOWS, **options):
    views = [
        look(objects, window, blind=whole_is_blind and k == 0, **options)
        for k, window in enumerate(windows)
    ]
    return merge_views(views, windows, "continuous")


def assert_found(found, objects):
    """The objects, exactly and each once."""
    boxes, masks = encode_image(found, "continuous", False)
    assert len(masks) == len(objects)
    unseen = {k: (class_id, mask) for k, (class_id, mask) in enumerate(objects)}
    for box, entry in zip(boxes, masks, strict=True):
        decoded = coco_mask.decode(entry["segmentation"])
        match = [k for k, (c, m) in unseen.items() if c == entry["category_id"]]
        match = [k for k in match if np.array_equal(unseen[k][1], decoded)]
        assert match, "not an object of the image"
        _, mask = unseen.pop(match[0])
        assert box["bbox"] == list(cv2.boundingRect(mask))
    assert (np.diff(found.scores) <= 0).all()


CROSSING = {
    "inside a tile": shape("rectangle", 10, 10, 40, 50),
    "over a seam": shape("rectangle", 60, 20, 150, 80),
    "over a corner": shape("ellipse", (100, 100), (60, 35), 30),
    "wholly in an overlap": shape("rectangle", 90, 10, 112, 40),
    "a pixel over a seam": shape("rectangle", 70, 10, 121, 40),
    "at the image's border": shape("rectangle", 400, 250, 500, 300),
    "over all columns": shape("rectangle", 5, 130, 495, 150),
    "larger than a tile": shape("ellipse", (250, 150), (200, 120), 10),
    "the whole image": shape("rectangle", 0, 0, WIDTH, HEIGHT),
    "a crooked line": shape("line", (20, 280), (120, 200), (240, 260), (400, 40), (480, 20)),
    "a single pixel": shape("rectangle", 118, 118, 119, 119),
}


@pytest.mark.parametrize("whole_is_blind", [True, False], ids=["tiles alone", "and the whole"])
@pytest.mark.parametrize("name", CROSSING)
def test_an_object_cut_by_seams_is_one(name, whole_is_blind):
    objects = [("a", CROSSING[name])]
    assert_found(merge(objects, whole_is_blind=whole_is_blind), objects)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("whole_is_blind", [True, False])
def test_many_objects_are_those_of_the_untiled_image(seed, whole_is_blind):
    """Disjoint convex objects of all sizes and two classes, some of which touch."""
    rng = np.random.default_rng(seed)
    free, objects = np.ones((HEIGHT, WIDTH), np.uint8), []
    for _ in range(60):
        center = int(rng.integers(0, WIDTH)), int(rng.integers(0, HEIGHT))
        axes = tuple(int(a) for a in np.exp(rng.uniform(1, 4.5, 2)))
        mask = shape("ellipse", center, axes, int(rng.integers(0, 180)))
        if mask.any() and not (mask & (1 - free)).any():
            objects.append((int(rng.integers(1, 3)), mask))
            free[mask > 0] = 0
    assert len(objects) > 10
    assert_found(merge(objects, whole_is_blind=whole_is_blind), objects)


def test_classes_are_not_merged():
    objects = [("a", CROSSING["over a seam"]), ("b", CROSSING["over a seam"])]
    assert_found(merge(objects), objects)


def test_a_small_object_on_a_large_one_of_its_class_stays():
    """Its intersection over the smaller area is 1."""
    objects = [(1, CROSSING["larger than a tile"]), (1, shape("rectangle", 240, 140, 260, 160))]
    assert_found(merge(objects, whole_is_blind=False), objects)


def test_neighbors_are_not_chained():
    """One tile sees two objects as one; only one of them is joined to that."""
    left, right = shape("rectangle", 60, 20, 104, 80), shape("rectangle", 104, 20, 118, 80)
    windows = view_windows(120, 210, TILES)
    first, second = windows[1:3]
    assert first == (0, 0, 120, 120) and second == (90, 0, 210, 120)
    views = [
        look([], windows[0]),
        look([(1, left), (1, right)], first),
        look([(1, left | right)], second),
    ]
    found = merge_views(views, windows, "continuous")
    assert len(found.scores) == 2


def test_of_full_views_the_best_is_kept_as_it_is():
    objects = [(7, CROSSING["wholly in an overlap"])]
    found = merge(objects, score=lambda k, window: 0.5 + window[0] / 1000)
    assert_found(found, objects)
    assert found.scores.tolist() == [np.float32(0.576)]


def test_a_box_that_exceeds_the_image_by_rounding_is_not_cut_there():
    """1333 / float32(1333 / 500) is more than 500."""
    objects = [(7, shape("rectangle", 440, 210, WIDTH, 280))]
    views = [look(objects, window) for window in WINDOWS]
    views = [view._replace(boxes=view.boxes + np.array([0, 0, 1e-4, 0])) for view in views]
    blob = np.ones((90, 80), np.uint8)  # the whole image is seen coarsely
    coarse = [WindowMask.from_crop(blob, (420, 200))]
    views[0] = views[0]._replace(masks=coarse, boxes=np.array([[420, 200, 500.0001, 290]]))
    views[0] = views[0]._replace(scores=np.array([0.95], np.float32))
    assert_found(merge_views(views, WINDOWS, "continuous"), objects)


def test_of_pieces_the_best_score_counts():
    objects = [(7, CROSSING["over all columns"])]
    found = merge(objects, score=lambda k, window: 0.5 + window[0] / 1000)
    assert found.scores.tolist() == [np.float32(0.5 + 0.38)]


def test_the_whole_image_adds_what_no_tile_finds():
    big = CROSSING["larger than a tile"]
    small = CROSSING["inside a tile"]
    views = [look([(1, big), (2, small)], w, blind=k > 0) for k, w in enumerate(WINDOWS)]
    found = merge_views(views, WINDOWS, "continuous")
    assert_found(found, [(1, big)])  # tiles see the small one better, and found nothing


def test_without_overlap_seams_remain():
    windows = view_windows(120, 240, Tiles(120, 0.0))
    found = merge([(1, CROSSING["over a seam"])], windows=windows)
    assert len(found.scores) == 2


def test_a_single_view_is_kept_as_it_is():
    view = look([("a", CROSSING["over a corner"])], WINDOWS[0])
    assert merge_views([view], WINDOWS[:1], "continuous") is view


@pytest.mark.parametrize("paste", ["continuous", "integer"])
def test_grids_are_pasted_in_their_tiles(paste):
    """Grids of ones are rectangles; "integer" enlarges them a little."""
    rectangle = CROSSING["over a seam"]
    views = []
    for k, window in enumerate(WINDOWS):
        view = look([(1, rectangle)], window, blind=k == 0)
        views.append(view._replace(masks=np.ones((len(view.scores), 28, 28), np.float32)))
    found = merge_views(views, WINDOWS, paste)
    crop, (left, top) = found.masks[0].crop()
    x, y, width, height = cv2.boundingRect(crop)
    atol = 2 if paste == "integer" else 0
    corners = np.array([x, y, x + width, y + height]) + (left, top, left, top)
    np.testing.assert_allclose(corners, [60, 20, 150, 80], atol=atol)
    assert crop[20 - top : 80 - top, 60 - left : 150 - left].mean() > 0.999
    assert found.boxes.tolist() == [[60, 20, 150, 80]]


def test_boxes_alone_are_merged_by_boxes():
    objects = [(1, CROSSING["over a seam"]), (1, CROSSING["over all columns"])]
    views = [look(objects, w, blind=k == 0)._replace(masks=None) for k, w in enumerate(WINDOWS)]
    found = merge_views(views, WINDOWS, "continuous")
    assert found.masks is None
    assert found.boxes.tolist() == [[60, 20, 150, 80], [5, 130, 495, 150]]


def test_masks_without_pixels_and_boxes_without_area():
    empty = np.zeros((2, 28, 28), np.float32)
    boxes = np.array([[90.0, 5, 118, 30], [100, 10, 100, 10]])
    views = []
    for x0, y0, x1, y1 in WINDOWS:
        scores = np.array([0.5, 0.4], np.float32)
        placed = boxes - (x0, y0, x0, y0) if (x0, y0) in ((0, 0), (76, 0)) else boxes
        views.append(ImageDetections(1, y1 - y0, x1 - x0, placed, scores, [1, 1], empty))
    found = merge_views(views, WINDOWS, "continuous")
    _, masks = encode_image(found, "continuous", False)
    assert masks and not any(coco_mask.area(entry["segmentation"]) for entry in masks)


def test_nothing_found():
    found = merge([])
    assert found.boxes.shape == (0, 4) and found.masks == [] and found.category_ids == []
    assert encode_image(found, "continuous", False) == ([], [])


def test_every_pair_that_may_be_one_object_is_compared_once():
    rng = np.random.default_rng(0)
    views = []
    for x0, y0, x1, y1 in WINDOWS:
        low = rng.integers(0, 100, (40, 2))
        boxes = np.concatenate([low, low + rng.integers(0, 60, (40, 2))], axis=1) * 1.0
        ids = rng.integers(1, 3, 40).tolist()
        views.append(ImageDetections("id", y1 - y0, x1 - x0, boxes, np.ones(40), ids, None))
    found = merging._Found.of(views, WINDOWS, "continuous")
    kept = np.flatnonzero(rng.random(len(found.scores)) < 0.7)
    pairs = [(i, j) for i, others in merging._candidates(found, kept) for j in others]
    low, high = found.boxes[:, :2], found.boxes[:, 2:]
    expected = {
        (i, j)
        for k, i in enumerate(kept.tolist())
        for j in kept[k + 1 :].tolist()
        if (low[i] < high[j]).all() and (low[j] < high[i]).all()
        and found.owners[i] != found.owners[j] and found.classes[i] == found.classes[j]
    }  # fmt: skip
    assert len(pairs) == len(expected) > 500
    assert {(min(pair), max(pair)) for pair in pairs} == expected
