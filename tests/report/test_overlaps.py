"""Objects that NMS drops although each is found: boxes that overlap."""

import numpy as np
import pytest

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data.coco import load_coco
from mask_rcnn_jax.formats.cells import write_cells
from mask_rcnn_jax.report.overlaps import dropped_share, find_overlaps, overlap_suggestions
from mask_rcnn_jax.report.set_objects import SetObjects, collect


def objects(boxes, images=None, classes=None):
    boxes = np.asarray(boxes, float)
    images = np.zeros(len(boxes), int) if images is None else np.asarray(images)
    classes = np.ones(len(boxes), int) if classes is None else np.asarray(classes)
    sizes = np.full((int(images.max(initial=0)) + 1, 2), 500)
    sides = np.sqrt((boxes[:, 2:] - boxes[:, :2]).prod(axis=1))
    return SetObjects(sizes, images, classes, boxes, sides, np.zeros((0, 2), int))


# IoU of neighbors 2/3 (offset 2 of 10), of every second one 3/7
ROW = [[2 * k, 0, 2 * k + 10, 10] for k in range(5)]


def test_by_hand():
    found = find_overlaps(objects(ROW))
    assert found.total == 5 and found.pairs.tolist()[:2] == [[0, 1], [0, 2]]
    np.testing.assert_allclose(found.ious[:2], [2 / 3, 3 / 7])
    # Greedy: 0 drops 1, 2 drops 3, 4 stays.
    assert dropped_share(found, 0.5, within_class=True) == 0.4
    assert dropped_share(found, 0.7, within_class=True) == 0
    # 0 drops 1 and 2, 3 drops 4.
    assert dropped_share(found, 0.4, within_class=True) == pytest.approx(0.6)


def test_images_and_classes_are_apart():
    found = find_overlaps(objects(ROW * 2, images=[0] * 5 + [1] * 5))
    assert found.total == 10 and dropped_share(found, 0.5, within_class=True) == 0.4
    classes = find_overlaps(objects(ROW, classes=[1, 2, 1, 2, 1]))
    assert dropped_share(classes, 0.5, within_class=True) == 0
    assert dropped_share(classes, 0.5, within_class=False) == 0.4
    assert dropped_share(find_overlaps(objects(np.zeros((0, 4)))), 0.5, within_class=True) == 0


def test_all_pairs_are_found():
    rng = np.random.default_rng(0)
    corners = rng.uniform(0, 60, (150, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(5, 25, (150, 2))], axis=1)
    found = find_overlaps(objects(boxes))
    low = np.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    both = (high - low).clip(0).prod(axis=2)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    iou = both / (areas[:, None] + areas[None] - both)
    assert found.pairs.tolist() == np.argwhere(np.triu(iou, 1) > 0.3).tolist()


def suggested(boxes, **entries):
    config = load_config("finetune", {k.replace("__", "."): v for k, v in entries.items()})
    return {s.entry: s for s in overlap_suggestions(objects(boxes), config)}


def test_a_threshold_that_keeps_them_or_soft_nms():
    found = suggested([[3 * k, 0, 3 * k + 14, 10] for k in range(6)])  # neighbors: 0.65
    assert found["eval.nms_thresh"].value == 0.7 and list(found) == ["eval.nms_thresh"]
    reason = "At 0.5, 50.0% of the objects, found perfectly, are dropped for one of their class"
    assert found["eval.nms_thresh"].reason.startswith(reason)
    found = suggested([[k, 0, k + 10, 10] for k in range(6)])  # neighbors: 0.82
    assert found["eval.nms"].value == "gaussian" and found["model.rpn.nms_thresh"].value == 0.9
    assert "66.7%" not in found["model.rpn.nms_thresh"].reason
    assert suggested([[k, 0, k + 10, 10] for k in range(6)], eval__nms="linear").keys() == {
        "model.rpn.nms_thresh"
    }
    assert suggested(ROW, eval__nms_thresh=0.7) == suggested([[0, 0, 9, 9], [20, 0, 29, 9]]) == {}


def test_cells_in_a_crowd(tmp_path):
    """Generated cells: few are lost where there is room, several where there is not."""
    losses = {}
    for size, count in ((256, 30), (96, 150)):
        paths = write_cells(
            tmp_path / str(size), train=2, val=1, size=(size, size), objects=(count, count), bits=8,
            channels=1,
        )  # fmt: skip
        dataset = load_coco(paths["train"], tmp_path / str(size) / "train")
        found = find_overlaps(collect(dataset.images))
        losses[size] = dropped_share(found, 0.4, within_class=True)
    assert losses[256] < losses[96] and losses[96] > 0.02
