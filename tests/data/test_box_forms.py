"""Boxes that do not fit their masks, and honest ones that are loose or larger than a mask."""

import numpy as np
import pytest

from mask_rcnn_jax.annotations.reader import read_ground_truth
from mask_rcnn_jax.annotations.segmentation import mask_to_rle
from mask_rcnn_jax.data.box_forms import boxes_of, misfits
from mask_rcnn_jax.data.checking import inspect_coco
from tests.data.small_set import write_coco

HEIGHT, WIDTH = 480, 640


def objects(count=40, seed=0, whole=True):
    """Corners (x1, y1, x2, y2) of objects on a picture of 480 x 640."""
    rng = np.random.default_rng(seed)
    sides = rng.uniform(12, 150, (count, 2))
    low = rng.uniform(0, 1, (count, 2)) * ([WIDTH, HEIGHT] - sides)
    corners = np.concatenate([low, low + sides], axis=1)
    return np.round(corners) if whole else corners


def annotations(corners, boxes, *, codes=False):
    entries = []
    for (x1, y1, x2, y2), box in zip(corners.tolist(), np.asarray(boxes).tolist(), strict=True):
        outline = [x1, y1, x2, y1, x2, y2, x1, y2]
        segmentation = [outline]
        if codes:
            mask = np.zeros((HEIGHT, WIDTH), bool)
            mask[round(y1) : round(y2), round(x1) : round(x2)] = True
            rle = mask_to_rle(mask)
            segmentation = rle | {"counts": rle["counts"].decode()}
        entries.append({"bbox": box, "segmentation": segmentation})
    return [entry | {"image_id": 1, "category_id": 3, "area": 9, "iscrowd": 0} for entry in entries]


def line_for(corners, boxes, *, codes=False):
    """What is said about boxes beside masks of these corners; "" for nothing."""
    entries = annotations(corners, boxes, codes=codes)
    image = {"id": 1, "file_name": "a.png", "height": HEIGHT, "width": WIDTH}
    numbered = [{"id": n, **entry} for n, entry in enumerate(entries, start=1)]
    categories = [{"id": 3, "name": "cat"}]
    content = {"images": [image], "categories": categories, "annotations": numbered}
    found = misfits(boxes_of(read_ground_truth(content)))
    return found[0] if found else ""


def xywh(corners):
    x1, y1, x2, y2 = corners.T
    return np.stack([x1, y1, x2 - x1, y2 - y1], axis=1)


def centers(corners):
    x, y, width, height = xywh(corners).T
    return np.stack([x + width / 2, y + height / 2, width, height], axis=1)


SIZE = np.array([WIDTH, HEIGHT, WIDTH, HEIGHT], float)
SWAPPED = [1, 0, 3, 2]
FORMS = {
    "x1, y1, x2, y2": lambda c: c,
    "center x, center y, width, height": centers,
    "y, x, height, width": lambda c: xywh(c)[:, SWAPPED],
    "y1, x1, y2, x2": lambda c: c[:, SWAPPED],
    "x1, x2, y1, y2": lambda c: c[:, [0, 2, 1, 3]],
    "x, y, width, height as fractions of the image": lambda c: xywh(c) / SIZE,
    "x1, y1, x2, y2 as fractions of the image": lambda c: c / SIZE,
    "center x, center y, width, height as fractions of the image": lambda c: centers(c) / SIZE,
    "y1, x1, y2, x2 as fractions of the image": lambda c: (c / SIZE)[:, SWAPPED],
    "x, y, width, height in percent of the image": lambda c: 100 * xywh(c) / SIZE,
    "x, y, width, height times 2": lambda c: xywh(c) / 2,
    "x, y, width, height divided by 3": lambda c: xywh(c) * 3,
    "x, y, width, height times 1.6": lambda c: xywh(c) / 1.6,
    "x1, y1, x2, y2 divided by 2": lambda c: c * 2,
    "y1, x1, y2, x2 as fractions of the image, of which 1000 is the whole": lambda c: np.round(
        1000 * c / SIZE
    )[:, SWAPPED],
}


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_another_form_is_named(form, codes):
    corners = objects()
    line = line_for(corners, FORMS[form](corners), codes=codes)
    masks = "masks" if codes else "polygons"
    start, end = line.split("; they fit as ")
    assert end == f"{form}, expected x, y, width, height in pixels"
    wrong, total = start.removesuffix(f" boxes do not fit their {masks}").split(" of ")
    assert total == "40" and int(wrong) >= 38


def test_sides_that_are_swapped_are_named():
    corners = objects()
    line = line_for(corners, xywh(corners)[:, [0, 1, 3, 2]])
    assert line.endswith("they fit as x, y, height, width, expected x, y, width, height in pixels")


def test_a_part_of_the_set_in_another_form_is_counted():
    corners = objects(60)
    boxes = xywh(corners)
    boxes[40:] = corners[40:]
    line = line_for(corners, boxes)
    assert "of 60 boxes" in line and "they fit as x1, y1, x2, y2" in line
    assert 17 <= int(line.split()[0]) <= 20


def covered(corners, rng):
    """Corners of what is to be seen of objects: a part at one of the sides is hidden."""
    hidden, seen = rng.integers(0, 4, len(corners)), corners.copy()
    sides = np.tile(corners[:, 2:] - corners[:, :2], 2)
    for row, side in enumerate(hidden):
        sign = 1 if side < 2 else -1
        seen[row, side] += sign * rng.uniform(0, 0.7) * sides[row, side]
    return seen


def test_honest_boxes_are_not_reported():
    rng = np.random.default_rng(1)
    for seed in range(10):
        corners = objects(50, seed, whole=False)
        exact = xywh(corners)
        assert line_for(corners, exact) == ""
        loose = corners + rng.uniform(-2, 2, corners.shape) * [1, 1, 1, 1]
        assert line_for(corners, xywh(loose)) == ""
        share = rng.uniform(0, 0.06, corners.shape) * np.tile(exact[:, 2:], 2) * [-1, -1, 1, 1]
        assert line_for(corners, xywh(corners + share)) == ""
        assert line_for(covered(corners, rng), exact) == ""  # amodal boxes
        assert line_for(corners, np.floor(exact)) == ""
        inclusive = exact + [0, 0, 1, 1]
        assert line_for(corners, inclusive) == ""
    tiny = np.array([[5.0, 5, 8, 8], [50, 60, 54, 63]])
    assert line_for(tiny, xywh(tiny) + [-1, -1, 2, 2]) == ""
    beyond = np.array([[-90.0, 100, 60, 200]])  # boxes are clipped to the image, polygons are not
    assert line_for(beyond, [[0, 100, 60, 100]]) == ""
    assert line_for(objects(1), xywh(objects(1))) == ""


def test_boxes_of_other_objects_are_counted():
    corners = objects(200, whole=False)
    boxes = xywh(corners)
    boxes[7] = [600, 10, 20, 20]
    boxes[90] = [0, 400, 10, 10]
    assert line_for(corners, boxes) == "2 of 200 boxes miss most of their polygons"
    wide = corners + np.tile(xywh(corners)[:, 2:], 2) * [-0.4, -0.4, 0.4, 0.4]
    inner = (corners > 200).any(axis=1)
    line = line_for(corners[inner], xywh(wide)[inner])
    assert "boxes are more than twice as large as their polygons" in line


def test_check_warns_and_names_the_first(tmp_path):
    corners = np.array([[4.0, 6, 30, 20], [10, 12, 40, 30], [3, 3, 50, 35]])
    entries = annotations(corners, corners)
    (warning,) = inspect_coco(*write_coco(tmp_path, annotations=entries)).warnings
    assert warning.endswith("fit as x1, y1, x2, y2, expected x, y, width, height in pixels; first: "
                            "annotation 1")  # fmt: skip
    entries = annotations(corners, corners / [60, 40, 60, 40])
    found = inspect_coco(*write_coco(tmp_path, annotations=entries))
    assert "as fractions of the image" in found.warnings[0]


def test_boxes_that_lie_outside_the_image_are_compared_too(tmp_path):
    corners = np.array([[4.0, 6, 30, 20], [40, 12, 58, 30], [45, 3, 55, 35]])
    found = inspect_coco(*write_coco(tmp_path, annotations=annotations(corners, centers(corners))))
    assert "fit as center x, center y, width, height" in found.warnings[0]
    entries = annotations(corners, xywh(corners)[:, SWAPPED])
    found = inspect_coco(*write_coco(tmp_path, annotations=entries))
    assert found.problems and "fit as y, x, height, width" in found.warnings[0]


def test_sets_without_boxes_or_masks_are_not_compared():
    corners = objects(3)
    entries = annotations(corners, xywh(corners))
    image = {"id": 1, "file_name": "a.png", "height": HEIGHT, "width": WIDTH}
    categories = [{"id": 3, "name": "cat"}]
    for change in ({"segmentation": []}, {"bbox": None}, {"bbox": "x"}, {"bbox": [1, 2, 3, None]}):
        changed = [entry | change for entry in entries]
        content = {"images": [image], "categories": categories, "annotations": changed}
        assert misfits(boxes_of(read_ground_truth(content, boxes_only=True))) is None
