"""Labels of anchors, proposals of a batch, and maps that end before their canvas."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.configs import coco_torchvision
from mask_rcnn_jax.models.build import build_model, init_variables
from mask_rcnn_jax.models.rpn import RPN
from mask_rcnn_jax.ops.anchors import Anchors
from mask_rcnn_jax.ops.boxes import BoxCoder
from mask_rcnn_jax.ops.extent import ValidExtent, valid_extent
from mask_rcnn_jax.structures import Targets
from tests.helpers import tiny_batch

LABELS = RPN(batch_size_per_image=4)
PROPOSALS = RPN(pre_nms_topk_train=10, min_size=-1.0)


def targets(*boxes):
    count = len(boxes)
    return Targets(
        boxes=jnp.array(boxes, jnp.float32), classes=jnp.ones(count, jnp.int32),
        masks=jnp.zeros((count, 8, 8), jnp.uint8), polygons=jnp.zeros((count, 0, 3)),
        valid=jnp.ones(count, bool),
    )  # fmt: skip


ANCHORS = jnp.array([[0, 0, 10, 10], [-2, 0, 8, 10], [90, 90, 101, 100], [50, 50, 60, 60]],
                    jnp.float32)  # fmt: skip


def anchor_targets(rpn, anchors):
    """Of one object on an image of 100 x 100 pixels."""
    return label(rpn, (100, 100), anchors)


@partial(jax.jit, static_argnums=0)
def label(rpn, size, anchors):
    image = None, targets([0, 0, 10, 10]), jnp.array(size)
    return rpn.targets(*image, anchors=anchors, coder=BoxCoder())


@pytest.mark.parametrize(
    ("straddle", "expected"), [(-1.0, [1, 0, 0, 0]), (0.0, [1, -1, -1, 0]), (2.0, [1, 0, 0, 0])]
)
def test_anchors_that_reach_over_the_image_are_left_out(straddle, expected):
    """maskrcnn-benchmark: they must lie inside the image, its right and lower edge not included."""
    rpn = replace(LABELS, bg_iou_thresh=0.7, straddle_thresh=straddle)
    labels, sampled, deltas = anchor_targets(rpn, Anchors([ANCHORS], None))
    np.testing.assert_array_equal(labels, expected)
    assert set(np.flatnonzero(sampled >= 0)) <= set(np.flatnonzero(labels >= 0))
    np.testing.assert_array_equal(deltas, 0.0)


@pytest.mark.parametrize("size, expected", [((50, 200), [1, 0, -1]), ((200, 50), [1, -1, 0])])
def test_the_image_they_reach_over_has_two_different_sides(size, expected):
    """(height, width); one anchor lies far to the right, one far down."""
    anchors = jnp.array([[0, 0, 10, 10], [150, 0, 160, 10], [0, 150, 10, 160]], jnp.float32)
    rpn = replace(LABELS, straddle_thresh=0.0)
    labels, _, _ = label(rpn, size, Anchors([anchors], None))
    np.testing.assert_array_equal(labels, expected)


def test_an_anchor_that_is_not_there_claims_nothing():
    """It would be the best of its object; the next best is taken."""
    valid = [jnp.array([False, True, True, True])]
    labels, _, _ = anchor_targets(LABELS, Anchors([ANCHORS], valid))
    np.testing.assert_array_equal(labels, [-1, 1, 0, 0])


def far_apart(scores):
    """Logits [B, N] with boxes that do not overlap, as the arguments of `select`."""
    logits = jnp.array(scores, jnp.float32)
    corner = 20.0 * jnp.arange(logits.shape[1])
    anchors = jnp.stack([corner, corner, corner + 10, corner + 10], axis=1)
    deltas = jnp.zeros((*logits.shape, 4))
    return [logits], [deltas], jnp.full((len(scores), 2), 400), Anchors([anchors], None)


@partial(jax.jit, static_argnums=0)
def select(rpn, logits, deltas, sizes, anchors):
    return rpn.proposals(logits, deltas, sizes, anchors=anchors, coder=BoxCoder(), train=True)


def test_the_best_of_a_batch():
    """maskrcnn-benchmark keeps the best of all images together while it trains."""
    problem = far_apart([[5, 1, 4], [9, 8, 7]])
    image = select(replace(PROPOSALS, post_nms_topk_train=2), *problem)
    np.testing.assert_array_equal(image.valid, [[True, True], [True, True]])
    rpn = replace(PROPOSALS, post_nms_topk_train=4, post_nms_scope="batch")
    batch = select(rpn, *problem)
    np.testing.assert_array_equal(batch.valid, [[True, False, False], [True, True, True]])
    np.testing.assert_array_equal(batch.boxes[0, 0], [0, 0, 10, 10])
    assert not batch.boxes[0, 1:].any() and not batch.scores[0, 1:].any()


def test_small_boxes_are_dropped():
    problem = far_apart([[5, 1, 4]])
    for min_size, count in ((-1.0, 3), (9.9, 3), (10.0, 0)):
        found = select(replace(PROPOSALS, post_nms_topk_train=3, min_size=min_size), *problem)
        assert int(found.valid.sum()) == count, min_size


def small_model():
    config = coco_torchvision.get_config()
    config.model.update(
        num_classes=3,
        backbone=dict(depth=10, frozen_stages=0),
        fpn=dict(channels=32),
        rpn=dict(
            channels=32,
            batch_size_per_image=16,
            pre_nms_topk_train=60,
            post_nms_topk_train=30,
            pre_nms_topk_test=60,
            post_nms_topk_test=30,
        ),
        box_head=dict(channels=32),
        mask_head=dict(channels=32),
        sampling=dict(batch_size_per_image=16),
    )
    config.eval.update(score_threshold=0.0, pre_nms_topk=90, detections_per_image=10)
    return config


@pytest.mark.slow
def test_a_larger_canvas_changes_nothing():
    """Maps end at the image rounded up to 32, whatever lies beyond: the same proposals, detections
    and labels on a canvas as large as that and on a larger one."""
    config = small_model()
    model, options = build_model(config.model), as_recipe(config).eval
    variables = init_variables(model, 0)
    height, width = 50, 70
    batch = tiny_batch(1, side=128)
    sizes = np.array([(height, width)], np.int32)

    @jax.jit
    def run(one):
        found = model.apply(variables, one.images, one.image_sizes, options, method="predict")
        return found, model.apply(variables, one, None, train=False, method="forward_train")

    found, trained = [], []
    for rows, columns in ((64, 96), (128, 192)):
        canvas = np.full((1, rows, columns, 3), 77, np.uint8)  # beyond the image: anything
        canvas[:, :height, :width] = batch.images[:, :height, :width]
        for outputs, kept in zip(
            run(batch.replace(images=canvas, image_sizes=sizes)), (found, trained), strict=True
        ):
            kept.append(outputs)
    assert found[0].valid.all()
    for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(found[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-4)
    for outputs in zip(trained[0].rois.boxes, trained[1].rois.boxes, strict=True):
        np.testing.assert_allclose(*outputs, atol=2e-4)
    for value in (-1, 0, 1):
        counts = [int((outputs.anchor_labels == value).sum()) for outputs in trained]
        assert counts[0] == counts[1] or value == -1


def test_an_extent_of_the_whole_canvas_masks_nothing():
    extent = valid_extent((64, 128), jnp.array([[30, 30]]), 0)
    assert extent == ValidExtent((64, 128), None)
    x = jnp.ones((1, 16, 32, 2))
    assert extent.mask(x) is x
